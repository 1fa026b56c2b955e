"""Block-sparse matrix products and attention for PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

# isort: off
from .core import interrupts as _interrupts

# isort: on
from . import nn, prune
from ._version import __version__
from .attention.api import attention
from .attention.merge import merge_states
from .attention.sdpa import scaled_dot_product_attention
from .core.errors import BskError, InvalidInput, InvalidType, OutOfPages, Unsupported
from .decode.api import attention_decode, check_decode_inputs
from .dispatch.dispatcher import explain
from .integrations.torch_sdpa import patch_sdpa
from .integrations.torch_sparse import enable_torch_sparse
from .kv_cache.append import kv_append
from .kv_cache.cache import KVCache
from .kv_cache.memory import kv_cache_bytes, kv_memory_table
from .kv_cache.paged import PagedKVCache
from .kv_cache.selection import PageSummaries, page_summaries, topk_pages
from .kv_cache.slots import Rotary
from .masks import patterns as masks
from .masks.block_mask import BlockMask
from .masks.key_selection import KeySelection
from .matmul.api import matmul, sddmm
from .ragged.api import attention_varlen
from .select_keys.api import select_keys
from .sparse.matrix import BSRMatrix
from .sparse_attention.api import sparse_attention
from .sparsek.api import sparsek, sparsek_causal

if TYPE_CHECKING:
    from . import distributed as distributed

__all__ = [
    "BSRMatrix",
    "BlockMask",
    "BskError",
    "InvalidInput",
    "InvalidType",
    "KVCache",
    "KeySelection",
    "OutOfPages",
    "PageSummaries",
    "PagedKVCache",
    "Rotary",
    "Unsupported",
    "__version__",
    "attention",
    "attention_decode",
    "attention_varlen",
    "check_decode_inputs",
    "distributed",
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
    "select_keys",
    "sparse_attention",
    "sparsek",
    "sparsek_causal",
    "topk_pages",
]


def __getattr__(name: str) -> Any:
    # torch.distributed.tensor takes longer to import than all of this package
    if name == "distributed":
        return importlib.import_module(".distributed", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_interrupts.raise_again()
