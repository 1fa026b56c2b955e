"""Block-sparse and sparse-attention layers as `torch.nn` modules."""

from .bsr_linear import BSRLinear
from .bsr_weight import strict_patterns
from .sparse_attention import (
    IndexerAttention,
    MixtureOfBlockAttention,
    NativeSparseAttention,
    SparsekAttention,
)

__all__ = [
    "BSRLinear",
    "IndexerAttention",
    "MixtureOfBlockAttention",
    "NativeSparseAttention",
    "SparsekAttention",
    "strict_patterns",
]
