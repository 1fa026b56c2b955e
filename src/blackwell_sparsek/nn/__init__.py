"""Block-sparse layers as `torch.nn` modules."""

from .bsr_linear import BSRLinear
from .bsr_weight import strict_patterns

__all__ = ["BSRLinear", "strict_patterns"]
