"""`attention_decode` for JAX: new queries over a contiguous or paged cache."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp

import jax
from jax import lax

from ..core.errors import InvalidInput, Unsupported
from ..core.messages import check_flag, message
from ..masks.band import Band, band_of
from .arrays import cdiv, check_array, check_integers, check_same_dtype, compute_dtype, vary_like
from .attention import LAYOUT, check_heads, check_qkv, check_sinks, score_options
from .attention_triton import kernel_options
from .choice import Kernels, choose, platform_of
from .decode_triton import NO_DERIVATIVE, decode_triton, why_not_triton
from .kernel_calls import arch_of, device_of, why_no_kernels

PAGES = "[pages, page_size, Hkv, D]"
# Keys of one step of the loop over the cache.
TILE = 128


class DecodeOptions(NamedTuple):
    """What is known while tracing."""

    scale: float
    softcap: float
    """0 for none."""
    band: Band
    kv_block: int
    """Tokens of a listed block of a contiguous cache; 0 where none are listed."""


class Cache(NamedTuple):
    """Keys and values, and where they lie."""

    k: Any
    v: Any
    lengths: Any
    page_table: Any
    kv_blocks: Any


class Tile(NamedTuple):
    """Keys and values of one step, `[B, Hkv, T, D | Dv]`, and their positions.

    `position` is `[B, 1 | Hkv, T]`, -1 where there is no key; `wrong` likewise, true where a page
    or block is out of range.
    """

    k: Any
    v: Any
    position: Any
    wrong: Any


def attention_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    cache_seqlens: jax.Array,
    page_table: jax.Array | None = None,
    kv_blocks: jax.Array | None = None,
    kv_block_size: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of the latest queries of each sequence over its cache.

    Means what `bsk.attention_decode` means: query i of Sq sits at position
    `cache_seqlens[b] - Sq + i`, and the keys and values of the queries are already in the cache.
    Keys past the longest length, or before every window, are not read. There are no gradients.
    Works under `jit`, `vmap` and `shard_map` over batch and heads, also with donated caches.

    Parameters
    ----------
    q : fp16, bf16, fp32 or fp64 `[B, Hq, Sq, D]`
    k_cache : `[B, Hkv, S, D]`, or pages `[pages, page_size, Hkv, D]` with `page_table`
        dtype of q.
    v_cache : as k_cache, with Dv in place of D
    cache_seqlens : int32 `[B]`
        Keys of each sequence, at most S or `max_pages * page_size`; 0 gives output 0, lse -inf.
    page_table : int32 `[B, max_pages]`, optional
        Page j of sequence b is `k_cache[page_table[b, j]]`.
    kv_blocks : int32 `[B, Hkv, n]`, optional
        Sparse decoding: the blocks to read, in any order, -1 for none. Block j holds the positions
        from `j * kv_block_size` on: with pages, page j of the sequence. Length, causal and window
        apply within blocks too. A block that is listed twice counts twice.
    kv_block_size : int, optional
        Tokens of a block of a contiguous cache; pages have their own.
    causal : bool
        Hide the keys after a query's position.
    window, scale, softcap, sinks : as in `attention`
    return_lse : bool
        Also return the log-sum-exp of the scores, sinks included.
    impl : "auto", "jnp" or "triton"
        "triton" launches the portable kernel of `bsk.attention_decode` on a GPU, through
        jax-triton, or says why it cannot. `explain` says what "auto" takes.

    Returns
    -------
    out : `[B, Hq, Sq, Dv]`, dtype of q
    lse : fp32 `[B, Hq, Sq]`
        Only with `return_lse`; fp64 for fp64 inputs.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or devices do not fit.
    Unsupported
        If `impl` cannot run this call.

    Notes
    -----
    A length, page or block that is out of range is never read; it makes the outputs and lse that
    depend on it NaN.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> q, cache = jnp.zeros((2, 8, 1, 64)), jnp.zeros((2, 2, 100, 64))
    >>> attention_decode(q, cache, cache, cache_seqlens=jnp.array([7, 100], jnp.int32)).shape
    (2, 8, 1, 64)
    """
    op = "attention_decode"
    check_flag(op, "return_lse", return_lse)
    paged = page_table is not None
    q = check_array(op, "q", q, 4, LAYOUT)
    layout = PAGES if paged else LAYOUT
    k = check_array(op, "k_cache", k_cache, 4, layout)
    v = check_array(op, "v_cache", v_cache, 4, layout)
    if paged:
        # heads where a contiguous cache has them
        check_same_dtype(op, {"q": q, "k_cache": k, "v_cache": v})
        _check_pages(op, q, k, v)
    else:
        check_qkv(op, {"q": q, "k_cache": k, "v_cache": v})
    batch, heads_kv = q.shape[0], k.shape[2 if paged else 1]
    lengths = check_integers(op, "cache_seqlens", cache_seqlens, (batch,))
    if paged:
        page_table = check_integers(op, "page_table", page_table, (batch, None))
    if kv_blocks is not None:
        kv_blocks = check_integers(op, "kv_blocks", kv_blocks, (batch, heads_kv, None))
    _check_block_size(op, kv_blocks, kv_block_size, paged)
    if sinks is not None:
        sinks = check_sinks(op, sinks, q.shape[1])
    factors = score_options(op, scale, softcap, q.shape[-1])
    options = DecodeOptions(*factors, band_of(op, causal, window), kv_block_size or 0)
    problem = (
        f"on {platform_of(q)}, {q.dtype.name}, batch {batch}, heads {q.shape[1]}:{heads_kv}, "
        f"queries {q.shape[2]}, {'pages' if paged else 'contiguous cache'} {list(k.shape)}"
    )
    cache, device = Cache(k, v, lengths, page_table, kv_blocks), device_of(q)

    def why_not() -> str | None:
        return why_no_kernels(device, q.dtype) or why_not_triton(q, cache, arch_of(device))

    if choose(op, impl, problem, Kernels("triton", why_not)) == "triton":
        name = device.device_kind
        kernels = kernel_options(*factors, options.band, arch_of(device), name, q.dtype)
        out, lse = decode_triton(kernels, options.kv_block, q, cache, sinks)
    else:
        out, lse = _decode(options, q, cache, sinks)
    return (out, lse) if return_lse else out


