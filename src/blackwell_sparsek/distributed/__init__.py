"""More than one GPU: sequences, heads and block-sparse weights split among ranks.

Built on `torch.distributed`: process groups, `DeviceMesh` and `DTensor`. `balance` makes a `Plan`
of who owns which tokens, `attention` computes over shards of a sequence.
"""

from ..masks.band import Band
from .api import attention
from .group import SentBytes, count_bytes
from .plan import Plan, balance
from .traffic import Shapes, Traffic, traffic

__all__ = [
    "Band",
    "Plan",
    "SentBytes",
    "Shapes",
    "Traffic",
    "attention",
    "balance",
    "count_bytes",
    "traffic",
]
