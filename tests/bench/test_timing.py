import time

import pytest
import torch

from blackwell_sparsek.bench import timing
from blackwell_sparsek.bench.timing import Timing, time_host, time_interleaved, time_reported

CPU = torch.device("cpu")


def test_quantiles_of_known_samples():
    timing = Timing([5.0, 1.0, 3.0, 2.0, 4.0])
    assert timing.median == 3.0
    assert timing.quantiles() == {
        "min": 1.0,
        "p10": pytest.approx(1.4),
        "p25": 2.0,
        "p50": 3.0,
        "p75": 4.0,
        "p90": pytest.approx(4.6),
        "max": 5.0,
    }


def test_contenders_take_turns_and_all_rounds_are_kept():
    order = []
    contenders = {name: lambda name=name: (order.append(name), time.sleep(0.003)) for name in "ab"}
    seen = []
    times = time_interleaved(
        contenders, CPU, budget_s=0.0, rounds=(4, 9), progress=lambda *at: seen.append(at)
    )
    assert [len(t.seconds) for t in times.values()] == [4, 4]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert order[:4] == ["a", "a", "b", "b"]  # warm-up and a first look at each
    assert order[4:] == list("abbaabba")


def test_a_slower_contender_measures_slower():
    contenders = {"fast": lambda: time.sleep(0.002), "slow": lambda: time.sleep(0.02)}
    times = time_interleaved(contenders, CPU, budget_s=0.0, rounds=(5, 5))
    assert times["slow"].median > 3 * times["fast"].median
    assert times["slow"].median >= 0.02


def test_short_calls_are_repeated_within_a_sample():
    calls = []
    time_interleaved({"short": lambda: calls.append(1)}, CPU, budget_s=0.0, rounds=(3, 3))
    assert len(calls) > 100


def test_the_budget_bounds_the_rounds():
    contenders = {"sleep": lambda: time.sleep(0.01)}
    times = time_interleaved(contenders, CPU, budget_s=0.1, rounds=(2, 50))
    assert 2 <= len(times["sleep"].seconds) <= 12


def test_host_times_are_of_many_short_calls_or_few_long_ones(monkeypatch):
    now, calls = [0.0], {"short": 0, "long": 0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def run(name, seconds):
        calls[name] += 1
        now[0] += seconds

    contenders = {"short": lambda: run("short", 1e-4), "long": lambda: run("long", 0.02)}
    times = time_host(contenders, CPU, 0.0)
    # one call to see how long it takes, then five samples
    assert calls == {"short": 1 + 5 * 20, "long": 1 + 5}
    assert times["long"].median == pytest.approx(0.02)
    assert times["short"].median == pytest.approx(1e-4)


def test_runs_that_measure_themselves():
    times = time_reported({"a": lambda: 3.5}, CPU)
    assert times["a"].seconds == [3.5] * 3
    assert time_reported({"a": lambda: 3.5}, CPU, 0.05)["a"].seconds == [3.5]


def test_who_takes_longer_than_the_budget_alone_has_two_rounds():
    contenders = {"long": lambda: time.sleep(0.05), "short": lambda: time.sleep(0.001)}
    times = time_interleaved(contenders, CPU, budget_s=0.02, rounds=(4, 9))
    assert [len(t.seconds) for t in times.values()] == [2, 4]


def test_the_cache_is_overwritten_until_the_host_is_ahead(monkeypatch):
    asked = []

    def once(self, run, repeats, flushes):
        asked.append(flushes)
        return 1.0, flushes < needed

    monkeypatch.setattr(timing._CudaSample, "__init__", lambda self: setattr(self, "flushes", {}))
    monkeypatch.setattr(timing._CudaSample, "_once", once)
    sample, run = timing._CudaSample(), object()
    needed = 3
    assert sample(run, 1) == sample(run, 1) == 1.0
    assert asked == [1, 2, 4, 4]  # and it is known from then on
    needed, asked[:] = 99, []
    sample(object(), 1)
    assert asked == [1, 2, 4, 8]
