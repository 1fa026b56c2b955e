"""Who is asked what a call costs the host. No context managers: they would be counted."""

import torch
import torch.nn.functional as F

from ..case import Contender, Peer
from ..problems.attention import AttentionInputs
from ..problems.decode import DecodeInputs
from ..problems.product import ProductInputs
from .decode import DECODE as DECODERS
from .matmul import DENSE
from .matmul import PEERS as PRODUCTS
from .ours import OURS, ours

SDPA, MM = "sdpa", "mm"


def _ours(inputs: AttentionInputs | DecodeInputs | ProductInputs) -> Contender:
    if isinstance(inputs, AttentionInputs):
        return ours.prepare(inputs)
    return (DECODERS if isinstance(inputs, DecodeInputs) else PRODUCTS)[OURS].prepare(inputs)


def _sdpa(inputs: AttentionInputs | DecodeInputs) -> Contender:
    """SDPA of the same shape, whatever the mask: what torch's own calls cost."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if isinstance(inputs, DecodeInputs):
        return Contender(
            lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), inputs.check
        )
    whole = AttentionInputs(inputs.problem.dense(), q, k, v, None)
    causal = inputs.problem.causal

    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Contender(call, whole.check())


def _mm(inputs: ProductInputs) -> Contender:
    return PRODUCTS[DENSE].prepare(inputs)


PEERS = {
    OURS: Peer(OURS, "blackwell_sparsek, impl auto", _ours),
    SDPA: Peer(SDPA, "SDPA of the same shape", _sdpa, rival=True),
    MM: Peer(MM, "torch.mm of the same shape", _mm, rival=True),
}
