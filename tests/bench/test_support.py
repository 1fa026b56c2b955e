"""The table of kernels: each family's problem is one that its kernel runs, and reasons are told."""

import json
import os
import subprocess
import sys

import pytest
import torch

from blackwell_sparsek.attention.sm90.tuning import attn_bwd_sm90_is_split
from blackwell_sparsek.bench import support
from blackwell_sparsek.bench.commands import info
from blackwell_sparsek.bench.report.support import HOPPER, as_if
from blackwell_sparsek.bench.support import KERNELS, verdict
from blackwell_sparsek.core import compat
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.compat import LAUNCHER_TRITON, WARPS_TRITON
from blackwell_sparsek.matmul.estimate import takes_warp_rows
from blackwell_sparsek.matmul.sm90 import tuning

CPU, INTERPRETED = Arch("cpu", 0, 1, 0, False), Arch("cpu", 0, 1, 0, True)
AMPERE, TURING = Arch("cuda", 80, 108, 166912, False), Arch("cuda", 75, 40, 65536, False)
FAMILIES = {kernels.name: kernels for kernels in KERNELS}
HOPPER_FAMILIES = [name for name, kernels in FAMILIES.items() if kernels.impl == "sm90"]
PORTABLE = [name for name, kernels in FAMILIES.items() if kernels.impl == "triton"]


@pytest.fixture(autouse=True)
def _known_triton():
    with as_if(WARPS_TRITON[-1]):
        yield


@pytest.mark.parametrize("release", WARPS_TRITON)
def test_everything_runs_at_full_speed_on_hopper_with_known_releases(release):
    with as_if(release):
        assert {verdict(kernels, HOPPER) for kernels in KERNELS} == {"full speed"}


@pytest.mark.parametrize("name", HOPPER_FAMILIES)
@pytest.mark.parametrize(
    ("arch", "release", "told"),
    [
        (AMPERE, (3, 9), "needs sm_90, this is sm_80; the portable kernels run instead"),
        (TURING, (3, 9), "needs sm_90, this is sm_75; plain PyTorch runs instead"),
        (CPU, (3, 9), "needs sm_90, this is cpu; plain PyTorch runs instead"),
        (
            HOPPER,
            (3, 10),
            "Hopper kernels are known to work with triton 3.6 to 3.9, got 3.10; the portable "
            "kernels run instead",
        ),
        (
            HOPPER,
            (3, 5),
            "triton 3.5 is older than 3.6; torch 2.10 and newer bring a newer one; plain PyTorch "
            "runs instead",
        ),
    ],
)
def test_where_hopper_kernels_do_not_run(name, arch, release, told):
    with as_if(release):
        assert verdict(FAMILIES[name], arch) == told


@pytest.mark.parametrize("name", PORTABLE)
@pytest.mark.parametrize(
    ("arch", "release", "told"),
    [
        (HOPPER, (3, 10), "full speed"),
        (AMPERE, (3, 10), "run, but were never timed on sm_80"),
        (
            TURING,
            (3, 9),
            "needs a CUDA GPU of sm_80 or newer, got sm_75; plain PyTorch runs instead",
        ),
        (INTERPRETED, (3, 9), "interpreted, when asked for"),
    ],
)
def test_where_portable_kernels_run(name, arch, release, told, monkeypatch):
    # whether interpreted bfloat16 can be trusted is asked elsewhere
    monkeypatch.setattr("blackwell_sparsek.dispatch.machine.bf16_is_exact", lambda: True)
    with as_if(release):
        assert verdict(FAMILIES[name], arch) == told


def test_a_torch_without_cuda_is_named(monkeypatch):
    monkeypatch.setattr(
        "blackwell_sparsek.dispatch.machine.why_torch_misses_gpu", lambda: "torch misses it"
    )
    told = (
        "needs a CUDA GPU of sm_80 or newer, got cpu; torch misses it; plain PyTorch runs instead"
    )
    assert {verdict(FAMILIES[name], CPU) for name in PORTABLE} == {told}


def test_each_product_is_one_of_its_own_kernel():
    """The families differ in tiles, which a reason does not show."""

    def problem(block, tokens):
        return support.product_problem(HOPPER, (block, block), tokens)

    wide, pairs = problem(128, 4096), problem(64, 8192)
    assert tuning.narrow_sm90_config(wide) is None
    assert tuning.spmm_sm90_paired(wide, tuning.spmm_sm90_config(wide, False)) is None
    assert tuning.spmm_sm90_paired(pairs, tuning.spmm_sm90_config(pairs, False)) is not None
    assert tuning.narrow_sm90_config(problem(128, 16)) is not None
    assert tuning.strips_config(problem(128, 16)) is None
    assert tuning.strips_config(problem(16, 16)) is not None
    assert takes_warp_rows(problem(16, 8192), False) and not takes_warp_rows(wide, False)


