"""The command line answers before torch is imported."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from blackwell_sparsek.bench import arguments
from blackwell_sparsek.bench.case import EAGER, GRAPH, HOST, REPORTED, SUSTAINED

SOURCE = pathlib.Path(__file__).parents[2] / "src"


def _without_torch(tmp_path, *args):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(tmp_path), str(SOURCE)])
    command = [sys.executable, "-m", "blackwell_sparsek", *args]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--help"], 0, "search for faster tiles"),
        (["--version"], 0, "bsk "),
        (["compile", "atn_fwd"], 2, "no kernel has 'atn_fwd' in its name; did you mean attn_fwd"),
        (["compile", "zz", "--arch", "sm_90"], 2, "there are attn_bwd_keys_sm90, "),
        (["compile", "--arch", "sm_42"], 2, "is 'sm_42'; expected one of sm_80, sm_89, sm_90"),
        (["profile", "attn_fwd", "--arch", "h200"], 2, "is 'h200'; expected one of sm_80"),
        (["profile"], 2, "required: CASE"),
        (["tune", "--jobs", "3"], 2, "unrecognized arguments: --jobs 3"),
        (["bench", "--mode", "fast"], 2, "invalid choice: 'fast'"),
        (["explain", "matmul", "--impl", "cuda"], 2, "invalid choice: 'cuda'"),
        (["memory", "--dtype", "int3"], 2, "invalid choice: 'int3'"),
    ],
)
def test_help_and_mistakes_need_no_torch(tmp_path, args, status, words):
    done = _without_torch(tmp_path, *args)
    assert done.returncode == status and words in done.stdout + done.stderr, done
    assert "torch was imported" not in done.stderr


@pytest.mark.parametrize("args", [["tune"], ["profile", "x"], ["compile"], ["bench", "--list"]])
def test_long_commands_speak_before_they_import_torch(tmp_path, args):
    done = _without_torch(tmp_path, *args)
    assert done.stderr == f"bsk {args[0]}: importing torch\ntorch was imported\n"


def test_a_command_for_programs_says_nothing_besides(tmp_path):
    assert _without_torch(tmp_path, "info", "--json").stderr == "torch was imported\n"


def test_names_are_those_of_torch_and_of_the_suites():
    assert (EAGER, GRAPH, SUSTAINED, HOST, REPORTED) == arguments.MODES
    for name in arguments.CACHE_DTYPES:
        assert isinstance(getattr(torch, name), torch.dtype)
