"""`blackwell_sparsek.jax.attention` against an fp64 oracle, with its gradients."""

import re

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import blackwell_sparsek.jax as bsk_jax  # noqa: E402
from blackwell_sparsek import InvalidInput, InvalidType  # noqa: E402
from blackwell_sparsek.jax import attention_jnp  # noqa: E402

from . import oracle  # noqa: E402

# one compilation instead of one for every operation
attention = jax.jit(
    bsk_jax.attention, static_argnames=("causal", "window", "scale", "softcap", "return_lse")
)


def normal(seed, *shapes, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def qkv(sq, sk, *, batch=2, heads=(4, 2), dims=(16, 16), dtype="float32", seed=0):
    shapes = ((heads[0], sq, dims[0]), (heads[1], sk, dims[0]), (heads[1], sk, dims[1]))
    return normal(seed, *((batch, *shape) for shape in shapes), dtype=dtype)


def random_elements(shape, seed=0, density=0.3):
    """A mask with blocks of every kind: absent, partial and full, and rows that see nothing."""
    rng = np.random.default_rng(seed)
    visible = rng.random(shape) < 0.7
    for place in np.ndindex(shape[:-2]):
        for row in range(0, shape[-2], 16):
            for col in range(0, shape[-1], 16):
                kind = rng.random()
                if kind > density:
                    visible[(*place, slice(row, row + 16), slice(col, col + 16))] = kind > 0.9
    visible[..., 3, :] = False
    return visible


def check(tensors, visible, options, formula=None):
    """Output, lse and all gradients against the oracle, under the budget of the plain formula."""
    formula = {} if formula is None else formula
    inputs = (*tensors, formula["sinks"]) if "sinks" in formula else tuple(tensors)
    batch, heads, sq, _ = tensors[0].shape
    dout, dlse = normal(9, (batch, heads, sq, tensors[2].shape[-1]), (batch, heads, sq))
    dout = dout.astype(tensors[0].dtype)

    @jax.jit
    def ours(*inputs):
        def function(q, k, v, sinks=None):
            return bsk_jax.attention(q, k, v, sinks=sinks, return_lse=True, **options)

        results, pull_back = jax.vjp(function, *inputs)
        return *results, *pull_back((dout, dlse))

    def formulas(to):
        results = oracle.attention(*tensors, visible, **formula, to=to)
        return *results, *oracle.gradients(*tensors, visible, dout, dlse, **formula, to=to)

    with np.errstate(all="ignore"):
        exact, plain = formulas(oracle.as64), formulas(oracle.as32)
    for i, (found, right, theirs) in enumerate(zip(ours(*inputs), exact, plain, strict=False)):
        # after out and lse come gradients: base-2 exponents round once more than the formula does,
        # which is the whole error in fp32 (as in `testing.attention_gradients`)
        gradient = i >= 2 and found.dtype == np.float32
        oracle.within_budget(found, right, theirs, factor=3 if gradient else 2)


@pytest.mark.parametrize(
    ("sq", "sk", "options", "shown"),
    [
        (1, 1, {}, {}),
        (65, 129, {}, {}),
        (129, 127, {"causal": True}, {"causal": True}),
        (63, 64, {"causal": True, "window": 5}, {"window": (4, 0)}),
        (17, 200, {"window": (3, 70)}, {"window": (3, 70)}),
        (40, 15, {"window": 2}, {"window": (1, 1)}),
    ],
)
def test_bands(sq, sk, options, shown):
    check(qkv(sq, sk), oracle.visible_elements(sq, sk, **shown), options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes(dtype):
    visible = oracle.visible_elements(70, 90, causal=True)
    check(qkv(70, 90, dtype=dtype, dims=(24, 40)), visible, {"causal": True})


@pytest.mark.parametrize(("heads", "masks"), [((6, 2), (2, 1)), ((3, 1), (1, 3)), ((4, 2), (2, 4))])
def test_block_masks_broadcast(heads, masks):
    visible = random_elements((*masks, 50, 70))
    mask = bsk_jax.BlockMask.from_element_mask(visible, 16)
    check(qkv(50, 70, heads=heads), visible, {"block_mask": mask})


@pytest.mark.parametrize("block", [(1, 1), (64, 33)])
def test_block_sizes(block):
    visible = random_elements((1, 1, 50, 70))
    mask = bsk_jax.BlockMask.from_element_mask(visible, block)
    check(qkv(50, 70), visible, {"block_mask": mask})


def test_all_options_together():
    visible = random_elements((2, 4, 50, 70)) & oracle.visible_elements(50, 70, window=(30, 2))
    tensors, (sinks,) = qkv(50, 70, dims=(16, 8)), normal(5, (4,))
    mask = bsk_jax.BlockMask.from_element_mask(random_elements((2, 4, 50, 70)), (16, 32))
    options = {"block_mask": mask, "window": (30, 2), "scale": 0.7, "softcap": 3.0}
    check(tensors, visible, options, {"scale": 0.7, "softcap": 3.0, "sinks": sinks})


def test_a_negative_scale():
    check(qkv(20, 30), np.ones((20, 30), bool), {"scale": -0.5}, {"scale": -0.5})


def test_many_chunks(monkeypatch):
    # with the real size, only long sequences need more than one chunk
    monkeypatch.setattr(attention_jnp, "CHUNK_SCORES", 3 * 16 * 16)
    monkeypatch.setattr(attention_jnp, "RESCALED_PER_KEY", 1000)
    visible = random_elements((2, 4, 50, 70))
    mask = bsk_jax.BlockMask.from_element_mask(visible, 16)
    check(qkv(50, 70), visible, {"block_mask": mask})


def test_nothing_visible():
    tensors, mask = qkv(20, 20), bsk_jax.BlockMask.from_dense(np.zeros((2, 2), bool), 10)
    out, lse = attention(*tensors, block_mask=mask, return_lse=True)
    assert not np.any(out) and np.all(np.isneginf(lse))
    gradients = jax.grad(lambda *x: attention(*x, block_mask=mask).sum(), (0, 1, 2))(*tensors)
    assert not any(map(np.any, gradients))


@pytest.mark.parametrize(("sq", "sk", "batch"), [(0, 5, 2), (5, 0, 2), (5, 5, 0)])
def test_empty(sq, sk, batch):
    tensors = qkv(sq, sk, batch=batch)
    out, lse = attention(*tensors, causal=True, return_lse=True)
    assert out.shape == (batch, 4, sq, 16) and not np.any(out) and np.all(np.isneginf(lse))
    gradients = jax.grad(lambda *x: attention(*x).sum(), (0, 1, 2))(*tensors)
    assert not any(map(np.any, gradients))


def test_absent_blocks_are_not_read():
    q, k, v = qkv(32, 64)
    keep = np.array([[True, False], [True, False]])
    mask = bsk_jax.BlockMask.from_dense(keep, (16, 32))
    want = attention(q, k, v, block_mask=mask)
    k, v = (np.array(x) for x in (k, v))
    k[:, :, 32:] = v[:, :, 32:] = np.nan
    np.testing.assert_array_equal(attention(q, k, v, block_mask=mask), want)


def test_nan_in_a_visible_key_is_not_hidden():
    q, k, v = qkv(8, 8)
    k = np.array(k)
    k[0, 0, 5] = np.nan
    out = np.asarray(attention(q, k, v, causal=True))
    assert np.isnan(out[0, :2, 5:]).all() and np.isfinite(out[0, :2, :5]).all()
    assert np.isfinite(out[0, 2:]).all() and np.isfinite(out[1]).all()


def test_gradients_of_gradients():
    with jax.enable_x64(True):
        tensors = qkv(9, 11, batch=1, heads=(2, 1), dims=(4, 3), dtype="float64")
        (sinks,) = normal(3, (2,), dtype="float64")
        mask = bsk_jax.BlockMask.from_element_mask(random_elements((1, 2, 9, 11)), 4)

        @jax.jit
        def function(q, k, v, sinks):
            options = {"causal": True, "softcap": 2.0, "block_mask": mask}
            return bsk_jax.attention(q, k, v, sinks=sinks, **options)

        check_grads(function, (*tensors, sinks), order=2, modes=["rev"])


def test_fp64_is_computed_in_fp64():
    with jax.enable_x64(True):
        tensors = qkv(33, 40, dtype="float64")
        visible = oracle.visible_elements(33, 40, causal=True)
        out, lse = attention(*tensors, causal=True, return_lse=True)
        want_out, want_lse = oracle.attention(*tensors, visible)
        assert lse.dtype == jnp.float64
        np.testing.assert_allclose(out, want_out, rtol=0, atol=64 * 2**-52)
        np.testing.assert_allclose(lse, want_lse, rtol=64 * 2**-52)


def test_vmap_is_the_batch():
    q, k, v = qkv(20, 30)
    visible = random_elements((2, 1, 20, 30))
    mask = bsk_jax.BlockMask.from_element_mask(visible, 8)

    def one(q, k, v, lists):
        single = bsk_jax.BlockMask(
            *jax.tree.map(lambda x: x[None], lists), mask.bits, (20, 30), (8, 8)
        )
        return bsk_jax.attention(q[None], k[None], v[None], block_mask=single)[0]

    def value_and_gradients(function):
        def loss(q, k, v):
            out = function(q, k, v)
            return (out**2).sum(), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    batched = value_and_gradients(
        lambda q, k, v: jax.vmap(one)(q, k, v, (mask.entries, mask.lists))
    )
    whole = value_and_gradients(lambda q, k, v: bsk_jax.attention(q, k, v, block_mask=mask))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), batched, whole
    )


