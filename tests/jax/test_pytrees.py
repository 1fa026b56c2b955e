"""Masks and matrices as pytrees: made from other frameworks, transformed, sharded."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import blackwell_sparsek as bsk  # noqa: E402
import blackwell_sparsek.jax as bsk_jax  # noqa: E402
from blackwell_sparsek import InvalidInput, InvalidType  # noqa: E402

from .test_attention import normal, qkv, random_elements  # noqa: E402
from .test_matmul import array, matrix  # noqa: E402


def test_importing_it_leaves_torch_alone():
    program = "import blackwell_sparsek.jax, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_lists_have_partial_blocks_before_full_ones():
    visible = np.ones((32, 32), bool)
    # the blocks of column 0 are full, then partial; those of row 1 partial, then full
    visible[20, 3] = False
    lists = bsk_jax.BlockMask.from_element_mask(visible, 16).lists
    found = {name: np.asarray(x)[0, 0].tolist() for name, x in lists._asdict().items()}
    assert found == {
        "row_start": [0, 2, 4],
        "row_full": [0, 3, 4],
        "q_block": [1, 0, 0, 1],
        "bits_id": [0, -1, -1, -1],
        "column_start": [0, 2, 4],
        "column_full": [1, 2, 4],
    }


def test_it_is_reached_as_an_attribute():
    program = (
        "import blackwell_sparsek as bsk, sys; bsk.jax.attention\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_without_jax_the_error_says_what_to_install(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('no jax here')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import blackwell_sparsek.jax"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'blackwell-sparsek[jax]'" in done.stderr


def test_an_old_jax_is_refused():
    from blackwell_sparsek.jax.version import check_version

    check_version("0.8.0")
    check_version("1.0.0.dev3")
    with pytest.raises(ImportError, match=r"needs jax 0.8 or newer, got 0.7.2"):
        check_version("0.7.2")


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray, torch.tensor])
def test_masks_from_every_framework(make):
    visible = random_elements((2, 3, 50, 70))
    mask = bsk_jax.BlockMask.from_element_mask(make(visible), (16, 40))
    np.testing.assert_array_equal(mask.to_element_mask(), visible)
    keep = np.random.default_rng(0).random((3, 4, 2)) < 0.5
    mask = bsk_jax.BlockMask.from_dense(make(keep), (16, 40), (50, 70))
    want = keep.repeat(16, 1).repeat(40, 2)[None, :, :50, :70]
    np.testing.assert_array_equal(mask.to_element_mask(), want)
    assert float(mask.density) == pytest.approx(keep.mean())


@pytest.mark.parametrize("full", [False, True])
def test_a_mask_of_the_torch_side(full):
    visible = torch.from_numpy(random_elements((2, 3, 50, 70)))
    if full:
        mask = bsk.BlockMask.from_dense(visible[:, :, ::16, ::16].contiguous(), 16, (50, 70))
    else:
        mask = bsk.BlockMask.from_element_mask(visible, (16, 32))
    made = bsk_jax.BlockMask.from_torch(mask)
    np.testing.assert_array_equal(made.to_element_mask(), mask.to_element_mask().numpy())
    assert (made.seq_lengths, made.block_size) == (mask.seq_lengths, mask.block_size)


def test_a_cut_block_is_full_if_all_of_it_is_visible():
    mask = bsk_jax.BlockMask.from_element_mask(np.ones((50, 70), bool), 16)
    assert (mask.entries.bits_id == -1).all() and mask.bits.shape[0] == 0


def test_lists_are_sorted_as_kernels_need_them():
    visible = random_elements((1, 1, 96, 96), density=0.5)
    rows, cols, ids = (
        np.asarray(x)[0, 0] for x in bsk_jax.BlockMask.from_element_mask(visible, 16).entries
    )
    key = list(zip(rows, ids < 0, cols, strict=True))
    assert key == sorted(key) and len(set(zip(rows, cols, strict=True))) == len(key)
    assert (ids >= 0).any() and (ids < 0).any()


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray, torch.tensor])
def test_matrices_from_every_framework(make):
    dense = np.zeros((50, 70), np.float32)
    dense[3, 5], dense[49, 69], dense[20, 40] = 1, 2, 3
    m = bsk_jax.BSRMatrix.from_dense(make(dense), (16, 32))
    assert m.nnz_blocks == 3
    np.testing.assert_array_equal(m.to_dense(), dense)
    np.testing.assert_array_equal(m.T.to_dense(), dense.T)
    parts = [make(np.asarray(x)) for x in (m.data, m.indices, m.indptr)]
    np.testing.assert_array_equal(bsk_jax.BSRMatrix.from_parts(*parts, (50, 70)).to_dense(), dense)


def test_tensors_of_torch_may_have_gaps():
    dense = torch.randn(32, 96)[:, ::3]
    m = bsk_jax.BSRMatrix.from_dense(dense, (16, 16))
    np.testing.assert_array_equal(m.to_dense(), dense)
    keep = torch.ones(1, 2, dtype=torch.bool).expand(2, 2)
    assert bsk_jax.BSRMatrix.from_mask(dense[:, :1].expand(32, 32), keep, (16, 16)).nnz_blocks == 4
    assert bsk_jax.BlockMask.from_dense(keep, 16).entries.q_block.size == 4


def test_long_indices_of_torch_are_not_cut_off():
    indices, indptr = torch.tensor([2**32]), torch.tensor([0, 1])
    with pytest.raises(InvalidInput, match="indices is out of range; expected 0 to 0"):
        bsk_jax.BSRMatrix.from_parts(torch.ones(1, 16, 16), indices, indptr, (16, 16))


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_checked_pattern_is_a_copy(make):
    # NumPy aligns some arrays such that JAX could share them, and others not
    for size in range(1, 64):
        indices, indptr = make([*range(size)]), make([0, size])
        indices = indices.astype(np.int32) if make is np.array else indices.int()
        data = np.ones((size, 1, 1), np.float32)
        m = bsk_jax.BSRMatrix.from_parts(data, indices, indptr, (1, size))
        indices[:], data[:] = 7, 7
        assert m.indices.tolist() == [*range(size)] and (m.data == 1).all()


@pytest.mark.parametrize("x", [None, np.array([["a"]]), np.eye(4, dtype=">f4")])
def test_what_jax_cannot_hold_is_refused(x):
    with pytest.raises(InvalidType, match=r"x has a dtype that JAX does not know; expected an ar"):
        bsk_jax.BSRMatrix.from_dense(x, (2, 2))


def test_a_known_array_makes_a_matrix_inside_of_jit():
    dense = np.eye(4, dtype=np.float32)
    product = jax.jit(lambda x: bsk_jax.BSRMatrix.from_dense(dense, (2, 2)) @ x)(jnp.ones((4, 3)))
    np.testing.assert_array_equal(product, np.ones((4, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_of_the_torch_side(dtype):
    dense = torch.zeros(48, 64, dtype=dtype)
    dense[3, 5], dense[47, 63] = 1, 2
    m = bsk.BSRMatrix.from_dense(dense, (16, 32))
    made = bsk_jax.BSRMatrix.from_torch(m)
    # one memory: DLPack copies nothing
    assert made.data.unsafe_buffer_pointer() == m.data.data_ptr()
    np.testing.assert_array_equal(np.asarray(made.to_dense(), np.float32), dense.float())
    turned = bsk_jax.BSRMatrix.from_torch(m.T)
    np.testing.assert_array_equal(np.asarray(turned.to_dense(), np.float32), dense.float().T)


def test_a_matrix_of_scipy():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    dense = np.zeros((48, 64), np.float32)
    dense[3, 5], dense[47, 63] = 1, 2
    made = bsk_jax.BSRMatrix.from_scipy(scipy_sparse.bsr_matrix(dense, blocksize=(16, 32)))
    np.testing.assert_array_equal(made.to_dense(), dense)
    with pytest.raises(InvalidType, match="is not in BSR format; expected bsr, got csr"):
        bsk_jax.BSRMatrix.from_scipy(scipy_sparse.csr_matrix(dense))


def test_pytrees_survive_a_round_trip():
    for tree in (
        matrix(50, 70, (16, 32)),
        bsk_jax.BlockMask.from_element_mask(random_elements((1, 2, 50, 70)), 16),
    ):
        leaves, structure = jax.tree.flatten(tree)
        again = jax.tree.unflatten(structure, leaves)
        assert repr(again) == repr(tree) and jax.tree.structure(again) == structure
        assert len(jax.tree.leaves(jax.tree.map(lambda x: x, tree))) == len(leaves)
        assert "None" in repr(jax.tree.unflatten(structure, [None] * len(leaves)))


def test_a_transpose_may_be_traced():
    m, x = matrix(50, 70, (16, 32)), array(50, 3)
    found = jax.jit(lambda m, x: m.T @ x)(m, x)
    np.testing.assert_allclose(found, np.asarray(m.to_dense()).T @ x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("indices", "indptr", "shape", "text"),
    [
        ([0, 2], [0, 1, 2], (32, 32), "indices is out of range; expected 0 to 1, got 0 to 2"),
        ([-1, 0], [0, 1, 2], (32, 32), "indices is out of range"),
        ([1, 0], [0, 2, 2], (32, 32), "does not ascend within a block row"),
        ([0, 0], [0, 2, 2], (32, 32), "does not ascend within a block row"),
        ([0, 1], [0, 1], (32, 32), "indptr has a wrong shape; expected [3], got [2]"),
        ([0, 1], [0, 1, 3], (32, 32), "indptr is malformed"),
        ([0, 1], [0, 2, 1], (32, 32), "indptr is malformed"),
        ([0], [0, 1, 1], (32, 32), "indices has a wrong shape; expected [2], got [1]"),
        ([0, 1], [0, 1, 2], (31, 32), "data has a nonzero beyond the edge"),
    ],
)
def test_wrong_patterns_are_refused(indices, indptr, shape, text):
    data = np.ones((2, 16, 16), np.float32)
    with pytest.raises(InvalidInput, match=re.escape(text)):
        bsk_jax.BSRMatrix.from_parts(data, np.array(indices), np.array(indptr), shape)


def test_patterns_are_not_traced():
    with pytest.raises(InvalidType, match="make the pattern outside jit"):
        jax.jit(lambda x: bsk_jax.BSRMatrix.from_dense(x, (2, 2)).data)(jnp.eye(4))
    with pytest.raises(InvalidType, match="make the pattern outside jit"):
        jax.jit(lambda x: bsk_jax.BlockMask.from_dense(x > 0, 2).bits)(jnp.eye(4))


def test_tensors_of_torch_are_not_converted_silently():
    m = matrix(32, 32, (16, 16))
    with pytest.raises(InvalidType, match=r"b is a tensor of torch; expected jnp.from_dlpack"):
        m @ torch.ones(32, 2)


MESH = ("batch", "heads")


def mesh():
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("needs 8 virtual CPU devices: JAX_NUM_CPU_DEVICES=8 before JAX starts")
    return Mesh(np.array(devices[:8]).reshape(2, 4), MESH)


@pytest.mark.parametrize("masks", [(1, 1), (2, 4), None])
def test_attention_over_shards(masks):
    q, k, v = qkv(40, 40, heads=(4, 4))
    (sinks,) = normal(4, (4,))
    mask, mask_spec = None, None
    if masks is not None:
        mask = bsk_jax.BlockMask.from_element_mask(random_elements((*masks, 40, 40)), 8)
        mask_spec = mask.partition_spec(*MESH)

    def attend(q, k, v, sinks, mask):
        return bsk_jax.attention(q, k, v, causal=True, block_mask=mask, sinks=sinks)

    spec = P(*MESH)
    sharded = jax.shard_map(
        attend, mesh=mesh(), in_specs=(spec, spec, spec, P("heads"), mask_spec), out_specs=spec
    )

    def value_and_gradients(function):
        def loss(q, k, v, sinks):
            return (function(q, k, v, sinks, mask) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(q, k, v, sinks)

    # sums over the batch are in another order for the sinks
    want, found = value_and_gradients(attend), value_and_gradients(sharded)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, want)


def test_keys_that_several_shards_read_get_the_sum_of_their_gradients():
    q, k, v = qkv(24, 24, heads=(8, 1))
    spec, shared = P("batch", "heads"), P("batch")
    sharded = jax.shard_map(
        lambda q, k, v: bsk_jax.attention(q, k, v, causal=True),
        mesh=mesh(), in_specs=(spec, shared, shared), out_specs=spec,
    )  # fmt: skip

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: (function(*x) ** 2).sum(), (0, 1, 2)))(q, k, v)

    want = gradients(lambda q, k, v: bsk_jax.attention(q, k, v, causal=True))
    for a, b in zip(gradients(sharded), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_products_and_decoding_over_shards():
    m, x = matrix(48, 40, (16, 8)), array(8, 40)
    sharded = jax.shard_map(
        lambda data, x: x @ m.T.with_data(m.with_data(data).T.data),
        mesh=mesh(), in_specs=(P(), P(MESH)), out_specs=P(MESH),
    )  # fmt: skip

    def loss(function):
        value = jax.value_and_grad(lambda data, x: (function(data, x) ** 2).sum(), (0, 1))
        return jax.jit(value)(m.data, x)

    found, want = loss(sharded), loss(lambda data, x: x @ m.with_data(data).T)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, want)

    q, cache, lengths = array(2, 4, 1, 16), array(2, 4, 30, 16), jnp.array([7, 30], jnp.int32)
    spec = P(*MESH)

    def decode(q, k, lengths):
        return bsk_jax.attention_decode(q, k, k, cache_seqlens=lengths)

    shards = jax.shard_map(decode, mesh=mesh(), in_specs=(spec, spec, P("batch")), out_specs=spec)
    np.testing.assert_allclose(
        jax.jit(shards)(q, cache, lengths), decode(q, cache, lengths), rtol=1e-5, atol=1e-6
    )
