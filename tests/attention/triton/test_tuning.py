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


# tile_m, tile_n, num_warps, num_stages of what is compiled without a GPU, by architecture
WIDE, TALL, SQUARE = (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2)
TALL_IN_99_KIB, FLAT_IN_99_KIB = (128, 64, 8, 2), (64, 32, 8, 2)
PICKED = {
    "bfloat16-d64": {80: TALL, 89: TALL, 90: WIDE, 100: WIDE, 120: TALL},
    "bfloat16-d128": {80: TALL, 89: TALL_IN_99_KIB, 90: TALL, 100: TALL, 120: TALL_IN_99_KIB},
    "bfloat16-d128-blocks128x128": {
        80: TALL_IN_99_KIB, 89: TALL_IN_99_KIB, 90: TALL, 100: TALL, 120: TALL_IN_99_KIB,
    },
    "float16-d256": {80: SQUARE, 89: FLAT_IN_99_KIB, 90: SQUARE, 100: SQUARE, 120: FLAT_IN_99_KIB},
    "bfloat16-d64-blocks128x16": {80: (128, 32, 8, 3), 90: TALL},
    "bfloat16-d128-blocks128x16": {80: TALL_IN_99_KIB, 90: TALL},
    "bfloat16-d128-blocks64x64": {80: (64, 64, 4, 2), 90: (64, 64, 4, 3)},
    "bfloat16-d128-blocks16x16": {80: (16, 64, 2, 2), 90: (16, 64, 2, 2)},
    "float16-d80-everything": {80: TALL, 90: TALL},
    "bfloat16-d40-dv8": {90: WIDE},
    "bfloat16-d24-dv8-blocks128x64": {90: TALL},
    "bfloat16-d72-dv8-blocks64x256": {90: (64, 64, 4, 3)},
    "float32-d128-tf32": {80: (64, 32, 8, 2), 90: (64, 32, 8, 2)},
    "float32-d128-ieee": {80: (32, 32, 8, 1), 90: (32, 32, 8, 1)},
    "bfloat16-d128-alibi": {80: TALL, 90: TALL},
    "bfloat16-d128-bias": {89: (128, 32, 8, 2), 90: TALL, 120: (128, 32, 8, 2)},
    "bfloat16-d64-blocks128x128-alibi-bias": {90: TALL},
    "float16-d256-alibi-bias": {89: FLAT_IN_99_KIB, 90: SQUARE},
}  # fmt: skip


def test_the_tiles_that_are_compiled_are_known():
    pytest.importorskip("triton")
    from blackwell_sparsek.testing.cases import attention as cases

    picked = {}
    for asked, archs in cases.FORWARD.items():
        for sm in archs:
            one = problem(
                sm, dtype=asked.dtype, head_dim=asked.head_dim,
                head_dim_v=asked.head_dim_v or asked.head_dim, mask_block=asked.block_size,
                bias="bias" in asked.added,
            )  # fmt: skip
            picked[asked.name(sm)] = attn_fwd_config(one, asked.precision)
    assert picked == {
        f"{name}-sm_{sm}": AttnFwdConfig(*tile, "tf32" if "tf32" in name else "ieee")
        for name, tiles in PICKED.items()
        for sm, tile in tiles.items()
    }