def _check_pages(op: str, q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    got = f"q {list(q.shape)}, k_cache {list(k.shape)}, v_cache {list(v.shape)}"
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1] or 0 in (*k.shape, v.shape[-1]):
        expected = f"{PAGES} and [pages, page_size, Hkv, Dv], D as in q, none of them 0"
        raise InvalidInput(message(op, "k_cache/v_cache", "do not fit", expected, got))
    check_heads(op, q.shape[1], k.shape[2])


def _check_block_size(op: str, kv_blocks: Any, size: Any, paged: bool) -> None:
    wanted = kv_blocks is not None and not paged
    if wanted and not (isinstance(size, int) and not isinstance(size, bool) and size >= 1):
        expected = "the tokens of a block, an int >= 1"
        raise InvalidInput(message(op, "kv_block_size", "is missing or wrong", expected, size))
    if not wanted and size is not None:
        problem = "has no meaning here"
        expected = "None without kv_blocks, and with pages, whose size is that of a block"
        raise InvalidInput(message(op, "kv_block_size", problem, expected, size))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _decode(
    options: DecodeOptions, q: jax.Array, cache: Cache, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of a checked call."""
    compute = compute_dtype(q.dtype)
    paged = cache.page_table is not None
    heads_kv = cache.k.shape[2 if paged else 1]
    batch, heads, sq, dim = q.shape
    grouped = q.reshape(batch, heads_kv, heads // heads_kv, sq, dim).astype(compute)
    capacity = cache.page_table.shape[1] * cache.k.shape[1] if paged else cache.k.shape[2]
    wrong_length = (cache.lengths < 0) | (cache.lengths > capacity)
    lengths = jnp.where(wrong_length, 0, cache.lengths)
    left, right = options.band.scalars()
    q_position = (lengths - sq)[:, None] + jnp.arange(sq)  # [B, Sq]

    def step(index: jax.Array, state: Any) -> Any:
        peak, total, acc = state
        tile = read(index)
        scores = jnp.einsum("bhgqd,bhtd->bhgqt", grouped, tile.k.astype(compute)) * options.scale
        if options.softcap:
            scores = options.softcap * jnp.tanh(scores / options.softcap)
        key = tile.position[:, :, None, None, :]
        ahead = key - q_position[:, None, None, :, None]
        visible = (key >= 0) & (key < lengths[:, None, None, None, None])
        visible &= (ahead <= right) & (ahead >= -left)
        scores = jnp.where(visible, scores, -jnp.inf)
        # pages that no query sees are not read, so they may be anything
        scores = jnp.where(visible & tile.wrong[:, :, None, None, :], jnp.nan, scores)
        new_peak = jnp.maximum(peak, scores.max(-1))
        shift = jnp.where(new_peak == -jnp.inf, 0, new_peak)
        weights = jnp.exp(scores - shift[..., None])
        rescale = jnp.exp(peak - shift)
        # what lies beyond the lengths is not read: NaN there must not reach the sum
        seen = visible.any((2, 3))[..., None]
        values = jnp.where(seen, tile.v.astype(compute), 0)
        products = jnp.einsum("bhgqt,bhtd->bhgqd", weights, values)
        return new_peak, total * rescale + weights.sum(-1), acc * rescale[..., None] + products

    read, first, last = _tiles(cache, options, lengths, sq)
    zeros = jnp.zeros(grouped.shape[:-1], compute)
    start = (zeros - jnp.inf, zeros, jnp.zeros((*zeros.shape, cache.v.shape[-1]), compute))
    inputs = jax.tree.leaves((q, cache))
    start = tuple(vary_like(x, *inputs) for x in start)
    # a loop over nothing would still be traced, with slices that do not exist
    nothing = capacity == 0 or (cache.kv_blocks is not None and cache.kv_blocks.shape[2] == 0)
    peak, total, acc = start if nothing else lax.fori_loop(first, last, step, start)
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log(jnp.where(empty, 1, total)))
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks.astype(compute).reshape(heads_kv, -1, 1))
    factor = jnp.where(empty, 0, jnp.exp(peak - jnp.where(lse == -jnp.inf, 0, lse)))
    out = (acc * factor[..., None]).reshape(batch, heads, sq, cache.v.shape[-1])
    lse = lse.reshape(batch, heads, sq)
    wrong = wrong_length[:, None]
    if cache.kv_blocks is not None:
        blocks = cdiv(capacity, cache.k.shape[1] if paged else options.kv_block)
        unknown = ((cache.kv_blocks < -1) | (cache.kv_blocks >= blocks)).any(-1)
        wrong = wrong | jnp.repeat(unknown, heads // heads_kv, axis=1)
    lse = jnp.where(wrong[..., None], jnp.nan, lse)
    out = jnp.where(wrong[..., None, None], jnp.nan, out)
    return out.astype(q.dtype), lse


@_decode.defjvp
def _refuse_gradients(options: DecodeOptions, primals: Any, tangents: Any) -> Any:
    raise Unsupported(NO_DERIVATIVE)


def _tiles(cache: Cache, options: DecodeOptions, lengths: jax.Array, sq: int) -> Any:
    """How to read a tile by its index, and the range of indices that some query sees."""
    if cache.kv_blocks is not None:
        return _listed(cache, options), 0, cache.kv_blocks.shape[2]
    read, tile, capacity = _paged(cache) if cache.page_table is not None else _contiguous(cache)
    left, _ = options.band.scalars()
    lo = jnp.maximum(lengths - sq - left, 0)
    first = jnp.where(lengths > 0, lo // tile, capacity).min(initial=capacity)
    last = ((lengths + tile - 1) // tile).max(initial=0)
    return read, first, last


def _contiguous(cache: Cache) -> Any:
    capacity = cache.k.shape[2]
    tile = max(min(TILE, capacity), 1)

    def read(index: jax.Array) -> Tile:
        # the last tile starts earlier, so that it is whole; what it repeats counts as no key
        begin = index * tile
        start = jnp.minimum(begin, capacity - tile)
        k, v = (lax.dynamic_slice_in_dim(x, start, tile, 2) for x in (cache.k, cache.v))
        position = start + jnp.arange(tile)
        position = jnp.where(position < begin, -1, position)[None, None]
        return Tile(k, v, position, jnp.zeros((1, 1, 1), bool))

    return read, tile, capacity


def _paged(cache: Cache) -> Any:
    pages, size = cache.k.shape[:2]
    columns = cache.page_table.shape[1]
    together = max(1, min(cdiv(TILE, size), columns))
    tile = together * size

    def read(index: jax.Array) -> Tile:
        begin = index * together
        start = jnp.minimum(begin, columns - together)
        page = lax.dynamic_slice_in_dim(cache.page_table, start, together, 1)  # [B, together]
        position = start * size + jnp.arange(tile)
        position = jnp.where(position < begin * size, -1, position)[None, None]
        wrong = jnp.repeat((page < 0) | (page >= pages), size, axis=1)[:, None]
        found = jnp.clip(page, 0, pages - 1)
        k, v = (_heads_first(x[found]) for x in (cache.k, cache.v))
        return Tile(k, v, position, wrong)

    return read, tile, columns * size


def _heads_first(pages: jax.Array) -> jax.Array:
    """[B, pages, page_size, H, D] as [B, H, tokens, D]."""
    batch, count, size, heads, dim = pages.shape
    return pages.reshape(batch, count * size, heads, dim).swapaxes(1, 2)


def _listed(cache: Cache, options: DecodeOptions) -> Any:
    """Read the blocks of `kv_blocks` one after another: `[B, Hkv]` of them at a time."""
    batch, heads, _ = cache.kv_blocks.shape
    row = jnp.arange(batch)[:, None, None]
    head = jnp.arange(heads)[None, :, None]

    def read(index: jax.Array) -> Tile:
        block = lax.dynamic_index_in_dim(cache.kv_blocks, index, 2, keepdims=True)  # [B, Hkv, 1]
        if cache.page_table is None:
            size, capacity = options.kv_block, cache.k.shape[2]
            blocks = cdiv(capacity, size)
            position = block * size + jnp.arange(size)
            slot = jnp.clip(position, 0, capacity - 1)
            k, v = (x[row, head, slot] for x in (cache.k, cache.v))
            wrong = jnp.zeros((), bool)
        else:
            pages, size = cache.k.shape[:2]
            blocks = cache.page_table.shape[1]
            position = block * size + jnp.arange(size)
            page = cache.page_table[row, jnp.clip(block, 0, blocks - 1)]
            wrong = (page < 0) | (page >= pages)
            slot = jnp.arange(size)[None, None]
            k, v = (x[jnp.clip(page, 0, pages - 1), slot, head] for x in (cache.k, cache.v))
        position = jnp.where(block < 0, -1, position)
        return Tile(k, v, position, jnp.broadcast_to(wrong, position.shape))

    return read
