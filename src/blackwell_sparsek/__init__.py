"""Block-sparse matrix products and attention for PyTorch."""

from ._version import __version__
from .core.errors import BskError, InvalidInput, InvalidType, Unsupported
from .formats import patterns as masks
from .formats.block_mask import BlockMask
from .formats.bsr import BSRMatrix
from .functional.bsr import matmul, sddmm
from .ops.dispatch import explain

__all__ = [
    "BSRMatrix",
    "BlockMask",
    "BskError",
    "InvalidInput",
    "InvalidType",
    "Unsupported",
    "__version__",
    "explain",
    "masks",
    "matmul",
    "sddmm",
]
