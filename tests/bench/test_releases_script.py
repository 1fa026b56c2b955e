"""benchmarks/releases.sh, with a command in place of Python that notes how it is called."""

import os
import pathlib
import subprocess

from blackwell_sparsek.bench.suites import SUITES

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks/releases.sh"
_STAND_IN = """#!/usr/bin/env bash
echo "$PYTHONPATH $TRITON_CACHE_DIR $*" >> "$LOG"
case "$PYTHONPATH $*" in *$FAILS*) exit 1 ;; esac
"""


def _run(tmp_path, fails):
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(_STAND_IN)
    python.chmod(0o755)
    given = {"PYTHON": str(python), "LOG": str(log), "JOBS": "3", "FAILS": fails}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | given
    environment["TRITON_CACHE_DIR"] = "/caches/c"
    command = [SCRIPT, "out", "3.6.0", "3.9.0=/other"]
    done = subprocess.run(command, env=environment, timeout=60, check=False)
    return done.returncode, [line.split() for line in log.read_text().splitlines()]


def test_releases_take_turns(tmp_path):
    status, calls = _run(tmp_path, fails="nothing of it")
    assert status == 0
    assert [call[0] for call in calls] == ["src", "/other:src"] * 4
    assert [call[1] for call in calls] == ["/caches/c-3.6.0", "/caches/c-3.9.0"] * 4
    assert all(call[2:5] == ["-m", "blackwell_sparsek", "bench"] for call in calls)
    assert all(call[-2:] == ["--peers", "bsk"] for call in calls)
    (prepared, _), measured = calls[:2], calls[2:]
    assert prepared[-6:-2] == ["--prepare", "3", "--time-left", "120"]
    of_each = [[word for word in call if word in SUITES] for call in measured]
    assert of_each[::2] == of_each[1::2]
    assert sorted(name for names in of_each[::2] for name in names) == [
        "attention_dense", "backward", "block_sparse", "decode", "first_call", "host",
        "matmul_decode", "matmul_founding",
    ]  # fmt: skip
    folders = [call[call.index("-o") + 1] for call in measured]
    assert folders == ["out/triton-3.6.0", "out/triton-3.9.0"] * 3


def test_a_failure_of_one_release_does_not_stop_the_others(tmp_path):
    status, calls = _run(tmp_path, fails="/other:src*decode")
    assert status == 1 and len(calls) == 8
