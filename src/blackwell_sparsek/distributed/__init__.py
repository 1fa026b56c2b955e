"""Several GPUs: sequences, heads and block-sparse weights split over ranks.

Built on `torch.distributed`: process groups, `DeviceMesh` and `DTensor`. `balance` makes a `Plan`
of who owns which tokens; `attention` computes over shards of a sequence, `attention_decode` over
parts of a cache; `ColwiseBSR` and `RowwiseBSR` split block-sparse layers.
"""

from ..masks.band import Band
from .api import attention
from .decode import attention_decode
from .explain import MethodDecision
from .group import SentBytes, count_bytes
from .linear import ColwiseBSR, FeatureSplit, ParallelBSRLinear, RowwiseBSR, split_features
from .plan import Plan, balance
from .traffic import Shapes, Traffic, traffic

__all__ = [
    "Band",
    "ColwiseBSR",
    "FeatureSplit",
    "MethodDecision",
    "ParallelBSRLinear",
    "Plan",
    "RowwiseBSR",
    "SentBytes",
    "Shapes",
    "Traffic",
    "attention",
    "attention_decode",
    "balance",
    "count_bytes",
    "split_features",
    "traffic",
]
