"""A kernel of each kind builds for Hopper with every release of Triton that is supported.

Releases come from the package index, once, into the user's cache folder, where what they compiled
is kept too: a kernel is compiled again only when its source has changed, whichever checkout asks.
The release that is installed is that of `test_all_kernels`.
"""

import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from blackwell_sparsek.core.compat import WARPS_TRITON
from blackwell_sparsek.testing.compile_only import compile_kernels, table

CACHES = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
# wheels differ from one Python to the next
FOLDER = CACHES / "blackwell_sparsek" / f"triton-releases-{sys.implementation.cache_tag}"
RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
HOPPER = {
    *("attn_fwd_sm90", "attn_bwd_sm90", "attn_bwd_keys_sm90", "attn_bwd_queries_sm90"),
    *("attn_decode_sm90", "bsr_spmm_sm90", "bsr_spmm_narrow_sm90", "bsr_spmm_strips"),
    *("bsr_spmm_warps", "attn_ragged_sm90", "bsr_sddmm_sm90", "attn_decode_latent"),
    *("attn_bwd_wide_keys_sm90", "attn_bwd_wide_queries_sm90", "attn_fwd_fp8_sm90"),
    *("sparse_attn_fwd_sm90", "sparse_attn_latent", "sparse_attn_dq_sm90", "gated_attn_fwd_sm90"),
    *("sparse_attn_dkdv_sm90", "bsr_spmm_fp8_sm90", "bsr_spmm_narrow_fp8_sm90"),
}


def release(version: str) -> pathlib.Path:
    """The folder of a release, installed if it is not there; skips without a package index."""
    place = FOLDER / version
    if not place.exists():
        fresh = FOLDER / f"{version}-{os.getpid()}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--target", str(fresh), f"triton=={version}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no triton {version} from the package index: {done.stderr.strip()[-200:]}")
        try:
            fresh.rename(place)
        except OSError:  # another checkout was first
            assert place.is_dir()
            shutil.rmtree(fresh)
    return place


@pytest.fixture
def records_with(monkeypatch):
    """Builds compile cases with a release."""

    def records(version: str, *args: Any, **options: Any) -> list[dict[str, Any]]:
        path = [str(release(version)), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(FOLDER / "cache"))
        made = compile_kernels(*args, **options)
        assert {record["triton"] for record in made} == {version}
        failed = [record for record in made if record["problems"]]
        assert not failed, "\n" + table(failed)
        return made

    return records


def test_every_supported_release_is_here():
    assert tuple(tuple(map(int, x.split(".")[:2])) for x in RELEASES) == WARPS_TRITON


OTHERS = [x for x in RELEASES if x != triton.__version__]


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", OTHERS)
def test_a_kernel_of_each_kind_builds_for_hopper(version, records_with):
    records = records_with(version, [90], one_of_each=True)
    assert {record["name"].split("/")[0] for record in records} >= HOPPER


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", OTHERS)
def test_rows_that_start_anywhere_are_not_copied_as_aligned_ones(version, records_with):
    # what 3.6 takes for aligned (docs/decisions/compiler.md), 3.7 and newer do not
    records = records_with(version, [80, 90], "odd-kv")
    assert len(records) >= 3
