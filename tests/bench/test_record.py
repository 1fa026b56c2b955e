"""benchmarks/record.sh, with a command in place of Python that notes how it is called."""

import os
import pathlib
import subprocess

from blackwell_sparsek.bench.suites import SUITES

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks/record.sh"
_STAND_IN = """#!/usr/bin/env bash
echo "$@" >> "$LOG"
while [ $# -gt 0 ]; do
  case $1 in
    -o) echo "{}" > "$2/$NAME.json" ;;
    matmul_square) wrong=1 ;;
    --prepare) exit 0 ;;
  esac
  shift
done
exit ${wrong:-0}
"""


def _run(tmp_path, **environment):
    python = tmp_path / "python"
    python.write_text(_STAND_IN)
    python.chmod(0o755)
    log, folder = tmp_path / "log", tmp_path / "made" / "results"
    given = {"PYTHON": str(python), "LOG": str(log), "NAME": "decode", "JOBS": "3"} | environment
    done = subprocess.run([SCRIPT, str(folder)], env=os.environ | given, timeout=60, check=False)
    return done.returncode, [line.split() for line in log.read_text().splitlines()], folder


def test_all_suites_are_compiled_then_measured_and_results_kept(tmp_path):
    status, (compiled, tables, sweeps), folder = _run(tmp_path)
    assert status == 1  # of the sweeps, as if something of ours had failed
    known = set(SUITES) - {"first_call"}  # minutes of fresh processes
    assert known - {word for word in compiled} == {"matmul_crossover", "matmul_square"}
    assert compiled[-4:] == ["--prepare", "3", "--time-left", "120"]
    measured = [word for word in (*tables, *sweeps) if word in SUITES]
    assert sorted(measured) == sorted(known)
    assert "--time-left" not in tables and sweeps[-4:-2] == ["--seconds", "0.1"]
    assert [path.name for path in folder.iterdir()] == ["decode.json"]


def test_a_budget_is_shared(tmp_path):
    _, (_, *measured), _ = _run(tmp_path, BUDGET="100")
    for words in measured:
        assert 80 <= int(words[words.index("--time-left") + 1]) <= 100
