"""Attention and its gradients in jnp, with work proportional to the visible blocks.

Every visible (query block, key block) pair of a (batch, query head) is a *visit*. All visits lie in
one list, and both passes fold over chunks of it, gathering the blocks that they need: the forward
as an online softmax, the backward from the lse that the forward returned. Nothing of size Sq x Sk
is made.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jax

from ..masks.band import Band, kv_range
from .arrays import (
    cdiv,
    compute_dtype,
    from_blocks,
    gradient_of,
    into_blocks,
    over_chunks,
    vary_like,
)
from .block_mask import BlockMask, Entries, unpack

# Scores of one chunk: 4 MiB in fp32, which the caches of a core nearly hold.
CHUNK_SCORES = 2**20
# Blocks where only causal and a window decide what is visible.
DENSE_BLOCK = 64
# Rows and columns of a softmax state that are rescaled in a chunk, per key that is visited.
RESCALED_PER_KEY = 4


class Options(NamedTuple):
    """What is known while tracing."""

    scale: float
    softcap: float
    """0 for none."""
    band: Band
    seq_lengths: tuple[int, int]
    block_size: tuple[int, int]


class Visits(NamedTuple):
    """Pairs of blocks to compute, int32 `[n]` each; `q_row` is -1 where there is none."""

    q_row: Any
    """Of all query blocks of all batches and heads."""
    kv_row: Any
    q_start: Any
    kv_start: Any
    bits_id: Any


def band_entries(options: Options) -> Entries:
    """The blocks that a band leaves visible, as the lists of one mask: known while tracing."""
    (sq, sk), (bq, bk) = options.seq_lengths, options.block_size
    pairs = []
    for block in range(cdiv(sq, bq)):
        lo, hi = kv_range(options.band, block * bq, (block + 1) * bq, sq, sk)
        pairs += [(block, kv_block) for kv_block in range(lo // bk, cdiv(hi, bk))]
    rows, cols = np.array(pairs, np.int32).reshape(-1, 2).T
    return Entries(rows[None, None], cols[None, None], np.full((1, 1, len(rows)), -1, np.int32))


def _visits(entries: Entries, q_shape: Any, kv_heads: int, options: Options) -> Visits:
    """The visits of all batches and heads; masks broadcast along either."""
    batch, heads = q_shape[:2]
    (sq, sk), (bq, bk) = options.seq_lengths, options.block_size
    shape = (batch, heads, entries.q_block.shape[-1])
    q_block, kv_block, bits_id = (jnp.broadcast_to(x, shape) for x in entries)
    head = jnp.arange(heads, dtype=jnp.int32)
    sequence = jnp.arange(batch, dtype=jnp.int32)[:, None]
    kv_head = sequence * kv_heads + head // (heads // kv_heads)
    q_row = (sequence * heads + head)[..., None] * cdiv(sq, bq) + q_block
    kv_row = kv_head[..., None] * cdiv(sk, bk) + kv_block
    q_row = jnp.where(q_block < 0, -1, q_row)
    found = (q_row, kv_row, q_block * bq, kv_block * bk, bits_id)
    return Visits(*(x.reshape(-1) for x in found))


def _scores(
    q: jax.Array, k: jax.Array, bits: jax.Array, visits: Visits, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Capped scores of some visits [n, bq, bk], and which of them are visible."""
    (sq, sk), (bq, bk) = options.seq_lengths, options.block_size
    scores = jnp.einsum("nqd,nkd->nqk", q, k) * options.scale
    if options.softcap:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    query = visits.q_start[:, None, None] + jnp.arange(bq)[:, None]
    key = visits.kv_start[:, None, None] + jnp.arange(bk)
    left, right = options.band.scalars()
    ahead = key - (query + (sk - sq))
    visible = (query < sq) & (key < sk) & (ahead <= right) & (ahead >= -left)
    visible &= visits.q_row[:, None, None] >= 0
    return scores, visible & unpack(bits, visits.bits_id, bk, bq)


