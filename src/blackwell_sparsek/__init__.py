"""Block-sparse matrix products and attention for PyTorch."""

from . import nn, prune
from ._version import __version__
from .core.errors import BskError, InvalidInput, InvalidType, OutOfPages, Unsupported
from .formats import patterns as masks
from .formats.block_mask import BlockMask
from .formats.bsr import BSRMatrix
from .formats.kv_memory import kv_cache_bytes, kv_memory_table
from .formats.page_summaries import PageSummaries
from .functional.attention import attention
from .functional.bsr import matmul, sddmm
from .functional.decode import attention_decode, check_decode_inputs
from .functional.kv_append import kv_append
from .functional.kv_cache import KVCache
from .functional.merge import merge_states
from .functional.page_selection import page_summaries, topk_pages
from .functional.paged_kv_cache import PagedKVCache
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
    "KVCache",
    "OutOfPages",
    "PageSummaries",
    "PagedKVCache",
    "Unsupported",
    "__version__",
    "attention",
    "attention_decode",
    "attention_varlen",
    "check_decode_inputs",
    "enable_torch_sparse",
    "explain",
    "kv_append",
    "kv_cache_bytes",
    "kv_memory_table",
    "masks",
    "matmul",
    "merge_states",
    "nn",
    "page_summaries",
    "patch_sdpa",
    "prune",
    "scaled_dot_product_attention",
    "sddmm",
    "topk_pages",
]
