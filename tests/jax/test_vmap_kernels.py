"""`jax.vmap` over the kernels: one launch for the whole axis, with the results of one by one."""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")

import jax.numpy as jnp  # noqa: E402

import blackwell_sparsek.jax as bsk_jax  # noqa: E402
from blackwell_sparsek.jax import decode_triton, matmul_triton  # noqa: E402
from blackwell_sparsek.jax.decode import Cache  # noqa: E402

from . import test_decode as decoding  # noqa: E402
from . import test_matmul as products  # noqa: E402
from .kernels import interpret_kernels  # noqa: E402
from .test_attention import normal, qkv, random_elements  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled on a GPU")
SIZE = 2


def check(monkeypatch, function, axes, arrays, tolerance=0):
    """Compare a mapped function with its entries; return the programs of both, by launch."""
    ran = []
    interpret_kernels(monkeypatch, ran=ran)
    found = jax.block_until_ready(jax.vmap(function, axes)(*arrays))
    mapped = list(ran)
    ran.clear()
    for entry in range(SIZE):
        given = [
            array if axis is None else jax.tree.map(lambda x, i=entry: x[i], array)
            for array, axis in zip(arrays, axes, strict=True)
        ]
        alone = jax.block_until_ready(function(*given))
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(ours[entry], theirs, rtol=tolerance, atol=tolerance)
    return mapped, ran[: len(ran) // SIZE]


def check_folds(*args, **options):
    mapped, once = check(*args, **options)
    assert mapped == [SIZE * programs for programs in once]


def stacked(x, seed=3):
    """Entries that differ, of the shape of x."""
    return jnp.stack([x, *normal(seed, *[x.shape] * (SIZE - 1), dtype=x.dtype)])


def attend(q, k, v, **options):
    return bsk_jax.attention(q, k, v, return_lse=True, impl="triton", **options)


def with_gradients(q, k, v, **options):
    def loss(q, k, v):
        out, lse = attend(q, k, v, **options)
        return (out**2).sum() + jnp.where(lse == -jnp.inf, 0, lse).sum(), (out, lse)

    return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)


# what all entries share is read with a stride of 0, or copied where it has a batch
@pytest.mark.parametrize(("mapped", "batch"), [("q", 1), ("kv", 2)])
def test_attention(monkeypatch, mapped, batch):
    tensors = dict(zip("qkv", qkv(9, 20, batch=batch, heads=(2, 1)), strict=True))
    arrays = [stacked(x) if name in mapped else x for name, x in tensors.items()]
    axes = tuple(0 if name in mapped else None for name in tensors)
    check_folds(monkeypatch, with_gradients, axes, arrays)


def test_two_axes(monkeypatch):
    q, k, v = qkv(9, 20, batch=1, heads=(2, 1))
    inner = jax.vmap(attend, (1, None, None))
    queries = jnp.moveaxis(jnp.stack([stacked(q), stacked(q, 4)]), 1, 2)
    check_folds(monkeypatch, inner, (0, 0, None), [queries, stacked(k), v])


@pytest.mark.parametrize(
    "kind", ["own lists", pytest.param("own bits", marks=pytest.mark.exhaustive)]
)
def test_masks(monkeypatch, kind):
    q, k, v = qkv(20, 40, heads=(1, 1))

    def call(q, lists, bits):
        mask = bsk_jax.BlockMask(*lists, bits, (20, 40), (16, 16))
        return with_gradients(q, k, v, block_mask=mask)

    if kind == "own lists":
        # of different lengths, over one pool, each for both sequences
        mask = bsk_jax.BlockMask.from_element_mask(random_elements((SIZE, 1, 20, 40)), 16)
        lists = jax.tree.map(lambda x: x[:, None], (mask.entries, mask.lists))
        arrays, axes = [stacked(q), lists, mask.bits], (0, 0, None)
    else:
        mask = bsk_jax.BlockMask.from_element_mask(random_elements((2, 1, 20, 40)), 16)
        lists, bits = (mask.entries, mask.lists), jnp.stack([mask.bits, ~mask.bits])
        arrays, axes = [q, lists, bits], (None, None, 0)
    check_folds(monkeypatch, call, axes, arrays)


