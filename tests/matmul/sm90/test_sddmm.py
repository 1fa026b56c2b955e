"""Host side of Hopper's sampled product: plans, configurations, and what its copies address."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.calls.matmul import BsrProblem, SddmmCall, lies_transposed, pattern_tensors
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.launch.descriptors import SMEM_BYTES
from blackwell_sparsek.launch.launcher import cdiv
from blackwell_sparsek.matmul.api import sddmm
from blackwell_sparsek.matmul.sm90.config import CONSUMERS
from blackwell_sparsek.matmul.sm90.sddmm_launch import _blocks, _descriptor
from blackwell_sparsek.matmul.sm90.sddmm_plan import TileSizes, build_sddmm_plan, sddmm_plan
from blackwell_sparsek.matmul.sm90.tuning import (
    LEAST_SHARE_STEPS,
    sddmm_sm90_config,
    sddmm_sm90_shares,
    sddmm_sm90_unsupported,
)
from blackwell_sparsek.testing.bsr import random_bsr
from blackwell_sparsek.testing.inputs import integers

H200 = Arch("cuda", 90, 132, 232448, False)
BLOCKS = [(16, 16), (32, 32), (16, 128), (128, 16), (64, 64), (128, 128), (192, 64), (256, 256)]
LAYER = BsrProblem(
    kind="sddmm",
    arch=H200,
    dtype=torch.bfloat16,
    out_dtype=torch.bfloat16,
    shape=(4096, 4096),
    block_shape=(128, 128),
    nnz_blocks=225,
    n=4096,
    tma=True,
)


@pytest.mark.parametrize("sizes", [TileSizes(2, 1, 128), TileSizes(4, 2, 256), TileSizes(8, 1, 64)])
def test_a_plan_takes_every_piece_once(sizes):
    pattern = random_bsr((19 * 16, 23 * 16), (16, 16), seed=1, density=0.4).pattern
    plan = build_sddmm_plan(pattern.indptr, pattern.indices, 23, sizes, 500)
    assert plan.dtype == torch.int32 and plan.shape == (500, 3)
    kept = sddmm_plan(pattern.indptr, pattern.indices, 23, sizes)
    assert sddmm_plan(pattern.indptr, pattern.indices, 23, sizes) is kept
    # what is not needed comes last and has no pieces
    assert torch.equal(plan[: len(kept)], kept) and not (plan[len(kept) :, 1:]).any()
    pieces = []
    for row, begin, end in kept.tolist():
        first, last = (sizes.block_pieces * int(pattern.indptr[row + i]) for i in (0, 1))
        assert first <= begin < end <= last and end - begin <= sizes.tile_pieces
        assert end == last or end - begin == sizes.tile_pieces
        pieces += range(begin, end)
    assert sorted(pieces) == list(range(pattern.nnz_blocks * sizes.block_pieces))


def test_a_plan_takes_some_rows_at_a_time_column_by_column():
    rows_b, cols_b = 96, 40
    keep = torch.ones(rows_b, cols_b, dtype=torch.bool)
    indptr = torch.arange(0, rows_b * cols_b + 1, cols_b, dtype=torch.int32)
    indices = keep.nonzero()[:, 1].int()
    plan = sddmm_plan(indptr, indices, cols_b, TileSizes(2, 1, 128))
    rows, begin, _ = plan.long().unbind(1)
    columns = indices[begin]
    # 4096 rows of the matrix are 32 block rows
    assert (rows[: 32 * 20] < 32).all() and (rows[32 * 20 : 64 * 20] // 32 == 1).all()
    assert (columns[: 32 * 20].diff() >= 0).all()
    assert rows[:32].tolist() == list(range(32))


def test_a_pattern_without_blocks_has_an_empty_plan():
    indptr = torch.zeros(5, dtype=torch.int32)
    assert sddmm_plan(indptr, indptr[:0], 4, TileSizes(2, 1, 128)).shape == (0, 3)


@pytest.mark.parametrize("block_shape", BLOCKS)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("b_transposed", [False, True])
def test_configurations_fit(block_shape, out_dtype, b_transposed):
    problem = replace(LAYER, block_shape=block_shape, out_dtype=out_dtype)
    assert sddmm_sm90_unsupported(problem) is None
    config = sddmm_sm90_config(problem, True, b_transposed)
    out_bytes = CONSUMERS * config.TILE_M * config.out_chunk * config.OUT_BYTES
    assert config.STAGES * config.stage_bytes + out_bytes <= SMEM_BYTES
    assert config.STAGES >= 4 and out_dtype.itemsize == config.OUT_BYTES
    # copies fill a stage exactly, and chunks are whole copies
    a, b = config.a_block(), config.b_block()
    copied = a[1] * a[2] + config.tile_pieces * b[1] * b[2]
    assert 2 * copied == config.stage_bytes
    rows, columns = config.out_block()
    assert config.out_copies * rows * columns == config.TILE_M * config.out_chunk
    partial = sddmm_sm90_config(problem, True, b_transposed, partial=True)
    assert partial.OUT_BYTES == 4


@pytest.mark.parametrize("block_shape", BLOCKS)
def test_every_block_is_computed_once_from_its_rows_and_columns(block_shape):
    """Work tiles, copies and stores as the kernel addresses them, with torch's arithmetic."""
    bh, bw = block_shape
    shape = (5 * bh - 3, 6 * bw + 5)
    pattern = random_bsr(shape, block_shape, seed=2, density=0.4).pattern
    a, b = integers(shape[0], 7, seed=3), integers(7, shape[1], seed=4)
    call = SddmmCall(a, b, pattern_tensors(pattern.tensors()), shape, block_shape)
    problem = replace(LAYER, block_shape=block_shape, nnz_blocks=pattern.nnz_blocks)
    config = sddmm_sm90_config(problem, False, False)
    blocks = _blocks(call, config)
    padded_b = torch.nn.functional.pad(b, (config.PIECE, 2 * bw + config.PIECE))
    padded_a = torch.nn.functional.pad(a, (0, 0, 0, 2 * config.tile_rows))
    out = torch.full((pattern.nnz_blocks * bh, bw), float("nan"))
    for block_row, begin, end in blocks.tiles.tolist():
        for row_tile in range(config.row_tiles):
            first_row = row_tile * config.TILE_M
            row = block_row * config.tile_rows + first_row
            a_tile = padded_a[row : row + config.TILE_M]
            for p in range(config.tile_pieces):
                piece, live = begin + p, begin + p < end
                entry, part = piece // config.block_pieces, piece % config.block_pieces
                if not live:
                    continue
                col = int(blocks.indices[entry]) * bw + part * config.PIECE + config.PIECE
                sums = a_tile @ padded_b[:, col : col + config.PIECE]
                for g in range(config.grouped_rows):
                    block = entry if blocks.source is None else int(blocks.source[entry, g])
                    if block < 0:
                        continue
                    target = block * bh + first_row
                    rows = slice(target, target + config.store_rows)
                    cols = slice(part * config.PIECE, (part + 1) * config.PIECE)
                    assert out[rows, cols].isnan().all()
                    out[rows, cols] = sums[g * config.store_rows : (g + 1) * config.store_rows]
    expected = sddmm(a, b, pattern, impl="reference").data
    assert torch.equal(out.view_as(expected), expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arch": replace(H200, sm=100)}, "needs sm_90"),
        ({"dtype": torch.float32}, "no 16-bit WGMMA"),
        ({"out_dtype": torch.float64}, "no output in torch.float64"),
        ({"block_shape": (48, 64)}, "block height 48 is neither 16, 32 nor a multiple of 64"),
        ({"block_shape": (64, 48)}, "block width 48 is not 16, 32, 64, 128 or 256"),
        ({"tma": False}, "multiples of 16 bytes"),
    ],
)
def test_reasons_why_not(change, reason):
    assert reason in sddmm_sm90_unsupported(replace(LAYER, **change))


