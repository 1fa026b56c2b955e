"""Masks that depend on data, made without waiting for the device: top scores or kept blocks."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.checks import check_dtype, check_tensor, message
from ..core.errors import InvalidInput
from ..core.torch_private import raw_stream
from ..core.torch_state import usable_in_training
from ..launch.launcher import cdiv
from ..launch.workspace import made_outside_pool
from . import bits as bit_masks
from .band import Band, band_of
from .bits import empty_pool
from .block_lists import BlockLists, lists_from_sorted
from .block_mask import BlockMask
from .check import IntPair, check_block_size, check_count, check_seq_lengths
from .device_build import MAX_TRANSPOSED_BLOCKS, bounded_lists, kept_lists, kernels_build, no_bits
from .parts import Problem, band_runs, causal_bits


@usable_in_training
def kept_blocks(
    keep: torch.Tensor, most: int, block_size: IntPair, seq_lengths: IntPair
) -> BlockMask:
    """Keep the given blocks, at most `most` in each row.

    Every row lists `most` blocks, so that sizes do not depend on the data. Fillers, which are not
    kept, have no bit set; they come from the end of the row, where causality skips them anyway.

    Parameters
    ----------
    keep : bool `[B or 1, H or 1, Mb, Nb]`
    most : int
        No row may keep more blocks than this; the excess is lost.
    block_size : (bq, bk)
    seq_lengths : (Sq, Sk)

    Examples
    --------
    >>> keep = torch.tensor([[True, False, False], [True, False, True]])[None, None]
    >>> mask = kept_blocks(keep, 2, (16, 16), (32, 48))
    >>> mask.nnz_blocks, mask.to_element_mask()[0, 0, ::16, ::16].int().tolist()
    (4, [[1, 0, 0], [1, 0, 1]])
    """
    batch, heads, mb, nb = keep.shape
    rows, most = batch * heads * mb, min(most, nb)
    device = keep.device
    bq, bk = block_size
    assert (mb, nb) == (cdiv(seq_lengths[0], bq), cdiv(seq_lengths[1], bk))
    pool = torch.zeros(1, bq, bit_masks.words_per_row(bk), dtype=torch.int32, device=device)
    if kernels_build(device, keep) and 0 < rows * most < 2**31:
        lists = bounded_lists(keep, most)
        return BlockMask._from_parts(lists, pool, batch, heads, seq_lengths, block_size)
    column = torch.arange(nb, device=device)
    # kept blocks first, then the others from the end
    order = torch.where(keep, column, 2 * nb - column).view(rows, nb).sort(dim=1).values[:, :most]
    kept = order < nb
    order = torch.where(kept, order + nb, 2 * nb - order).sort(dim=1).values
    kept = order >= nb
    indptr = torch.arange(rows + 1, dtype=torch.int32, device=device) * most
    lists = BlockLists(
        indptr,
        indptr[:-1] + (~kept).sum(1, dtype=torch.int32),
        torch.where(kept, order - nb, order).flatten().to(torch.int32),
        torch.where(kept, -1, 0).flatten().to(torch.int32),
    )
    return BlockMask._from_parts(lists, pool, batch, heads, seq_lengths, block_size)


@usable_in_training
def topk(
    scores: torch.Tensor,
    k: int,
    block_size: int | IntPair = 128,
    *,
    seq_lengths: int | IntPair | None = None,
    causal: bool = False,
) -> BlockMask:
    """Each block of queries sees the `k` blocks of keys with the highest scores.

    Made on the device of `scores` without waiting for it.

    Parameters
    ----------
    scores : floating `[B or 1, H or 1, Mb, Nb]`
        `[H, Mb, Nb]` and `[Mb, Nb]` broadcast. NaN counts as the highest, as in `torch.topk`.
    k : int
        1 .. Nb.
    block_size : int or (bq, bk)
    seq_lengths : int or (Sq, Sk), optional
        With `ceil(Sq / bq) == Mb` and `ceil(Sk / bk) == Nb`; by default whole blocks.
    causal : bool
        Choose among the blocks up to the diagonal (all of them if there are fewer than `k`), and
        cut those on it to the element.

    Raises
    ------
    InvalidInput
        For an unsupported block size or another value out of range.

    Examples
    --------
    >>> scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    >>> topk(scores, 2, (64, 32)).to_dense()[0, 0].int()
    tensor([[1, 0, 1],
            [0, 1, 1]], dtype=torch.int32)
    """
    op = "masks.topk"
    check_tensor(op, "scores", scores)
    check_dtype(op, "scores", scores, [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    if not 2 <= scores.dim() <= 4:
        layout = "[B or 1, H or 1, Mb, Nb]"
        raise InvalidInput(message(op, "scores", "has a wrong rank", layout, list(scores.shape)))
    scores = scores.detach()[(None,) * (4 - scores.dim())]
    batch, heads, mb, nb = scores.shape
    block = check_block_size(op, block_size)
    given = (mb * block[0], nb * block[1]) if seq_lengths is None else seq_lengths
    p = Problem(check_seq_lengths(op, given), block)
    if p.grid() != (mb, nb):
        got = f"seq_lengths {p.seq} in blocks of {block}, which are {p.grid()[0]} x {p.grid()[1]}"
        raise InvalidInput(message(op, "scores", "do not match", f"{mb} x {nb} blocks", got))
    check_count(op, "k", k, at_least=1)
    if k > nb:
        raise InvalidInput(message(op, "k", "is too large", f"at most {nb} (Nb)", k))

    device = scores.device
    by_kernels = kernels_build(device, scores) and 0 < scores.numel() <= MAX_TRANSPOSED_BLOCKS
    if by_kernels and (count := _known_count(p, k, causal)) > 0:
        return _by_kernels(scores, k, p, causal, batch * heads * count)
    band = band_of(op, causal, None)
    limit = band_runs(band, p, device).end
    # a score of -inf still wins against blocks that are not visible at all
    scores = scores.clamp(min=torch.finfo(scores.dtype).min)
    hidden = torch.arange(nb, device=device) >= limit.unsqueeze(-1)
    cols = scores.masked_fill(hidden, float("-inf")).topk(k, dim=-1).indices
    rows = torch.arange(batch * heads * mb, device=device).view(batch, heads, mb, 1)
    kept = torch.arange(k, device=device) < limit.unsqueeze(-1)
    bits_id, pool = torch.full_like(cols, -1), empty_pool(block, device)
    if causal:
        bits_id, pool = causal_bits(torch.arange(mb, device=device).unsqueeze(-1), cols, p)
    group = rows * 2 + (bits_id < 0)
    # blocks that are not kept sort to the end, past a count that the host knows
    key = torch.where(kept, group * nb + cols, 2 * nb * rows.numel())
    count = batch * heads * _count_on_host(p, k, causal)
    order = torch.argsort(key.flatten())[:count]
    group, cols, bits_id = (x.flatten()[order] for x in (group, cols, bits_id))
    lists = lists_from_sorted(group, cols, bits_id, rows.numel())
    return BlockMask._from_parts(lists, pool, batch, heads, p.seq, block)


class _Cut(NamedTuple):
    """What causality leaves visible of each (query block, key block)."""

    hidden: torch.Tensor
    """bool `[Mb, Nb]`."""
    values: torch.Tensor
    """int32 `[Mb, Nb]`, as `list_kernels` takes them."""
    pool: torch.Tensor


# Cuts cached for the sizes of a model's layers, per stream: 5 bytes a block, 20 MiB each at most.
MAX_CUTS = 4
MAX_CUT_BLOCKS = 2**22
_cuts: dict[Any, _Cut] = {}


def _by_kernels(scores: torch.Tensor, k: int, p: Problem, causal: bool, count: int) -> BlockMask:
    batch, heads, _, _ = scores.shape
    cut = None
    if causal:
        cut = _cut(p, scores.device)
        scores = scores.clamp(min=torch.finfo(scores.dtype).min)
        scores = scores.masked_fill(cut.hidden, float("-inf"))
    cols = scores.topk(k, dim=-1, sorted=False).indices
    if cut is None:
        kept = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        values, pool = kept.scatter_(-1, cols, True), no_bits(p.block, scores.device)
    else:
        values = torch.zeros(scores.shape, dtype=torch.int32, device=scores.device)
        values.scatter_(-1, cols, cut.values.expand(scores.shape).gather(-1, cols))
        pool = cut.pool
    lists = kept_lists(values, count)
    return BlockMask._from_parts(lists, pool, batch, heads, p.seq, p.block)


def _cut(p: Problem, device: torch.device) -> _Cut:
    def make() -> _Cut:
        q_blocks = torch.arange(p.grid()[0], device=device).unsqueeze(-1)
        kv_blocks = torch.arange(p.grid()[1], device=device)
        hidden = kv_blocks >= band_runs(Band(None, 0), p, device).end.unsqueeze(-1)
        bits_id, pool = causal_bits(q_blocks, kv_blocks.expand(p.grid()), p)
        return _Cut(hidden, (bits_id + 2).masked_fill(hidden, 0).to(torch.int32), pool)

    too_large = p.grid()[0] * p.grid()[1] > MAX_CUT_BLOCKS
    if too_large or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return make()
    key = (p, device, raw_stream(device.index))
    if key not in _cuts:
        if len(_cuts) >= MAX_CUTS:
            _cuts.clear()
        _cuts[key] = made_outside_pool(make, device)
    return _cuts[key]


def _count_on_host(p: Problem, k: int, causal: bool) -> int:
    """Blocks of one mask whose rows keep `k` blocks, or all visible ones; no tensor is read."""
    (sq, sk), (bq, bk), (mb, _) = p.seq, p.block, p.grid()
    if not causal:
        return mb * k
    visible_keys = np.clip(np.minimum((np.arange(mb) + 1) * bq, sq) + p.shift(), 0, sk)
    return int(np.minimum(-(-visible_keys // bk), k).sum())


_known_count = lru_cache(maxsize=64)(_count_on_host)
