"""Lengths of a call on the host: for implementations and checks that wait for the device."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from ..calls.ragged import RaggedCall
from ..core.checks import message
from ..core.errors import InvalidInput
from ..masks.packed import check_cu_seqlens_values


class Sequence(NamedTuple):
    """One sequence of a call, in plain numbers."""

    number: int
    first_row: int
    """Its first row of q."""
    q_len: int
    """Queries that are used."""
    kv_len: int
    first_key: int
    first_slot: int
    """Its first row of packed keys, otherwise 0."""
    slab: int
    """Its row of a contiguous cache, otherwise 0."""
    shift: int
    """Position of its first query."""

    def kv_range(self, call: RaggedCall, first: int, end: int) -> tuple[int, int]:
        """Keys `[lo, hi)` that hold all that some query of `[first, end)` sees."""
        left, right = call.band.scalars()
        lo, hi = first + self.shift - left, end + self.shift + right
        if call.chunk:
            lo = max(lo, (first + self.shift) // call.chunk * call.chunk)
            hi = min(hi, ((end - 1 + self.shift) // call.chunk + 1) * call.chunk)
        lo, hi = max(lo, self.first_key, 0), min(hi, self.kv_len)
        return (lo, hi) if lo < hi else (0, 0)


def sequences(call: RaggedCall) -> Iterator[Sequence]:
    """The sequences of a call whose values were checked; waits for the device."""
    offsets = call.cu_seqlens_q.tolist()
    slots = [0] * (call.batch + 1) if call.cu_seqlens_k is None else call.cu_seqlens_k.tolist()
    if call.seqlens_k is not None:
        lengths = call.seqlens_k.tolist()
    else:
        lengths = [end - start for start, end in pairwise(slots)]
    used = None if call.seqused_q is None else call.seqused_q.tolist()
    first_keys = None if call.first_key is None else call.first_key.tolist()
    slabs = None if call.slabs is None else call.slabs.tolist()
    for b, length in enumerate(lengths):
        q_len = offsets[b + 1] - offsets[b] if used is None else used[b]
        yield Sequence(
            b,
            offsets[b],
            q_len,
            length,
            0 if first_keys is None else first_keys[b],
            slots[b],
            b if slabs is None else slabs[b],
            0 if call.top_left else length - q_len,
        )


def check_values(op: str, call: RaggedCall) -> None:
    """Raise `InvalidInput` for the first offset, length, block or page that is out of range.

    Waits for the device. Checks only entries that the call reads.
    """
    _check_offsets(op, "cu_seqlens_q", call.cu_seqlens_q.tolist(), call.q.shape[0], call.max_q)
    if call.cu_seqlens_k is not None:
        tokens = call.k.shape[0]
        check_cu_seqlens_values(op, "cu_seqlens_k", call.cu_seqlens_k, tokens, call.max_k)
    _check_lengths(op, call)
    if call.kv_blocks is not None:
        most = -(-call.slots // call.kv_block_size)
        for at, block in _entries("kv_blocks", call.kv_blocks.tolist()):
            _check_number(op, at, block, -1, most - 1)
    if call.page_table is not None:
        _check_pages(op, call)


def _check_offsets(op: str, arg: str, offsets: list[int], total: int, most: int) -> None:
    """From 0, never falling, at most `total`: rows of q after the last sequence are padding."""
    _check_number(op, f"{arg}[0]", offsets[0], 0, 0)
    for i, (start, end) in enumerate(pairwise(offsets), start=1):
        if end < start:
            raise InvalidInput(message(op, f"{arg}[{i}]", "falls", f"at least {start}", end))
        if end - start > most:
            problem, expected = "ends a sequence longer than max_seqlen_q", f"at most {most} tokens"
            raise InvalidInput(message(op, f"{arg}[{i}]", problem, expected, end - start))
    _check_number(op, f"{arg}[{len(offsets) - 1}]", offsets[-1], 0, total)


def _check_lengths(op: str, call: RaggedCall) -> None:
    offsets = call.cu_seqlens_q.tolist()
    slots = None if call.cu_seqlens_k is None else call.cu_seqlens_k.tolist()
    of_keys = "cache_seqlens" if slots is None else "seqused_k"
    for b in range(call.batch):
        most = call.capacity if slots is None else slots[b + 1] - slots[b]
        if call.seqlens_k is not None:
            _check_number(op, f"{of_keys}[{b}]", int(call.seqlens_k[b]), 0, most)
        if call.seqused_q is not None:
            rows = offsets[b + 1] - offsets[b]
            _check_number(op, f"seqused_q[{b}]", int(call.seqused_q[b]), 0, rows)
        if call.first_key is not None:
            _check_number(op, f"leftpad_k[{b}]", int(call.first_key[b]), 0, most)
        if call.slabs is not None:
            rows = call.k.shape[0] - 1
            _check_number(op, f"cache_batch_idx[{b}]", int(call.slabs[b]), 0, rows)


def _check_pages(op: str, call: RaggedCall) -> None:
    assert call.page_table is not None
    pages, size = call.k.shape[:2]
    lists = None if call.kv_blocks is None else call.kv_blocks.tolist()
    for sequence in sequences(call):
        lo, hi = sequence.kv_range(call, 0, sequence.q_len) if sequence.q_len else (0, 0)
        read = range(lo // size, -(-hi // size))
        row = call.page_table[sequence.number].tolist()
        listed = read if lists is None else {p for head in lists[sequence.number] for p in head}
        for i in read:
            if i in listed:
                _check_number(op, f"page_table[{sequence.number}, {i}]", row[i], 0, pages - 1)


def _entries(arg: str, lists: list[list[list[int]]]) -> Iterator[tuple[str, int]]:
    for b, heads in enumerate(lists):
        for h, blocks in enumerate(heads):
            for i, block in enumerate(blocks):
                yield f"{arg}[{b}, {h}, {i}]", block


def _check_number(op: str, arg: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        expected = f"{least} to {most}" if least < most else f"{least}"
        raise InvalidInput(message(op, arg, "is out of range", expected, value))
