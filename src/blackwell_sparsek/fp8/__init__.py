"""fp8: rounding with scales, attention and block-sparse products computed in fp8."""

from ..calls.fp8 import Quantized
from .api import quantize
from .attend import attention
from .multiply import matmul

__all__ = ["Quantized", "attention", "matmul", "quantize"]