def test_few_tiles_share_their_sums():
    config = sddmm_sm90_config(LAYER, True, False)
    steps = cdiv(LAYER.n, config.TILE_K)
    assert sddmm_sm90_shares(replace(LAYER, nnz_blocks=2000), config, 1056, steps) == 1
    # 28 tiles would leave most SMs idle
    few = replace(LAYER, nnz_blocks=56)
    shares = sddmm_sm90_shares(few, config, 28, 8 * LEAST_SHARE_STEPS)
    assert 2 <= shares <= 8
    # a sum that is too short is not shared
    assert sddmm_sm90_shares(few, config, 28, LEAST_SHARE_STEPS) == 1


def test_orientation_of_operands():
    x = torch.empty(3, 64, 128, dtype=torch.bfloat16)
    assert lies_transposed(x) is False and lies_transposed(x.mT) is True
    assert lies_transposed(x[..., ::2]) is None
    assert lies_transposed(x[..., :100]) is False
    assert lies_transposed(x[..., 1:]) is None
    assert lies_transposed(x[:1].expand(3, 64, 128)) is None
    assert lies_transposed(x[..., :0]) is None
    # one column is contiguous in both directions, and TMA reads it as a row
    column = torch.empty(64, 1, dtype=torch.bfloat16)
    assert lies_transposed(column) is True and lies_transposed(column.mT) is False


def test_dimensions_of_one_have_strides_that_tma_takes():
    x = torch.empty(40, 8, dtype=torch.bfloat16)[:1].as_strided((1, 1, 8), (3, 5, 1))
    assert _descriptor(x, [1, 64, 8], False).strides == (16, 16, 1)
    assert _descriptor(torch.empty(2, 8, 64).mT, [1, 8, 64], True).strides == (512, 64, 1)