@pytest.mark.exhaustive
def test_sinks_of_their_own_run_one_by_one(monkeypatch):
    q, k, v = qkv(9, 20, batch=1, heads=(1, 1))

    def call(q, sinks):
        return jax.grad(lambda *x: attend(x[0], k, v, sinks=x[1])[0].sum(), (0, 1))(q, sinks)

    sinks = jnp.ones(1)
    # kernels have one logit for each head, and add its gradient up over the batch
    mapped, once = check(monkeypatch, call, (0, 0), [stacked(q), stacked(sinks)], tolerance=1e-6)
    assert mapped == [once[0]] * SIZE + once[1:] * SIZE
    mapped, once = check(monkeypatch, call, (0, None), [stacked(q), sinks], tolerance=1e-6)
    assert mapped == [SIZE * once[0], *once[1:] * SIZE]


@pytest.mark.parametrize(
    "kind", ["shared cache", pytest.param("own pages", marks=pytest.mark.exhaustive)]
)
def test_decode(monkeypatch, kind):
    q, k, v, lengths = decoding.problem(
        20, heads=(2, 1), sq=1, dims=(16, 16), lengths=(7,) if kind == "shared cache" else (7, 20)
    )
    arrays, axes, options = [stacked(q), k, v], (0, None, None), {}
    if kind == "own pages":
        (k, table), (v, _) = (decoding.paged(x, 16) for x in (k, v))
        arrays, axes = [q, *(jnp.stack([x, -x]) for x in (k, v))], (None, 0, 0)
        options = {"page_table": table}

    def call(q, k, v):
        return bsk_jax.attention_decode(
            q, k, v, cache_seqlens=lengths, return_lse=True, impl="triton", **options
        )

    # the work of a batch is cut by its size, so that the last bits may differ
    mapped, once = check(monkeypatch, call, axes, arrays, tolerance=1e-6)
    assert len(mapped) == len(once) == 1


def test_folded_caches():
    """Which arrays are copied, and how page tables point into pages that were joined."""
    q, pages, lengths = jnp.zeros((SIZE, 3, 2, 1, 8)), jnp.zeros((5, 16, 1, 8)), jnp.arange(3)
    table = jnp.array([[0, 4], [1, -1], [2, 3]])
    paged = Cache(pages, pages, lengths, table, None)
    shared = Cache(False, False, False, False, None)
    (folded_q, cache, _), batch = decode_triton._fold(SIZE, (True, shared, None), (q, paged, None))
    assert batch == 3 and folded_q.shape == (6, 2, 1, 8) and cache.k is cache.v is pages
    np.testing.assert_array_equal(cache.page_table, np.tile(table, (2, 1)))
    np.testing.assert_array_equal(cache.lengths, [0, 1, 2, 0, 1, 2])
    own = jnp.stack([pages, pages])
    mapped = (False, shared._replace(k=True, v=True), None)
    (_, cache, _), _ = decode_triton._fold(SIZE, mapped, (q[0], paged._replace(k=own, v=own), None))
    assert cache.k.shape == cache.v.shape == (10, 16, 1, 8)
    moved = [[0, 4], [1, -1], [2, 3], [5, 9], [6, -1], [7, 8]]
    np.testing.assert_array_equal(cache.page_table, moved)
    # one table serves keys and values
    mapped = (False, shared._replace(k=True), None)
    assert decode_triton._fold(SIZE, mapped, (q[0], paged._replace(k=own), None)) is None
    assert decode_triton._fold(SIZE, (True, shared, True), (q, paged, jnp.zeros((2, 2)))) is None


def test_products(monkeypatch):
    a, x = products.matrix(33, 20, (16, 16)), products.array(SIZE, 2, 5, 33)

    def call(x):
        out, pull = jax.vjp(lambda x: bsk_jax.matmul(x, a, impl="triton"), x)
        return out, pull(out)

    # what comes back for the values of each entry is a product of its own
    mapped, (product, values, back) = check(monkeypatch, call, (0,), [x], tolerance=1e-5)
    assert mapped == [SIZE * product, *[values] * SIZE, SIZE * back]
    # and so are products with matrices of their own
    pattern = matmul_triton.Pattern(a.indices, a.indptr, a.indices)
    mapped = (True, True, matmul_triton.Pattern(False, False, False))
    assert matmul_triton._fold_product(SIZE, mapped, (a.data, x, pattern)) is None
