"""Arguments of the kernels of gated attention: the mask of live blocks, and gate pointers.

Blocks that no query of a tile gives a weight are left out by a block mask, made on the device
without waiting for it. A mask that the user gives is walked whole.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...calls.attention import AttentionCall
from ...calls.gated_attention import GatedCall, KeyGate
from ...masks.block_mask import BlockMask

if TYPE_CHECKING:
    from ...device.gates import KeyGates

# Queries and keys of the blocks that are left out: no tile is higher, few are wider.
BLOCK = (128, 64)


def live_blocks(call: GatedCall) -> BlockMask:
    """The blocks in which some query may give some key a weight."""
    u, tau = call.gate
    q, k = call.attention.q, call.attention.k
    highest = _over_blocks(u, BLOCK[1], -torch.inf).amax(-1)
    lowest = _over_blocks(tau, BLOCK[0], torch.inf).amin(-1)
    # NaN compares as false, and the gate shows it
    keep = ~(highest[:, :, None, :] <= lowest[..., None])
    if keep.shape[1] > 1:
        keep = keep.repeat_interleave(call.heads_per_gate, dim=1)
    return BlockMask.from_dense(keep.contiguous(), BLOCK, (q.shape[2], k.shape[2]))


def _over_blocks(x: torch.Tensor, size: int, missing: float) -> torch.Tensor:
    """[..., blocks, size], the last block filled up."""
    if absent := -x.shape[-1] % size:
        x = torch.nn.functional.pad(x, (0, absent), value=missing)
    return x.unflatten(-1, (-1, size))


def with_live_blocks(call: GatedCall) -> AttentionCall:
    """The attention within blocks that have a weight."""
    given = call.attention
    if given.spec.block_mask is not None or 0 in (given.q.numel(), given.k.numel()):
        return given
    return replace(given, spec=given.spec._replace(block_mask=live_blocks(call)))


def key_gates(gate: KeyGate, heads_per_gate: int) -> "KeyGates":
    """Pointers and strides of a gate, as kernels take them."""
    # imported late: live blocks are found without Triton
    from ...device.gates import KeyGates

    u, tau = gate
    return KeyGates(u, tau, *_row_strides(u), *_row_strides(tau), heads_per_gate)


def _row_strides(x: torch.Tensor) -> tuple[int, int]:
    return (x.stride(0) if x.shape[0] > 1 else 0), (x.stride(1) if x.shape[1] > 1 else 0)
