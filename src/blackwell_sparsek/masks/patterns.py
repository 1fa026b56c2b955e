"""Common mask patterns, public as `bsk.masks`.

Each returns a `BlockMask` and takes time and memory proportional to the blocks it keeps, never to
Sq x Sk. As everywhere in this package, query i sits at position i + Sk - Sq. `causal`,
`sliding_window` and `documents` are exact to the element. The others keep whole blocks, except that
`causal=True` cuts the blocks on the diagonal to the element.
"""

import torch

from ..core.checks import message
from ..core.errors import InvalidInput, InvalidType
from ..core.torch_state import usable_in_training
from .band import Band, band_of
from .block_lists import check_entry_count
from .block_mask import BlockMask
from .check import IntPair, check_block_size, check_count, check_seq_lengths
from .parts import CPU, Problem, band_mask, band_runs, blocks_mask, expand
from .segments import documents
from .topk import topk

__all__ = ["causal", "documents", "global_local", "random", "sliding_window", "strided", "topk"]

_Device = torch.device | str | None


def _problem(op: str, seq_lengths: int | IntPair, block_size: int | IntPair) -> Problem:
    return Problem(check_seq_lengths(op, seq_lengths), check_block_size(op, block_size))


def _device(device: _Device) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)


def _placed(mask: BlockMask, device: _Device) -> BlockMask:
    return mask.to(_device(device))


@usable_in_training
def causal(
    seq_lengths: int | IntPair, block_size: int | IntPair = 128, *, device: _Device = None
) -> BlockMask:
    """Each query sees the keys up to its own position.

    Parameters
    ----------
    seq_lengths : int or (Sq, Sk)
    block_size : int or (bq, bk)
    device : optional
        Where to put the mask; torch's default device if None.

    Raises
    ------
    InvalidInput
        For an unsupported block size or another value out of range.

    Examples
    --------
    >>> causal((2, 4), 16).to_element_mask()[0, 0].int()
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 1]], dtype=torch.int32)
    """
    p = _problem("masks.causal", seq_lengths, block_size)
    return band_mask(Band(None, 0), p, _device(device))


