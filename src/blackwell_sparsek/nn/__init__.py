"""Block-sparse layers as `torch.nn` modules."""

from .bsr_linear import BSRLinear
from .bsr_weight import adopt_patterns

__all__ = ["BSRLinear", "adopt_patterns"]