def test_another_mask_of_the_same_size_compiles_nothing():
    tensors, traces = qkv(32, 32), []

    @jax.jit
    def function(q, k, v, mask):
        traces.append(None)
        return bsk_jax.attention(q, k, v, block_mask=mask)

    for keep in ([[1, 0], [1, 1]], [[1, 1], [0, 1]]):
        mask = bsk_jax.BlockMask.from_dense(np.array(keep, bool), 16)
        visible = np.kron(keep, np.ones((16, 16))).astype(bool)
        exact, plain = (
            oracle.attention(*tensors, visible, to=to)[0] for to in (oracle.as64, oracle.as32)
        )
        oracle.within_budget(function(*tensors, mask), exact, plain)
    assert len(traces) == 1


def test_work_follows_the_visible_blocks():
    q, k, v = qkv(512, 512, batch=1, heads=(1, 1))

    def flops(blocks):
        keep = np.zeros((8, 8), bool)
        keep.flat[:blocks] = True
        mask = bsk_jax.BlockMask.from_dense(keep, 64)
        compiled = jax.jit(bsk_jax.attention).lower(q, k, v, block_mask=mask).compile()
        return compiled.cost_analysis()["flops"]

    few, many = flops(8), flops(64)
    assert 5 * few < many


GOOD = {"q": (2, 4, 8, 16), "k": (2, 2, 8, 16), "v": (2, 2, 8, 16)}


