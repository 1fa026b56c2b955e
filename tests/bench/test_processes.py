import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from blackwell_sparsek.bench import cli, results
from blackwell_sparsek.bench import processes as prepare
from blackwell_sparsek.bench import processes as supervise
from blackwell_sparsek.bench.case import REPORTED

from .fakes import CPU, case, contender, peer, suite

_WORKER = """
import json, os, pathlib, signal, sys, time
path = pathlib.Path(sys.argv[1])
partial = path.with_name(path.name + ".partial")
starts = path.with_suffix(".starts")
count = int(starts.read_text()) + 1 if starts.exists() else 1
starts.write_text(str(count))
document = {"schema": 2, "suite": "fake", "environment": {"device_name": "a"}, "cases": []}
if sys.argv[2:] == ["again"]:
    document = json.loads(partial.read_text())
"""


def _command(tmp_path, script):
    path = tmp_path / "fake.json"
    command = [sys.executable, "-c", _WORKER + script, str(path)]
    return (lambda first, again: [*command, *(["again"] if again else [])]), path


def _dies(how):
    return f"""
if count == 1:
    partial.write_text(json.dumps(document))
    path.with_name(path.name + ".running").write_text(json.dumps(["case 3", "fa4"]))
    {how}
path.write_text(json.dumps(document))
"""


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV on case 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "died of SIGKILL on case 3"),
        ("sys.exit(70)", "broke the GPU context on case 3"),
    ],
)
def test_a_worker_that_dies_starts_again_without_the_peer_at_work(tmp_path, capsys, how, word):
    command, path = _command(tmp_path, _dies(how))
    assert supervise.run_worker(command, [path]) == 0
    document = json.loads(path.read_text())
    assert document["crashed"] == {"fa4": word} and results.running(path) is None
    assert path.with_suffix(".starts").read_text() == "2"
    assert f"fa4 {word}: going on without it" in capsys.readouterr().err


def test_a_worker_that_dies_while_all_are_timed_goes_on_with_the_next_case(tmp_path, capsys):
    script = _dies("os.kill(os.getpid(), signal.SIGSEGV)").replace('"fa4"', '""')
    command, path = _command(tmp_path, script)
    assert supervise.run_worker(command, [path]) == 0
    (case,) = json.loads(path.read_text())["cases"]
    assert case["error"] == "the process died of SIGSEGV while peers were timed"
    assert case["name"] == "case 3" and "going on with the next" in capsys.readouterr().err


def test_a_worker_that_dies_of_nobody_does_not_start_again(tmp_path):
    script = "partial.write_text(json.dumps(document)); os.kill(os.getpid(), signal.SIGSEGV)"
    command, path = _command(tmp_path, script)
    assert supervise.run_worker(command, [path]) == -signal.SIGSEGV
    assert path.with_suffix(".starts").read_text() == "1"


