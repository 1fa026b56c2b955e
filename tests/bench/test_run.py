import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from blackwell_sparsek.bench import measure as measuring
from blackwell_sparsek.bench import results
from blackwell_sparsek.bench import run as runner
from blackwell_sparsek.bench.case import EAGER, GRAPH, HOST, REPORTED
from blackwell_sparsek.bench.machine import ClockLog
from blackwell_sparsek.bench.measure import ContextLost, measure
from blackwell_sparsek.bench.run import failures, run_suite

from .fakes import CPU, case, contender, peer, suite


def _fails(out):
    raise AssertionError("error 1 at (0,) is over the budget 0.1")


def _raises(error):
    def prepare(inputs):
        raise error

    return prepare


def test_a_suite_gives_a_document_and_the_file_is_the_same(tmp_path):
    path = tmp_path / "deep" / "fake.json"
    document = run_suite(
        suite(), [case("one"), case("two")], CPU, seconds=0.0, path=path, commit="abc"
    )
    assert json.loads(path.read_text()) == document
    assert document["schema"] == 2 and document["suite"] == "fake" and document["commit"] == "abc"
    assert document["environment"]["device"] == "cpu" and document["elapsed_s"] > 0
    assert [c["name"] for c in document["cases"]] == ["one", "two"]
    ours = document["cases"][0]["peers"]["bsk"]["times"][EAGER]
    quantiles = ours["quantiles_s"]
    assert quantiles["p25"] <= quantiles["p50"] <= quantiles["p75"] and ours["rounds"] >= 3
    assert ours["executed_tflops"] == pytest.approx(1e6 / quantiles["p50"] / 1e12)
    assert ours["dense_equivalent_tflops"] == pytest.approx(4 * ours["executed_tflops"])
    assert document["cases"][0]["ratios"][EAGER]["best_peer"] == "other"


def test_everything_that_goes_wrong_has_its_word_and_the_rest_is_timed():
    peers = [
        peer("bsk"),
        peer("absent", available=lambda: "absent is not installed"),
        peer("unfit", supports=lambda inputs: f"cannot take {inputs}"),
        peer("refuses", _raises(NotImplementedError("only on Tuesdays"))),
        peer("crashes", _raises(RuntimeError("boom\nand a page of trace"))),
        peer("asserts", _raises(AssertionError("head_dim must be 7"))),
        peer("wrong", lambda inputs: contender(check=_fails)),
        peer("cannot_be_asked", available=_raises_now),
    ]
    one = suite(peers)
    document = run_suite(one, [case(peers=one.peers)], CPU, seconds=0.0)
    entries = document["cases"][0]["peers"]
    assert entries["absent"]["n/a"] == "absent is not installed"
    assert entries["unfit"]["n/a"] == "cannot take inputs"
    assert entries["refuses"]["n/a"] == "NotImplementedError: only on Tuesdays"
    assert entries["crashes"]["crashed"] == "RuntimeError: boom"
    assert entries["asserts"]["crashed"] == "AssertionError: head_dim must be 7"
    assert entries["wrong"]["failed"].startswith("AssertionError: error 1")
    assert entries["cannot_be_asked"]["crashed"] == "OSError: no such library"
    assert [name for name, entry in entries.items() if "times" in entry] == ["bsk"]
    assert failures(document) == []


def _raises_now():
    raise OSError("no such library")


@pytest.mark.parametrize(
    ("ours", "word"),
    [
        (peer("bsk", lambda inputs: contender(check=_fails)), "AssertionError: error 1"),
        (peer("bsk", _raises(ValueError("wrong shape"))), "ValueError: wrong shape"),
    ],
)
def test_what_fails_of_ours_is_a_failure(ours, word):
    document = run_suite(suite([ours, peer("other")]), [case()], CPU, seconds=0.0)
    (problem,) = failures(document)
    assert problem.startswith(f"one: bsk: {word}")


def test_inputs_that_cannot_be_built_are_an_error_and_the_next_case_runs():
    def build(device):
        raise MemoryError("140 GiB")

    document = run_suite(suite(), [case("big", build=build), case("small")], CPU, seconds=0.0)
    assert document["cases"][0]["error"] == "MemoryError: 140 GiB"
    assert "times" in document["cases"][1]["peers"]["bsk"]
    assert failures(document) == ["big: MemoryError: 140 GiB"]


def test_modes_of_gpus_are_left_out_on_a_cpu_and_those_not_asked_for_too():
    one = case(modes=(EAGER, GRAPH, HOST))
    clocks = ClockLog(CPU)
    result = measure(one, suite().peers, CPU, seconds=0.0, clocks=clocks)
    assert set(result["peers"]["bsk"]["times"]) == {EAGER, HOST}
    result = measure(one, suite().peers, CPU, seconds=0.0, clocks=clocks, modes=(HOST,))
    assert set(result["peers"]["bsk"]["times"]) == {HOST}


def test_runs_that_measure_themselves_are_believed():
    times = iter([9.0, 2.0])
    own = contender()._replace(run=lambda: next(times))
    one = case(peers=["bsk"], modes=(REPORTED,))
    peers = {"bsk": peer("bsk", lambda inputs: own)}
    result = measure(one, peers, CPU, seconds=0.0, clocks=ClockLog(CPU))
    # the first is the run that was checked
    assert result["peers"]["bsk"]["times"][REPORTED]["quantiles_s"]["p50"] == 2.0