@pytest.mark.parametrize(
    ("changed", "options", "error", "text"),
    [
        ({"q": (4, 8, 16)}, {}, InvalidInput, "q has a wrong rank; expected [B, H, S, D]"),
        ({"k": (1, 2, 8, 16)}, {}, InvalidInput, "q/k/v have different batch sizes"),
        ({"k": (2, 2, 8, 8)}, {}, InvalidInput, "q/k/v have different head dims"),
        ({"v": (2, 2, 8, 0)}, {}, InvalidInput, "q/k/v have an empty head dim; expected 1 or more"),
        ({"v": (2, 2, 9, 16)}, {}, InvalidInput, "q/k/v do not match"),
        ({"q": (2, 3, 8, 16)}, {}, InvalidInput, "expected a multiple of the 2 heads of k, got 3"),
        ({}, {"causal": 1}, InvalidType, "causal is not a bool"),
        ({}, {"return_lse": 1}, InvalidType, "return_lse is not a bool"),
        ({}, {"window": -1}, InvalidInput, "window sees no key"),
        ({}, {"scale": "x"}, InvalidType, "scale is not a number"),
        ({}, {"scale": float("inf")}, InvalidInput, "scale is not finite"),
        ({}, {"softcap": 0.0}, InvalidInput, "softcap is not positive"),
        ({}, {"sinks": np.zeros(3, np.float32)}, InvalidInput, "sinks has a wrong shape"),
        ({}, {"sinks": np.zeros(4, np.int32)}, InvalidType, "sinks has a wrong dtype"),
        ({}, {"block_mask": np.ones(4)}, InvalidType, "block_mask is not a block mask"),
    ],
)
def test_errors(changed, options, error, text):
    arrays = [jnp.zeros(shape) for shape in {**GOOD, **changed}.values()]
    with pytest.raises(error, match=re.escape(text)):
        bsk_jax.attention(*arrays, **options)


def test_a_mask_for_other_sizes_is_refused():
    arrays = [jnp.zeros(shape) for shape in GOOD.values()]
    mask = bsk_jax.BlockMask.from_dense(np.ones((1, 1), bool), 16)
    with pytest.raises(InvalidInput, match=r"was made for other lengths; expected \(8, 8\)"):
        bsk_jax.attention(*arrays, block_mask=mask)
    mask = bsk_jax.BlockMask.from_dense(np.ones((3, 1, 1), bool), 8)
    with pytest.raises(InvalidInput, match="along the heads; expected 1 or 4, got 3"):
        bsk_jax.attention(*arrays, block_mask=mask)


def test_dtypes_are_not_mixed():
    q, k, v = (jnp.zeros(shape) for shape in GOOD.values())
    with pytest.raises(InvalidType, match=r"have different dtypes.*q bfloat16, k float32"):
        bsk_jax.attention(q.astype(jnp.bfloat16), k, v)
    with pytest.raises(InvalidType, match=r"q has a wrong dtype.*got int32"):
        bsk_jax.attention(q.astype(jnp.int32), k, v)


def test_explain():
    arrays = [jnp.zeros(shape) for shape in GOOD.values()]
    decision = bsk_jax.explain(bsk_jax.attention, *arrays, causal=True)
    assert decision.chosen == "jnp" and "triton" in decision.reasons
    problem = f"on {jax.default_backend()}, float32, batch 2, heads 4:2"
    assert problem in str(decision) and "causal or window" in str(decision)
    assert "not triton: " in str(decision)
    with pytest.raises(InvalidInput, match="fn chose no implementation"):
        bsk_jax.explain(jnp.sin, 1.0)


def test_explain_of_a_jitted_function_that_ran_before():
    arrays = [jnp.zeros(shape) for shape in GOOD.values()]
    fn = jax.jit(lambda *arrays: 2 * jax.jit(bsk_jax.attention)(*arrays))
    fn(*arrays)
    assert bsk_jax.explain(fn, *arrays).chosen == "jnp"
