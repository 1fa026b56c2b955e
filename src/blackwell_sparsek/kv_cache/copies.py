"""Copies of caches: deep copies, pickled and saved caches.

The state of a cache is its tensors and plain Python data. Everything on the device that follows
from the accounts on the host, such as lengths and page tables, is made again, so that a loaded
cache agrees with itself. Kernels follow these accounts, and a file may hold anything: all of it is
checked.
"""

from typing import Any

import torch

from ..core.checks import check_choice, check_rank, check_same_device, check_tensor, message
from ..core.errors import InvalidInput, Unsupported
from ..launch.launcher import cdiv
from ..masks.check import check_count
from .layout import CONTIGUOUS, FP8, PAGED, STORED, check_latent, check_scale
from .pages import SequencePages

TENSORS = ("k", "v", "k_scale", "v_scale")


def shallow_copy(cache: str) -> Unsupported:
    """The error for `copy.copy` of a cache."""
    return Unsupported(
        f"{cache}: a shallow copy would share keys and values, but not the account of what is in "
        "them; use copy.deepcopy"
    )


def malformed(cache: str, what: str, expected: Any, got: Any) -> InvalidInput:
    """The error for a state that no cache has."""
    return InvalidInput(message(cache, what, "in a saved cache does not fit", expected, got))


def saved_tensors(cache: Any) -> dict[str, Any]:
    """The tensors of a cache by name; fp8 as bytes, since unpickling it fails.

    Of a latent cache the values are not saved, only how many channels of the keys they are: not
    all ways of copying keep two tensors in one memory.
    """
    state = {name: getattr(cache, name) for name in TENSORS}
    if cache.latent:
        state["v"] = cache.v.shape[-1]
    if state["k"].dtype == FP8:
        state |= {name: state[name].view(torch.uint8) for name in ("k", "v")}
    return state


def loaded_tensors(cache: str, state: Any, keys: tuple[str, ...], *, paged: bool) -> dict[str, Any]:
    """The tensors of a state, which has besides them exactly `keys`; and `latent`."""
    expected = sorted((*TENSORS, *keys))
    if not isinstance(state, dict) or sorted(map(str, state)) != expected:
        got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise malformed(cache, "state", expected, got)
    tensors = {name: state[name] for name in TENSORS}
    latent = isinstance(tensors["v"], int)
    for name in ("k",) if latent else ("k", "v"):
        x = tensors[name]
        check_tensor(cache, name, x)
        check_rank(cache, name, x, PAGED if paged else CONTIGUOUS)
        if x.dtype == torch.uint8:
            tensors[name] = x = x.view(FP8)
        check_choice(cache, f"dtype of {name}", x.dtype, STORED)
    if latent:
        k, channels = tensors["k"], check_count(cache, "v", tensors["v"], at_least=1)
        check_latent(cache, True, k.shape[-1], channels, k.dtype)
        tensors["v"] = k[..., :channels]
    k, v = tensors["k"], tensors["v"]
    if k.dtype != v.dtype or k.shape[:-1] != v.shape[:-1] or 0 in (*k.shape, *v.shape):
        got = f"k {list(k.shape)} {k.dtype}, v {list(v.shape)} {v.dtype}"
        raise malformed(cache, "k/v", "equal sizes up to the last, and one dtype", got)
    heads = k.shape[2 if paged else 1]
    scales = {name: tensors[name] for name in ("k_scale", "v_scale") if tensors[name] is not None}
    for name, scale in scales.items():
        check_scale(cache, name, scale, k.dtype, heads)
    if k.dtype == FP8 and len(scales) < 2:
        raise malformed(cache, "k_scale/v_scale", "both, for fp8", list(scales))
    check_same_device(cache, {"k": k, "v": v, **scales})
    return {**tensors, "latent": latent}


def check_ints(cache: str, what: str, values: Any, count: int | None, allowed: range) -> None:
    """Check for a list of `count` ints out of `allowed`; None: of any length."""
    if not isinstance(values, list) or not all(type(x) is int for x in values):
        raise malformed(cache, what, "a list of ints", type(values).__name__)
    if count is not None and len(values) != count:
        raise malformed(cache, what, f"{count} of them", len(values))
    if outside := [x for x in values if x not in allowed]:
        raise malformed(cache, what, f"{allowed.start} to {allowed.stop - 1}", outside[0])


def saved_book(cache: str, saved: Any, num_pages: int, page_size: int) -> SequencePages:
    """Check what `SequencePages.saved` returned, and restore it."""
    names = ["free_pages", "free_rows", "max_pages", "max_sequences", "next_id", "sequences"]
    if not isinstance(saved, dict) or sorted(map(str, saved)) != names:
        raise malformed(cache, "book", names, type(saved).__name__)
    for name in ("max_pages", "max_sequences"):
        check_count(cache, name, saved[name], at_least=1, at_most=2**31 - 1)
    check_ints(cache, "max_pages", [saved["max_pages"]], 1, range(1, num_pages + 1))
    check_count(cache, "next_id", saved["next_id"], at_most=2**63 - 1)
    sequences = saved["sequences"]
    if not isinstance(sequences, dict):
        raise malformed(cache, "sequences", "a dict", type(sequences).__name__)
    check_ints(cache, "sequences", list(sequences), None, range(saved["next_id"]))
    check_ints(cache, "free_rows", saved["free_rows"], None, range(saved["max_sequences"]))
    rows, used = list(saved["free_rows"]), set()
    for entry in sequences.values():
        if not isinstance(entry, list) or len(entry) != 3:
            raise malformed(cache, "sequences", "[row, length, pages] for each", entry)
        row, length, pages = entry
        check_ints(cache, "row and length", [row, length], 2, range(2**31))
        check_ints(cache, "pages", pages, cdiv(length, page_size), range(num_pages))
        check_ints(cache, "length", [length], 1, range(saved["max_pages"] * page_size + 1))
        rows.append(row)
        used.update(pages)
        if len(set(pages)) != len(pages):
            raise malformed(cache, "pages", "each once in a sequence", pages)
    # every row and every page is either free or used, and free only once
    check_ints(cache, "rows", rows, saved["max_sequences"], range(saved["max_sequences"]))
    check_ints(cache, "free_pages", saved["free_pages"], num_pages - len(used), range(num_pages))
    free = saved["free_pages"]
    if len(set(rows)) != len(rows) or len(set(free)) != len(free) or used & set(free):
        raise malformed(cache, "rows/pages", "each free once or used", "one twice")
    return SequencePages.restored(saved, num_pages, page_size)
