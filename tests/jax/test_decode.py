"""`blackwell_sparsek.jax.attention_decode` against an fp64 oracle that gathers the cache first."""

import re

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")

import jax.numpy as jnp  # noqa: E402

import blackwell_sparsek.jax as bsk_jax  # noqa: E402
from blackwell_sparsek import InvalidInput, InvalidType, Unsupported  # noqa: E402

from . import oracle  # noqa: E402

LENGTHS = (0, 7, 290)
CAPPED = {"softcap": 2.0, "scale": 0.3}


STATIC = ("kv_block_size", "causal", "window", "scale", "softcap", "return_lse")
# one compilation instead of one for every operation
attention_decode = jax.jit(bsk_jax.attention_decode, static_argnames=STATIC)


def problem(capacity=300, *, heads=(6, 2), sq=2, dims=(16, 24), dtype="float32", lengths=LENGTHS):
    rng = np.random.default_rng(0)
    shapes = ((heads[0], sq, dims[0]), (heads[1], capacity, dims[0]), (heads[1], capacity, dims[1]))
    q, k, v = (rng.standard_normal((len(lengths), *shape)) for shape in shapes)
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.array(lengths, jnp.int32)


def visible(lengths, heads, sq, capacity, window=(None, 0)):
    """Which slots of the cache each query sees, [B, Hq, Sq, S]."""
    shown = np.zeros((len(lengths), heads, sq, capacity), bool)
    for b, length in enumerate(np.asarray(lengths)):
        shown[b, ..., :length] = oracle.visible_elements(sq, length, window=window)
    return shown


def check(found, q, k, v, shown, **formula):
    results = [
        oracle.attention(q, k, v, shown, **formula, to=to) for to in (oracle.as64, oracle.as32)
    ]
    for mine, exact, plain in zip(found, *results, strict=True):
        oracle.within_budget(mine, exact, plain)


