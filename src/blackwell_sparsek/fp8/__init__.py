"""fp8: rounding with scales, and attention computed in fp8."""

from ..calls.fp8 import Quantized
from .api import quantize
from .attend import attention

__all__ = ["Quantized", "attention", "quantize"]
