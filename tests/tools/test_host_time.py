"""`tests.tools.host_time` runs: it names functions of many modules."""

import subprocess
import sys
from pathlib import Path

import pytest

from blackwell_sparsek.core.env import environment_for_compiler

ROOT = Path(__file__).parents[2]
ENV = environment_for_compiler()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["forward", "packed training", "product", "training"])
def test_a_kind_is_reported(kind):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.tools.host_time", kind, "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENV)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(kind) and "replayed" in done.stdout
