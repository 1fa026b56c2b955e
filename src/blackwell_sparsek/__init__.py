"""Block-sparse matrix products and attention for PyTorch."""

from ._version import __version__
from .core.errors import BskError, InvalidInput, InvalidType, Unsupported
from .ops.dispatch import explain

__all__ = ["BskError", "InvalidInput", "InvalidType", "Unsupported", "__version__", "explain"]