_KILLED = """
import os, pathlib, signal, sys, time
from blackwell_sparsek.bench.run import run_suite
from tests.bench.fakes import CPU, case, suite

def waits(device):
    print("measuring", flush=True)
    time.sleep(120)

cases = [case("first"), case("second", build=waits)]
run_suite(suite(), cases[int(sys.argv[2]):], CPU, seconds=0.0, path=pathlib.Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("skipped", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_run_that_is_killed_leaves_the_earlier_results(tmp_path, number, skipped):
    path = tmp_path / "fake.json"
    run_suite(suite(), [case("one"), case("two")], CPU, seconds=0.0, path=path)
    earlier = path.read_bytes()
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-c", _KILLED, str(path), str(skipped)]
    worker = subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # tests that a shell runs in the background inherit that interrupts are ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert worker.stdout.readline() == "measuring\n"
    worker.send_signal(number)
    assert worker.wait(60) == (-number if number == signal.SIGKILL else 0)
    assert path.read_bytes() == earlier
    killed = number == signal.SIGKILL
    partial = results.partial(path)
    # a run that ends in order leaves nothing behind if it has measured nothing
    assert partial.exists() == (killed or skipped == 0)
    if partial.exists():
        assert [c["name"] for c in results.read(partial)["cases"]] == ["first"][skipped:]
    # what was left behind does not disturb the next run, whose results replace the earlier ones
    run_suite(suite(), [case("three")], CPU, seconds=0.0, path=path)
    assert [c["name"] for c in results.read(path)["cases"]] == ["three"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fake.json"]


def test_a_disk_that_is_full_leaves_the_earlier_results(tmp_path, monkeypatch):
    path = tmp_path / "fake.json"
    run_suite(suite(), [case("one")], CPU, seconds=0.0, path=path)
    earlier = path.read_bytes()

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run_suite(suite(), [case("two")], CPU, seconds=0.0, path=path)
    assert path.read_bytes() == earlier


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(tmp_path, number):
    def build(device):
        os.kill(os.getpid(), number)

    path = tmp_path / "fake.json"
    cases = [case("first"), case("second", build=build), case("third")]
    # tests that a shell runs in the background inherit that interrupts are ignored
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        document = run_suite(suite(), cases, CPU, seconds=0.0, path=path)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert document["interrupted"] is True
    assert [c["name"] for c in json.loads(path.read_text())["cases"]] == ["first"]


def test_nothing_is_begun_after_the_time_is_up():
    document = run_suite(suite(), [case("one"), case("two")], CPU, seconds=0.0, until=0.0)
    assert document["cases"] == [] and document["left_out"] == ["one", "two"]


def test_a_lost_gpu_ends_the_process_and_a_new_one_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "fake.json"
    real = runner.measure

    def loses(one, *args, stage, **more):
        if one.name == "second":
            stage("checking other", "other")
            raise ContextLost("other: illegal memory access")
        return real(one, *args, stage=stage, **more)

    monkeypatch.setattr(runner, "measure", loses)
    cases = [case("first"), case("second"), case("third")]
    with pytest.raises(ContextLost):
        run_suite(suite(), cases, CPU, seconds=0.0, path=path)
    left = json.loads(results.partial(path).read_text())
    assert not path.exists()
    assert results.running(path) == ("second", "other") and len(left["cases"]) == 1
    assert left["lost"] == "ContextLost: other: illegal memory access"

    monkeypatch.setattr(runner, "measure", real)
    before = {**left, "crashed": {"other": "broke the GPU context on second"}}
    document = run_suite(suite(), cases, CPU, seconds=0.0, path=path, before=before)
    assert [c["name"] for c in document["cases"]] == ["first", "second", "third"]
    assert "times" in document["cases"][0]["peers"]["other"]
    for later in document["cases"][1:]:
        assert later["peers"]["other"]["crashed"] == "broke the GPU context on second"
        assert "times" in later["peers"]["bsk"]


def test_what_follows_from_all_cases_is_added():
    def finish(document):
        document["count"] = len(document["cases"])

    document = run_suite(suite(finish=finish), [case("a"), case("b")], CPU, seconds=0.0)
    assert document["count"] == 2


def test_who_takes_too_long_to_start_is_asked_once(monkeypatch):
    monkeypatch.setattr(measuring, "_LONGEST_START_S", 0.2)
    asked = []

    def waits(inputs):
        asked.append(1)
        time.sleep(30)

    peers = [peer("bsk"), peer("slow", waits)]
    cases = [case(name, peers=("bsk", "slow")) for name in ("a", "b")]
    document = run_suite(suite(peers), cases, CPU, seconds=0.0)
    first, second = (result["peers"]["slow"] for result in document["cases"])
    assert asked == [1] and "too_slow" not in first
    assert first["crashed"] == "TookTooLong: no result after 0 s"
    assert second["crashed"] == "TookTooLong: no result after 0 s on a"
    assert all("times" in result["peers"]["bsk"] for result in document["cases"])


def test_without_signals_there_is_no_limit():
    done = []

    def work():
        with measuring.time_limit(0.0):
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]
