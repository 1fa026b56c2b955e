"""Block-sparse matrix products and attention for PyTorch, and for JAX in `blackwell_sparsek.jax`.

Public names that need torch are imported as soon as torch is imported too, or at their first use.
A program that only imports `blackwell_sparsek.jax` therefore never imports torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

# isort: off
from .core import interrupts as _interrupts

# isort: on
from ._version import __version__
from .core.after_torch import after_torch as _after_torch
from .core.errors import BskError, InvalidInput, InvalidType, OutOfPages, Unsupported

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import fp8, nn, prune
    from .attention.api import attention
    from .attention.merge import merge_states
    from .attention.sdpa import scaled_dot_product_attention
    from .decode.api import attention_decode, check_decode_inputs
    from .dispatch.dispatcher import explain
    from .dispatch.sparsity import sparsity_report
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
    from .sparsek.cache import SparsekCache

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
    "SparsekCache",
    "Unsupported",
    "__version__",
    "attention",
    "attention_decode",
    "attention_varlen",
    "check_decode_inputs",
    "distributed",
    "enable_torch_sparse",
    "explain",
    "fp8",
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
    "sparsity_report",
    "topk_pages",
]

# Where each public name comes from that needs torch: a module, or "module:name".
_PUBLIC = {
    "BSRMatrix": ".sparse.matrix:BSRMatrix",
    "BlockMask": ".masks.block_mask:BlockMask",
    "KVCache": ".kv_cache.cache:KVCache",
    "KeySelection": ".masks.key_selection:KeySelection",
    "PageSummaries": ".kv_cache.selection:PageSummaries",
    "PagedKVCache": ".kv_cache.paged:PagedKVCache",
    "Rotary": ".kv_cache.slots:Rotary",
    "SparsekCache": ".sparsek.cache:SparsekCache",
    "attention": ".attention.api:attention",
    "attention_decode": ".decode.api:attention_decode",
    "attention_varlen": ".ragged.api:attention_varlen",
    "check_decode_inputs": ".decode.api:check_decode_inputs",
    "enable_torch_sparse": ".integrations.torch_sparse:enable_torch_sparse",
    "explain": ".dispatch.dispatcher:explain",
    "fp8": ".fp8",
    "integrations": ".integrations",
    "kv_append": ".kv_cache.append:kv_append",
    "kv_cache_bytes": ".kv_cache.memory:kv_cache_bytes",
    "kv_memory_table": ".kv_cache.memory:kv_memory_table",
    "masks": ".masks.patterns",
    "matmul": ".matmul.api:matmul",
    "merge_states": ".attention.merge:merge_states",
    "nn": ".nn",
    "page_summaries": ".kv_cache.selection:page_summaries",
    "patch_sdpa": ".integrations.torch_sdpa:patch_sdpa",
    "prune": ".prune",
    "scaled_dot_product_attention": ".attention.sdpa:scaled_dot_product_attention",
    "sddmm": ".matmul.api:sddmm",
    "select_keys": ".select_keys.api:select_keys",
    "sparse_attention": ".sparse_attention.api:sparse_attention",
    "sparsek": ".sparsek.api:sparsek",
    "sparsek_causal": ".sparsek.api:sparsek_causal",
    "sparsity_report": ".dispatch.sparsity:sparsity_report",
    "topk_pages": ".kv_cache.selection:topk_pages",
}
# Imported only when they are asked for: torch.distributed.tensor takes longer to import than all
# of this package, and jax may not be installed.
_ON_REQUEST = ("distributed", "jax")


class _Package(ModuleType):
    """Keeps the names of functions from being rebound to the packages that they come from.

    Importing `blackwell_sparsek.attention.inputs` makes Python bind `attention` here to the
    package; users mean the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        shadowed = _PUBLIC.get(name, f".{name}") != f".{name}"
        if shadowed and isinstance(value, ModuleType) and value.__name__ == f"{__name__}.{name}":
            return
        super().__setattr__(name, value)


def _import_all() -> None:
    """Import every public name that needs torch; operators are registered by this."""
    # first, and with it all below: no module of ours may be half imported when that happens
    importlib.import_module("torch")
    found = {}
    for public, source in _PUBLIC.items():
        module, _, name = source.partition(":")
        imported = importlib.import_module(module, __name__)
        found[public] = getattr(imported, name) if name else imported
    globals().update(found)
    importlib.import_module(".dispatch.flops", __name__).register_flops()


def _import_with_torch() -> None:
    """Import all, unless it is a module of ours that imports torch, and is only half imported."""
    ours = (x for name, x in sys.modules.items() if name.startswith(f"{__name__}."))
    if not any(getattr(x.__spec__, "_initializing", False) for x in ours):
        _import_all()


def __getattr__(name: str) -> Any:
    if name in _ON_REQUEST:
        return importlib.import_module(f".{name}", __name__)
    if name in _PUBLIC:
        _import_all()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
if _interrupts.ends_quietly() and not _interrupts.imports_late():
    _import_all()
else:
    # programs that use operators or load saved objects may never touch a name of this package
    _after_torch(_import_with_torch)
if not _interrupts.imports_late():
    _interrupts.raise_again()
