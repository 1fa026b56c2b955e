"""The suite of first calls: what runs in fresh processes, how often, and what it imports."""

import os
import subprocess
import sys

import pytest
import torch

from blackwell_sparsek.bench.run import failures, run_suite
from blackwell_sparsek.bench.suites import SUITES, first_call

CPU = torch.device("cpu")


def test_it_is_timed_in_a_process_of_its_own(tmp_path):
    assert 0 < first_call.seconds_of("sdpa", tmp_path) < 60
    with pytest.raises(RuntimeError, match="the process of nothing ended with 1: KeyError"):
        first_call.seconds_of("nothing", tmp_path)


def test_this_package_is_imported_while_the_clock_runs():
    code = first_call._START.replace("'__main__'", "'not main'")
    code += "; print('blackwell_sparsek' in sys.modules)"
    command = [sys.executable, "-c", code, str(first_call._WORKER)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "False"


def test_only_what_looks_like_a_time_is_read(monkeypatch, tmp_path):
    def run(out):
        done = subprocess.CompletedProcess([], 0, out, "")
        monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
        return first_call.seconds_of("attention", tmp_path)

    assert run('warming up\n{"seconds": 2.5, "finite": true}\nbye\n') == 2.5
    with pytest.raises(RuntimeError, match="the process of attention printed no time"):
        run("")
    with pytest.raises(AssertionError, match="not finite"):
        run('{"seconds": 2.5, "finite": false}')


@pytest.fixture
def processes(monkeypatch):
    """The calls that would have run in fresh processes, and whether their cache held anything."""
    found = []

    def seconds_of(call, cache):
        mark = cache / call
        found.append((call, mark.exists()))
        mark.touch()
        return float(len(found))

    monkeypatch.setattr(first_call, "seconds_of", seconds_of)
    monkeypatch.setattr(first_call, "_compiled", {})
    return found


def _run(seconds, state=""):
    suite = SUITES["first_call"]
    cases = [case for case in suite.cases(True) if state in case.name]
    document = run_suite(suite, cases, CPU, seconds=seconds)
    assert failures(document) == []
    return document


def test_each_needs_one_process_for_a_round(processes):
    document = _run(seconds=0.05)
    ours = [("matmul", False), ("matmul", True)]
    both = [(call, warm) for warm in (False, True) for call in ("attention", "sdpa")]
    assert processes == ours + both
    times = [case["peers"]["bsk"]["times"]["reported"] for case in document["cases"]]
    assert [t["quantiles_s"]["p50"] for t in times] == [1.0, 2.0, 3.0, 5.0]


def test_every_round_without_a_cache_begins_with_an_empty_one(processes):
    _run(seconds=0.3, state="matmul, nothing")
    assert processes == [("matmul", False)] * 3


def test_the_cache_is_filled_where_nobody_did(processes):
    (case,) = _run(seconds=0.2, state="matmul, compiled")["cases"]
    assert processes == [("matmul", False), ("matmul", True), ("matmul", True)]
    assert case["peers"]["bsk"]["times"]["reported"]["quantiles_s"]["min"] == 2.0
