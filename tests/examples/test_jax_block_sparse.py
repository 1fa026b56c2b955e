"""The JAX example trains, and its layers compute what dense ones would."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

for package in ("jax", "flax", "optax"):
    pytest.importorskip(package, reason=f"the example needs {package}, which is not installed")

from flax import nnx  # noqa: E402

import jax  # noqa: E402

PATH = Path(__file__).parents[2] / "examples" / "jax_block_sparse.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("jax_block_sparse", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive
def test_the_loss_falls(example):
    # enough to unlearn the random start; to learn the task takes about a hundred steps
    losses = example.train(16)
    assert np.mean(losses[-4:]) < np.mean(losses[1:5]) - 0.2


def test_the_dense_layer_multiplies_by_its_blocks(example):
    layer = example.BSRDense(64, 256, 0.5, rngs=nnx.Rngs(1))
    weight = example.bsk_jax.BSRMatrix(layer.data[...], layer.indices, layer.indptr, layer.shape)
    assert 0.3 < weight.density < 0.8
    x = jax.random.normal(jax.random.key(0), (3, 5, 64))
    np.testing.assert_allclose(layer(x), x @ weight.to_dense(), rtol=1e-4, atol=1e-5)


def test_the_mask_shows_the_token_to_copy(example):
    visible = np.asarray(example.copy_mask().to_element_mask())[0, 0]
    query = np.arange(example.LENGTH // 2, example.LENGTH)
    # the token after the last occurrence of this one, half a sequence ago
    assert visible[query, query - example.LENGTH // 2 + 1].all()
    assert np.tril(visible).mean() < 0.18
