"""benchmarks/record.sh, with a command in place of Python that notes how it is called."""

import os
import pathlib
import subprocess

from blackwell_sparsek.bench.suites import SUITES

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks/record.sh"
_STAND_IN = """#!/usr/bin/env bash
echo "$@" >> "$LOG"
sleep "${SLEEP:-0}"
while [ $# -gt 0 ]; do
  case $1 in
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
    log = tmp_path / "log"
    given = {"PYTHON": str(python), "LOG": str(log), "JOBS": "3"} | environment
    done = subprocess.run([SCRIPT, "results"], env=os.environ | given, timeout=60, check=False)
    return done.returncode, [line.split() for line in log.read_text().splitlines()]


def test_all_suites_are_compiled_for_then_measured(tmp_path):
    status, (compiled, tables, sweeps) = _run(tmp_path)
    assert status == 1  # of the sweeps, as if something of ours had failed
    # those that run kernels of others, what JAX compiles, and the one that is about compiling
    others = {"matmul_crossover", "matmul_square", "matmul_layers", "jax", "first_call"}
    assert set(SUITES) - set(compiled) == others
    assert compiled[-4:] == ["--prepare", "3", "--time-left", "120"]
    measured = [word for word in (*tables, *sweeps) if word in SUITES]
    assert sorted(measured) == sorted(SUITES)
    assert tables[-4:] == ["--seconds", "0.15", "-o", "results"]
    assert sweeps[-4:] == ["--seconds", "0.05", "-o", "results"]


def test_a_budget_is_shared(tmp_path):
    _, (_, *measured) = _run(tmp_path, BUDGET="100")
    for words in measured:
        assert 80 <= int(words[words.index("--time-left") + 1]) <= 100


def test_a_budget_that_is_spent_leaves_no_time(tmp_path):
    # a case that runs when the time is over ends, and what comes after it must not be refused
    _, (_, *measured) = _run(tmp_path, BUDGET="0", SLEEP="1.1")
    assert [words[words.index("--time-left") + 1] for words in measured] == ["0", "0"]
