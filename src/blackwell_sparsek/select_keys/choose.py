# mypy: ignore-errors
"""Choosing entries from scores: buffers of those that may still be chosen, and stored scores.

A buffer holds scores as ordered integers, and numbers of entries, ascending. What is added must be
above the `floor` of the buffer. When it is full, only the `most` best stay, and the worst of them
is the new floor: later ones that are equal have higher numbers.

Where `scores.py` has stored the scores of a query, a program takes a floor from a sample of them,
so low that the `most` best are above it with all but certainty. One pass over the scores marks
those above it, a bit each, without a barrier; then the marked ones alone are collected and the best
of them kept. If the sample misled, or too many scores are equal, entries are added to the buffer
step by step instead. The sample decides how long a choice takes, never what is chosen.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..calls.select_keys import SelectCall
from ..device.masks import position, row_bounds
from ..device.ordering import HIGHEST, LOWEST, midpoint, ordered_int
from ..launch.launcher import launch
from ..launch.workspace import scratch
from .tuning import ChooseConfig

# Places of a list that are cleared at a time.
TILE_CLEARED = tl.constexpr(64)
# Entries of a buffer that are moved, or whose scores are read, at a time.
TILE_MOVED = tl.constexpr(2048)
# A sample takes at most one in this many scores.
SPARSEST_SAMPLE = tl.constexpr(4)
# Scores of a word of marks; words that are marked, and whose entries are collected, at a time.
WORD = tl.constexpr(32)
TILE_MARKED = tl.constexpr(256)
TILE_COLLECTED = tl.constexpr(2048)
# Spreads the places of a sample over their strides: 2**16 divided by the golden ratio.
SPREAD = tl.constexpr(40503)


class Rule(NamedTuple):
    """Entries of a list, and how many of the first and latest ones are always taken."""

    most: Any
    force_first: Any
    force_last: Any


class Buffer(NamedTuple):
    """Of one query: scores as integers; numbers in its list, and past the end of that."""

    keys: Any
    ids: Any
    spare: Any


class Held(NamedTuple):
    """How many entries a buffer holds, and what later ones must be above."""

    count: Any
    floor: Any


class Rows(NamedTuple):
    """Queries whose scores are stored: the first one, and how many."""

    first: int
    count: int


@triton.jit
def entry_scores(
    s, kv_pos, entry, last_key,
    MEAN: tl.constexpr, BLOCK_KV: tl.constexpr, TILE_M: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """S [TILE_M, ENTRIES] of entries that have a key up to `last_key`, that of their query."""
    if BLOCK_KV == 1:
        return s
    seen = kv_pos[None, :] <= last_key[:, None]
    if MEAN:
        sums = tl.reshape(tl.where(seen, s, 0.0), [TILE_M, ENTRIES, BLOCK_KV])
        keys = tl.minimum(last_key[:, None] + 1 - entry[None, :] * BLOCK_KV, BLOCK_KV)
        # rounded once, so that equal means of different counts are equal
        return tl.div_rn(tl.sum(sums, 2), tl.maximum(keys, 1).to(tl.float32))
    return tl.max(tl.reshape(tl.where(seen, s, -float("inf")), [TILE_M, ENTRIES, BLOCK_KV]), 2)


@triton.jit
def _kth_largest(keys, k, low):
    """A number that k of the keys reach, but k - 1 of them, or fewer, exceed.

    Where such numbers are many, any of them; at least k of the keys reach `low`.
    """
    high = tl.max(keys, 0)
    while low < high:
        middle = midpoint(low, high)
        reached = tl.sum((keys >= middle).to(tl.int32), 0)
        low = tl.where(reached >= k, middle, low)
        high = tl.where(reached > k, high, tl.where(reached == k, middle, middle - 1))
    return low


@triton.jit
def _number_at(buffer, place, most):
    """Where a buffer holds the number of an entry."""
    return tl.where(place < most, buffer.ids + place, buffer.spare + place - most)


@triton.jit
def keep_the_best(buffer, held, most, TILE_C: tl.constexpr):
    """Leave the `most` best of more entries in a buffer of at most TILE_C."""
    TILE: tl.constexpr = min(TILE_C, TILE_MOVED)
    # threads read what others have written
    tl.debug_barrier()
    offs = tl.arange(0, TILE_C)
    all_keys = tl.load(buffer.keys + offs, mask=offs < held.count, other=LOWEST)
    threshold = _kth_largest(all_keys, most, held.floor)
    room = most - tl.sum((all_keys > threshold).to(tl.int32), 0)
    # above the threshold, and equal to it
    above, level = room * 0, room * 0
    for start in tl.range(0, held.count, TILE):
        at = start + tl.arange(0, TILE)
        live = at < held.count
        keys = tl.load(buffer.keys + at, mask=live, other=LOWEST)
        number = tl.load(_number_at(buffer, at, most), mask=live, other=0)
        # both counts in one scan; neither exceeds TILE
        counted = (live & (keys > threshold)).to(tl.int32) << 16
        counted += (live & (keys == threshold)).to(tl.int32)
        so_far = tl.cumsum(counted, 0)
        of_level = level + (so_far & 0xFFFF)
        place = above + (so_far >> 16) + tl.minimum(of_level, room) - 1
        kept = (counted > 1) | ((counted == 1) & (of_level <= room))
        total = tl.sum(counted, 0)
        above += total >> 16
        level += total & 0xFFFF
        # nothing moves up, but into places that others have not read yet
        tl.debug_barrier()
        tl.store(buffer.keys + place, keys, mask=kept)
        tl.store(buffer.ids + place, number, mask=kept)
    tl.debug_barrier()
    return Held(held.count * 0 + most, threshold)


@triton.jit
def _sampled_floor(scores_row, entries, most, SAMPLE: tl.constexpr):
    """What the `most` best of a query's scores are above, with all but certainty."""
    floor = entries * 0 + LOWEST
    stride = entries // SAMPLE
    if stride >= SPARSEST_SAMPLE:
        # how many of the best are in the sample, and four standard deviations more
        expected = most * (SAMPLE * 1.0) / entries
        rank = (expected + 4.0 * tl.sqrt(expected) + 4.0).to(tl.int32)
        if rank <= SAMPLE // 2:
            i = tl.arange(0, SAMPLE)
            # one of each stride, at a different place of it, for scores that repeat
            within = (i * SPREAD % 65536 >> 4) % stride
            keys = ordered_int(tl.load(scores_row + i * stride + within))
            floor = _kth_largest(keys, rank, tl.min(keys, 0)) - 1
    return floor


