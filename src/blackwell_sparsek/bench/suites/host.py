"""What a call costs the host: checks, dispatch and launch, the GPU working behind."""

from collections.abc import Iterator
from typing import Any

from ..case import HOST, Case, Suite
from ..peers.host import MM, PEERS, SDPA
from ..peers.ours import OURS
from ..problems.attention import Attention
from ..problems.decode import Decode
from ..problems.product import Product
from .attention import dtype_of


def host(tiny: bool = False) -> Iterator[Case]:
    """Small calls of attention, of decoding and of products, against SDPA and torch.mm."""
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
    for linear in (False, True):
        product = Product(512, 512, 64, (64, 64), 0.25, dtype, linear)
        yield _case(f"matmul {product.describe()['order']}", product, MM)


def _case(name: str, problem: Attention | Decode | Product, *peers: str) -> Case:
    return Case(name, problem.describe(), problem.build, (OURS, *peers), modes=(HOST,))


SUITES = [Suite("host", host.__doc__ or "", host, PEERS, OURS, unit="us")]