def test_a_worker_that_leaves_nothing_is_an_error(tmp_path):
    command, path = _command(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(RuntimeError, match="status -11 and left no results"):
        supervise.run_worker(command, [path])


def test_results_of_an_earlier_run_are_not_taken_for_this_one(tmp_path):
    command, path = _command(tmp_path, "path.write_text(json.dumps(document))")
    path.write_text(json.dumps({"schema": 2, "old": True}))
    path.with_name(path.name + ".running").write_text('["old case", "fa4"]')
    assert supervise.run_worker(command, [path]) == 0
    assert "old" not in json.loads(path.read_text()) and results.running(path) is None


def test_another_worker_begins_with_the_suite_that_ended_the_last(tmp_path):
    paths, seen = [tmp_path / f"{name}.json" for name in "abc"], []

    def command(first, again):
        seen.append((first, again))
        ends = _dies("os.kill(os.getpid(), signal.SIGSEGV)")
        more = ["again"] if again else []
        return [sys.executable, "-c", _WORKER + ends, str(paths[1]), *more]

    paths[2].write_text("of an earlier run, not begun in this one")
    assert supervise.run_worker(command, paths) == 0
    assert seen == [(0, False), (1, True)]
    assert json.loads(paths[1].read_text())["crashed"] == {"fa4": "died of SIGSEGV on case 3"}
    assert paths[2].read_text().startswith("of an earlier run")


def test_signals_reach_the_worker_and_its_status_comes_back(tmp_path):
    script = """
def stop(*_):
    path.write_text(json.dumps(document | {"interrupted": True}))
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
path.with_suffix(".ready").write_text("")
time.sleep(60)
"""
    command, path = _command(tmp_path, script)

    def terminate():
        while not path.with_suffix(".ready").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    assert supervise.run_worker(command, [path]) == 130
    thread.join()
    assert json.loads(path.read_text())["interrupted"] is True


_ECHO = """
import sys
for line in sys.stdin:
    if line == "1\\n":
        sys.exit(3)
    print("0.0 s", flush=True)
"""


def _case(name, **problem):
    return replace(case(name), problem=problem)


def test_the_first_and_last_case_of_each_kind_run():
    cases = [
        _case("a", length=1, causal=True),
        _case("b", length=2, causal=True),
        _case("c", length=3, causal=True),
        _case("full", length=1, causal=False),
        _case("grouped", length=1, causal=False, heads=4, kv_heads=2),
    ]
    tasks = prepare.tasks_of([(suite(), cases)])
    ours = [task.case.name for task in tasks if task.peer.name == "bsk"]
    assert ours == ["a", "full", "grouped", "c"]


def test_libraries_are_not_run_and_the_slowest_begin():
    peers = [peer(name) for name in ("bsk", "sdpa_cudnn", "dense", "fa4")]
    cases = [replace(case("a"), peers=tuple(p.name for p in peers))]
    tasks = prepare.tasks_of([(suite(peers), cases)])
    assert [task.peer.name for task in tasks] == ["fa4", "bsk"]


def test_fresh_processes_are_not_prepared_for():
    cases = [replace(case("first"), modes=(REPORTED,)), case("a")]
    tasks = prepare.tasks_of([(suite(), cases)])
    assert {task.case.name for task in tasks} == {"a"}


def test_what_a_task_answers():
    def crashes(inputs):
        raise RuntimeError("no such thing")

    ran = []
    fine = peer("bsk", lambda inputs: contender()._replace(run=lambda: ran.append(1)))
    assert prepare._once(prepare.Task(case("a"), fine), CPU).endswith(" s") and ran == [1]
    wrong = peer("bsk", crashes)
    assert prepare._once(prepare.Task(case("a"), wrong), CPU) == "RuntimeError: no such thing"
    absent = replace(fine, available=lambda: "is not installed")
    assert prepare._once(prepare.Task(case("a"), absent), CPU) == "n/a"
    unfit = replace(fine, supports=lambda inputs: "has no such mask")
    assert prepare._once(prepare.Task(case("a"), unfit), CPU) == "n/a"


def test_a_process_that_dies_is_followed_by_another(capsys):
    tasks = [prepare.Task(case(f"case {i}"), peer("bsk")) for i in range(4)]
    prepare.prepare([sys.executable, "-c", _ECHO], tasks, 1, 60.0)
    err = capsys.readouterr().err
    assert "compiled case 1, bsk: the process died" in err
    assert err.count(": 0.0 s") == 3 and "Compiled 4 of 4 in" in err


def test_what_takes_too_long_is_left(capsys):
    tasks = [prepare.Task(case("slow"), peer("bsk"))]
    prepare.prepare([sys.executable, "-c", "import time; time.sleep(60)"], tasks, 4, 0.3)
    assert "Compiled 0 of 1 in 0 s." in capsys.readouterr().err


def test_the_command_compiles_and_times_nothing(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = ["bench", "host", "--case", "matmul*", "--prepare", "2", "-o", str(tmp_path)]
    assert cli.main(args) == 0
    err = capfd.readouterr().err
    assert "compiled matmul W @ x, bsk:" in err and "Compiled 3 of 3" in err
    assert list(tmp_path.iterdir()) == []
