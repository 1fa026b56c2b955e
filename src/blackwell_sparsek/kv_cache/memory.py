"""How much memory the KV caches of models take, and what grouped heads save."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..core.checks import message
from ..core.errors import InvalidInput
from ..masks.check import check_count
from .layout import check_latent


class KVModel(NamedTuple):
    """The sizes of a model that determine the size of its cache."""

    name: str
    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int


MODELS = (
    KVModel("Llama 3.1 8B", 32, 32, 8, 128),
    KVModel("Mistral 7B", 32, 32, 8, 128),
    KVModel("Qwen2.5 7B", 28, 28, 4, 128),
    KVModel("MHA, 96 heads (GPT-3 175B)", 96, 96, 96, 128),
)


class KVMemoryRow(NamedTuple):
    """One line of the table; bytes for all layers."""

    model: KVModel
    tokens: int
    dtype: torch.dtype
    replicated_bytes: int
    """With a copy of each KV head for every query head that reads it."""
    grouped_bytes: int
    """With the KV heads that the model has, as the caches of this package store them."""

    @property
    def saving(self) -> float:
        """How many times smaller the grouped cache is."""
        return self.replicated_bytes / self.grouped_bytes


def kv_cache_bytes(
    tokens: int,
    *,
    layers: int,
    heads_kv: int,
    head_dim: int,
    head_dim_v: int | None = None,
    latent: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes of the keys and values of `tokens` cached tokens, over all layers.

    Parameters
    ----------
    tokens : int
        Over all sequences.
    layers, heads_kv, head_dim : int
    head_dim_v : int, optional
        Head dim of the values; `head_dim` by default.
    latent : bool
        The values are the first `head_dim_v` channels of the keys and take no memory of their own.
    dtype : torch.dtype
        Of the cache.

    Raises
    ------
    InvalidInput
        If a size is negative, or one that no latent cache has.
    Unsupported
        If a latent cache is to be in fp8.

    Examples
    --------
    >>> kv_cache_bytes(16384, layers=32, heads_kv=8, head_dim=128) / 1e9
    2.147483648

    DeepSeek-V3 with absorbed weights:

    >>> latent = {"heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "latent": True}
    >>> kv_cache_bytes(16384, layers=61, **latent) / 1e9
    1.151336448
    """
    channels_v = head_dim if head_dim_v is None else head_dim_v
    sizes = {"tokens": tokens, "layers": layers, "heads_kv": heads_kv, "head_dim": head_dim}
    for arg, value in {**sizes, "head_dim_v": channels_v}.items():
        check_count("kv_cache_bytes", arg, value)
    check_latent("kv_cache_bytes", latent, head_dim, head_dim_v, dtype)
    channels = head_dim if latent else head_dim + channels_v
    return tokens * layers * heads_kv * channels * dtype.itemsize


def kv_memory_table(
    models: Sequence[KVModel] = MODELS,
    tokens: int = 16384,
    dtype: torch.dtype = torch.bfloat16,
) -> list[KVMemoryRow]:
    """KV cache sizes of models, with as many KV heads as query heads and with their own (GQA).

    Parameters
    ----------
    models : `KVModel`s (name, layers, heads_q, heads_kv, head_dim); known ones by default
    tokens : cached tokens, over all sequences
    dtype : of the cache

    Returns
    -------
    list of rows with `replicated_bytes`, `grouped_bytes` and `saving`, the ratio of the two

    Raises
    ------
    InvalidInput
        If a model's query heads are no multiple of its KV heads.

    Examples
    --------
    >>> llama, *_ = kv_memory_table()
    >>> round(llama.replicated_bytes / 1e9, 1), round(llama.grouped_bytes / 1e9, 1), llama.saving
    (8.6, 2.1, 4.0)
    """
    rows = []
    for model in models:
        if model.heads_kv < 1 or model.heads_q % model.heads_kv:
            expected = f"a multiple of its {model.heads_kv} KV heads"
            problem = f"{model.name} has a wrong number of query heads"
            raise InvalidInput(
                message("kv_memory_table", "model", problem, expected, model.heads_q)
            )
        replicated, grouped = (
            kv_cache_bytes(
                tokens, layers=model.layers, heads_kv=heads, head_dim=model.head_dim, dtype=dtype
            )
            for heads in (model.heads_q, model.heads_kv)
        )
        rows.append(KVMemoryRow(model, tokens, dtype, replicated, grouped))
    return rows


def format_kv_memory_table(rows: Sequence[KVMemoryRow]) -> str:
    """The rows as aligned text, in GB of 10^9 bytes.

    Examples
    --------
    >>> print(format_kv_memory_table(kv_memory_table(tokens=16384)[:1]))
    model         layers  heads  head dim  tokens  dtype     replicated  grouped  saving
    Llama 3.1 8B      32   32:8       128   16384  bfloat16      8.6 GB   2.1 GB    4.0x
    """
    head = ["model", "layers", "heads", "head dim", "tokens", "dtype", "replicated", "grouped"]
    lines = [[*head, "saving"]]
    for row in rows:
        m = row.model
        sizes = [f"{count / 1e9:.1f} GB" for count in (row.replicated_bytes, row.grouped_bytes)]
        dtype = str(row.dtype).removeprefix("torch.")
        numbers = [str(m.layers), f"{m.heads_q}:{m.heads_kv}", str(m.head_dim), str(row.tokens)]
        lines.append([m.name, *numbers, dtype, *sizes, f"{row.saving:.1f}x"])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = {head.index("model"), head.index("dtype")}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
