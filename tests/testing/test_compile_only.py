"""The offline compiler sees what kernels are: spills, missing instructions, code that is wrong."""

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.core import compat
from blackwell_sparsek.core.compat import SPILLS_TRITON
from blackwell_sparsek.core.env import environment_for_compiler
from blackwell_sparsek.testing import compile_cases, compile_only, compile_worker
from blackwell_sparsek.testing.compile_cases import CompileCase
from blackwell_sparsek.testing.compile_only import compile_kernels

PLANTED = """
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blackwell_sparsek.testing.compile_cases import CompileCase, compile_cases


class Strides(NamedTuple):
    row: int
    col: int


@triton.jit
def _twice(x):
    return x * 2


@triton.jit
def _dot_kernel(out_ptr, a_ptr, b_ptr, strides, bias_ptr, policy, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * strides.row + tl.arange(0, N)[None, :] * strides.col
    c = tl.dot(tl.load(a_ptr + offs), tl.load(b_ptr + offs), input_precision="ieee")
    if bias_ptr is not None:
        c += tl.load(bias_ptr + tl.arange(0, N))[None, :]
    tl.store(out_ptr + offs, policy[0](c))


@triton.jit
def _multiply_add_kernel(out_ptr, x_ptr, y_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    tl.store(out_ptr + offs, x * y + x)


@triton.jit
def _broken_kernel(x_ptr):
    tl.store(x_ptr, undefined_name)


@gluon.jit
def _copy_kernel(out_ptr, x_ptr, N: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs = gl.arange(0, N, layout=layout)
    gl.store(out_ptr + offs, gl.load(x_ptr + offs))


@compile_cases
def _cases():
    half = torch.float16
    dot = dict(out_ptr=torch.float32, a_ptr=half, b_ptr=half, strides=Strides(64, 1),
               bias_ptr=None, policy=(_twice,), N=64)
    yield CompileCase("dot", _dot_kernel, dot, archs=(80, 90))
    yield CompileCase("dot/wants wgmma", _dot_kernel, dot, archs=(80, 90), expect={"wgmma": 1})
    yield CompileCase("dot/short of args", _dot_kernel, {"N": 64}, archs=(90,))
    add = dict(out_ptr=torch.float32, x_ptr=torch.float32, y_ptr=torch.float32, N=128)
    yield CompileCase("multiply_add", _multiply_add_kernel, add, archs=(80,), expect={"fma.rn": 1})
    yield CompileCase("broken", _broken_kernel, {"x_ptr": torch.float32}, archs=(90,))
    yield CompileCase("spilling", _dot_kernel, dot, archs=(80,), options={"maxnreg": 40})
    yield CompileCase("gluon", _copy_kernel, dict(out_ptr=half, x_ptr=half, N=128), archs=(90,))
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Records of the planted kernels by (name, arch), built from a process that interprets."""
    root = tmp_path_factory.mktemp("planted")
    package = root / "planted_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "cases.py").write_text(textwrap.dedent(PLANTED))
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        patch.setenv("PYTHONPATH", path)
        patch.setenv("TRITON_INTERPRET", "1")
        # kernels must not depend on a default that Triton 3.10 changes
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
        seen = []
        records = compile_kernels(
            (80, 90),
            package="planted_kernels",
            counts=["wgmma", "sass:HGMMA"],
            progress=lambda done, total, record: seen.append((done, total)),
        )
    assert seen == [(i + 1, len(records)) for i in range(len(records))]
    return {(record["name"], record["arch"]): record for record in records}


def test_counts_instructions_and_finds_the_target(planted):
    hopper, ampere = planted["dot", 90], planted["dot", 80]
    assert hopper["problems"] == [] and ampere["problems"] == []
    assert hopper["target"] == "sm_90a" and ampere["target"] == "sm_80"
    assert hopper["counts"]["wgmma"] > 0 and hopper["counts"]["sass:HGMMA"] > 0
    assert ampere["counts"] == {"wgmma": 0, "sass:HGMMA": 0}
    assert 0 < hopper["registers"] <= 255 and hopper["shared"] > 0


def test_a_missing_instruction_is_a_problem(planted):
    assert planted["dot/wants wgmma", 90]["problems"] == []
    assert planted["dot/wants wgmma", 80]["problems"] == ["wgmma occurs 0 times (at least 1)"]


def test_products_and_sums_are_fused_whatever_the_default(planted):
    assert planted["multiply_add", 80]["problems"] == []