@usable_in_training
def sliding_window(
    seq_lengths: int | IntPair,
    window: int | tuple[int | None, int | None],
    block_size: int | IntPair = 128,
    *,
    causal: bool = False,
    device: _Device = None,
) -> BlockMask:
    """Each query sees the keys near its own position.

    Parameters
    ----------
    seq_lengths : int or (Sq, Sk)
    window : int or (left, right)
        As in `attention`: position p sees p - left .. p + right, None means unbounded; n means the
        n latest keys, `(n - 1, 0)` under causal and `(n - 1, n - 1)` otherwise.
    block_size : int or (bq, bk)
    causal : bool
        Limits the right side to 0.
    device : optional

    Raises
    ------
    InvalidInput
        For an unsupported block size or another value out of range.

    Examples
    --------
    >>> sliding_window(4, 2, 16, causal=True).to_element_mask()[0, 0].int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    op = "masks.sliding_window"
    p = _problem(op, seq_lengths, block_size)
    return band_mask(band_of(op, causal, window), p, _device(device))


@usable_in_training
def strided(
    seq_lengths: int | IntPair,
    stride: int,
    block_size: int | IntPair = 128,
    *,
    local_blocks: int = 1,
    causal: bool = False,
    device: _Device = None,
) -> BlockMask:
    """Each block of queries sees its neighbours and every `stride`-th key block from its own.

    Key block c is kept for the queries at the positions of key blocks `own_first .. own_last` if
    `own_first - local_blocks < c < own_last + local_blocks` or `(own_last - c) % stride == 0`.

    Parameters
    ----------
    seq_lengths : int or (Sq, Sk)
    stride : int
        In blocks of keys, at least 1.
    block_size : int or (bq, bk)
    local_blocks : int
        How far neighbours reach: 0 for none, 1 for its own blocks, 2 for one more on each side.
    causal : bool
        Drop keys in the future, to the element.
    device : optional

    Raises
    ------
    InvalidInput
        For an unsupported block size or another value out of range.

    Examples
    --------
    >>> strided(80, 3, 16, causal=True).to_dense()[0, 0].int()
    tensor([[1, 0, 0, 0, 0],
            [0, 1, 0, 0, 0],
            [0, 0, 1, 0, 0],
            [1, 0, 0, 1, 0],
            [0, 1, 0, 0, 1]], dtype=torch.int32)
    """
    op = "masks.strided"
    p = _problem(op, seq_lengths, block_size)
    check_count(op, "stride", stride, at_least=1)
    check_count(op, "local_blocks", local_blocks)
    own_first, own_last = _own_blocks(p)
    limit = _visible_blocks(op, p, causal)
    column = own_last % stride
    lengths = (limit - column + stride - 1).clamp(min=0) // stride
    keys = [
        _keys(p, column, lengths, stride),
        _local_keys(p, own_first, own_last, local_blocks, limit),
    ]
    return _placed(_union_mask(keys, p, causal), device)


@usable_in_training
def global_local(
    seq_lengths: int | IntPair,
    block_size: int | IntPair = 128,
    *,
    global_blocks: int = 1,
    local_blocks: int = 1,
    causal: bool = False,
    device: _Device = None,
) -> BlockMask:
    """The first tokens see all tokens and are seen by all; the others see their neighbours.

    The first `global_blocks` blocks of keys are visible to every query, and blocks of queries at
    their positions see every key. With `causal=True` this is the mask of attention sinks.

    Parameters
    ----------
    seq_lengths : int or (Sq, Sk)
    block_size : int or (bq, bk)
    global_blocks : int
        In blocks of keys.
    local_blocks : int
        How far neighbours reach: 0 for none, 1 for its own blocks, 2 for one more on each side.
    causal : bool
        Drop keys in the future, to the element.
    device : optional

    Raises
    ------
    InvalidInput
        For an unsupported block size or another value out of range.

    Examples
    --------
    >>> global_local(80, 16).to_dense()[0, 0].int()
    tensor([[1, 1, 1, 1, 1],
            [1, 1, 0, 0, 0],
            [1, 0, 1, 0, 0],
            [1, 0, 0, 1, 0],
            [1, 0, 0, 0, 1]], dtype=torch.int32)
    """
    op = "masks.global_local"
    p = _problem(op, seq_lengths, block_size)
    check_count(op, "global_blocks", global_blocks)
    check_count(op, "local_blocks", local_blocks)
    own_first, own_last = _own_blocks(p)
    limit = _visible_blocks(op, p, causal)
    is_global = (own_first < global_blocks) & (own_last >= 0)
    seen = torch.where(is_global, limit, limit.clamp(max=global_blocks))
    keys = [
        _keys(p, torch.zeros_like(seen), seen),
        _local_keys(p, own_first, own_last, local_blocks, limit),
    ]
    return _placed(_union_mask(keys, p, causal), device)


@usable_in_training
def random(
    seq_lengths: int | IntPair,
    density: float,
    block_size: int | IntPair = 128,
    *,
    batch: int = 1,
    heads: int = 1,
    causal: bool = False,
    generator: torch.Generator | None = None,
    device: _Device = None,
) -> BlockMask:
    """Each block of queries sees the same share of the blocks of keys, chosen uniformly.

    Parameters
    ----------
    seq_lengths : int or (Sq, Sk)
    density : float
        Share of the visible blocks that each row keeps, 0 to 1, rounded to whole blocks; a row
        keeps at least one unless `density` is 0.
    block_size : int or (bq, bk)
    batch, heads : int
        How many different masks to draw.
    causal : bool
        Choose among the blocks up to the diagonal, and cut those on it to the element.
    generator : torch.Generator, optional
        A generator on the CPU; the mask depends on its state alone. None means torch's default.
    device : optional

    Raises
    ------
    InvalidInput
        For an unsupported block size or another value out of range.

    Examples
    --------
    >>> mask = random(1024, 0.25, 64, heads=2, generator=torch.Generator().manual_seed(0))
    >>> mask.density
    0.25
    """
    op = "masks.random"
    p = _problem(op, seq_lengths, block_size)
    masks = check_count(op, "batch", batch) * check_count(op, "heads", heads)
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise InvalidType(
            message(op, "density", "is not a number", "float", type(density).__name__)
        )
    if not 0.0 <= density <= 1.0:
        raise InvalidInput(message(op, "density", "is out of range", "0 .. 1", density))
    if generator is not None and not isinstance(generator, torch.Generator):
        got = type(generator).__name__
        raise InvalidType(message(op, "generator", "is of a wrong type", "torch.Generator", got))
    if generator is not None and generator.device.type != "cpu":
        raise InvalidInput(
            message(op, "generator", "is on a wrong device", "cpu", generator.device)
        )
    limit = _visible_blocks(op, p, causal).repeat(masks)
    counts = (limit * density).round().to(torch.int64)
    if density > 0:
        counts = torch.maximum(counts, limit.clamp(max=1))
    check_entry_count(int(counts.sum()))
    rows, cols = _sample_blocks(limit, counts, p.grid()[1], generator)
    return _placed(blocks_mask(rows, cols, p, causal, (batch, heads)), device)


def _own_blocks(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last key block at the positions of each query block; may be outside 0 .. Nb."""
    first, last = p.positions(torch.arange(p.grid()[0], device=CPU))
    bk = p.block[1]
    return first.div(bk, rounding_mode="floor"), last.div(bk, rounding_mode="floor")


