"""`bsk::select_keys`: the keys of highest scores of each query token. It has no derivative.

`sizes` is [granularity, lists, most, force_first, force_last]; `top_p` is 0 where the number of
entries alone decides.
"""

from typing import Any

import torch

from ..calls.select_keys import SelectCall, SelectOptions
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only, only_asked
from ..dispatch.operators import Operator, define_op
from .tuning import why_not

Tensors = tuple[torch.Tensor, ...]


select_dispatch: Dispatcher = Dispatcher("select_keys")
select_dispatch.register(
    "triton", why_not, "blackwell_sparsek.select_keys.triton:forward", auto_passes=interpreted_only
)
select_dispatch.register("eager", every_problem, "blackwell_sparsek.select_keys.eager:forward")
select_dispatch.register(
    "reference",
    every_problem,
    "blackwell_sparsek.reference.select_keys:forward",
    auto_passes=only_asked,
)


def select(call: SelectCall, impl: str) -> Tensors:
    """ids and counts of a checked call, through the operator."""
    given = call.options
    sizes = [given.granularity, given.lists, given.most, given.force_first, given.force_last]
    results: Tensors = select_op(
        call.q_index,
        call.k_index,
        call.weights,
        sizes,
        given.top_p,
        given.activation,
        given.pool,
        given.causal,
        impl,
    )
    return results


def _select(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    weights: torch.Tensor | None,
    sizes: list[int],
    top_p: float,
    activation: str,
    pool: str,
    causal: bool,
    impl: str,
) -> Tensors:
    granularity, lists, most, force_first, force_last = sizes
    options = SelectOptions(
        granularity, lists, most, top_p, force_first, force_last, activation, pool, causal
    )
    with without_autocast(q_index.device):
        results: Tensors = select_dispatch.run(impl, SelectCall(q_index, k_index, weights, options))
    return results


def _select_fake(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: Any, sizes: list[int], *others: Any
) -> Tensors:
    _, lists, most, _, _ = sizes
    shape = (q_index.shape[0], lists, q_index.shape[2])
    ids = q_index.new_empty((*shape, most), dtype=torch.int32)
    return ids, q_index.new_empty(shape, dtype=torch.int32)


select_op: Operator = define_op(
    "select_keys",
    "(Tensor q_index, Tensor k_index, Tensor? weights, SymInt[] sizes, float top_p, "
    "str activation, str pool, bool causal, str impl) -> (Tensor ids, Tensor counts)",
    _select,
    _select_fake,
)
