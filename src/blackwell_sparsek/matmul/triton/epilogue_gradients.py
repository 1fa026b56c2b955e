# mypy: ignore-errors
"""Gradients of a product's epilogue in one pass: before = dy * activation'(pre), and its sums.

dy, pre and before [features, positions] with any strides, sums [features]. One program takes TILE_F
features and a share of the positions. With more than one share each leaves an fp32 partial sum of
sums, and `add_shares` adds them in order: the result does not depend on timing.
"""

import torch
import triton
import triton.language as tl

from ...core.arch import arch_of
from ...device.epilogue import slope
from ...device.tiles import offsets_2d
from ...launch.launcher import cdiv, launch, on_device_of
from ...launch.workspace import scratch
from .shares import add_shares

TILE_F, TILE_P, WARPS = 64, 64, 4
# Programs per SM that keep the memory system busy.
PROGRAMS_PER_SM = 4


@triton.jit(do_not_specialize=["features", "positions", "per_share"])
def _epilogue_gradients_kernel(
    before_ptr,
    sums_ptr,  # fp32 [shares, features], or the bias itself where there is one share
    dy_ptr,
    pre_ptr,
    before_strides,
    dy_strides,
    pre_strides,
    features,
    positions,
    per_share,
    ACTIVATION: tl.constexpr,
    TILE_F: tl.constexpr,
    TILE_P: tl.constexpr,
):
    """Go through a share of the positions of TILE_F features."""
    f_tiles = tl.cdiv(features, TILE_F)
    offs_f = tl.program_id(0) % f_tiles * TILE_F + tl.arange(0, TILE_F)
    share = tl.program_id(0) // f_tiles
    mask_f = offs_f < features
    end = tl.minimum((share + 1) * per_share, positions)
    total = tl.zeros((TILE_F,), dtype=tl.float32)
    for first in range(share * per_share, end, TILE_P):
        offs_p = first + tl.arange(0, TILE_P)
        mask = mask_f[:, None] & (offs_p < end)[None, :]
        f_stride, p_stride = dy_strides
        dy = tl.load(dy_ptr + offsets_2d(offs_f, offs_p, f_stride, p_stride), mask=mask, other=0.0)
        dy = dy.to(tl.float32)
        if pre_ptr is not None:
            f_stride, p_stride = pre_strides
            pre_ptrs = pre_ptr + offsets_2d(offs_f, offs_p, f_stride, p_stride)
            dy *= slope(tl.load(pre_ptrs, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
            f_stride, p_stride = before_strides
            before_ptrs = before_ptr + offsets_2d(offs_f, offs_p, f_stride, p_stride)
            tl.store(before_ptrs, dy.to(before_ptr.dtype.element_ty), mask=mask)
        total += tl.sum(dy, 1)
    if sums_ptr is not None:
        sums_ptrs = sums_ptr + tl.cast(share, tl.int64) * features + offs_f
        tl.store(sums_ptrs, total.to(sums_ptr.dtype.element_ty), mask=mask_f)


def launch_epilogue_gradients(
    before: torch.Tensor | None,
    d_bias: torch.Tensor | None,
    dy: torch.Tensor,
    pre: torch.Tensor | None,
    activation: str | None,
) -> None:
    """Write dy * activation'(pre) to `before` and its sums to `d_bias`; either may be None.

    Parameters
    ----------
    before, dy, pre : [features, positions], any strides; `before` and `pre` together or neither
    d_bias : [features], contiguous
    """
    features, positions = dy.shape
    if dy.numel() == 0:
        return
    f_tiles = cdiv(features, TILE_F)
    programs = PROGRAMS_PER_SM * max(1, arch_of(dy.device).num_sms)
    # whole tiles of positions to each share
    per_share = TILE_P * cdiv(cdiv(positions, max(1, programs // f_tiles)), TILE_P)
    shares = cdiv(positions, per_share)
    sums = d_bias
    if d_bias is not None and shares > 1:
        sums = scratch((shares, features), torch.float32, dy.device)
    with on_device_of(dy):
        args = (
            before,
            sums,
            dy,
            pre,
            (0, 0) if before is None else before.stride(),
            dy.stride(),
            (0, 0) if pre is None else pre.stride(),
            features,
            positions,
            per_share,
            activation if pre is not None else None,
            TILE_F,
            TILE_P,
        )
        launch(_epilogue_gradients_kernel, f_tiles * shares, args, num_warps=WARPS)
    if d_bias is not None and shares > 1:
        add_shares(d_bias, sums)
