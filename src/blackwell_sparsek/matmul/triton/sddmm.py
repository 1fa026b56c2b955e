# mypy: ignore-errors
"""Sampled dense product: out[e] = sum over b of a[b] @ b[b] at block e of a pattern.

a [B, M, K], b [B, K, N], out [nnzb, BLOCK_H, BLOCK_W]; zeros where a block reaches beyond (M, N).

One program computes a TILE_M by TILE_N tile of one block over one share of the sum. Blocks are
taken column by column, as the metadata of the transpose lists them with their rows, so that
programs running together read the same columns of `b`. With more than one share, each leaves an
fp32 partial sum, and `add_shares` adds them in order. Blocks must have sides that are multiples of
16.

`sddmm` is implementation `triton` of `bsk::bsr_sddmm`.
"""

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from ...core.sizes import cdiv
from ...device.tiles import add_product, offsets_2d
from ...launch.description import KernelLaunch, run
from ..strides import strides_of
from .shares import add_shares, plan_add_shares
from .tuning import SddmmConfig, sddmm_config

if TYPE_CHECKING:
    import torch

    from ...calls.matmul import PatternTensors, SddmmCall


@triton.jit(do_not_specialize=["batches", "nnz_blocks", "steps_per_share"])
def _bsr_sddmm_kernel(
    out_ptr,  # [shares, nnzb, BLOCK_H, BLOCK_W], contiguous
    a_ptr,
    b_ptr,
    indices_ptr,
    t_indices_ptr,  # block row of each block, column by column
    t_perm_ptr,  # which block that is
    a_strides,
    b_strides,
    m_size,
    n_size,
    k_size,
    batches,
    nnz_blocks,
    steps_per_share,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute one tile of one block over one share of the steps."""
    tl.static_assert(BLOCK_H % TILE_M == 0 and BLOCK_W % TILE_N == 0)
    N_TILES: tl.constexpr = BLOCK_W // TILE_N
    TILES: tl.constexpr = BLOCK_H // TILE_M * N_TILES

    pid = tl.program_id(0)
    tile = pid % TILES
    entry = (pid // TILES) % nnz_blocks
    share = pid // TILES // nnz_blocks
    rows = tile // N_TILES * TILE_M + tl.arange(0, TILE_M)  # in the block
    cols = tile % N_TILES * TILE_N + tl.arange(0, TILE_N)
    block = tl.load(t_perm_ptr + entry)
    offs_m = tl.load(t_indices_ptr + entry) * BLOCK_H + rows
    offs_n = tl.load(indices_ptr + block) * BLOCK_W + cols
    offs_k = tl.arange(0, TILE_K)

    mask_m = (offs_m < m_size)[:, None]
    mask_n = (offs_n < n_size)[None, :]
    a_ptrs = a_ptr + offsets_2d(offs_m, offs_k, a_strides.row, a_strides.col)
    b_ptrs = b_ptr + offsets_2d(offs_k, offs_n, b_strides.row, b_strides.col)
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)

    # One flat loop over the steps of all batch entries.
    k_steps = tl.cdiv(k_size, TILE_K)
    first = share * steps_per_share
    last = tl.minimum(first + steps_per_share, batches * k_steps)
    for step in range(first, last):
        batch = tl.cast(step // k_steps, tl.int64)
        k_first = tl.cast(step % k_steps, tl.int64) * TILE_K
        mask_k = k_first + offs_k < k_size
        a = tl.load(
            a_ptrs + (batch * a_strides.batch + k_first * a_strides.col),
            mask=mask_m & mask_k[None, :],
            other=0.0,
        )
        b = tl.load(
            b_ptrs + (batch * b_strides.batch + k_first * b_strides.row),
            mask=mask_k[:, None] & mask_n,
            other=0.0,
        )
        acc = add_product(acc, a, b, nnz_blocks, INPUT_PRECISION)

    first_row = (tl.cast(share, tl.int64) * nnz_blocks + block) * BLOCK_H
    out_ptrs = out_ptr + offsets_2d(first_row + rows, cols, BLOCK_W, 1)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty))


def sddmm(call: "SddmmCall") -> "torch.Tensor":
    """Sum over the batch of a @ b at the blocks of the pattern."""
    import torch

    from ...dispatch.machine import fp32_precision
    from ...launch.workspace import scratch
    from ..rows import sampled_product

    out = call.empty_out()
    if call.a.numel() == 0 or call.b.numel() == 0:
        return out.zero_()
    parts, problem = sampled_product(call)
    config = sddmm_config(problem, fp32_precision(call.a.dtype))
    if len(parts) == 1:
        (views,) = parts
        launch_sddmm(out, views.a, views.b, call.pattern, config)
        return out
    sums = scratch((len(parts), *out.shape), torch.float32, out.device)
    for partial_sum, views in zip(sums, parts, strict=True):
        launch_sddmm(partial_sum, views.a, views.b, call.pattern, config)
    add_shares(out, sums)
    return out


def launch_sddmm(
    out: "torch.Tensor",
    a: "torch.Tensor",
    b: "torch.Tensor",
    pattern: "PatternTensors",
    config: SddmmConfig,
) -> None:
    """Write the blocks of sum over batch of a @ b to `out`; see `plan_sddmm`."""
    import torch

    from ...launch.workspace import scratch

    shares = sddmm_shares(a, config)
    parts = None
    if shares > 1 and out.numel() > 0:
        parts = scratch((shares, *out.shape), torch.float32, out.device)
    for planned in plan_sddmm(out, parts, a, b, pattern, config):
        run(planned, out)


def sddmm_shares(a: Any, config: SddmmConfig) -> int:
    """How many programs share the sum of a tile over the columns of a [B, M, K]."""
    steps = a.shape[0] * cdiv(a.shape[2], config.tile_k)
    return max(1, min(config.split_k, steps))


def plan_sddmm(
    out: Any, parts: Any, a: Any, b: Any, pattern: Any, config: SddmmConfig
) -> list[KernelLaunch | None]:
    """The launches that write the blocks of sum over batch of a @ b to `out`.

    Parameters
    ----------
    out : [nnzb, bh, bw], contiguous
    parts : fp32 [sddmm_shares(a, config), nnzb, bh, bw]; None if the sum is not shared
    a : [B, M, K], b : [B, K, N], any strides
    pattern : `PatternTensors`, of which indices, t_indices and t_perm are read
    """
    nnz_blocks, block_h, block_w = out.shape
    config.check_blocks((block_h, block_w))
    batches, m, k = a.shape
    if out.numel() == 0:
        return []
    shares, steps = sddmm_shares(a, config), batches * cdiv(k, config.tile_k)
    tiles = (block_h // config.tile_m) * (block_w // config.tile_n)
    args = (
        out if parts is None else parts,
        a,
        b,
        pattern.indices,
        pattern.t_indices,
        pattern.t_perm,
        strides_of(a),
        strides_of(b),
        m,
        b.shape[2],
        k,
        batches,
        nnz_blocks,
        cdiv(steps, shares),
        config.input_precision,
        block_h,
        block_w,
        config.tile_m,
        config.tile_n,
        config.tile_k,
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launches = [KernelLaunch(_bsr_sddmm_kernel, shares * nnz_blocks * tiles, args, options)]
    return launches if parts is None else [*launches, plan_add_shares(out, parts)]
