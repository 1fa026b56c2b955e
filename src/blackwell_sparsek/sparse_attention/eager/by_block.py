"""Sparse attention block by block: one product for all queries that chose a block of keys.

For entries of 16 keys and more, and many queries. The entries of a chunk of queries are sorted by
block and cut into tiles of R entries of one block, so that all products are one batched product
of tiles. The last tile of a block is padded with entries of a query that does not exist: one more
row of zeros at the end of what is read, dropped from what is written. The softmax of a
query spans several tiles; its maxima and sums go through a table with a place for each entry. The
window is dense attention, whose result joins the softmax.
"""

from typing import NamedTuple

import torch

from ...calls.sparse_attention import SparseAttentionCall
from .parts import Part

# Elements of the gathered queries, scores and outputs of a chunk.
CHUNK = 2**24
# Rows of a tile, entries times heads.
TILE_ROWS = 128
# Below as many queries of a sequence, gathering keys is faster.
FEWEST_QUERIES = 64


def is_faster(call: SparseAttentionCall) -> bool:
    """Whether to go block by block rather than query by query."""
    spec = call.spec
    many = spec.max_q >= FEWEST_QUERIES and spec.max_k > 0 and spec.selection.most > 0
    return many and spec.page_table is None and spec.selection.granularity >= 16


