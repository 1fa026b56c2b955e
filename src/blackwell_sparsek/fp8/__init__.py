"""FP8: quantization, attention and block-sparse products."""

from ..calls.fp8 import Quantized
from .api import quantize
from .attend import attention
from .multiply import matmul

__all__ = ["Quantized", "attention", "matmul", "quantize"]
