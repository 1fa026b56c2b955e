"""Tiles of the backward kernels: what they may depend on, and what they must fit."""

import itertools

import pytest
import torch

from blackwell_sparsek.attention.triton.tuning import (
    AttnBwdConfig,
    attn_dkdv_config,
    attn_dq_config,
)

from .test_tuning import ARCHS, problem

CONFIGS = (attn_dq_config, attn_dkdv_config)


@pytest.mark.parametrize("sm", ARCHS)
@pytest.mark.parametrize("config", CONFIGS)
def test_lengths_bands_and_options_do_not_change_the_tiles(sm, config):
    expected = config(problem(sm), "ieee")
    for changes in (
        {"max_q": 1}, {"max_k": 1}, {"max_q": 2**20, "max_k": 2**20}, {"batch": 4096},
        {"banded": True}, {"softcap": True}, {"sinks": True}, {"varlen": True},
        {"deterministic": True}, {"backward": True},
    ):  # fmt: skip
        assert config(problem(sm, **changes), "ieee") == expected


@pytest.mark.parametrize("sm", ARCHS)
def test_tiles_lie_within_blocks(sm):
    dims, dtypes = (16, 64, 80, 128, 256), (torch.float16, torch.float32)
    sides = (16, 32, 64, 128, 256)
    for block_q, block_kv, dim, dtype in itertools.product(sides, sides, dims, dtypes):
        masked = problem(sm, mask_block=(block_q, block_kv), head_dim=dim, dtype=dtype)
        where = (block_q, block_kv, dim, dtype)
        assert block_q % attn_dq_config(masked, "ieee").tile_m == 0, where
        assert block_kv % attn_dkdv_config(masked, "ieee").tile_n == 0, where


@pytest.mark.parametrize("sm", ARCHS[1:])
def test_operands_fit_shared_memory(sm):
    """The own pair of tiles and the stages of the others; compiled kernels are exact elsewhere."""
    limit = 227 * 1024 if sm in (90, 100, 103) else 163 * 1024 if sm == 80 else 99 * 1024
    for dtype, dim in itertools.product((torch.float16, torch.float32), (16, 64, 128, 256)):
        precisions = ("ieee", "tf32") if dtype == torch.float32 else ("ieee",)
        for precision, config in itertools.product(precisions, CONFIGS):
            tiles = config(problem(sm, dtype=dtype, head_dim=dim), precision)
            own, other = tiles.tile_m, tiles.tile_n
            if config is attn_dkdv_config:
                own, other = other, own
            rows = 2 * own + 2 * other * max(tiles.num_stages - 1, 1)
            assert rows * max(dim, 64) * dtype.itemsize <= limit, (dtype, dim, tiles)


def test_the_kernels_that_are_compiled_are_the_ones_that_run():
    cases = pytest.importorskip("blackwell_sparsek.attention.triton.backward_cases")
    assert cases.BUILDS
    for call, tiles in cases.BUILDS.items():
        for sm, pair in tiles.items():
            asked = problem(
                sm, dtype=call.dtype, head_dim=call.head_dim, head_dim_v=call.head_dim,
                mask_block=call.block_size,
            )  # fmt: skip
            picked = tuple(config(asked, call.precision) for config in CONFIGS)
            built = tuple(AttnBwdConfig(*tile, call.precision) for tile in pair)
            assert picked == built, (call, sm)
