"""What a call costs the host: checks, dispatch and launch, the GPU working behind."""

from collections.abc import Iterator
from typing import Any

from ..case import HOST, Case, Suite
from ..peers.host import ATTENTION, MATMUL
from ..peers.ours import OURS
from ..problems.attention import Attention
from ..problems.product import Product
from .attention import dtype_of


def host(tiny: bool = False) -> Iterator[Case]:
    """Small calls of attention and of products, against SDPA and torch.mm."""
    dtype = dtype_of(tiny)
    variants: dict[str, Any] = {
        "": {},
        ", causal": {"causal": True},
        ", window": {"causal": True, "window": 64},
    }
    for text, options in variants.items():
        problem = Attention(1, 4, 128, 64, dtype=dtype, **options)
        yield Case(
            f"attention{text}", problem.describe(), problem.build, tuple(ATTENTION), modes=(HOST,)
        )
    masked = Attention(1, 4, 256, 64, dtype=dtype, block=(128, 128), density=0.5)
    yield Case(
        "attention, block mask", masked.describe(), masked.build, tuple(ATTENTION), modes=(HOST,)
    )
    for linear in (False, True):
        product = Product(512, 512, 64, (64, 64), 0.25, dtype, linear)
        name = f"matmul {product.describe()['order']}"
        yield Case(name, product.describe(), product.build, tuple(MATMUL), modes=(HOST,))


SUITES = [Suite("host", host.__doc__ or "", host, ATTENTION | MATMUL, OURS, unit="us")]
