# mypy: ignore-errors
"""SparseK, the portable kernel: weights and thresholds of rows, sm_80 and newer.

    p[i, j] = clip(z[i, j] - tau[i], 0, 1)          with sum_j p[i, j] = k[i]

z, p [A, B, C, n], tau [A, B, C] fp32. One program finds the threshold of one row by the steps of
`eager.py`: Newton's method on a sum that is linear between bends, from a first guess that needs no
search, halving the interval where that fails. A row of up to MAX_TILE entries is read once and
stays in registers; a longer one is read again in each step. Thresholds of the prefixes of rows are
the same kernel without weights: the rows of a [n, n] matrix whose row stride is 0, with lengths 1
to n.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..calls.sparsek import PrefixSparsekCall, SparsekCall
from ..device.records import Strides
from ..launch.launcher import launch, on_device_of
from . import eager

# Steps that Newton's method may take without halving the interval.
FREE_STEPS = tl.constexpr(eager.FREE_STEPS)
# Then halving an interval of fp32 numbers down to neighbours, every other step.
MAX_STEPS = tl.constexpr(eager.FREE_STEPS + 100)
WIDTH_OF_DEVIATION = tl.constexpr(eager.WIDTH_OF_DEVIATION)
# Entries that one program holds in registers: 32 of each thread with 8 warps. Fewer threads with
# more entries each spend less on reductions; up to 1024 entries, one warp needs no barrier.
MAX_TILE = 8192
ENTRIES_PER_WARP = 1024
# Entries of one step through a longer row.
LOOP_TILE = 4096


class Row(NamedTuple):
    """One row: its entries if one tile holds them all, else where they are and how many."""

    tile: Any
    ptr: Any
    length: Any


class Sums(NamedTuple):
    """Of the weights above a threshold: how many are 1, how many below 1, and the sum of these."""

    full: Any
    active: Any
    partial: Any


@triton.jit
def _entries(ptr, start, length, TILE_N: tl.constexpr):
    """Entries from `start` on, -inf past the length."""
    offs = start + tl.arange(0, TILE_N)
    z = tl.load(ptr + offs, mask=offs < length, other=-float("inf"))
    return z.to(tl.float32)


@triton.jit
def _sums_of(z, tau):
    """The `Sums` of some entries."""
    over = z - tau
    between = (over > 0.0) & (over < 1.0)
    # both counts are at most MAX_TILE and share a word, which saves a reduction
    counts = tl.sum(tl.where(over >= 1.0, 65536, between.to(tl.int32)), 0)
    partial = tl.sum(tl.where(between, over, 0.0), 0)
    return Sums((counts >> 16).to(tl.float32), (counts & 65535).to(tl.float32), partial)


@triton.jit
def _sums(row, tau, TILE_N: tl.constexpr):
    """Count and add up the weights of a row above `tau`."""
    if row.tile is not None:
        full, active, partial = _sums_of(row.tile, tau)
    else:
        full = tau - tau
        active = full
        partial = full
        for start in tl.range(0, row.length, TILE_N):
            part = _sums_of(_entries(row.ptr, start, row.length, TILE_N), tau)
            full += part.full
            active += part.active
            partial += part.partial
    return Sums(full, active, partial)


class Facts(NamedTuple):
    """How many entries exist and how many are NaN or inf; largest, smallest, sums of powers."""

    count: Any
    bad: Any
    largest: Any
    smallest: Any
    total: Any
    squares: Any


@triton.jit
def _facts_of(z):
    """The `Facts` of some entries."""
    there = z > -float("inf")
    bad = (z != z) | (z == float("inf"))
    counts = tl.sum(tl.where(bad, 65536, there.to(tl.int32)), 0)
    smallest = tl.min(tl.where(there, z, float("inf")), 0)
    finite = tl.where(there, z, 0.0)
    return Facts(
        (counts & 65535).to(tl.float32),
        (counts >> 16).to(tl.float32),
        tl.max(z, 0),
        smallest,
        tl.sum(finite, 0),
        tl.sum(finite * finite, 0),
    )


@triton.jit
def _facts(row, TILE_N: tl.constexpr):
    """The `Facts` of a row."""
    if row.tile is not None:
        count, bad, largest, smallest, total, squares = _facts_of(row.tile)
    else:
        count = (row.length - row.length).to(tl.float32)
        bad = count
        largest = count - float("inf")
        smallest = count + float("inf")
        total = count
        squares = count
        for start in tl.range(0, row.length, TILE_N):
            part = _facts_of(_entries(row.ptr, start, row.length, TILE_N))
            count += part.count
            bad += part.bad
            largest = tl.maximum(largest, part.largest)
            smallest = tl.minimum(smallest, part.smallest)
            total += part.total
            squares += part.squares
    return Facts(count, bad, largest, smallest, total, squares)


@triton.jit
def _first_guess(facts, k):
    """The threshold of logistic entries with the mean and deviation of these; see `eager.py`."""
    mean = facts.total / facts.count
    variance = tl.maximum(facts.squares / facts.count - mean * mean, 0.0)
    width = WIDTH_OF_DEVIATION * tl.sqrt(variance)
    # equal entries share k, and the search ends where it begins if this division is exact
    share = tl.div_rn(k, facts.count)
    below = tl.log(1.0 - tl.exp(-share / width))
    return mean - share - width * (below - tl.log(1.0 - tl.exp((share - 1.0) / width)))


@triton.jit
def _largest_below(row, tau, TILE_N: tl.constexpr):
    """The largest entry at or below `tau`."""
    if row.tile is not None:
        below = tl.max(tl.where(row.tile > tau, -float("inf"), row.tile), 0)
    else:
        below = tau - float("inf")
        for start in tl.range(0, row.length, TILE_N):
            z = _entries(row.ptr, start, row.length, TILE_N)
            below = tl.maximum(below, tl.max(tl.where(z > tau, -float("inf"), z), 0))
    return below


@triton.jit
def _threshold(row, k, TILE_N: tl.constexpr):
    """The smallest tau for which the weights add up to at most k; see `eager.thresholds`."""
    facts = _facts(row, TILE_N)
    bad = (facts.bad > 0.0) | (k != k) | (k < 0.0)
    everything = k >= facts.count
    settled = bad | everything
    high = tl.where(settled, 0.0, facts.largest)
    low = tl.where(settled, -1.0, facts.smallest - 1.0)
    guess = _first_guess(facts, k)
    tau = tl.where((guess > low) & (guess < high), guess, low + (high - low) / 2)
    last_full = tau - tau - 1.0
    last_active = last_full
    number = 0
    newton_led = 0
    # whether an entry is known to lie between tau and tau + 1
    shared = 0
    while (number < MAX_STEPS) & (settled == 0):
        full, active, partial = _sums(row, tau, TILE_N)
        excess = partial + (full - k)
        newton = tau + excess / tl.maximum(active, 1.0)
        same = (newton_led != 0) & (full == last_full) & (active == last_active)
        # also where tau was right before
        same = same | ((active > 0.0) & (excess == 0.0))
        shared = (same & (active > 0.0)).to(tl.int32)
        ended = same | ((active == 0.0) & (full == k))
        fits = excess <= 0.0
        low = tl.where(fits, low, tau)
        high = tl.where(fits, tau, high)
        middle = low + (high - low) / 2
        ended = ended | (middle <= low) | (middle >= high)
        free = (number < FREE_STEPS) | (number % 2 == 0)
        use = (active > 0.0) & (newton > low) & (newton < high) & free
        answer = tl.where(active > 0.0, newton, high)
        tau = tl.where(ended, answer, tl.where(use, newton, middle))
        last_full = full
        last_active = active
        newton_led = use.to(tl.int32)
        settled = settled | ended
        number += 1
    if shared == 0:
        _, active, _ = _sums(row, tau, TILE_N)
        if active == 0.0:
            tau = _largest_below(row, tau, TILE_N)
    tau = tl.where(everything, -float("inf"), tau)
    return tl.where(bad, float("nan"), tau)


@triton.jit
def _offset(place, strides):
    """Element offset of a row, or of its k or length."""
    a, b, c = place
    return a * strides.batch + b * strides.head + c * strides.token


@triton.jit
def _store_weights(p_ptr, z, tau, start, size):
    """Weights of the entries from `start` on."""
    offs = start + tl.arange(0, z.shape[0])
    p = tl.minimum(tl.maximum(z - tau, 0.0), 1.0)
    # minimum and maximum drop NaN, which a row without a threshold shall show
    p = tl.where(tau != tau, tau, tl.where(z == -float("inf"), 0.0, p))
    tl.store(p_ptr + offs, p.to(p_ptr.dtype.element_ty), mask=offs < size)


@triton.jit(do_not_specialize=["size", "b_size", "c_size"])
def _sparsek_kernel(
    p_ptr,
    tau_ptr,
    z_ptr,
    k_ptr,
    number,
    lengths_ptr,
    p_strides,
    z_strides,
    k_strides,
    lengths_strides,
    size,
    b_size,
    c_size,
    SIZE_DIVISOR: tl.constexpr,
    TILE_N: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
):
    """The row [pid // (B C), pid // C % B, pid % C], whose k is `number` where k_ptr is None."""
    row = tl.program_id(0).to(tl.int64)
    place = (row // c_size // b_size, row // c_size % b_size, row % c_size)
    z_ptr += _offset(place, z_strides)
    k = number
    if k_ptr is not None:
        k = tl.load(k_ptr + _offset(place, k_strides)).to(tl.float32)
    # masks that are equal for neighbours let loads and stores be wide
    size = size // SIZE_DIVISOR * SIZE_DIVISOR
    length = size
    wrong = size < 0
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + _offset(place, lengths_strides))
        # a length out of range must not lead to a read
        wrong = (length < 0) | (length > size)
        length = tl.where(wrong, 0, length)
    tile = _entries(z_ptr, 0, length, TILE_N) if IN_REGISTERS else None
    tau = _threshold(Row(tile, z_ptr, length), k, TILE_N)
    tau = tl.where(wrong, float("nan"), tau)
    tl.store(tau_ptr + row, tau)
    if p_ptr is not None:
        p_ptr += _offset(place, p_strides)
        if IN_REGISTERS:
            _store_weights(p_ptr, tile, tau, 0, size)
        else:
            for start in tl.range(0, size, TILE_N):
                z = _entries(z_ptr, start, length, TILE_N)
                _store_weights(p_ptr, z, tau, start, size)


def _strides(x: torch.Tensor) -> Strides:
    return Strides(*x.stride()[:3])


def launch_sparsek(
    p: torch.Tensor | None,
    tau: torch.Tensor,
    z: torch.Tensor,
    k: torch.Tensor | float,
    lengths: torch.Tensor | None,
) -> None:
    """Fill `p` and `tau`.

    Parameters
    ----------
    p : dtype of z [A, B, C, n], contiguous in the last dimension, or None for thresholds alone
    tau : fp32 [A, B, C], contiguous
    z : fp16, bf16 or fp32 [A, B, C, n], contiguous in the last dimension
    k : float [A, B, C], any strides, or one number for all rows
    lengths : int32 [A, B, C], any strides, or None
    """
    rows, size = tau.numel(), z.shape[-1]
    if rows == 0:
        return
    in_registers = size <= MAX_TILE
    tile = triton.next_power_of_2(max(size, 16)) if in_registers else LOOP_TILE
    num_warps = max(tile // ENTRIES_PER_WARP, 1) if in_registers else 8
    k, number = (k, 0.0) if isinstance(k, torch.Tensor) else (None, k)
    with on_device_of(z):
        args = (
            p,
            tau,
            z,
            k,
            number,
            lengths,
            None if p is None else _strides(p),
            _strides(z),
            None if k is None else _strides(k),
            None if lengths is None else _strides(lengths),
            size,
            *tau.shape[1:],
            16 if size % 16 == 0 else 1,
            tile,
            in_registers,
        )
        launch(_sparsek_kernel, rows, args, num_warps=num_warps)


def _rank_four(x: torch.Tensor, rank: int) -> torch.Tensor:
    """`x`, one of whose callers has `rank` dimensions of rows, with three of them."""
    if rank > 3:
        return x.flatten(0, rank - 3)
    return x.view(*(1,) * (3 - rank), *x.shape)


def forward(call: SparsekCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in the dtype of z, and thresholds."""
    z, shape = call.z, call.z.shape[:-1]
    p, tau = z.new_empty(z.shape), z.new_empty(shape, dtype=torch.float32)
    lengths = None if call.lengths is None else call.lengths.expand(shape)
    given = (p, tau, z, call.k, lengths)
    launch_sparsek(
        *(_rank_four(x, len(shape)) if isinstance(x, torch.Tensor) else x for x in given)
    )
    return p, tau


def prefixes(call: PrefixSparsekCall) -> torch.Tensor:
    """Thresholds of each prefix of a row."""
    u, size = call.u, call.u.shape[-1]
    tau = u.new_empty(u.shape, dtype=torch.float32)
    rows = u.flatten(0, -2) if u.dim() > 2 else u.view(-1, size)
    k = call.k.expand(u.shape[:-1]).reshape(-1)
    shape = (1, len(rows), size)
    lengths = torch.arange(1, size + 1, dtype=torch.int32, device=u.device)
    launch_sparsek(
        None,
        tau.view(shape),
        rows[None, :, None, :].expand(*shape, size),
        k[None, :, None].expand(shape),
        lengths.expand(shape),
    )
    # thresholds of neighbours may differ by a rounding
    return tau.cummax(-1).values
