"""This package as a peer of attention."""

from functools import partial
from typing import Any

import torch

from ... import attention, explain
from ..case import Contender, Peer
from ..problems.attention import AttentionInputs

OURS, OURS_DENSE = "bsk", "bsk_dense"


def options_of(inputs: AttentionInputs) -> dict[str, Any]:
    """Arguments of `bsk.attention` for a problem."""
    p = inputs.problem
    return {"causal": p.causal, "window": p.window, "block_mask": inputs.mask}


def _prepare(inputs: AttentionInputs) -> Contender:
    options = options_of(inputs)

    def call(x: AttentionInputs) -> torch.Tensor:
        out = attention(x.q, x.k, x.v, **options)
        assert isinstance(out, torch.Tensor)  # a pair only with return_lse
        return out

    decision = explain(attention, inputs.q, inputs.k, inputs.v, **options)
    return Contender(
        lambda: call(inputs),
        inputs.check(),
        inputs.flops,
        tuple(partial(call, x) for x in inputs.others()),
        {"implementation": decision.chosen, "why_not": dict(decision.reasons)},
    )


def _prepare_dense(inputs: AttentionInputs) -> Contender:
    """Without the mask: what a mask that hides nothing costs is the ratio to this."""
    whole = AttentionInputs(inputs.problem.dense(), inputs.q, inputs.k, inputs.v, None)
    return _prepare(whole)


ours_dense = Peer(OURS_DENSE, "blackwell_sparsek without the mask", _prepare_dense)
ours = Peer(OURS, "blackwell_sparsek, impl auto", _prepare)
