"""Fixed calls over chosen keys, packed queries over caches, latent heads and fp8.

See `fixed_calls`, which has these among its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..decode.api import attention_decode
from ..fp8.attend import attention as fp8_attention
from ..masks.key_selection import KeySelection
from ..ragged import api as ragged_api
from ..select_keys.api import select_keys
from ..sparse_attention import api as sparse_attention_api
from ..sparsek.api import sparsek
from .inputs import normal

Results = tuple[torch.Tensor, ...]
Make = Callable[[torch.device], Callable[[], Results]]
# With options from a table, whose types no checker can know.
attention_varlen: Any = ragged_api.attention_varlen
sparse_attention: Any = sparse_attention_api.sparse_attention

BRAIN = torch.bfloat16
LATENT, LATENT_VALUES = 576, 512
# Keys of an entry, and head dimensions. On Hopper, entries of 64 and 128 keys are walked, and
# smaller ones gathered, unless heads have 80 columns: those are left to the portable kernels.
CHOSEN = ((64, 128), (128, 64), (1, 64), (4, 128), (16, 128), (32, 256), (4, 80))


def _values(device: torch.device, *shape: int, seed: int) -> torch.Tensor:
    return normal(*shape, seed=seed, dtype=BRAIN, device=device)


def _lists(device: torch.device, heads: int, queries: int, keys: int, size: int) -> KeySelection:
    """Every third entry before a query, its own among them, another offset for each head."""
    entries = -(-keys // size)
    at = torch.arange(entries, device=device)
    own = torch.arange(keys - queries, keys, device=device)[:, None] // size
    head = torch.arange(heads, device=device)[:, None, None]
    wanted = ((at + head) % 3 == 0) & (at < own) | (at == own)
    most = int(wanted.sum(-1).max())
    ids = torch.where(wanted, at, entries).sort(-1).values[..., :most]
    ids = ids.masked_fill(ids == entries, -1)
    return KeySelection.from_indices(ids[None], granularity=size, kv_len=keys)


def _chosen(size: int, dim: int, impl: str, device: torch.device) -> Callable[[], Results]:
    q, k, v = (
        _values(device, 1, heads, tokens, dim, seed=71 + i)
        for i, (heads, tokens) in enumerate(((16, 130), (2, 400), (2, 400)))
    )
    lists = _lists(device, 2, 130, 400, size)
    run = partial(sparse_attention, q, k, v, lists, return_lse=True, impl=impl)
    return lambda: run()


def _chosen_gradients(size: int, impl: str, device: torch.device) -> Callable[[], Results]:
    q, k, v = (
        _values(device, 1, heads, 200, 128, seed=74 + i).requires_grad_()
        for i, heads in enumerate((16, 2, 2))
    )
    lists = _lists(device, 2, 200, 200, size)
    dout = _values(device, 1, 16, 200, 128, seed=77)

    def run() -> Results:
        with torch.enable_grad():
            out = sparse_attention(q, k, v, lists, deterministic=True, impl=impl)
            return torch.autograd.grad(out, (q, k, v), dout)

    return run


def _chosen_latent(impl: str, device: torch.device) -> Callable[[], Results]:
    q = _values(device, 1, 16, 20, LATENT, seed=78)
    k = _values(device, 1, 1, 300, LATENT, seed=79)
    lists = _lists(device, 1, 20, 300, 1)
    v = k[..., :LATENT_VALUES]
    return lambda: sparse_attention(q, k, v, lists, return_lse=True, impl=impl)


def _decoded_latent(impl: str, device: torch.device) -> Callable[[], Results]:
    q = _values(device, 3, 64, 1, LATENT, seed=80)
    k = _values(device, 3, 1, 700, LATENT, seed=81)
    lengths = torch.tensor([700, 1, 333], dtype=torch.int32, device=device)
    v = k[..., :LATENT_VALUES]
    return lambda: attention_decode(q, k, v, cache_seqlens=lengths, return_lse=True, impl=impl)


def _ragged(impl: str, device: torch.device) -> Callable[[], Results]:
    """Decoding steps and prompts over pages of 16."""
    q_lens, kv_lens, page = (1, 200, 1, 77), (500, 200, 40, 300), 16
    q = _values(device, sum(q_lens), 8, 128, seed=82)
    k, v = (_values(device, 80, page, 2, 128, seed=83 + i) for i in range(2))
    offsets = torch.tensor([0, *q_lens], device=device).cumsum(0, dtype=torch.int32)
    most = -(-max(kv_lens) // page)
    table = torch.arange(len(kv_lens) * most, dtype=torch.int32, device=device).view(-1, most) % 80
    options: dict[str, Any] = {
        "cache_seqlens": torch.tensor(kv_lens, dtype=torch.int32, device=device),
        "page_table": table,
        "max_seqlen_q": max(q_lens),
        "causal": True,
    }
    return lambda: attention_varlen(q, k, v, offsets, **options, return_lse=True, impl=impl)


def _rounded(options: dict[str, Any], impl: str, device: torch.device) -> Callable[[], Results]:
    q, k, v = (
        _values(device, 1, heads, 400, 128, seed=86 + i) for i, heads in enumerate((8, 2, 2))
    )
    return lambda: fp8_attention(q, k, v, **options, return_lse=True, impl=impl)


# Scores of many heads are stored, if the lists of all queries take as much memory.
def _selected(heads: int, queries: int, impl: str, device: torch.device) -> Callable[[], Results]:
    q = _values(device, 1, heads, queries, 64, seed=89)
    k = _values(device, 1, 1, 600, 64, seed=90)
    weights = normal(1, heads, queries, seed=91, device=device)

    def run() -> Results:
        options: dict[str, Any] = {"activation": "relu", "granularity": 1, "top_k": 50}
        found = select_keys(q, k, weights=weights, impl=impl, **options)
        return found.ids, found.counts

    return run


def _sparsek(impl: str, device: torch.device) -> Callable[[], Results]:
    z = normal(40, 3000, seed=92, device=device)
    return lambda: (sparsek(z, 17.5, impl=impl),)


def sparse_calls(impl: str) -> dict[str, Make]:
    """How to make each call, by its name in `fixed_calls`."""
    found: dict[str, Make] = {
        f"sparse_attention/blocks{size}-d{dim}": partial(_chosen, size, dim, impl)
        for size, dim in CHOSEN
    }
    for size in (64, 128):
        found[f"sparse_attention-backward/blocks{size}"] = partial(_chosen_gradients, size, impl)
    found |= {
        "sparse_attention/latent": partial(_chosen_latent, impl),
        "attention_decode/latent": partial(_decoded_latent, impl),
        "attention_varlen/pages16": partial(_ragged, impl),
        "fp8.attention/causal": partial(_rounded, {"causal": True}, impl),
        "fp8.attention/window": partial(_rounded, {"causal": True, "window": 100}, impl),
        "select_keys/heads64": partial(_selected, 64, 600, impl),
        "select_keys/heads4": partial(_selected, 4, 40, impl),
        "sparsek/rows": partial(_sparsek, impl),
    }
    return {f"{name}/{impl}": make for name, make in found.items()}
