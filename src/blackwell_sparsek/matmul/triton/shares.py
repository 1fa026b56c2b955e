# mypy: ignore-errors
"""The second pass of a sum split between programs: out = parts[0] + parts[1] + ..., in order.

parts [shares, ...] in float32, out [...] in any dtype, both contiguous. One program adds TILE
elements; that reads and writes memory once.
"""

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from ...core.sizes import cdiv
from ...launch.description import KernelLaunch, run

if TYPE_CHECKING:
    import torch

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


def add_shares(out: "torch.Tensor", parts: "torch.Tensor") -> None:
    """Write the sum of `parts` [shares, *out.shape] to `out`; both contiguous."""
    run(plan_add_shares(out, parts), out)


def plan_add_shares(out: Any, parts: Any) -> KernelLaunch | None:
    """The launch that writes the sum of `parts` [shares, *out.shape] to `out`."""
    size = out.numel()
    if size == 0:
        return None
    args = (out, parts, size, parts.shape[0], TILE)
    return KernelLaunch(_add_shares_kernel, cdiv(size, TILE), args, {"num_warps": WARPS})
