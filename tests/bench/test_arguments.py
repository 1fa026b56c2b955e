"""The command line answers before torch is imported."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from blackwell_sparsek.bench import arguments, cli
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
        (["compile", "zz", "--arch", "sm_90"], 2, "choose from attn_bwd_keys_sm90, "),
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


# sizes that no size is, numbers that Python or torch cannot take, what a terminal would obey
ODD = [
    *("", "0", "-1", "x", "²", "²x4", "4x²", "٣", "nan", "inf", "1e9", "../../x", "\x1b[2J"),
    *(str(2**62), str(2**63), str(10**30), "9" * 400, "9" * 5000, "9" * 5000 + "x1"),
    *(f"{2**62}x{2**62}", f"1x1x{2**62}x{2**62}", f"{2**31}x{2**31}", "8:²", "8:3", "0:0"),
    *("1:" + "9" * 5000, "cuda:99", "meta", "xpu"),
]
ATTENTION = ["explain", "attention", "--q", "1x2x64x64"]
MATMUL = ["explain", "matmul", "--weight", "64x64", "--n", "8"]
DECODE = ["explain", "decode", "--kv-length", "64"]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (ATTENTION, "--q --kv-heads --kv-length --window --block --density --device --dtype"),
        (MATMUL, "--weight --n --block --density --device --impl"),
        (DECODE, "--q --kv-heads --kv-length --page-size --device"),
        (["memory", "--layers", "2", "--heads", "4:2"], "--tokens --head-dim --layers --heads"),
        (["bench", "no_such_suite"], "--device --seconds --time-left --prepare --mode"),
        (["profile", "no_such_kernel"], "--arch --jobs"),
    ],
    ids=lambda x: x[0] + x[1] if isinstance(x, list) else "",
)
def test_any_wrong_value_of_an_option_is_answered(command, options, capsys):
    for option in options.split():
        for value in ODD:
            try:
                status = cli.main([*command, f"{option}={value}"])
            except SystemExit as stop:  # of argparse
                status = stop.code
            except Exception as error:
                raise AssertionError(f"{option}={value[:30]}") from error
            said = capsys.readouterr()
            assert status in (0, 2) and bool(said.err) == (status == 2), (option, value[:30])


@pytest.mark.parametrize("command", [["report"], ["compare", "."], ["bench", "--device=cpu"]])
def test_names_of_strangers_do_not_move_the_cursor(command, capsys):
    assert cli.main([*command, "a\x1b[2Jb"]) == 2
    said = capsys.readouterr()
    assert r"a\x1b[2Jb" in said.err and "\x1b" not in said.out + said.err


def test_names_are_those_of_torch_and_of_the_suites():
    assert (EAGER, GRAPH, SUSTAINED, HOST, REPORTED) == arguments.MODES
    for name in arguments.CACHE_DTYPES:
        assert isinstance(getattr(torch, name), torch.dtype)