def _visible_blocks(op: str, p: Problem, causal: bool) -> torch.Tensor:
    """How many leading key blocks each query block may see at all, int64 `[Mb]`."""
    return band_runs(band_of(op, causal, None), p).end


def _keys(p: Problem, starts: torch.Tensor, lengths: torch.Tensor, step: int = 1) -> torch.Tensor:
    """`row * Nb + column` of the blocks in one run of each row."""
    check_entry_count(int(lengths.sum()))
    first_keys = torch.arange(p.grid()[0], device=CPU) * p.grid()[1]
    return expand(first_keys + starts, lengths, step)


def _local_keys(
    p: Problem, own_first: torch.Tensor, own_last: torch.Tensor, near: int, limit: torch.Tensor
) -> torch.Tensor:
    start = (own_first - near + 1).clamp(min=0)
    length = (torch.minimum(own_last + near, limit) - start).clamp(min=0)
    return _keys(p, start, length * (near > 0))


def _union_mask(keys: list[torch.Tensor], p: Problem, causal: bool) -> BlockMask:
    union = torch.unique(torch.cat(keys))
    nb = max(p.grid()[1], 1)
    return blocks_mask(union // nb, union % nb, p, causal)


def _sample_blocks(
    limits: torch.Tensor, counts: torch.Tensor, width: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw `counts` of the columns `0 .. limits` in each row; every such set is equally likely.

    Parameters
    ----------
    limits, counts : int64 `[rows]` on the CPU, with counts <= limits <= width

    Returns
    -------
    rows, cols : int64 `[sum of counts]`, sorted
    """
    # rows that keep more than half draw the columns to leave out, so that most draws are new
    inverted = counts * 2 > limits
    drawn = _distinct(limits, torch.where(inverted, limits - counts, counts), width, generator)
    first_keys = torch.arange(limits.numel(), device=CPU) * width
    candidates = expand(first_keys, torch.where(inverted, limits, 0))
    kept = candidates[~torch.isin(candidates, drawn)]
    straight = drawn[~inverted[drawn // max(width, 1)]]
    keys, _ = torch.sort(torch.cat([straight, kept]))
    return keys // max(width, 1), keys % max(width, 1)


def _distinct(
    limits: torch.Tensor, counts: torch.Tensor, width: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Keys `row * width + column`, drawn until each row has enough distinct columns."""
    rows = torch.arange(limits.numel(), device=CPU)
    keys = torch.empty(0, dtype=torch.int64, device=CPU)
    missing = counts
    while bool(missing.any()):
        row = torch.repeat_interleave(rows, missing)
        uniform = torch.rand(row.numel(), dtype=torch.float64, generator=generator, device=CPU)
        column = (uniform * limits[row]).to(torch.int64)
        keys = torch.unique(torch.cat([keys, row * width + column]))
        missing = counts - torch.bincount(keys // width, minlength=limits.numel())
    return keys
