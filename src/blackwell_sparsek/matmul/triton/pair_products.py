# mypy: ignore-errors
"""BSR times BSR on pair lists: out[o] = sum of op(first[f]) @ op(second[s]) over triples (f, s, o).

first [F, BLOCK_H, INNER] and second [S, INNER, BLOCK_W] as seen (stored blocks may be transposed:
the caller passes transposed views), out [O, BLOCK_H, BLOCK_W].

One program computes a TILE_M by TILE_N tile of one block of the result, walking its pairs in
order. Blocks must have sides that are multiples of 16.

`pair_products` is implementation `triton` of `bsk::bsr_pair_products`.
"""

import torch
import triton
import triton.language as tl

from ...calls.matmul import PairProductsCall
from ...device.tiles import add_product, offsets_2d
from ...dispatch.machine import fp32_precision
from ...launch.launcher import launch, on_device_of
from ...sparse.product import PairLists
from ..rows import strides_of
from .tuning import PairConfig, pair_config, triton_stages


@triton.jit
def _bsr_pair_products_kernel(
    out_ptr,  # [O, BLOCK_H, BLOCK_W], contiguous
    first_ptr,
    second_ptr,
    first_of_ptr,
    second_of_ptr,
    order_ptr,  # pairs sorted by their block of the result
    pair_indptr_ptr,  # where the pairs of each block of the result begin in that order
    first_strides,
    second_strides,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute one tile of one block of the result."""
    tl.static_assert(BLOCK_H % TILE_M == 0 and BLOCK_W % TILE_N == 0 and INNER % TILE_K == 0)
    N_TILES: tl.constexpr = BLOCK_W // TILE_N
    TILES: tl.constexpr = BLOCK_H // TILE_M * N_TILES
    K_STEPS: tl.constexpr = INNER // TILE_K

    pid = tl.program_id(0)
    tile = pid % TILES
    block = pid // TILES
    rows = tile // N_TILES * TILE_M + tl.arange(0, TILE_M)
    cols = tile % N_TILES * TILE_N + tl.arange(0, TILE_N)
    offs_k = tl.arange(0, TILE_K)
    first_ptrs = first_ptr + offsets_2d(rows, offs_k, first_strides.row, first_strides.col)
    second_ptrs = second_ptr + offsets_2d(offs_k, cols, second_strides.row, second_strides.col)
    begin = tl.load(pair_indptr_ptr + block)
    end = tl.load(pair_indptr_ptr + block + 1)
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)

    for step in range(begin * K_STEPS, end * K_STEPS):
        pair = tl.load(order_ptr + step // K_STEPS)
        k_first = tl.cast(step % K_STEPS, tl.int64) * TILE_K
        first_block = tl.load(first_of_ptr + pair).to(tl.int64)
        second_block = tl.load(second_of_ptr + pair).to(tl.int64)
        a = tl.load(first_ptrs + (first_block * first_strides.batch + k_first * first_strides.col))
        b = tl.load(
            second_ptrs + (second_block * second_strides.batch + k_first * second_strides.row)
        )
        acc = add_product(acc, a, b, first_block, INPUT_PRECISION)

    out_ptrs = out_ptr + tl.cast(block, tl.int64) * (BLOCK_H * BLOCK_W)
    tl.store(out_ptrs + offsets_2d(rows, cols, BLOCK_W, 1), acc.to(out_ptr.dtype.element_ty))


def pair_products(call: PairProductsCall) -> torch.Tensor:
    """out[o] = sum of op(first[f]) @ op(second[s]) over the triples (f, s, o) of the pairs."""
    out = call.empty_out()
    config = pair_config(call.problem, fp32_precision(call.first.dtype))
    launch_pair_products(out, *call.seen(), call.pairs, config)
    return out


def launch_pair_products(
    out: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    pairs: PairLists,
    config: PairConfig,
) -> None:
    """Write the sum of the products of its pairs to each block of `out`.

    Parameters
    ----------
    out : [O, bh, bw], contiguous
    first : [F, bh, inner], second : [S, inner, bw], any strides
    """
    blocks, block_h, block_w = out.shape
    inner = first.shape[2]
    config.check_blocks((block_h, block_w), inner)
    if out.numel() == 0:
        return
    tiles = (block_h // config.tile_m) * (block_w // config.tile_n)
    with on_device_of(out):
        args = (
            out,
            first,
            second,
            pairs.first,
            pairs.second,
            pairs.order_out,
            pairs.ptr_out,
            strides_of(first),
            strides_of(second),
            config.input_precision,
            block_h,
            inner,
            block_w,
            config.tile_m,
            config.tile_n,
            config.tile_k,
        )
        stages = triton_stages(config.num_stages, 2)
        options = {"num_warps": config.num_warps, "num_stages": stages}
        launch(_bsr_pair_products_kernel, blocks * tiles, args, **options)
