"""`impl="sm90"` on a Hopper GPU: the kernel through XLA, against the fp64 oracle in NumPy."""

import importlib.util

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")

import jax.numpy as jnp  # noqa: E402

import blackwell_sparsek.jax as bsk_jax  # noqa: E402

from . import oracle  # noqa: E402
from .test_attention import check, normal, qkv, random_elements  # noqa: E402


def _why_not():
    if jax.default_backend() != "gpu":
        return "JAX sees no GPU"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed"
    x = jnp.zeros((1, 1, 64, 64), jnp.bfloat16)
    chosen = bsk_jax.explain(bsk_jax.attention, x, x, x)
    return None if chosen.chosen == "sm90" else chosen.reasons.get("sm90", "")


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))]


def attend(q, k, v, **options):
    return bsk_jax.attention(q, k, v, impl="sm90", **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("sq", "sk", "options"),
    [
        (129, 257, {"causal": True}),
        (300, 200, {"window": (60, 7)}),
        (1, 1, {}),
        (640, 640, {}),
        (257, 4097, {"causal": True}),
    ],
)
def test_attention(dtype, dim, sq, sk, options):
    """With gradients, which are those of the portable kernels; `check` compares lse too."""
    tensors = qkv(sq, sk, dtype=dtype, dims=(dim, dim))
    check(tensors, oracle.visible_elements(sq, sk, **options), {"impl": "sm90", **options})


@pytest.mark.parametrize("dims", [(40, 24), (96, 96), (192, 128), (256, 256)])
def test_head_dims(dims):
    tensors = qkv(70, 90, dtype="bfloat16", dims=dims)
    visible = oracle.visible_elements(70, 90, causal=True)
    check(tensors, visible, {"causal": True, "impl": "sm90"})


def test_all_options_together():
    visible = oracle.visible_elements(150, 170, window=(30, 2))
    tensors, (sinks,) = qkv(150, 170, dtype="bfloat16", dims=(64, 128)), normal(5, (4,))
    options = {"window": (30, 2), "scale": 0.7, "softcap": 3.0}
    formula = {"scale": 0.7, "softcap": 3.0, "sinks": sinks}
    check(tensors, visible, {"impl": "sm90", **options}, formula)


@pytest.mark.parametrize("block", [(64, 64), (128, 128), (64, 16)])
@pytest.mark.parametrize("masks", [(1, 1), (2, 4)])
def test_block_masks(block, masks):
    visible = random_elements((*masks, 260, 300))
    mask = bsk_jax.BlockMask.from_element_mask(visible, block)
    tensors = qkv(260, 300, dtype="bfloat16", dims=(64, 64))
    check(tensors, visible, {"block_mask": mask, "impl": "sm90"})


def test_a_split_tail_and_memory_full_of_nan():
    """Long keys share the last work tiles; what XLA frees before is NaN where results will lie."""
    q, k, v = (x.astype(jnp.bfloat16) for x in normal(3, *[(1, 9, 4096, 128)] * 3))
    poison = jax.jit(lambda: jnp.full((2**27,), jnp.nan))
    step = jax.jit(lambda q, k, v: attend(q, k, v, return_lse=True))
    # all rows take NumPy too long; these are in every tile, and in every place of some tile
    rows = slice(None, None, 7)
    exact, plain = (
        oracle.attention(q[:, :, rows], k, v, True, to=to) for to in (oracle.as64, oracle.as32)
    )
    for _ in range(3):
        poison().block_until_ready()
        for found, right, theirs in zip(step(q, k, v), exact, plain, strict=True):
            assert not jnp.isnan(found).any()
            oracle.within_budget(found[:, :, rows], right, theirs)


def test_calls_repeat_their_bits_and_trace_once():
    step = jax.jit(lambda q, k, v: attend(q, k, v, causal=True))
    for length in (512, 640, 512):
        tensors = qkv(length, length, dtype="bfloat16", dims=(128, 128))
        first = step(*tensors)
        for _ in range(50):
            again = step(*tensors)
        np.testing.assert_array_equal(first, again)
    assert step._cache_size() == 2


def test_calls_that_read_each_other_in_a_loop():
    """PDL, counters and addresses that alternate: the result of one call is read by the next."""
    q, k, v = qkv(700, 700, dtype="bfloat16", dims=(64, 64))

    def many(q):
        return jax.lax.fori_loop(0, 20, lambda _, x: attend(x, k, v, causal=True), q, unroll=2)

    found, one = jax.jit(many)(q), jax.jit(lambda q: attend(q, k, v, causal=True))
    expected = q
    for _ in range(20):
        expected = one(expected).block_until_ready()
    np.testing.assert_array_equal(found, expected)


def test_vmap():
    q, k, v = qkv(130, 150, batch=1, dtype="bfloat16", dims=(64, 64))
    stacked = jnp.stack([q, -q])
    found = jax.jit(jax.vmap(lambda q: attend(q, k, v)))(stacked)
    for ours, query in zip(found, stacked, strict=True):
        np.testing.assert_array_equal(ours, attend(query, k, v))


def test_shard_map():
    q, k, v = qkv(130, 150, dtype="bfloat16", dims=(64, 64))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "batch")
    spec = jax.sharding.PartitionSpec("batch")
    sharded = jax.shard_map(
        lambda *x: attend(*x, causal=True), mesh=mesh, in_specs=spec, out_specs=spec
    )
    found = jax.jit(sharded)(q, k, v)
    np.testing.assert_array_equal(found, attend(q, k, v, causal=True))
