"""The functions of flash-attn, computed by this package: change an import, keep the calls.

    from blackwell_sparsek.integrations.flash_attn import flash_attn_func

Positional arguments are those of flash-attn 2; keywords of flash-attn 2, 3 and 4 are taken, each of
them honoured or refused by name (`Unsupported`). Layouts are flash-attn's: [B, S, H, D], packed
[T, H, D], pages [pages, page_size, Hkv, D]. So is alignment: the last query sits at the last key.
`num_splits`, `pack_gqa` and `sm_margin` tune kernels of flash-attn and have no effect on results;
they are accepted and not used.
"""

from .functions import flash_attn_func, flash_attn_varlen_func
from .with_kvcache import flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
