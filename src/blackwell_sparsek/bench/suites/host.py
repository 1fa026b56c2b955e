"""What a call costs the host: checks, dispatch and launch, while the GPU works asynchronously.

Peers use no context managers inside a call, because their cost would be counted.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ..case import HOST, Case, Contender, Peer, Suite
from .attention import dtype_of
from .attention_peers import OURS, ours
from .attention_problem import Attention, AttentionInputs
from .decode import DECODE as DECODERS
from .decode import Decode, DecodeInputs
from .matmul import DENSE, Product, ProductInputs
from .matmul import PEERS as PRODUCTS
from .serving import APPENDS, STEPS, Append, AppendInputs, Step, StepInputs

SDPA, MM = "sdpa", "mm"


_OURS: dict[type, Peer] = {
    AttentionInputs: ours,
    DecodeInputs: DECODERS[OURS],
    ProductInputs: PRODUCTS[OURS],
    StepInputs: STEPS[OURS],
    AppendInputs: APPENDS[OURS],
}


def _ours(inputs: Any) -> Contender:
    return _OURS[type(inputs)].prepare(inputs)


def _sdpa(inputs: AttentionInputs | DecodeInputs) -> Contender:
    """SDPA of the same shape without window or block mask, for the cost of torch's own calls."""
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


def host(tiny: bool = False) -> Iterator[Case]:
    """Host time of small calls of attention, decoding, a step of an engine, and products."""
    dtype = dtype_of(tiny)
    variants: dict[str, Any] = {
        "": {},
        ", causal": {"causal": True},
        ", window": {"causal": True, "window": 64},
    }
    for text, options in variants.items():
        yield _case(f"attention{text}", Attention(1, 4, 128, 64, dtype=dtype, **options), SDPA)
    masked = Attention(1, 4, 256, 64, dtype=dtype, block=(128, 128), density=0.5)
    yield _case("attention, block mask", masked, SDPA)
    yield _case("decode", Decode(2, 256, 8, 2, 64, dtype=dtype), SDPA)
    yield _case("decode, pages of 16", Decode(2, 256, 8, 2, 64, 16, dtype))
    yield _case("step of an engine", Step(2, 256, 1, 64, 8, 2, 64, 16, dtype))
    yield _case("append with rotary", Append(64, 8, 2, 64, dtype))
    for linear in (False, True):
        product = Product(512, 512, 64, (64, 64), 0.25, dtype, linear)
        yield _case(f"matmul {product.describe()['order']}", product, MM)
    # `auto` densifies the matrix and ends in torch's product
    sizes = (128, 128, 64) if tiny else (1024, 1024, 512)
    full = Product(*sizes, (16, 16), 0.9, dtype)
    yield _case("matmul W @ x, nearly dense", full, MM)


def _case(name: str, problem: Attention | Decode | Step | Append | Product, *peers: str) -> Case:
    return Case(name, problem.describe(), problem.build, (OURS, *peers), modes=(HOST,))


SUITES = [Suite("host", host.__doc__ or "", host, PEERS, OURS, unit="us")]
