"""Who is asked what a call costs the host. No context managers: they would be counted."""

import torch
import torch.nn.functional as F

from ..case import Contender, Peer
from ..problems.attention import AttentionInputs
from ..problems.product import ProductInputs
from .matmul import DENSE
from .matmul import PEERS as PRODUCTS
from .ours import OURS, ours

SDPA = "sdpa"


def _ours(inputs: AttentionInputs | ProductInputs) -> Contender:
    if isinstance(inputs, AttentionInputs):
        return ours.prepare(inputs)
    return PRODUCTS[OURS].prepare(inputs)


def _sdpa(inputs: AttentionInputs) -> Contender:
    """SDPA of the same shape, whatever the mask: what torch's own calls cost."""
    whole = AttentionInputs(inputs.problem.dense(), inputs.q, inputs.k, inputs.v, None)
    q, k, v, causal = inputs.q, inputs.k, inputs.v, inputs.problem.causal

    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Contender(call, whole.check())


def _mm(inputs: ProductInputs) -> Contender:
    return PRODUCTS[DENSE].prepare(inputs)


_ours_peer = Peer(OURS, "blackwell_sparsek, impl auto", _ours)
ATTENTION = {
    OURS: _ours_peer,
    SDPA: Peer(SDPA, "SDPA of the same shape", _sdpa, rival=True),
}
MATMUL = {
    OURS: _ours_peer,
    "mm": Peer("mm", "torch.mm of the same shape", _mm, rival=True),
}
