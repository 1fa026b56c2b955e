"""FlashMLA: the operators of its package, or of the library that vLLM builds of it."""

from typing import Any

import torch

from .attention_peers import call_by_name, library_on_path, load, why_missing

FLASH_MLA = "flash_mla"
_LIBRARY = "_flashmla_C.abi3.so"


def flash_mla_available() -> str | None:
    """The reason if neither FlashMLA nor vLLM's library of it is installed, or None."""
    reason = why_missing(FLASH_MLA, "flash_mla_sparse_fwd")
    return None if reason is None or library_on_path(_LIBRARY) is not None else reason


def _operator(name: str) -> Any:
    path = library_on_path(_LIBRARY)
    if path is not None:
        ops: Any = torch.ops
        ops.load_library(str(path))
    return getattr(torch.ops._flashmla_C, name)


class LatentDecoding:
    """FlashMLA's decoding over pages of 64; it plans in the first call and keeps the plan."""

    def __init__(self, lengths: torch.Tensor, table: torch.Tensor, values: int, scale: float):
        self.lengths: torch.Tensor = lengths
        self.table: torch.Tensor = table
        self.values: int = values
        self.scale: float = scale
        self._plan: tuple[Any, Any] = (None, None)
        self._is_package: bool = why_missing(FLASH_MLA, "flash_mla_with_kvcache") is None

    def __call__(self, q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Outputs [B, 1, H, 512] of q [B, 1, H, 576] over pages [pages, 64, 1, 576]."""
        return self._by_package(q, pages) if self._is_package else self._by_library(q, pages)

    def _by_package(self, q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        if self._plan == (None, None):
            self._plan = load(FLASH_MLA, "get_mla_metadata")(self.lengths, q.shape[2], 1)
        out: torch.Tensor
        out, _ = load(FLASH_MLA, "flash_mla_with_kvcache")(
            *(q, pages, self.table, self.lengths, self.values, *self._plan),
            softmax_scale=self.scale,
            causal=True,
        )
        return out

    def _by_library(self, q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        metadata, splits = self._plan
        out: torch.Tensor
        out, _, *plan = call_by_name(
            _operator("dense_decode_fwd"),
            {
                "q": q,
                "kcache": pages,
                "head_size_v": self.values,
                "seqlens_k": self.lengths,
                "block_table": self.table,
                "softmax_scale": self.scale,
                "is_causal": True,
                "tile_scheduler_metadata": metadata,
                "num_splits": splits,
            },
        )
        self._plan = (plan[0], plan[1])
        return out


def latent_prefill(
    q: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor, values: int, scale: float
) -> torch.Tensor:
    """Outputs [T, H, 512] of q [T, H, 576] over chosen rows ids [T, 1, K] of keys [S, 1, 576]."""
    if why_missing(FLASH_MLA, "flash_mla_sparse_fwd") is None:
        made, *_ = load(FLASH_MLA, "flash_mla_sparse_fwd")(q, keys, ids, scale, values)
    else:
        named = {"q": q, "kv": keys, "indices": ids, "sm_scale": scale, "d_v": values}
        made, *_ = call_by_name(_operator("sparse_prefill_fwd"), named)
    out: torch.Tensor = made
    return out
