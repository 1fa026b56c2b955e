"""`impl="triton"` on a GPU: the kernels through jax-triton, against the fp64 oracle in NumPy."""

import importlib.util
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")

import jax.numpy as jnp  # noqa: E402

import blackwell_sparsek.jax as bsk_jax  # noqa: E402

from . import oracle  # noqa: E402
from . import test_decode as decoding  # noqa: E402
from . import test_matmul as products  # noqa: E402
from .test_attention import check, normal, qkv, random_elements  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed"
    ),
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="JAX sees no GPU"),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("sq", "sk", "options", "shown"),
    [
        (129, 257, {"causal": True}, {"causal": True}),
        (300, 200, {"window": (60, 7)}, {"window": (60, 7)}),
        (1, 1, {}, {}),
    ],
)
def test_attention(dtype, sq, sk, options, shown):
    tensors = qkv(sq, sk, dtype=dtype, dims=(64, 64))
    check(tensors, oracle.visible_elements(sq, sk, **shown), {"impl": "triton", **options})


@pytest.mark.parametrize("dims", [(16, 16), (40, 24), (128, 128), (192, 128), (1, 3)])
def test_head_dims(dims):
    visible = oracle.visible_elements(70, 90, causal=True)
    tensors = qkv(70, 90, dtype="bfloat16", dims=dims)
    check(tensors, visible, {"causal": True, "impl": "triton"})


@pytest.mark.parametrize("block", [(16, 16), (32, 64), (128, 128)])
@pytest.mark.parametrize("masks", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_block_masks(block, masks):
    visible = random_elements((*masks, 260, 300))
    mask = bsk_jax.BlockMask.from_element_mask(visible, block)
    tensors = qkv(260, 300, dtype="bfloat16", dims=(64, 64))
    check(tensors, visible, {"block_mask": mask, "impl": "triton"})


def test_all_options_together():
    elements = random_elements((2, 4, 150, 170))
    visible = elements & oracle.visible_elements(150, 170, window=(30, 2))
    tensors, (sinks,) = qkv(150, 170, dims=(32, 16)), normal(5, (4,))
    mask = bsk_jax.BlockMask.from_element_mask(elements, (16, 32))
    options = {"block_mask": mask, "window": (30, 2), "scale": 0.7, "softcap": 3.0}
    formula = {"scale": 0.7, "softcap": 3.0, "sinks": sinks}
    check(tensors, visible, {"impl": "triton", **options}, formula)


def test_another_mask_compiles_nothing():
    tensors = qkv(128, 128, dtype="bfloat16", dims=(64, 64))
    attend = jax.jit(lambda q, k, v, m: bsk_jax.attention(q, k, v, block_mask=m, impl="triton"))
    for shift in (0, 1):
        keep = np.roll(np.eye(8, dtype=bool), shift, 1)
        mask = bsk_jax.BlockMask.from_dense(keep, 16)
        visible = np.kron(keep, np.ones((16, 16), bool))
        exact, plain = (
            oracle.attention(*tensors, visible, to=to)[0] for to in (oracle.as64, oracle.as32)
        )
        oracle.within_budget(attend(*tensors, mask), exact, plain)
    assert attend._cache_size() == 1


def test_vmap():
    q, k, v = qkv(40, 50, batch=1, dtype="bfloat16")
    stacked = jnp.stack([q, -q])
    found = jax.vmap(lambda q: bsk_jax.attention(q, k, v, impl="triton"))(stacked)
    for ours, query in zip(found, stacked, strict=True):
        np.testing.assert_array_equal(ours, bsk_jax.attention(query, k, v, impl="triton"))


def test_vmap_of_gradients_with_masks():
    q, k, v = qkv(260, 300, dtype="bfloat16", dims=(64, 64))
    mask = bsk_jax.BlockMask.from_element_mask(random_elements((3, 4, 260, 300)), 32)
    lists = jax.tree.map(lambda x: x[:, None], (mask.entries, mask.lists))
    queries = jnp.stack([q, -q, 2 * q])

    def gradients(q, lists):
        def loss(q, k, v):
            own = bsk_jax.BlockMask(*lists, mask.bits, (260, 300), (32, 32))
            out = bsk_jax.attention(q, k, v, block_mask=own, impl="triton")
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    found = jax.jit(jax.vmap(gradients))(queries, lists)
    for entry in range(3):
        alone = jax.jit(gradients)(queries[entry], jax.tree.map(lambda x, i=entry: x[i], lists))
        for ours, theirs in zip(found, alone, strict=True):
            np.testing.assert_array_equal(ours[entry], theirs)


def test_vmap_of_decode_over_one_cache():
    q, k, v, lengths = decoding.problem(500, lengths=(499,), dims=(64, 64), dtype="float16")
    shown = decoding.visible(lengths, 6, 2, 500)

    def step(q):
        return bsk_jax.attention_decode(
            q, k, v, cache_seqlens=lengths, return_lse=True, impl="triton"
        )

    queries = jnp.stack([q, -q])
    for out, lse, query in zip(*jax.jit(jax.vmap(step))(queries), queries, strict=True):
        decoding.check((out, lse), query, k, v, shown)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_decode(page_size, dtype):
    q, k, v, lengths = decoding.problem(2000, lengths=(0, 7, 1999), dims=(64, 64), dtype=dtype)
    formula = {"softcap": 2.0, "scale": 0.3, "sinks": jnp.linspace(-1, 1, 6)}
    shown = decoding.visible(lengths, 6, 2, 2000, (700, 0))
    past = np.arange(2000)[None, None, :, None] >= np.asarray(lengths)[:, None, None, None]
    k_cache, v_cache = (jnp.where(past, jnp.nan, x) for x in (k, v))
    table = {}
    if page_size is not None:
        k_cache, pages = decoding.paged(k_cache, page_size)
        v_cache, _ = decoding.paged(v_cache, page_size)
        table = {"page_table": pages}
    step = jax.jit(
        lambda q, k, v: bsk_jax.attention_decode(
            q, k, v, cache_seqlens=lengths, window=(700, None), return_lse=True, impl="triton",
            **formula, **table,
        )
    )  # fmt: skip
    # twice: counters must be zero before the second launch too
    for _ in range(2):
        decoding.check(step(q, k_cache, v_cache), q, k, v, shown, **formula)


@pytest.mark.parametrize(
    ("m", "k", "n", "block", "dtype"),
    [
        (65, 127, 17, (16, 32), "float32"),
        (256, 512, 300, (64, 64), "float16"),
        (500, 260, 129, (128, 32), "bfloat16"),
    ],
)
def test_products_and_gradients(m, k, n, block, dtype):
    products.check_products(partial(bsk_jax.matmul, impl="triton"), m, k, n, block, dtype)


def test_rows_that_are_cut():
    """One long row among short ones: parts of it are added by a second launch."""
    keep = np.eye(16, 256, dtype=bool)
    keep[3] = True
    dense = np.random.default_rng(0).standard_normal((16 * 16, 256 * 16))
    a = bsk_jax.BSRMatrix.from_mask(jnp.asarray(dense, jnp.float16), keep, (16, 16))
    x = products.array(2, 256 * 16, 80, dtype="float16")
    found = jax.jit(lambda a, x: bsk_jax.matmul(a, x, impl="triton"))(a, x)
    products.budget(found, np.asarray(a.to_dense()), x)


def test_explain():
    tensors = qkv(16, 16, dtype="bfloat16")
    for impl in ("auto", "jnp", "triton"):
        chosen = "triton" if impl == "auto" else impl
        assert bsk_jax.explain(bsk_jax.attention, *tensors, impl=impl).chosen == chosen
