"""Tiles and raster groups of the split Hopper backward."""

import dataclasses

import pytest
import torch

from blackwell_sparsek.attention.sm90.tuning import (
    attn_bwd_dkdv_config,
    attn_bwd_dkdv_raster_group,
    attn_bwd_dq_config,
)
from blackwell_sparsek.calls.attention import AttnProblem, AttnSpec
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.launch.descriptors import SMEM_BYTES


def problem(**changes):
    q = torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16)
    spec = AttnSpec(0.1, max_q=4096, max_k=4096)
    base = AttnProblem.of(q, q, q, spec, backward=True)
    given = {"arch": Arch("cuda", 90, 132, 232448, False), "mask_block": (64, 64), **changes}
    return dataclasses.replace(base, **given)


@pytest.mark.parametrize(
    "dims, tiles", [((64, 64), (64, 64)), ((40, 128), (64, 128)), ((128, 8), (128, 64))]
)
def test_tiles_cover_the_head_dims(dims, tiles):
    call = problem(head_dim=dims[0], head_dim_v=dims[1])
    for config in (attn_bwd_dkdv_config(call), attn_bwd_dq_config(call)):
        assert tiles == (config.TILE_D, config.TILE_DV)


@pytest.mark.parametrize("dim, dim_v", [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_two_programs_share_an_sm(dim, dim_v):
    """Tiles of both leave room for barriers and for what the system takes."""
    call = problem(head_dim=dim, head_dim_v=dim_v)
    keys, queries = attn_bwd_dkdv_config(call), attn_bwd_dq_config(call)
    of_keys = 64 * (dim + dim_v) * 2 + keys.STAGES * keys.TILE_M * ((dim + dim_v) * 2 + 8)
    rings = queries.K_STAGES * dim + queries.V_STAGES * dim_v
    of_queries = 2 * 64 * (dim + dim_v) + 2 * queries.TILE_N * rings
    assert max(of_keys, of_queries) + 1024 <= SMEM_BYTES // 2
    for config in (keys, queries):
        assert 2 * config.MAX_REGISTERS * 256 == 65536


def test_a_visit_is_a_block_or_part_of_one():
    for rows in (64, 128, 256):
        config = attn_bwd_dkdv_config(problem(mask_block=(rows, 64)))
        assert (config.BLOCK_Q, config.TILE_M, config.tile_n, config.parts) == (rows, 64, 64, 1)


def test_raster_groups():
    # queries and output gradients of a head take 2 MiB
    assert attn_bwd_dkdv_raster_group(problem()) == 8
    assert attn_bwd_dkdv_raster_group(problem(max_q=16384)) == 2
    assert attn_bwd_dkdv_raster_group(problem(max_q=65536)) == 1
    assert attn_bwd_dkdv_raster_group(problem(heads_kv=4)) == 2
    assert attn_bwd_dkdv_raster_group(problem(max_q=16, heads_q=2, heads_kv=2)) == 2
