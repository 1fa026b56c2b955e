"""Block-sparse matrix products and attention for PyTorch."""

from . import nn, prune
from ._version import __version__
from .core.errors import BskError, InvalidInput, InvalidType, Unsupported
from .formats import patterns as masks
from .formats.block_mask import BlockMask
from .formats.bsr import BSRMatrix
from .functional.attention import attention
from .functional.bsr import matmul, sddmm
from .functional.decode import attention_decode, check_decode_inputs
from .functional.merge import merge_states
from .functional.sdpa import scaled_dot_product_attention
from .functional.varlen import attention_varlen
from .integrations.torch_sdpa import patch_sdpa
from .integrations.torch_sparse import enable_torch_sparse
from .ops.dispatch import explain

__all__ = [
    "BSRMatrix",
    "BlockMask",
    "BskError",
    "InvalidInput",
    "InvalidType",
    "Unsupported",
    "__version__",
    "attention",
    "attention_decode",
    "attention_varlen",
    "check_decode_inputs",
    "enable_torch_sparse",
    "explain",
    "masks",
    "matmul",
    "merge_states",
    "nn",
    "patch_sdpa",
    "prune",
    "scaled_dot_product_attention",
    "sddmm",
]