def paged(x, size, seed=1):
    """A contiguous cache as scattered pages, and their table; page 0 is NaN and never used."""
    batch, heads, capacity, dim = x.shape
    count = -(-capacity // size)
    pad = np.pad(np.asarray(x), ((0, 0), (0, 0), (0, count * size - capacity), (0, 0)))
    table = 1 + np.random.default_rng(seed).permutation(batch * count).reshape(batch, count)
    pages = np.full((batch * count + 1, size, heads, dim), np.nan, pad.dtype)
    pages[table] = pad.reshape(batch, heads, count, size, dim).transpose(0, 2, 3, 1, 4)
    return jnp.asarray(pages), jnp.asarray(table, jnp.int32)


@pytest.mark.parametrize(
    ("options", "window", "formula"),
    [
        ({}, (None, 0), {}),
        ({"window": 5}, (4, 0), {}),
        (
            {"causal": False, "softcap": 2.0, "scale": 0.3},
            (None, None),
            {"softcap": 2.0, "scale": 0.3},
        ),
    ],
)
@pytest.mark.parametrize("page_size", [None, 16, 200])
def test_contiguous_and_paged(options, window, formula, page_size):
    q, k, v, lengths = problem()
    shown = visible(lengths, 6, 2, 300, window)
    # what lies past the lengths is not read
    past = np.arange(300)[None, None, :, None] >= np.asarray(lengths)[:, None, None, None]
    k_cache, v_cache = (jnp.where(past, jnp.nan, x) for x in (k, v))
    if page_size is not None:
        (k_cache, table), (v_cache, _) = (paged(x, page_size) for x in (k_cache, v_cache))
        # pages past the length may be anything
        table = table.at[0].set(-7)
        options = {**options, "page_table": table}

    @jax.jit
    def ours(q, k, v, lengths):
        return bsk_jax.attention_decode(q, k, v, cache_seqlens=lengths, return_lse=True, **options)

    check(ours(q, k_cache, v_cache, lengths), q, k, v, shown, **formula)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes_and_sinks(dtype):
    q, k, v, lengths = problem(dtype=dtype)
    sinks = jnp.linspace(-1, 1, 6)
    found = attention_decode(q, k, v, cache_seqlens=lengths, sinks=sinks, return_lse=True)
    check(found, q, k, v, visible(lengths, 6, 2, 300), sinks=sinks)


@pytest.mark.parametrize("page_size", [None, 32])
def test_listed_blocks(page_size):
    q, k, v, lengths = problem()
    rng = np.random.default_rng(3)
    blocks = np.stack([rng.permutation(10)[:4] for _ in range(6)]).reshape(3, 2, 4)
    blocks[:, 1, 2] = -1
    listed = np.zeros((3, 2, 10), bool)
    for b, h in np.ndindex(3, 2):
        listed[b, h, blocks[b, h][blocks[b, h] >= 0]] = True
    shown = visible(lengths, 6, 2, 300) & listed.repeat(3, 1).repeat(32, 2)[:, :, None, :300]
    options = {"kv_blocks": jnp.asarray(blocks, jnp.int32), "kv_block_size": 32}
    k_cache, v_cache = k, v
    if page_size is not None:
        (k_cache, table), (v_cache, _) = (paged(x, 32) for x in (k, v))
        options |= {"page_table": table, "kv_block_size": None}
    found = attention_decode(q, k_cache, v_cache, cache_seqlens=lengths, return_lse=True, **options)
    check(found, q, k, v, shown)


def test_values_out_of_range_give_nan():
    q, k, v, _ = problem()
    lengths = jnp.array([-1, 300, 301], jnp.int32)
    out, lse = attention_decode(q, k, v, cache_seqlens=lengths, return_lse=True)
    for x in (out, lse):
        assert jnp.isnan(x[0]).all() and jnp.isfinite(x[1]).all() and jnp.isnan(x[2]).all()
    (pages, table), (v_pages, _) = paged(k, 100), paged(v, 100)
    table = table.at[1, 1].set(len(pages)).at[2, 2].set(-1)
    lengths = jnp.array([300, 300, 200], jnp.int32)
    out = attention_decode(q, pages, v_pages, cache_seqlens=lengths, page_table=table)
    assert jnp.isfinite(out[0]).all() and jnp.isnan(out[1]).all() and jnp.isfinite(out[2]).all()
    blocks = jnp.zeros((3, 2, 1), jnp.int32).at[0, 1].set(10).at[1, 0].set(-2)
    lengths = jnp.array([300, 300, 300], jnp.int32)
    out = attention_decode(q, k, v, cache_seqlens=lengths, kv_blocks=blocks, kv_block_size=32)
    assert jnp.isnan(out[0, 3:]).all() and jnp.isfinite(out[0, :3]).all()
    assert jnp.isnan(out[1, :3]).all() and jnp.isfinite(out[1, 3:]).all()


def test_nothing_to_read():
    q, k, v, lengths = problem(0, lengths=(0, 0))
    out, lse = attention_decode(q, k, v, cache_seqlens=lengths, return_lse=True)
    assert not out.any() and (lse == -jnp.inf).all()
    q, k, v, lengths = problem(8, lengths=(3, 8))
    out = attention_decode(
        q, k, v, cache_seqlens=lengths, kv_blocks=jnp.zeros((2, 2, 0), jnp.int32), kv_block_size=4
    )
    assert not out.any()


@pytest.mark.parametrize("batch, sq", [(0, 1), (3, 0)])
@pytest.mark.parametrize("pages", [False, True])
def test_without_queries(batch, sq, pages):
    q, cache = jnp.zeros((batch, 4, sq, 16)), jnp.zeros((batch, 2, 20, 16))
    options = {"cache_seqlens": jnp.full(batch, 7, jnp.int32)}
    if pages:
        cache = jnp.zeros((5, 8, 2, 16))
        options["page_table"] = jnp.zeros((batch, 3), jnp.int32)
    sinks = jnp.zeros(4)
    out, lse = bsk_jax.attention_decode(q, cache, cache, **options, sinks=sinks, return_lse=True)
    assert out.shape == (batch, 4, sq, 16) and lse.shape == (batch, 4, sq)


def test_a_loop_that_appends_to_donated_caches():
    q, k, v, _ = problem(12, sq=1, lengths=(0, 0))
    new_k, new_v = k[:, :, :5], v[:, :, :5]

    def step(k_cache, v_cache, lengths, k, v):
        batch = jnp.arange(2)
        k_cache = k_cache.at[batch, :, lengths].set(k)
        v_cache = v_cache.at[batch, :, lengths].set(v)
        lengths = lengths + 1
        return (
            k_cache,
            v_cache,
            lengths,
            bsk_jax.attention_decode(q, k_cache, v_cache, cache_seqlens=lengths),
        )

    compiled = jax.jit(step, donate_argnums=(0, 1, 2))
    state = (jnp.full_like(k, jnp.nan), jnp.full_like(v, jnp.nan), jnp.zeros(2, jnp.int32))
    first = state[0]
    for i in range(5):
        *state, out = compiled(*state, new_k[:, :, i], new_v[:, :, i])
    assert first.is_deleted()
    exact = oracle.attention(q, new_k, new_v, np.ones((1, 5), bool))[0]
    plain = oracle.attention(q, new_k, new_v, np.ones((1, 5), bool), to=oracle.as32)[0]
    oracle.within_budget(out, exact, plain)


def test_vmap():
    q, k, v, lengths = problem()
    want = attention_decode(q, k, v, cache_seqlens=lengths)

    def one(q, k, v, length):
        return attention_decode(q[None], k[None], v[None], cache_seqlens=length[None])[0]

    np.testing.assert_allclose(jax.jit(jax.vmap(one))(q, k, v, lengths), want, rtol=1e-5, atol=1e-6)


def test_there_is_no_derivative():
    q, k, v, lengths = problem(8, lengths=(3, 8))
    with pytest.raises(Unsupported, match="attention_decode: has no derivative"):
        jax.grad(lambda q: bsk_jax.attention_decode(q, k, v, cache_seqlens=lengths).sum())(q)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"cache_seqlens": np.zeros(2, np.int32)}, InvalidInput, "expected [3], got [2]"),
        ({"cache_seqlens": np.zeros(3, np.int16)}, InvalidType, "expected int32, got int16"),
        ({"return_lse": 1}, InvalidType, "return_lse is not a bool"),
        ({"kv_block_size": 4}, InvalidInput, "kv_block_size has no meaning here"),
        ({"kv_blocks": np.zeros((3, 2, 1), np.int32)}, InvalidInput, "kv_block_size is missing"),
        ({"kv_blocks": np.zeros((3, 6, 1), np.int32)}, InvalidInput, "expected [3, 2, any]"),
        ({"page_table": np.zeros((3, 1), np.int32)}, InvalidInput, "multiple of the 300 heads"),
    ],
)
def test_errors(options, error, text):
    q, k, v, lengths = problem()
    with pytest.raises(error, match=re.escape(text)):
        bsk_jax.attention_decode(q, k, v, **{"cache_seqlens": lengths, **options})


def test_explain():
    q, k, v, lengths = problem()
    decision = bsk_jax.explain(bsk_jax.attention_decode, q, k, v, cache_seqlens=lengths)
    assert decision.chosen == "jnp" and "contiguous cache" in decision.problem
