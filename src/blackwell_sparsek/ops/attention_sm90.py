"""The Hopper kernel as implementation `sm90` of `bsk::attn_fwd`.

Triton and the kernel are imported at the first call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.apart import made_apart
from ..core.compat import why_no_triton
from ..formats.attention_spec import AttnSpec, empty_lse, empty_out
from ..formats.block_mask import BlockMask
from ..formats.block_order import longest_first
from ..tuning.attention_sm90 import (
    attn_fwd_sm90_config,
    attn_fwd_sm90_passed_over,
    attn_fwd_sm90_section,
    attn_fwd_sm90_unsupported,
)
from ..tuning.problem_attention import AttnProblem

# Orders kept for one mask: used with a band or two by layers of one or two shapes, it has one for
# the forward pass and up to three for gradients.
MAX_ORDERS = 16


class _Order(NamedTuple):
    rows: torch.Tensor
    stream: torch.cuda.Stream
    ready: torch.cuda.Event


# Orders by the row pointers of their mask, which live as long as the mask does.
_ORDERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def why_not_forward(problem: AttnProblem) -> str | None:
    """Why the forward kernel cannot run this problem, or None when it can."""
    return why_no_triton() or attn_fwd_sm90_unsupported(problem)


auto_passes = attn_fwd_sm90_passed_over


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, laid out as `empty_out` and `empty_lse` do."""
    from ..kernels.attention.fwd_sm90_launch import launch_attn_fwd_sm90

    problem = AttnProblem.of(q, k, v, spec)
    out, lse = empty_out(q, v.shape[-1]), empty_lse(q)
    config, section = attn_fwd_sm90_config(problem), attn_fwd_sm90_section(problem)
    order = None
    # an order of mask rows knows nothing of the lengths of packed sequences
    if (mask := spec.block_mask) is not None and not spec.is_varlen:
        key = ("rows", q.shape[0], q.shape[1], spec.band, section)
        order = kept_order(mask, key, lambda: longest_first(mask, *key[1:]))
    launch_attn_fwd_sm90(out, lse, q, k, v, spec, order, section, config)
    return out, lse


def kept_order(
    mask: BlockMask, key: tuple[Any, ...], make: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """An order of the rows or columns of a mask: made once, and ready on the current stream."""
    known = _ORDERS.setdefault(mask._listed.indptr, {})
    key = (mask.seq_lengths, mask.block_size, *key)
    order = known.get(key)
    with torch.cuda.device(mask.device):
        stream = torch.cuda.current_stream()
        if torch.cuda.is_current_stream_capturing():
            # what is known was made before the capture; what is made here may not leave its graph
            return make() if order is None else order.rows
        if order is None:
            order = _Order(made_apart(make, mask.device), stream, stream.record_event())
            if len(known) >= MAX_ORDERS:
                known.clear()
            known[key] = order
        elif order.stream != stream:
            stream.wait_event(order.ready)
            order.rows.record_stream(stream)
    return order.rows