class Buffers:
    """Memory for the large tensors of a chunk, by name, which the next chunk uses again.

    The first touch of new memory takes longer than a product that is written there.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def get(self, name: str, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """A tensor of this shape, with the dtype and device of `like`; holds anything."""
        size = torch.Size(shape).numel()
        flat = self._kept.get(name)
        if flat is None or flat.numel() < size:
            flat = self._kept[name] = like.new_empty(size)
        return flat[:size].view(shape)


class Result(NamedTuple):
    """The output of attention and its lse."""

    out: torch.Tensor
    lse: torch.Tensor


class Entries(NamedTuple):
    """The entries of a chunk of C queries, E of them in tiles of R, with those that fill tiles up.

    E is a multiple of R; those that fill up belong to query C, at place C * K.
    """

    places: torch.Tensor
    """int64 [E]: place in the lists of the chunk, query * K + entry."""
    queries: torch.Tensor
    """int64 [E]: query, counted from the first of the chunk."""
    blocks: torch.Tensor
    """int64 [E / R]: the block of each tile."""
    partial: torch.Tensor
    """int64: entries of which some keys are hidden."""
    visible: torch.Tensor
    """bool [partial, granularity]."""
    weights: torch.Tensor | None
    """[E]: gates."""


def _chunk_size(part: Part) -> int:
    call, chosen = part.call, part.call.spec.selection
    heads = part.heads.stop - part.heads.start
    row = chosen.most * heads * (call.q.shape[-1] + chosen.granularity + call.v.shape[-1])
    return max(1, int(CHUNK // row))


def _entries(part: Part, own: slice) -> Entries:
    spec, chosen = part.call.spec, part.call.spec.selection
    size, most = chosen.granularity, chosen.most
    ids, counts = part.lists(chosen.ids)[own].long(), part.lists(chosen.counts)[own]
    device, rows = ids.device, len(ids)
    listed = torch.arange(most, device=device) < counts[:, None]
    # entries past the end of a packed sequence hold no key
    listed = listed & (ids * size < part.kv_len)
    end = -(-part.kv_len // size)
    order = torch.where(listed, ids, end).flatten().sort(stable=True)
    of_block = torch.bincount(order.values, minlength=end + 1)[:end]
    number = int(of_block.sum())
    places, blocks = order.indices[:number], order.values[:number]

    each = max(1, TILE_ROWS // (part.heads.stop - part.heads.start))
    tiles = (of_block + each - 1) // each
    first_slot, first_entry = (tiles.cumsum(0) - tiles) * each, of_block.cumsum(0) - of_block
    slots = torch.arange(number, device=device) + (first_slot - first_entry)[blocks]
    total = int(tiles.sum()) * each
    dealt = torch.full((total,), rows * most, device=device)
    dealt[slots] = places
    queries = dealt // max(most, 1)
    names = torch.repeat_interleave(torch.arange(end, device=device), tiles)

    position = part.positions()[own][places // most]
    first, last = blocks * size, blocks * size + size - 1
    latest = (position + spec.limit_right).clamp(max=part.kv_len - 1)
    cut = last > latest
    if spec.local is not None:
        left, right = spec.local.scalars()
        cut |= (last >= position - left) & (first <= position + right)
    partial = cut.nonzero().flatten()
    keys = first[partial, None] + torch.arange(size, device=device)
    visible = keys <= latest[partial, None]
    if spec.local is not None:
        near = position[partial, None]
        visible &= (keys < near - left) | (keys > near + right)
    weights = None
    if spec.gate is not None:
        gate = part.lists(spec.gate)[own].to(part.dtype).flatten()
        weights = torch.nn.functional.pad(gate, (0, 1))[dealt]
    return Entries(dealt, queries, names, slots[partial], visible, weights)


def _with_none(x: torch.Tensor) -> torch.Tensor:
    """`x` [C, ...] with the zeros of a query that does not exist."""
    return torch.cat([x, x.new_zeros((1, *x.shape[1:]))])


def _blocks(part: Part, x: torch.Tensor) -> torch.Tensor:
    """Keys or values [blocks, granularity, D], the last block filled up with zeros."""
    size = part.call.spec.selection.granularity
    rows = part.keys(x).to(part.dtype)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % size))
    return rows.contiguous().view(-1, size, rows.shape[-1])


def _in_tiles(entries: Entries, rows: torch.Tensor) -> torch.Tensor:
    """Rows [E, P, D] as tiles [E / R, R P, D]."""
    return rows.view(len(entries.blocks), -1, rows.shape[-1])


def _rows_of(entries: Entries, x: torch.Tensor, buffers: Buffers, name: str) -> torch.Tensor:
    """Rows [E, ...] of the queries of all entries, from `x` [C + 1, ...]."""
    rows = buffers.get(name, x, len(entries.queries), *x.shape[1:])
    return torch.index_select(x, 0, entries.queries, out=rows)


def _products(
    entries: Entries,
    rows: torch.Tensor,
    blocks: torch.Tensor,
    transposed: bool,
    buffers: Buffers,
    name: str,
) -> torch.Tensor:
    """Rows [E, P, D] times the block of their entry: [E, P, columns]."""
    columns = blocks.shape[1 if transposed else 2]
    made = buffers.get(name, rows, *rows.shape[:2], columns)
    if len(rows):
        factors = buffers.get("factors", blocks, len(entries.blocks), *blocks.shape[1:])
        torch.index_select(blocks, 0, entries.blocks, out=factors)
        tiles = _in_tiles(entries, rows)
        torch.bmm(tiles, factors.mT if transposed else factors, out=_in_tiles(entries, made))
    return made


def _add_products(
    entries: Entries, into: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> None:
    """Add left^T [granularity, R P] @ right [R P, D] of each tile to its block of `into`."""
    if len(left):
        made = torch.bmm(_in_tiles(entries, left).mT, _in_tiles(entries, right))
        into.index_add_(0, entries.blocks, made)


def _scores(
    part: Part, entries: Entries, q: torch.Tensor, k: torch.Tensor, buffers: Buffers
) -> torch.Tensor:
    """Scores [E, P, granularity], with softcap, before masks."""
    spec = part.call.spec
    scores = _products(entries, q, k, True, buffers, "scores")
    if spec.softcap:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return scores


def _mask(entries: Entries, scores: torch.Tensor, value: float) -> None:
    if entries.partial.numel():
        hidden = ~entries.visible[:, None]
        scores[entries.partial] = scores[entries.partial].masked_fill(hidden, value)


def _spread(
    part: Part, entries: Entries, values: torch.Tensor, rows: int, missing: float
) -> torch.Tensor:
    """Values [E, ...] of entries at their places in the lists, [rows, K, ...]."""
    most = part.call.spec.selection.most
    table = values.new_full((rows * most + 1, *values.shape[1:]), missing)
    table[entries.places] = values
    return table[:-1].view(rows, most, *values.shape[1:])


def _summed(entries: Entries, values: torch.Tensor, rows: int) -> torch.Tensor:
    """Values [E, ...] of entries added up for their queries, [rows, ...]."""
    sums = values.new_zeros((rows + 1, *values.shape[1:]))
    return sums.index_add_(0, entries.queries, values)[:-1]


def attend(
    part: Part,
    out: torch.Tensor,
    lse: torch.Tensor,
    beside: Result | None,
    buffers: Buffers,
) -> None:
    """Fill `out` [T, P, Dv] and `lse` [T, P]; `beside` holds those of the window alone."""
    call, spec = part.call, part.call.spec
    k, v = _blocks(part, call.k), _blocks(part, call.v)
    step = _chunk_size(part)
    for start in range(0, part.q_len, step):
        own = slice(start, min(start + step, part.q_len))
        rows = own.stop - start
        entries = _entries(part, own)
        q = _with_none(part.own(call.q)[own].to(part.dtype) * spec.scale)
        rows_q = _rows_of(entries, q, buffers, "queries")
        scores = _scores(part, entries, rows_q, k, buffers)
        _mask(entries, scores, -torch.inf)
        if entries.weights is not None:
            scores[entries.weights == 0] = -torch.inf
        peak = _spread(part, entries, scores.amax(-1), rows, -torch.inf).amax(1)
        if beside is not None:
            peak = torch.maximum(peak, beside.lse[own])
        if spec.sinks is not None:
            peak = torch.maximum(peak, spec.sinks[part.heads].to(part.dtype))
        shift = torch.where(peak == -torch.inf, 0.0, peak)
        p = scores.sub_(_with_none(shift)[entries.queries][..., None]).exp_()
        sums, parts = p.sum(-1), _products(entries, p, v, False, buffers, "parts")
        if entries.weights is not None:
            sums.mul_(entries.weights[:, None])
            parts.mul_(entries.weights[:, None, None])
        total = _spread(part, entries, sums, rows, 0.0).sum(1)
        made = _summed(entries, parts, rows)
        if beside is not None:
            weight = torch.exp(beside.lse[own] - shift)
            total += weight
            made += weight[..., None] * beside.out[own]
        if spec.sinks is not None:
            total += torch.exp(spec.sinks[part.heads].to(part.dtype) - shift)
        out[own] = (made / torch.where(total == 0, 1.0, total)[..., None]).to(out.dtype)
        lse[own] = shift + torch.log(total)


def add_gradients(
    part: Part,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dgate: torch.Tensor | None,
    buffers: Buffers,
) -> None:
    """Fill `dq` [T, P, D]; add to `dk` [Sk, D], `dv` [Sk, Dv] and `dgate` [T, K]; no window.

    `dout` [T, P, Dv], `lse` and `delta` [T, P]; all in the precision of sums.
    """
    call, spec = part.call, part.call.spec
    k, v = _blocks(part, call.k), _blocks(part, call.v)
    dk_blocks, dv_blocks = torch.zeros_like(k), torch.zeros_like(v)
    step = _chunk_size(part)
    for start in range(0, part.q_len, step):
        own = slice(start, min(start + step, part.q_len))
        rows = own.stop - start
        entries = _entries(part, own)
        q = _with_none(part.own(call.q)[own].to(part.dtype) * spec.scale)
        q = _rows_of(entries, q, buffers, "queries")
        given = _rows_of(entries, _with_none(dout[own]), buffers, "given")
        scores = _scores(part, entries, q, k, buffers)
        slope = 1 - (scores / spec.softcap).square() if spec.softcap else None
        shift = torch.where(lse[own] == -torch.inf, torch.inf, lse[own])
        p = scores.sub_(_with_none(shift)[entries.queries][..., None]).exp_()
        _mask(entries, p, 0.0)
        change = _products(entries, given, v, True, buffers, "change")
        change.sub_(_with_none(delta[own])[entries.queries][..., None])
        # what is hidden may hold anything, also NaN
        _mask(entries, change, 0.0)
        ds = p * change
        if dgate is not None:
            dgate[own] += _spread(part, entries, ds.sum((1, 2)), rows, 0.0)
        if entries.weights is not None:
            weights = entries.weights[:, None, None]
            p, ds = (torch.where(weights > 0, x * weights, 0.0) for x in (p, ds))
        if slope is not None:
            ds.mul_(slope)
        _add_products(entries, dv_blocks, p, given)
        _add_products(entries, dk_blocks, ds, q)
        moved = _products(entries, ds, k, False, buffers, "moved").mul_(spec.scale)
        dq[own] = _summed(entries, moved, rows)
    dk += dk_blocks.flatten(0, 1)[: part.kv_len]
    dv += dv_blocks.flatten(0, 1)[: part.kv_len]
