"""What compute-sanitizer prints becomes a table and a status; the tool itself needs a GPU."""

import subprocess
import sys

import pytest
import torch

from blackwell_sparsek.testing import sanitize as tool
from blackwell_sparsek.testing.sanitize import Verdict, judged, sanitize, table

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "status, output, verdict",
    [
        (0, "========= ERROR SUMMARY: 0 errors", Verdict("ok", False)),
        (9, "========= ERROR SUMMARY: 3 errors", Verdict("3 errors", True)),
        (9, "========= ERROR SUMMARY: 1 error", Verdict("1 errors", True)),
        (1, "========= ERROR SUMMARY: 0 errors", Verdict("the call failed (1)", True)),
        (
            0,
            "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            Verdict("ok", False),
        ),
        (
            9,
            "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)",
            Verdict("2 hazards", True),
        ),
        (1, "Error: this device is not supported", Verdict("not supported", False)),
        (139, "Segmentation fault", Verdict("no summary (139)", True)),
    ],
)
def test_verdicts(status, output, verdict):
    assert judged("memcheck", status, output) == verdict


def test_each_call_is_run_once_with_each_tool():
    runs = []

    def run(name, call):
        runs.append((name, call))
        return Verdict("ok", False) if name == "memcheck" else Verdict("2 hazards", True)

    kernels = {"_a_kernel": "first", "_b_kernel": "first", "_c_kernel": "second"}
    verdicts = sanitize(kernels, ("memcheck", "racecheck"), run, jobs=2)
    assert sorted(runs) == [
        ("memcheck", "first"), ("memcheck", "second"),
        ("racecheck", "first"), ("racecheck", "second"),
    ]  # fmt: skip
    lines = table(kernels, verdicts).splitlines()
    assert lines[0].split() == ["kernel", "memcheck", "racecheck", "call"]
    assert lines[2].split() == ["_b_kernel", "ok", "2", "hazards", "first"]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tool.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_one_call_is_repeated(monkeypatch):
    made = []

    class Planted:
        name = "planted"

        @staticmethod
        def make(device):
            return lambda: made.append(device)

    monkeypatch.setattr(tool, "fixed_calls", lambda device: [Planted])
    tool.make_call("planted", CPU)
    assert made == [CPU] * tool.REPEATS


def test_a_tool_that_takes_too_long_is_told(tmp_path):
    command = tmp_path / "slow"
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    command.chmod(0o755)
    verdict = tool.run_tool("memcheck", "a/b", str(command), 0.2, tmp_path / "logs")
    assert verdict == Verdict("over 0.2 s", True)
    assert (tmp_path / "logs" / "a-b.memcheck.txt").exists()


@pytest.mark.gpu
def test_memcheck_of_one_kernel():
    if tool.sanitizer() is None:
        pytest.skip("needs compute-sanitizer of the CUDA toolkit")
    # in a process of its own: here, launches that other tests recorded would not be noted
    command = [sys.executable, "-m", tool.__name__, "merge_states", "--tool", "memcheck"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