def test_the_two_backwards_are_told_apart():
    assert not attn_bwd_sm90_is_split(support.attention_problem(HOPPER))
    assert attn_bwd_sm90_is_split(support.attention_problem(HOPPER, mask_block=(64, 64)))


# What `bsk info` tells.


def _info(monkeypatch, arch, release):
    monkeypatch.setattr(info, "arch_of", lambda device: arch)
    with as_if(release):
        return info.gathered(torch.device("cpu"))


def test_info_tells_of_kernels_and_who_launches_them(monkeypatch):
    found = _info(monkeypatch, HOPPER, LAUNCHER_TRITON[-1])
    assert found["triton"] == "can compile kernels" and found["launching"] == "by the CUDA driver"
    assert list(found["kernels"]) == list(FAMILIES)
    assert set(found["kernels"].values()) == {"full speed"}
    told = info.told(found)
    assert "launching by the CUDA driver" in told
    (line,) = (line for line in told.splitlines() if "  attention forward" in line)
    assert line.split("  ")[1] == "attention forward" and line.endswith(" full speed")


def test_info_with_a_newer_triton(monkeypatch):
    found = _info(monkeypatch, HOPPER, (3, 10))
    known = "known to work with triton 3.6 to 3.9, got 3.10"
    assert found["triton"] == f"can compile the portable kernels only: Hopper kernels are {known}"
    assert found["launching"] == (
        "by Triton's front end, about 300 us of host time a call instead of 20 to 30: direct "
        "launches are known for triton 3.6 to 3.9, got 3.10"
    )


@pytest.mark.parametrize("arch", [CPU, INTERPRETED])
def test_info_without_a_gpu(monkeypatch, arch):
    assert _info(monkeypatch, arch, (3, 9))["launching"] == "no compiled kernels on cpu"


def test_info_with_a_triton_that_is_too_old(monkeypatch):
    found = _info(monkeypatch, HOPPER, (3, 5))
    why = "triton 3.5 is older than 3.6; torch 2.10 and newer bring a newer one"
    assert found["triton"] == f"{why}; plain PyTorch runs instead"
    assert found["launching"] == "no compiled kernels on sm_90"


def test_info_tells_of_a_gpu_that_torch_misses(monkeypatch):
    found = _info(monkeypatch, CPU, (3, 9))
    assert found["gpu"] is None and "\ngpu" not in info.told(found)
    found["gpu"] = "torch misses it"
    assert "\ngpu       torch misses it; the CPU is used instead\n" in info.told(found)


_BROKEN = """
import json
import torch, blackwell_sparsek as bsk
from blackwell_sparsek.bench.commands.info import gathered
q = torch.randn(1, 2, 16, 16)
decision = bsk.explain(bsk.attention, q, q, q)
try:
    bsk.attention(q, q, q, impl="triton")
except bsk.Unsupported as error:
    refused = str(error)
kept = bool(torch.isfinite(bsk.attention(q, q, q)).all())
print(json.dumps([decision.chosen, refused, kept, gathered(q.device)["triton"]]))
"""


def test_a_triton_that_cannot_be_imported_leaves_plain_pytorch(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("raise ImportError('libtriton.so: no such file')")
    (tmp_path / "triton-3.9.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: triton\nVersion: 3.9.0\n"
    (tmp_path / "triton-3.9.0.dist-info/METADATA").write_text(metadata)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", _BROKEN],
        capture_output=True,
        text=True,
        # interpreted, kernels run on a CPU, so that Triton would be imported
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    chosen, refused, kept, told = json.loads(done.stdout)
    fails = "importing it fails: ImportError: libtriton.so: no such file"
    assert chosen == "eager" and kept
    assert refused == f"attn_fwd: impl='triton' cannot run this: triton is installed, but {fails}"
    assert told == f"triton is installed, but {fails}; plain PyTorch runs instead"


def test_compat_is_as_before_after_an_assumption():
    before = compat.triton_version
    with as_if((3, 10)):
        assert compat.triton_version() == (3, 10)
    assert compat.triton_version is before
