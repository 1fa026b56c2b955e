import sys
from dataclasses import replace

import torch

from blackwell_sparsek.bench import cli
from blackwell_sparsek.bench import processes as prepare
from blackwell_sparsek.bench.case import REPORTED

from .fakes import CPU, case, contender, peer, suite

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
    assert "compiled matmul W @ x, bsk:" in err and "Compiled 2 of 2" in err
    assert list(tmp_path.iterdir()) == []
