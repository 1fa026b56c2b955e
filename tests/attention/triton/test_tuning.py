"""Tiles of the attention kernels: what they may depend on, and what they must fit."""

import dataclasses
import itertools

import pytest
import torch

from blackwell_sparsek.attention.triton.tuning import AttnFwdConfig, attn_fwd_config
from blackwell_sparsek.calls.attention import AttnProblem, AttnSpec
from blackwell_sparsek.core.arch import Arch

ARCHS = (0, 80, 86, 89, 90, 100, 103, 120)


def problem(sm=90, **changes):
    q = torch.empty(1, 4, 8, 64, dtype=torch.float16)
    base = AttnProblem.of(q, q, q, AttnSpec(0.125, max_q=8, max_k=8))
    kind = "cuda" if sm else "cpu"
    return dataclasses.replace(base, arch=Arch(kind, sm, 132, 0, sm == 0), **changes)


@pytest.mark.parametrize("sm", ARCHS)
def test_lengths_bands_and_options_do_not_change_the_tiles(sm):
    expected = attn_fwd_config(problem(sm), "ieee")
    for changes in (
        {"max_q": 1}, {"max_k": 1}, {"max_q": 2**20, "max_k": 2**20}, {"batch": 4096},
        {"banded": True}, {"softcap": True}, {"sinks": True}, {"varlen": True},
    ):  # fmt: skip
        assert attn_fwd_config(problem(sm, **changes), "ieee") == expected


@pytest.mark.parametrize("sm", ARCHS)
def test_tiles_lie_within_query_blocks(sm):
    dims = (16, 64, 80, 128, 256)
    dtypes = (torch.float16, torch.float32)
    for block, dim, dtype in itertools.product((16, 32, 64, 128, 256), dims, dtypes):
        masked = problem(sm, mask_block=(block, 16), head_dim=dim, dtype=dtype)
        config = attn_fwd_config(masked, "ieee")
        assert block % config.tile_m == 0, (block, dim, dtype)


@pytest.mark.parametrize("sm", ARCHS[1:])
def test_operands_fit_shared_memory(sm):
    """Stages of K and V and one Q; the compiled kernels are checked to the byte elsewhere."""
    limit = 227 * 1024 if sm in (90, 100, 103) else 163 * 1024 if sm == 80 else 99 * 1024
    for dtype, dim in itertools.product((torch.float16, torch.float32), (16, 64, 128, 256)):
        precisions = ("ieee", "tf32") if dtype == torch.float32 else ("ieee",)
        for precision in precisions:
            config = attn_fwd_config(problem(sm, dtype=dtype, head_dim=dim), precision)
            rows = config.tile_m + 2 * config.tile_n * (config.num_stages - 1)
            assert rows * max(dim, 64) * dtype.itemsize <= limit, (dtype, dim, config)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tile_m": 8}, "tile_m is 8; expected a power of two from 16 on"),
        ({"tile_n": 48}, "tile_n is 48; expected a power of two from 16 on"),
        ({"precision": "fp8"}, "precision is 'fp8'; expected one of"),
    ],
)
def test_configs_check_themselves(changes, words):
    good = {"tile_m": 16, "tile_n": 16, "num_warps": 4, "num_stages": 2}
    AttnFwdConfig(**good)
    with pytest.raises(ValueError, match=words):
        AttnFwdConfig(**{**good, **changes})


def test_the_kernels_that_are_compiled_are_the_ones_that_run():
    cases = pytest.importorskip("blackwell_sparsek.attention.triton.forward_cases")
    for call, tiles in cases.BUILDS.items():
        for sm, tile in tiles.items():
            asked = problem(
                sm, dtype=call.dtype, head_dim=call.head_dim, head_dim_v=call.head_dim,
                mask_block=call.block_size,
            )  # fmt: skip
            picked = attn_fwd_config(asked, call.precision)
            assert picked == AttnFwdConfig(*tile, call.precision), (call, sm)
