"""Attention of Hugging Face models through this package; needs transformers 5.17 or newer."""

from .block_sparse import BlockSparse
from .context_parallel import register_context_parallel
from .fp8 import Fp8
from .registration import NAME, register

__all__ = ["NAME", "BlockSparse", "Fp8", "register", "register_context_parallel"]