def _chunk(options: Options, q_rows: int) -> int:
    """Visits of a chunk: few, but enough that rescaling the state is a small part of the work."""
    bq, bk = options.block_size
    return max(1, CHUNK_SCORES // (bq * bk), q_rows // (RESCALED_PER_KEY * bk))


def _flat_blocks(x: jax.Array, block: int) -> jax.Array:
    """[B, H, S, D] as blocks [B * H * blocks, block, D]."""
    blocks = into_blocks(x, block)
    return blocks.reshape(math.prod(blocks.shape[:3]), block, x.shape[-1])


def _flat_rows(x: jax.Array, block: int) -> jax.Array:
    """[B, H, S] as [B * H * blocks, block]."""
    return _flat_blocks(x[..., None], block)[..., 0]


def _unflat(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `_flat_blocks` for an array with the batch, heads and length of `like`."""
    batch, heads, rows = like.shape[:3]
    blocks = cdiv(rows, x.shape[1])
    return from_blocks(x.reshape(batch, heads, blocks, *x.shape[1:]), rows)


def _where(index: jax.Array, size: int) -> jax.Array:
    """An index for scatters that drop what is out of range; -1 would be the last row."""
    return jnp.where(index < 0, size, index)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    options: Options,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    entries: Entries,
    bits: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Output [B, Hq, Sq, Dv] and lse [B, Hq, Sq], of the blocks that `entries` list."""
    compute = compute_dtype(q.dtype)
    bq, bk = options.block_size
    q_blocks, k_blocks, v_blocks = _flat_blocks(q, bq), _flat_blocks(k, bk), _flat_blocks(v, bk)
    rows = q_blocks.shape[0]

    def step(state: Any, visits: Visits) -> Any:
        peak, total, acc = state
        q_tile = q_blocks[visits.q_row].astype(compute)
        k_tile = k_blocks[visits.kv_row].astype(compute)
        scores, visible = _scores(q_tile, k_tile, bits, visits, options)
        scores = jnp.where(visible, scores, -jnp.inf)
        at = _where(visits.q_row, rows)
        new_peak = peak.at[at].max(scores.max(-1), mode="drop")
        shift = jnp.where(new_peak == -jnp.inf, 0, new_peak)
        weights = jnp.exp(scores - shift[visits.q_row][..., None])
        rescale = jnp.exp(peak - shift)
        total = (total * rescale).at[at].add(weights.sum(-1), mode="drop")
        products = jnp.einsum("nqk,nkd->nqd", weights, v_blocks[visits.kv_row].astype(compute))
        acc = (acc * rescale[..., None]).at[at].add(products, mode="drop")
        return new_peak, total, acc

    varying = tuple(map(jnp.asarray, (q, k, v, *entries, bits)))
    zeros = jnp.zeros((rows, bq), compute)
    start = (zeros - jnp.inf, zeros, jnp.zeros((rows, bq, v.shape[-1]), compute))
    start = tuple(vary_like(x, *varying) for x in start)
    visits = _visits(entries, q.shape, k.shape[1], options)
    peak, total, acc = over_chunks(step, start, visits, _chunk(options, rows))
    peak, total = (_unflat(x[..., None], q)[..., 0] for x in (peak, total))
    lse = jnp.where(total > 0, peak + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
    # NaN is not above zero, and must not become an empty row
    lse = jnp.where(jnp.isnan(total), jnp.nan, lse)
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks.astype(compute)[:, None])
    factor = jnp.where(total == 0, 0, jnp.exp(peak - jnp.where(lse == -jnp.inf, 0, lse)))
    out = _unflat(acc, q) * factor[..., None]
    return out.astype(q.dtype), lse


def _attend_fwd(options: Options, *inputs: Any) -> Any:
    out, lse = attend(options, *inputs)
    return (out, lse), (*inputs, out, lse)


def _attend_bwd(options: Options, saved: Any, cotangents: Any) -> Any:
    q, k, v, sinks, entries, bits, out, lse = saved
    dout, dlse = cotangents
    compute = lse.dtype
    bq, bk = options.block_size
    empty = lse == -jnp.inf
    delta = jnp.einsum("bhsd,bhsd->bhs", dout.astype(compute), out.astype(compute)) - dlse
    delta = jnp.where(empty, 0, delta)
    q_blocks, k_blocks, v_blocks = _flat_blocks(q, bq), _flat_blocks(k, bk), _flat_blocks(v, bk)
    dout_blocks = _flat_blocks(dout, bq)
    lse_rows = _flat_rows(jnp.where(empty, 0, lse), bq)
    delta_rows = _flat_rows(delta, bq)

    def step(state: Any, visits: Visits) -> Any:
        dq, dk, dv = state
        row, col = visits.q_row, visits.kv_row
        q_tile, k_tile = q_blocks[row].astype(compute), k_blocks[col].astype(compute)
        dout_tile, v_tile = dout_blocks[row].astype(compute), v_blocks[col].astype(compute)
        scores, visible = _scores(q_tile, k_tile, bits, visits, options)
        exponent = jnp.where(visible, scores - lse_rows[row][..., None], -jnp.inf)
        weights = jnp.exp(exponent)
        dweights = jnp.einsum("nqd,nkd->nqk", dout_tile, v_tile)
        dscores = weights * (dweights - delta_rows[row][..., None])
        if options.softcap:
            dscores *= 1 - (scores / options.softcap) ** 2
        dscores = jnp.where(visible, dscores, 0) * options.scale
        row, col = _where(row, dq.shape[0]), jnp.where(row < 0, dk.shape[0], col)
        dq = dq.at[row].add(jnp.einsum("nqk,nkd->nqd", dscores, k_tile), mode="drop")
        dk = dk.at[col].add(jnp.einsum("nqk,nqd->nkd", dscores, q_tile), mode="drop")
        dv = dv.at[col].add(jnp.einsum("nqk,nqd->nkd", weights, dout_tile), mode="drop")
        return dq, dk, dv

    varying = tuple(map(jnp.asarray, (q, k, v, dout, lse, delta, *entries, bits)))
    start = tuple(
        vary_like(jnp.zeros(x.shape, compute), *varying) for x in (q_blocks, k_blocks, v_blocks)
    )
    visits = _visits(entries, q.shape, k.shape[1], options)
    size = max(1, CHUNK_SCORES // (bq * bk))
    gradients = over_chunks(step, start, visits, size)
    pairs = zip((q, k, v), gradients, strict=True)
    dq, dk, dv = (gradient_of(x, _unflat(gradient, x)) for x, gradient in pairs)
    dsinks = None
    if sinks is not None:
        # of the softmax that has one more column: its weight times (0 - delta)
        weight = jnp.exp(sinks.astype(compute)[:, None] - lse)
        dsinks = gradient_of(sinks, -(jnp.where(empty, 0, weight) * delta).sum((0, 2)))
    return dq, dk, dv, dsinks, None, None


attend.defvjp(_attend_fwd, _attend_bwd)


def attention_jnp(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: BlockMask | None,
    sinks: jax.Array | None,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of a checked call."""
    if mask is not None:
        return attend(options, q, k, v, sinks, mask.entries, mask.bits)
    bits = np.zeros((0, *options.block_size), np.uint32)
    return attend(options, q, k, v, sinks, band_entries(options), bits)


def dense_block(length: int) -> int:
    """Side of the blocks of a call without a mask, along a dimension of this length."""
    return min(DENSE_BLOCK, max(length, 1))
