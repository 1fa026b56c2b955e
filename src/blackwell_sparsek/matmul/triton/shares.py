# mypy: ignore-errors
"""The second pass of a sum that programs have shared: out = parts[0] + parts[1] + ..., in order.

parts [shares, ...] in float32, out [...] in any dtype, both contiguous. One program adds TILE
elements; that reads and writes memory once.
"""

import torch
import triton
import triton.language as tl

from ...launch.launcher import cdiv, launch, on_device_of

# 16 bytes a thread and share.
TILE, WARPS = 1024, 8


@triton.jit(do_not_specialize=["shares"])
def _add_shares_kernel(out_ptr, parts_ptr, size, shares, TILE: tl.constexpr):
    """Add the shares of TILE elements."""
    offsets = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = offsets < size
    total = tl.zeros((TILE,), dtype=tl.float32)
    for share in range(shares):
        place = tl.cast(share, tl.int64) * size + offsets
        total += tl.load(parts_ptr + place, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


def add_shares(out: torch.Tensor, parts: torch.Tensor) -> None:
    """Write the sum of `parts` [shares, *out.shape] to `out`; both contiguous."""
    size = out.numel()
    if size == 0:
        return
    with on_device_of(out):
        args = (out, parts, size, parts.shape[0], TILE)
        launch(_add_shares_kernel, cdiv(size, TILE), args, num_warps=WARPS)