@triton.jit
def _popcount(x):
    """How many bits of a uint32 are set."""
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x += x >> 8
    return ((x + (x >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _keys_of(s, entry, entries, rule):
    """Scores as integers; those of entries that are always taken are the highest."""
    forced = (entry < rule.force_first) | (entry >= entries - rule.force_last)
    return tl.where(forced, HIGHEST, ordered_int(s))


@triton.jit
def _mark(scores_row, scores_stride, marks_row, entries, rule, floor):
    """Set the bits of scores above the floor; rows of scores and marks are read to their end."""
    offs_w = tl.arange(0, TILE_MARKED)
    bit = tl.arange(0, WORD)[None, :]
    offs = offs_w[:, None] * WORD + bit
    ahead = tl.load(scores_row + offs, mask=offs < scores_stride, other=0.0)
    for start in tl.range(0, entries, TILE_MARKED * WORD):
        s = ahead
        entry = start + offs
        following = entry + TILE_MARKED * WORD
        ahead = tl.load(scores_row + following, mask=following < scores_stride, other=0.0)
        above = (_keys_of(s, entry, entries, rule) > floor) & (entry < entries)
        # each bit of a word once: a sum without carries
        marks = tl.sum(above.to(tl.int32) << bit, 1)
        word = start // WORD + offs_w
        tl.store(marks_row + word, marks, mask=word * WORD < entries)


@triton.jit
def _marks_of(marks_row, word, entries):
    """Words of marks, uint32."""
    marks = tl.load(marks_row + word, mask=word * WORD < entries, other=0)
    return marks.to(tl.uint32, bitcast=True)


@triton.jit
def _marked(marks_row, entries):
    """How many bits are set."""
    count = entries * 0
    for start in tl.range(0, entries, TILE_COLLECTED * WORD):
        word = start // WORD + tl.arange(0, TILE_COLLECTED)
        count += tl.sum(_popcount(_marks_of(marks_row, word, entries)), 0)
    return count


@triton.jit
def _collect(scores_row, marks_row, entries, rule, buffer, count):
    """Put the `count` marked entries into a buffer."""
    before = entries * 0
    for start in tl.range(0, entries, TILE_COLLECTED * WORD):
        word = start // WORD + tl.arange(0, TILE_COLLECTED)
        marks = _marks_of(marks_row, word, entries)
        ones = _popcount(marks)
        place = before + tl.cumsum(ones, 0) - ones
        before += tl.sum(ones, 0)
        # the lowest bit of each word, the next one, and so on
        for _ in tl.range(0, tl.max(ones, 0)):
            below = tl.maximum(marks, 1) - 1
            entry = word * WORD + _popcount(marks ^ below) - 1
            tl.store(_number_at(buffer, place, rule.most), entry, mask=marks != 0)
            place += 1
            marks &= below
    # threads read what others have written
    tl.debug_barrier()
    for start in tl.range(0, count, TILE_MOVED):
        at = start + tl.arange(0, TILE_MOVED)
        live = at < count
        entry = tl.load(_number_at(buffer, at, rule.most), mask=live, other=0)
        s = tl.load(scores_row + entry, mask=live, other=0.0)
        tl.store(buffer.keys + at, _keys_of(s, entry, entries, rule), mask=live)


@triton.jit(do_not_specialize=["q_len", "kv_len", "right", "capacity", "first_query"])
def _choose_kernel(
    ids_ptr,
    counts_ptr,
    keys_ptr,
    spare_ptr,
    marks_ptr,
    marks_stride,
    scores_ptr,
    scores_stride,
    rule,
    q_len,
    kv_len,
    right,
    capacity,
    first_query,
    MEAN: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_C: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """The list of one query; `scores_ptr` begins with those of `first_query`."""
    ENTRIES: tl.constexpr = TILE_N // BLOCK_KV
    most = rule.most
    program = tl.program_id(0)
    row = program.to(tl.int64)
    query = first_query + program
    last_key = row_bounds(position(query % q_len, q_len, kv_len), kv_len, 0, right).last
    last_key = tl.maximum(last_key, -1)
    entries = (last_key + BLOCK_KV) // BLOCK_KV
    expected = tl.minimum(entries, most)
    scores_row = scores_ptr + row * scores_stride
    ids_row = ids_ptr + query.to(tl.int64) * most
    buffer = Buffer(keys_ptr + row * capacity, ids_row, spare_ptr + row * (capacity - most))
    offs_n = tl.arange(0, TILE_N)
    offs_e = tl.arange(0, ENTRIES)
    held = Held(entries * 0, entries * 0 + LOWEST)
    if BLOCK_KV == 1:
        floor = _sampled_floor(scores_row, entries, most, SAMPLE)
        if floor > LOWEST:
            marks_row = marks_ptr + row * marks_stride
            _mark(scores_row, scores_stride, marks_row, entries, rule, floor)
            # threads read what others have written
            tl.debug_barrier()
            count = _marked(marks_row, entries)
            if count >= expected:
                held = Held(held.count, floor)
                if count <= capacity:
                    _collect(scores_row, marks_row, entries, rule, buffer, count)
                    held = Held(count, floor)
    if held.count < expected:
        # scores are read one step ahead, up to the end of their row
        ahead = tl.load(scores_row + offs_n, mask=offs_n < scores_stride, other=0.0)
        for start in tl.range(0, last_key + 1, TILE_N):
            kv_pos = start + offs_n
            entry = start // BLOCK_KV + offs_e
            s = ahead
            following = kv_pos + TILE_N
            ahead = tl.load(scores_row + following, mask=following < scores_stride, other=0.0)
            if BLOCK_KV > 1:
                last = last_key + tl.zeros([1], tl.int32)
                s = entry_scores(s[None, :], kv_pos, entry, last, MEAN, BLOCK_KV, 1, ENTRIES)
                s = tl.reshape(s, [ENTRIES])
            keys = _keys_of(s, entry, entries, rule)
            better = ((entry < entries) & (keys > held.floor)).to(tl.int32)
            added = tl.sum(better, 0)
            so_far = tl.cumsum(better, 0)
            if held.count + added > capacity:
                held = keep_the_best(buffer, held, most, TILE_C)
            place = held.count + so_far - 1
            tl.store(buffer.keys + place, keys, mask=better != 0)
            tl.store(_number_at(buffer, place, most), entry, mask=better != 0)
            held = Held(held.count + added, held.floor)
    if held.count > most:
        held = keep_the_best(buffer, held, most, TILE_C)
    tl.store(counts_ptr + query, held.count)
    for start in tl.range(held.count, most, TILE_CLEARED):
        place = start + tl.arange(0, TILE_CLEARED)
        tl.store(ids_row + place, tl.zeros([TILE_CLEARED], tl.int32), mask=place < most)


def launch_choose(
    ids: torch.Tensor,
    counts: torch.Tensor,
    call: SelectCall,
    scores: torch.Tensor,
    rows: Rows,
    config: ChooseConfig,
) -> None:
    """Fill `ids`, int32 [B, lists, Tq, most], and `counts`, int32 [B, lists, Tq], for `rows`.

    `scores` are fp32 [at least rows.count, Tk]: numbers without negative zeros.
    """
    given = call.options
    device = ids.device
    marks = scratch((rows.count, config.words), torch.int32, device) if config.words else None
    args = (
        ids,
        counts,
        scratch((rows.count, config.capacity), torch.int32, device),
        scratch((rows.count, config.capacity - given.most), torch.int32, device),
        marks,
        config.words,
        scores,
        scores.stride(0),
        Rule(given.most, given.force_first, given.force_last),
        call.q_index.shape[2],
        call.k_index.shape[2],
        given.right,
        config.capacity,
        rows.first,
        given.pool == "mean",
        given.granularity,
        config.tile_n,
        config.tile_c,
        config.sample,
    )
    options = {"num_warps": config.num_warps, "maxnreg": config.max_registers}
    launch(_choose_kernel, rows.count, args, **options)