def test_a_kernel_that_does_not_compile_is_a_problem(planted):
    (problem,) = planted["broken", 90]["problems"]
    assert "undefined_name" in problem


def test_forgotten_arguments_are_named(planted):
    (problem,) = planted["dot/short of args", 90]["problems"]
    assert "a_ptr" in problem and "differ" in problem


def test_spills_are_a_problem_with_the_release_they_were_counted_with(planted, monkeypatch):
    record = planted["spilling", 80]
    case = CompileCase("spilling", None, {})
    for release in (SPILLS_TRITON, (SPILLS_TRITON[0], SPILLS_TRITON[1] + 1)):
        monkeypatch.setattr(compat, "triton_version", lambda release=release: release)
        problems = compile_worker._problems(case, 80, record)
        assert [p.split()[0] for p in problems] == ["spills"] * (release == SPILLS_TRITON)


def test_gluon_kernels_build(planted):
    assert planted["gluon", 90]["problems"] == []


def test_the_table_shows_problems_under_their_row(planted):
    lines = compile_only.table([planted["dot/wants wgmma", 80]]).splitlines()
    assert lines[0].split()[:5] == ["case", "arch", "regs", "shared", "spills"]
    assert lines[1].endswith("FAILED") and lines[2].strip().startswith("wgmma occurs 0")


def test_a_crash_of_the_child_is_raised():
    with pytest.raises(RuntimeError, match="No module named 'no_such_package'"):
        compile_kernels((90,), package="no_such_package")


@pytest.mark.exhaustive
def test_command_line(capsys):
    assert compile_only.main(["--arch", "sm_90", "merge_states/float16-d64", "--jobs", "1"]) == 0
    captured = capsys.readouterr()
    assert "merge_states/float16-d64  sm_90" in captured.out
    assert captured.err.endswith(" s  [1/1] merge_states/float16-d64 sm_90\n")
    with pytest.raises(SystemExit):
        compile_only.main(["--arch", "hopper"])
    assert compile_only.main(["--arch", "sm_90", "no such kernel", "--jobs", "1"]) == 1


def test_an_interrupt_ends_the_children(monkeypatch):
    started = []

    def start(command):
        slow = [sys.executable, "-c", "import time; print('{\"total\": 1}', flush=True); "]
        slow[-1] += "time.sleep(600)"
        started.append(subprocess.Popen(slow, stdout=-1, stderr=-1, text=True))
        return started[-1]

    def interrupted(lines, running, progress):
        assert lines.get() == {"total": 1}
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_only, "_start", start)
    monkeypatch.setattr(compile_only, "_gathered", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_only.compile_kernels([90], jobs=2)
    assert [child.wait(timeout=30) < 0 for child in started] == [True, True]


def test_parts_are_all_cases_once(monkeypatch):
    asked = []

    def start(command):
        asked.append([command[command.index(f"--{what}") + 1] for what in ("shard", "shards")])
        nothing = [sys.executable, "-c", "print('{\"total\": 0}')"]
        return subprocess.Popen(nothing, stdout=-1, stderr=-1, text=True)

    monkeypatch.setattr(compile_only, "_start", start)
    for part in range(3):
        compile_only.compile_kernels([90], jobs=2, part=(part, 3))
    assert sorted(asked) == [[str(i), "6"] for i in range(6)]


NOT_EVERY_TRITON = """
from blackwell_sparsek.testing.cases import matmul

sources = (matmul.paired_cases, matmul.split_cases, matmul.strips_cases, matmul.warp_rows_cases)
for may in (True, False):
    matmul.warps_may_part = lambda: may
    print(*(bool(list(source())) for source in sources))
"""


def test_kernels_that_this_triton_does_not_run_are_not_built():
    # launches of kernels that are interpreted cannot be captured
    done = subprocess.run(
        [sys.executable, "-c", NOT_EVERY_TRITON],
        env=environment_for_compiler(),
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["True"] * 4 + ["False"] * 4, done.stderr


def test_one_of_each_kernel(monkeypatch):
    def cases(*names):
        return lambda: iter([CompileCase(name, None, {}) for name in names])

    sources = [cases("a/1", "b/1", "a/2"), cases("a/3", "a/4")]
    monkeypatch.setattr(compile_cases, "_sources", sources)
    names = [case.name for case in compile_cases.registered_cases(one_of_each=True)]
    assert names == ["a/1", "b/1", "a/3"]
    assert len(compile_cases.registered_cases()) == 5
