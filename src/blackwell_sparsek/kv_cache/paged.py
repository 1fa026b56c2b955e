"""`PagedKVCache`: keys and values of many sequences in pages of one pool."""

from collections.abc import Sequence, Sized
from typing import Any, NamedTuple

import torch

from ..core.checks import message
from ..core.errors import InvalidInput, InvalidType
from ..core.torch_state import usable_in_training
from ..core.transfer import ALIGNED_INTS, aligned_rows, refuse_capture, to_device
from ..launch.launcher import cdiv
from ..masks.check import check_count
from .append import check_new, kv_append
from .copies import (
    check_ints,
    loaded_tensors,
    malformed,
    saved_book,
    saved_tensors,
    shallow_copy,
)
from .layout import FP8, check_counts, empty_cache, latent_values
from .pages import NO_PAGE, Growth, PagePool, SequencePages


class Reservation(NamedTuple):
    """Room made for new tokens of some sequences."""

    sequences: list[int]
    counts: list[int]
    before: torch.Tensor
    """int32 [B] on the device: lengths before the reservation."""
    count_tensor: torch.Tensor


class PagedKVCache:
    """Keys and values in pages `[num_pages, page_size, Hkv, D]` that sequences take as they grow.

    Sequences have ids, which are never reused after `release`. The host keeps account of lengths
    and pages; the page table is on the device and is updated by small asynchronous copies. A
    request that does not fit raises before anything is changed.

    For a CUDA graph, capture `bsk.kv_append` and `bsk.attention_decode` on static tensors; before
    each replay, call `reserve` and copy `page_table(sequences, max_pages)` and
    `lengths(sequences)` to them.

    Deep copies and pickled or saved caches are independent and start from this state. Loading,
    also with `weights_only=True`, checks them. `copy.copy` is refused.

    Parameters
    ----------
    num_pages, page_size, heads_kv, head_dim : int
    head_dim_v : int, optional
        Head dim of the values; `head_dim` by default.
    latent : bool
        For MLA with absorbed weights: the values are the first `head_dim_v` channels of the keys,
        and only the keys are stored and appended. Not for fp8.
    dtype : torch.dtype, optional
        Of the stored values: fp16, bf16, fp32, fp64 or float8_e4m3fn; by default torch's default.
    device : optional
    k_scale, v_scale : float, or fp32 tensor with one element or `[Hkv]`, optional
        For fp8: `x / scale` is stored, saturated at ±448. 1 by default.
    max_sequences : int
        Most sequences at one time: the rows of the page table.
    max_tokens : int, optional
        Most tokens of one sequence, rounded up to whole pages; by default those of all pages.

    Attributes
    ----------
    k, v : `[num_pages, page_size, Hkv, D]`, `[num_pages, page_size, Hkv, Dv]`
        In a latent cache, `v` is the view `k[..., :Dv]`.
    latent : bool
    k_scale, v_scale : fp32 tensors for fp8, otherwise None

    Raises
    ------
    InvalidInput
        If sizes, dtypes, scales or sequence ids are wrong.
    Unsupported
        If a latent cache is to be in fp8.
    OutOfPages
        If too few pages are free.

    Examples
    --------
    >>> import torch, blackwell_sparsek as bsk
    >>> cache = bsk.PagedKVCache(8, 16, 4, 64)
    >>> a, b = cache.add_sequences(2)
    >>> cache.append([a, b], torch.randn(2, 4, 20, 64), torch.randn(2, 4, 20, 64), counts=[20, 5])
    >>> c = cache.fork(a)
    >>> cache.lengths([a, b, c]), cache.free_pages
    (tensor([20,  5, 20], dtype=torch.int32), 5)
    >>> cache.page_table([a, b, c])
    tensor([[ 0,  1],
            [ 2, -1],
            [ 0,  1]], dtype=torch.int32)

    A latent cache:

    >>> cache = bsk.PagedKVCache(8, 64, 1, 576, head_dim_v=512, latent=True)
    >>> cache.append(cache.add_sequences(1), torch.randn(1, 1, 20, 576))
    >>> cache.v.shape, cache.v.data_ptr() == cache.k.data_ptr()
    (torch.Size([8, 64, 1, 512]), True)
    """

    # a cache made in inference mode could not be written to outside of it
    @usable_in_training
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        heads_kv: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        latent: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        max_sequences: int = 256,
        max_tokens: int | None = None,
    ):
        max_tokens = num_pages * page_size if max_tokens is None else max_tokens
        sizes = {"num_pages": num_pages, "page_size": page_size, "heads_kv": heads_kv}
        made = empty_cache(
            "PagedKVCache",
            {**sizes, "max_sequences": max_sequences, "max_tokens": max_tokens},
            (num_pages, page_size, heads_kv),
            head_dim,
            head_dim_v,
            latent=latent,
            dtype=dtype,
            device=device,
            scales=(k_scale, v_scale),
        )
        self.k: torch.Tensor = made.k
        self.v: torch.Tensor = made.v
        self.k_scale: torch.Tensor | None = made.k_scale
        self.v_scale: torch.Tensor | None = made.v_scale
        self.latent = latent
        max_pages = min(cdiv(max_tokens, page_size), num_pages)
        self._open(SequencePages(PagePool(num_pages), page_size, max_sequences, max_pages))

    def _open(self, book: SequencePages) -> None:
        """Begin with the accounts of `book`: make the page table."""
        self._book = book
        width = cdiv(book.max_pages, ALIGNED_INTS) * ALIGNED_INTS
        size, place = (book.max_sequences, width), self.k.device
        self._table = torch.full(size, NO_PAGE, dtype=torch.int32, device=place)
        self._reserved: Reservation | None = None
        self._last_rows: tuple[list[int], torch.Tensor] | None = None
        self._apply(book.all_entries())

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.k.shape[1]

    @property
    def free_pages(self) -> int:
        """Pages that no sequence uses."""
        return self._book.pool.free_pages

    @property
    def memory_bytes(self) -> int:
        """Bytes of all pages of keys and values, used or not."""
        return self.k.nbytes if self.latent else self.k.nbytes + self.v.nbytes

    def add_sequences(self, count: int) -> list[int]:
        """Start `count` empty sequences; returns their ids."""
        check_count("PagedKVCache.add_sequences", "count", count, at_least=0)
        return self._book.add("PagedKVCache.add_sequences", count)

    def append(
        self,
        sequences: Sequence[int],
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        counts: int | Sequence[int] | None = None,
    ) -> None:
        """Add tokens to several sequences at once.

        Parameters
        ----------
        sequences : B ids, each at most once
        k, v : `[B, Hkv, T, D]`, `[B, Hkv, T, Dv]`
            Without `v` for a latent cache.
        counts : int or B ints, optional
            How many of the T tokens to take for each sequence, the first ones; all by default.
        """
        op = "PagedKVCache.append"
        _check_ids(op, sequences)
        self._check_new(op, sequences, k, v)
        self._reserve(op, sequences, check_counts(op, counts, len(sequences), k.shape[2]))
        self.write(k, v)

    def reserve(self, sequences: Sequence[int], counts: int | Sequence[int]) -> None:
        """Make room for `counts` more tokens, an int for all of `sequences` or one for each.

        Takes pages and enters them in the page table; copies the last page if it is only partly
        filled and shared with another sequence. Raises `OutOfPages` or `InvalidInput`, and changes
        nothing, if there is no room.
        """
        op = "PagedKVCache.reserve"
        _check_ids(op, sequences)
        self._reserve(op, sequences, check_counts(op, counts, len(sequences), None))

    def _reserve(self, op: str, sequences: Sequence[int], counts: list[int]) -> None:
        refuse_capture(op, self.k.device)
        self._apply(self._book.grow(op, sequences, counts))
        self._reserved = self._reservation(sequences, counts)

    def _reservation(self, sequences: Sequence[int], counts: list[int]) -> Reservation:
        """Room of `counts` tokens, which the lengths of the sequences include already."""
        after = self.host_lengths(sequences)
        before = [length - count for length, count in zip(after, counts, strict=True)]
        state = to_device(aligned_rows([before, counts]), torch.int32, self.k.device)
        lengths, count_tensor = state[:, : len(counts)]
        return Reservation(list(sequences), counts, lengths, count_tensor)

    def write(self, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        """Write the tokens of the last reservation.

        Parameters
        ----------
        k, v : `[B, Hkv, T, D]`, `[B, Hkv, T, Dv]`
            In the order of the sequences in the reservation, T at least the largest count. Without
            `v` for a latent cache.
        """
        op = "PagedKVCache.write"
        if self._reserved is None:
            raise InvalidInput(message(op, "cache", "has no reservation", "reserve first", "none"))
        sequences, counts, before, count_tensor = self._reserved
        values = self._check_new(op, sequences, k, v)
        if k.shape[2] < max(counts, default=0):
            expected = f"at least the {max(counts)} tokens that were reserved"
            raise InvalidInput(message(op, "k", "is too short", expected, k.shape[2]))
        kv_append(
            self.k,
            self.v,
            k,
            values,
            cache_seqlens=before,
            counts=count_tensor,
            # the whole width, so that the shape stays the same and calls are replayed
            page_table=self.page_table(sequences, self._table.shape[1]),
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    def fork(self, sequence: int) -> int:
        """Start a new sequence with the tokens of this one; return its id.

        Pages are shared. The first of the two to append copies the last page, if it is only partly
        filled; all others stay shared.
        """
        refuse_capture("PagedKVCache.fork", self.k.device)
        child, growth = self._book.fork("PagedKVCache.fork", sequence)
        self._apply(growth)
        return child

    def truncate(self, sequences: Sequence[int], lengths: int | Sequence[int]) -> None:
        """Keep only the first `lengths` tokens, for instance the accepted ones of a draft."""
        op = "PagedKVCache.truncate"
        _check_ids(op, sequences)
        refuse_capture(op, self.k.device)
        kept = check_counts(op, lengths, len(sequences), None, arg="lengths")
        self._apply(self._book.truncate(op, sequences, kept))
        self._reserved = None

    def release(self, sequences: int | Sequence[int]) -> None:
        """End sequences and free the pages that no other sequence shares."""
        op = "PagedKVCache.release"
        refuse_capture(op, self.k.device)
        ids = [sequences] if isinstance(sequences, int) else sequences
        self._apply(self._book.release(op, ids))
        self._reserved = None

    def reset(self) -> None:
        """Release all sequences; the memory stays."""
        self.release(self._book.ids)

    def host_lengths(self, sequences: Sequence[int]) -> list[int]:
        """Tokens of each sequence, on the host."""
        return [s.length for s in self._book.states("PagedKVCache.host_lengths", sequences)]

    def lengths(self, sequences: Sequence[int]) -> torch.Tensor:
        """Tokens of each sequence, int32 `[B]` on the device."""
        states = self._book.states("PagedKVCache.lengths", sequences)
        return to_device([state.length for state in states], torch.int32, self.k.device)

    def page_table(self, sequences: Sequence[int], max_pages: int | None = None) -> torch.Tensor:
        """Pages of each sequence in order, int32 `[B, max_pages]` on the device; -1 past the last.

        Parameters
        ----------
        sequences : B ids
        max_pages : int, optional
            Columns; by default as many as the longest of these sequences has, at least 1.
        """
        op = "PagedKVCache.page_table"
        states = self._book.states(op, sequences)
        used = max((len(state.pages) for state in states), default=0)
        columns = max(used, 1) if max_pages is None else check_count(op, "max_pages", max_pages)
        if not used <= columns <= self._table.shape[1]:
            expected = f"{used} (in use) to {self._table.shape[1]}"
            raise InvalidInput(message(op, "max_pages", "is out of range", expected, columns))
        return self._rows_of([state.row for state in states])[:, :columns]

    def _rows_of(self, rows: list[int]) -> torch.Tensor:
        """Rows of the table; a view if they are consecutive."""
        if rows and rows == list(range(rows[0], rows[0] + len(rows))):
            return self._table[rows[0] : rows[0] + len(rows)]
        last, index = self._last_rows or (None, None)
        if index is None or last != rows:
            index = to_device(rows, torch.int64, self.k.device)
            self._last_rows = (rows, index)
        return self._table.index_select(0, index)

    def _apply(self, growth: Growth) -> None:
        """Bring the device up to date: copied pages, entries of the page table."""
        place = self.k.device
        if growth.copies:
            old, new = to_device(list(zip(*growth.copies, strict=True)), torch.int64, place)
            for pages in (self.k,) if self.latent else (self.k, self.v):
                raw = pages.view(torch.uint8) if pages.dtype == FP8 else pages
                raw.index_copy_(0, new, raw.index_select(0, old))
        if growth.entries:
            width = self._table.shape[1]
            at = to_device([row * width + i for row, i, _ in growth.entries], torch.int64, place)
            ids = to_device([page for _, _, page in growth.entries], torch.int32, place)
            self._table.view(-1).index_copy_(0, at, ids)

    def _check_new(
        self, op: str, sequences: Sequence[int], k: torch.Tensor, v: torch.Tensor | None
    ) -> torch.Tensor:
        """Check new keys and values; return the values."""
        values = latent_values(op, self.v.shape[-1], k, v) if self.latent else v
        batch, _ = check_new(op, self.k, self.v, k, values, paged=True)
        if batch != len(sequences):
            expected = f"{len(sequences)}, the sequences"
            raise InvalidInput(message(op, "k", "has a wrong batch size", expected, batch))
        assert values is not None
        return values

    def __getstate__(self) -> dict[str, Any]:
        reserved = self._reserved
        accounts = {
            "book": self._book.saved(),
            "reserved": None if reserved is None else [reserved.sequences, reserved.counts],
        }
        return {**saved_tensors(self), **accounts}

    @usable_in_training
    def __setstate__(self, state: dict[str, Any]) -> None:
        op = "PagedKVCache"
        tensors = loaded_tensors(op, state, ("book", "reserved"), paged=True)
        num_pages, page_size, _, _ = state["k"].shape
        book, reserved = saved_book(op, state["book"], num_pages, page_size), state["reserved"]
        if reserved is not None:
            if not isinstance(reserved, list) or len(reserved) != 2:
                raise malformed(op, "reserved", "[sequences, counts]", reserved)
            sequences, counts = reserved
            check_ints(op, "reserved sequences", sequences, None, range(2**63))
            check_ints(op, "reserved", counts, len(sequences), range(num_pages * page_size + 1))
            for sequence, count in zip(book.distinct_states(op, sequences), counts, strict=True):
                check_ints(op, "reserved", [count], 1, range(sequence.length + 1))
        self.__dict__.update(tensors)
        self._open(book)
        if reserved is not None:
            self._reserved = self._reservation(sequences, counts)

    def __copy__(self) -> "PagedKVCache":
        raise shallow_copy("PagedKVCache")

    def __repr__(self) -> str:
        sequences = f"{len(self._book.ids)} sequences, {self.free_pages} free pages"
        return f"PagedKVCache({list(self.k.shape)}, {self.k.dtype}, {self.k.device}, {sequences})"


def _check_ids(op: str, sequences: Any) -> None:
    if not isinstance(sequences, Sized):
        expected, got = "a list of ids", type(sequences).__name__
        raise InvalidType(message(op, "sequences", "are not a list", expected, got))


# What `__setstate__` takes is plain data, and all of it is checked.
torch.serialization.add_safe_globals([PagedKVCache])
