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


# tile_m, tile_n, num_warps, num_stages of both kernels as they are compiled without a GPU
PICKED = {
    "bfloat16-d64": {
        80: ((128, 64, 8, 2), (32, 128, 8, 2)),
        89: ((128, 64, 8, 2), (32, 128, 8, 2)),
        90: ((128, 64, 4, 3), (64, 64, 4, 3)),
        100: ((128, 64, 8, 2), (64, 128, 8, 1)),
        120: ((128, 64, 8, 2), (32, 128, 8, 2)),
    },
    "bfloat16-d128": {
        80: ((128, 64, 8, 2), (64, 64, 8, 2)),
        89: ((128, 32, 8, 2), (64, 64, 8, 2)),
        90: ((128, 64, 8, 3), (64, 64, 4, 2)),
        100: ((128, 64, 8, 2), (64, 128, 8, 1)),
        120: ((128, 32, 8, 2), (64, 64, 8, 2)),
    },
    "bfloat16-d128-blocks128x128": {
        80: ((128, 64, 8, 2), (64, 64, 8, 2)),
        89: ((128, 32, 8, 2), (64, 64, 8, 2)),
        90: ((128, 64, 8, 3), (64, 64, 4, 2)),
        100: ((128, 64, 8, 2), (64, 128, 8, 1)),
        120: ((128, 32, 8, 2), (64, 64, 8, 2)),
    },
    "bfloat16-d128-alibi": {
        80: ((128, 64, 8, 2), (64, 64, 8, 2)),
        90: ((128, 64, 8, 3), (64, 64, 4, 2)),
    },
    "bfloat16-d128-bias": {
        89: ((64, 32, 8, 2), (64, 64, 8, 2)),
        90: ((128, 64, 8, 3), (64, 64, 4, 2)),
        120: ((64, 32, 8, 2), (64, 64, 8, 2)),
    },
    "float16-d256": {
        80: ((64, 32, 8, 2), (32, 32, 8, 2)),
        89: ((32, 32, 8, 2), (32, 32, 8, 2)),
        90: ((64, 32, 8, 2), (32, 64, 8, 2)),
        100: ((64, 32, 8, 2), (64, 64, 8, 1)),
        120: ((32, 32, 8, 2), (32, 32, 8, 2)),
    },
    "bfloat16-d128-blocks64x64": {
        80: ((64, 64, 4, 2), (64, 64, 8, 2)),
        90: ((64, 64, 4, 3), (64, 64, 4, 2)),
    },
    "bfloat16-d64-blocks128x16": {
        80: ((128, 64, 8, 2), (64, 16, 4, 2)),
        90: ((128, 64, 8, 3), (64, 16, 4, 3)),
    },
    "bfloat16-d128-blocks16x16": {
        80: ((16, 64, 2, 2), (64, 16, 4, 2)),
        90: ((16, 64, 2, 3), (64, 16, 4, 2)),
    },
    "float16-d80-everything": {
        80: ((128, 64, 8, 2), (64, 64, 8, 2)),
        90: ((128, 64, 8, 3), (64, 64, 4, 2)),
    },
    "float32-d128-tf32": {
        80: ((32, 32, 8, 2), (32, 32, 8, 2)),
        90: ((32, 32, 8, 2), (32, 32, 8, 2)),
    },
    "float32-d128-ieee": {
        80: ((32, 32, 8, 1), (32, 32, 8, 1)),
        90: ((32, 32, 8, 1), (32, 32, 8, 1)),
    },
}


def test_the_tiles_that_are_compiled_are_known():
    pytest.importorskip("triton")
    from blackwell_sparsek.testing.cases import attention as cases

    picked = {}
    for asked, archs in cases.BACKWARD.items():
        for sm in archs:
            one = problem(
                sm, dtype=asked.dtype, head_dim=asked.head_dim, head_dim_v=asked.head_dim,
                mask_block=asked.block_size,
                bias="bias" in asked.added,
            )  # fmt: skip
            picked[asked.name(sm)] = tuple(config(one, asked.precision) for config in CONFIGS)
    assert picked == {
        f"{name}-sm_{sm}": tuple(
            AttnBwdConfig(*tile, "tf32" if "tf32" in name else "ieee") for tile in pair
        )
        for name, tiles in PICKED.items()
        for sm, pair in tiles.items()
    }
