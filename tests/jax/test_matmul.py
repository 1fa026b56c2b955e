"""`blackwell_sparsek.jax.matmul` and `sddmm` against NumPy in fp64, with their gradients."""

import operator
import re
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import blackwell_sparsek.jax as bsk_jax  # noqa: E402
from blackwell_sparsek import InvalidInput, InvalidType  # noqa: E402

from . import oracle  # noqa: E402

# `bsk_jax.matmul` is the function
MODULE = sys.modules["blackwell_sparsek.jax.matmul"]


def matrix(m, k, block, dtype="float32", seed=0):
    """About half of the blocks, an empty block row and an empty block column."""
    rng = np.random.default_rng(seed)
    keep = rng.random((-(-m // block[0]), -(-k // block[1]))) < 0.5
    keep[1:2], keep[:, 1:2] = False, False
    keep[0, 0] = True
    x = jnp.asarray(rng.standard_normal((m, k)), dtype)
    return bsk_jax.BSRMatrix.from_mask(x, keep, block)


def array(*shape, dtype="float32", seed=7):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def budget(found, a, b):
    """`a @ b` in NumPy, in fp64 and in fp32."""
    oracle.within_budget(found, oracle.as64(a) @ oracle.as64(b), oracle.as32(a) @ oracle.as32(b))


@pytest.mark.parametrize(
    ("m", "k", "n", "block", "dtype"),
    [
        (65, 127, 17, (16, 32), "float32"),
        (63, 40, 1, (32, 8), "float16"),
        (129, 70, 15, (64, 33), "bfloat16"),
        (1, 1, 1, (1, 1), "float32"),
    ],
)
def test_products_and_gradients(m, k, n, block, dtype):
    check_products(operator.matmul, m, k, n, block, dtype)


def check_products(product, m, k, n, block, dtype):
    """Compare A @ X, X @ A and their gradients by `product` with NumPy."""
    a, x, y = matrix(m, k, block, dtype), array(k, n, dtype=dtype), array(n, m, dtype=dtype)

    @jax.jit
    def ours(a, x, y):
        left, pull_left = jax.vjp(lambda data, x: product(a.with_data(data), x), a.data, x)
        right, pull_right = jax.vjp(lambda data, y: product(y, a.with_data(data)), a.data, y)
        return left, pull_left(y.T), right, pull_right(x.T)

    left, (dleft, dx), right, (dright, dy) = ours(a, x, y)
    dense = np.asarray(a.to_dense())
    budget(left, dense, x)
    budget(right, y, dense)
    budget(dx, dense.T, y.T)
    budget(dy, x.T, dense.T)
    # the gradient of the values is x^T's outer product with y^T, at the stored blocks
    for gradient in (dleft, dright):
        at_blocks = bsk_jax.BSRMatrix.from_mask(jnp.ones((m, k)), _keep(a), block).to_dense()
        found = a.with_data(gradient).to_dense()
        exact = oracle.as64(y).T @ oracle.as64(x).T * np.asarray(at_blocks)
        plain = oracle.as32(y).T @ oracle.as32(x).T * np.asarray(at_blocks)
        oracle.within_budget(found, exact, plain)
        assert not a.with_data(gradient)._beyond_edges().any()


def _keep(a):
    keep = np.zeros(a.grid, bool)
    keep[np.asarray(a.row_indices()), np.asarray(a.indices)] = True
    return keep


def test_leading_dimensions():
    a, x = matrix(48, 40, (16, 8)), array(2, 3, 40, 5)
    dense = np.asarray(a.to_dense())
    y = array(2, 3, 5, 48)
    left, right, batched = jax.jit(lambda x, y: (a @ x, y @ a, jax.vmap(a.__matmul__)(x[0])))(x, y)
    budget(left, dense, x)
    budget(right, y, dense)
    budget(batched, dense, x[0])


def test_many_chunks(monkeypatch):
    monkeypatch.setattr(MODULE, "CHUNK_ELEMENTS", 3 * 16 * 9)
    a, x = matrix(100, 90, (16, 16)), array(90, 9)
    budget(jax.jit(lambda x: a @ x)(x), a.to_dense(), x)
    pattern = jax.jit(bsk_jax.sddmm)(array(100, 9), array(9, 90), a)
    exact = oracle.as64(array(100, 9)) @ oracle.as64(array(9, 90))
    shown = np.asarray(
        bsk_jax.BSRMatrix.from_mask(jnp.ones((100, 90)), _keep(a), (16, 16)).to_dense()
    )
    plain = oracle.as32(array(100, 9)) @ oracle.as32(array(9, 90))
    oracle.within_budget(pattern.to_dense(), exact * shown, plain * shown)


def test_gradients_of_gradients():
    with jax.enable_x64(True):
        a, x = matrix(7, 9, (3, 4), "float64"), array(9, 2, dtype="float64")
        check_grads(
            jax.jit(lambda data, x: a.with_data(data) @ x), (a.data, x), order=2, modes=["rev"]
        )
        b, c = array(7, 2, dtype="float64"), array(2, 9, dtype="float64")
        check_grads(
            jax.jit(lambda b, c: bsk_jax.sddmm(b, c, a).data), (b, c), order=2, modes=["rev"]
        )


def test_nothing_stored():
    a = bsk_jax.BSRMatrix.from_dense(np.zeros((32, 48), np.float32), (16, 16))
    assert a.nnz_blocks == 0 and a.density == 0
    assert not (a @ array(48, 3)).any() and (array(3, 32) @ a).shape == (3, 48)
    assert bsk_jax.sddmm(array(32, 4), array(4, 48), a).data.shape == (0, 16, 16)
    gradient = jax.grad(lambda x: (a @ x).sum())(array(48, 3))
    assert gradient.shape == (48, 3) and not gradient.any()


def test_no_columns():
    a = matrix(32, 32, (16, 16))
    assert (a @ array(32, 0)).shape == (32, 0) and (array(0, 32) @ a).shape == (0, 32)
    flat = bsk_jax.BSRMatrix.from_dense(np.zeros((32, 0), np.float32), (16, 16))
    assert (flat @ array(0, 4)).shape == (32, 4) and (array(2, 32) @ flat).shape == (2, 0)


def test_numpy_on_the_left():
    a, x = matrix(32, 48, (16, 16)), np.ones((3, 32), np.float32)
    budget(x @ a, x, a.to_dense())


@pytest.mark.parametrize(
    ("a", "b", "error", "text"),
    [
        ("matrix", "matrix", InvalidType, "a/b do not fit; expected one BSRMatrix and one array"),
        ("matrix", np.ones((31, 2), np.float32), InvalidInput, "expected 32 in dimension -2"),
        (np.ones((2, 31), np.float32), "matrix", InvalidInput, "expected 32 in dimension -1"),
        ("matrix", np.ones(32, np.float32), InvalidInput, "b has a wrong rank"),
        ("matrix", np.ones((32, 2), np.float16), InvalidType, "have different dtypes"),
        ("matrix", "text", InvalidType, "b is not an array"),
    ],
)
def test_errors(a, b, error, text):
    m = matrix(32, 32, (16, 16))
    a, b = (m if isinstance(x, str) and x == "matrix" else x for x in (a, b))
    with pytest.raises(error, match=re.escape(text)):
        bsk_jax.matmul(a, b)


@pytest.mark.parametrize("block", [16, (16,), (16, 16, 16), (16, 2.5), (True, 16), "ab"], ids=str)
def test_malformed_blocks(block):
    text = f"block_shape is malformed; expected a pair of ints, got {block}"
    with pytest.raises(InvalidType, match=re.escape(text)):
        bsk_jax.BSRMatrix.from_dense(array(32, 32), block)


def test_sddmm_errors():
    m = matrix(32, 48, (16, 16))
    with pytest.raises(InvalidInput, match=re.escape("expected [32, K] and [K, 48]")):
        bsk_jax.sddmm(array(32, 4), array(5, 48), m)
    with pytest.raises(InvalidType, match="pattern is not a matrix; expected BSRMatrix, got"):
        bsk_jax.sddmm(array(32, 4), array(4, 48), array(32, 48))


def test_explain():
    a, x = matrix(32, 48, (16, 16)), array(48, 3)
    decision = bsk_jax.explain(lambda: a @ x)
    assert decision.chosen == "jnp" and "blocks of 16 x 16" in decision.problem
