"""BSRMatrix and BSRPattern: structure, conversions, copies, compilation."""

import copy
import pickle

import pytest
import torch

from blackwell_sparsek.core.errors import InvalidInput, InvalidType, Unsupported
from blackwell_sparsek.matmul.api import sddmm
from blackwell_sparsek.sparse.matrix import BSRMatrix, BSRPattern

SHAPES = [
    ((64, 64), (16, 16)),
    ((65, 63), (16, 32)),
    ((17, 15), (1, 4)),
    ((1, 1), (8, 8)),
    ((100, 3), (7, 5)),
    ((0, 8), (4, 4)),
    ((8, 0), (4, 4)),
    ((0, 0), (4, 4)),
]


def keep_of(shape, block_shape, density=0.4):
    rows, cols = (-(-s // b) for s, b in zip(shape, block_shape, strict=True))
    keep = torch.rand(rows, cols) < density
    keep[rows // 2 : rows // 2 + 1] = False
    return keep


def masked(x, keep, block_shape):
    full = keep.repeat_interleave(block_shape[0], 0).repeat_interleave(block_shape[1], 1)
    return x * full[: x.shape[0], : x.shape[1]].to(x.device)


@pytest.mark.parametrize(("shape", "block_shape"), SHAPES)
def test_round_trip_and_transpose(shape, block_shape, device):
    x = torch.randn(shape, device=device)
    keep = keep_of(shape, block_shape).to(device)
    dense = masked(x, keep, block_shape)
    matrix = BSRMatrix.from_mask(x, keep, block_shape)
    matrix.validate()
    assert matrix.shape == shape and matrix.block_shape == block_shape
    assert matrix.nnz_blocks == int(keep.sum())
    assert torch.equal(matrix.to_dense(), dense)

    transpose = matrix.T
    assert transpose.storage is matrix.storage and transpose.pattern is matrix.pattern
    assert transpose.shape == shape[::-1] and transpose.block_shape == block_shape[::-1]
    assert torch.equal(transpose.to_dense(), dense.T)
    rebuilt = BSRMatrix(transpose.data, transpose.indices, transpose.indptr, transpose.shape)
    assert torch.equal(rebuilt.to_dense(), dense.T)
    assert torch.equal(transpose.with_data(transpose.data).to_dense(), dense.T)
    assert torch.equal(transpose.T.to_dense(), dense)


def test_pattern_against_nested_loops(device):
    keep = keep_of((90, 50), (10, 7))
    matrix = BSRMatrix.from_mask(torch.zeros(90, 50, device=device), keep.to(device), (10, 7))
    pattern = matrix.pattern
    coordinates = [(r, c) for r in range(9) for c in range(8) if keep[r, c]]
    assert pattern.row_indices().tolist() == [r for r, _ in coordinates]
    assert pattern.indices.tolist() == [c for _, c in coordinates]
    assert pattern.indptr.tolist() == [sum(r < i for r, _ in coordinates) for i in range(10)]
    by_column = sorted(range(len(coordinates)), key=lambda e: coordinates[e][::-1])
    assert pattern.transpose_perm.tolist() == by_column
    transposed = pattern.transposed()
    assert pattern.transposed() is transposed
    assert transposed.indices.tolist() == [coordinates[e][0] for e in by_column]
    assert transposed.row_indices().tolist() == [coordinates[e][1] for e in by_column]
    transposed.validate()
    back = transposed.transposed()
    for mine, theirs in zip(pattern.tensors(), back.tensors(), strict=True):
        assert torch.equal(mine, theirs) and mine.dtype == torch.int32
    assert (pattern.rows_b, pattern.cols_b) == (9, 8)


def test_from_dense_keeps_blocks_with_any_nonzero():
    x = torch.zeros(6, 6)
    x[0, 0], x[5, 2], x[3, 4] = 1.0, -0.5, float("nan")
    matrix = BSRMatrix.from_dense(x, (3, 3))
    assert matrix.indices.tolist() == [0, 0, 1] and matrix.indptr.tolist() == [0, 1, 3]
    assert BSRMatrix.from_dense(torch.zeros(6, 6), (3, 3)).nnz_blocks == 0


def test_from_mask_keeps_zero_blocks_and_infers_the_block():
    keep = torch.tensor([[True, False], [True, True]])
    matrix = BSRMatrix.from_mask(torch.zeros(6, 8), keep)
    assert matrix.nnz_blocks == 3 and matrix.block_shape == (3, 4)
    with pytest.raises(InvalidInput, match="from_mask: block_shape cannot be inferred"):
        BSRMatrix.from_mask(torch.zeros(5, 8), keep)
    assert BSRMatrix.from_mask(torch.zeros(5, 8), keep, (3, 4)).nnz_blocks == 3
    with pytest.raises(InvalidInput, match=r"block_keep has a wrong shape; expected \[3, 2\]"):
        BSRMatrix.from_mask(torch.zeros(5, 8), keep, (2, 4))
    with pytest.raises(InvalidType, match=r"block_keep has an unsupported dtype; .*torch.bool"):
        BSRMatrix.from_mask(torch.zeros(6, 8), keep.int())
    with pytest.raises(InvalidType, match="from_mask: block_keep is not a tensor"):
        BSRMatrix.from_mask(torch.zeros(6, 8), [[True]])
    with pytest.raises(InvalidInput, match=r"block_keep has a wrong rank; .*\[rows_b, cols_b\]"):
        BSRMatrix.from_mask(torch.zeros(6, 8), keep[None])
    with pytest.raises(InvalidInput, match=r"from_mask: arguments are on different devices"):
        BSRMatrix.from_mask(torch.zeros(6, 8), keep.to("meta"))
    with pytest.raises(Unsupported, match=r"from_mask: block_keep is on the meta device"):
        BSRMatrix.from_mask(torch.zeros(6, 8, device="meta"), keep.to("meta"))


def test_from_element_mask_zeroes_the_rest_of_a_block():
    x = torch.full((5, 5), float("nan"))
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[0, 1] = mask[4, 4] = True
    x[mask] = 3.0
    matrix = BSRMatrix.from_element_mask(x, mask, (2, 2))
    assert matrix.nnz_blocks == 2
    assert torch.equal(matrix.to_dense(), torch.where(mask, 3.0, 0.0))
    with pytest.raises(InvalidInput, match=r"mask has a wrong shape; expected \[5, 5\]"):
        BSRMatrix.from_element_mask(x, mask[:4], (2, 2))


@pytest.mark.parametrize("bad", [(0, 2), (2,), (2, 2, 2), (-1, 2)])
def test_bad_block_shapes(bad):
    with pytest.raises(InvalidInput, match="from_dense: block_shape is"):
        BSRMatrix.from_dense(torch.ones(4, 4), bad)


def test_bad_dense():
    with pytest.raises(InvalidType, match="x is not a tensor"):
        BSRMatrix.from_dense([[1.0]], (1, 1))
    with pytest.raises(InvalidInput, match=r"x has a wrong rank; expected \[M, K\]"):
        BSRMatrix.from_dense(torch.ones(4), (1, 1))
    with pytest.raises(InvalidType, match="x has an unsupported dtype"):
        BSRMatrix.from_dense(torch.ones(4, 4).int(), (1, 1))


@pytest.mark.parametrize("transposed", [False, True])
def test_constructors_are_differentiable(transposed):
    x = torch.randn(7, 9, dtype=torch.float64)
    x[:4, 3:6] = 0
    x.requires_grad_()
    keep = keep_of((7, 9), (2, 3), 0.5)
    weight = torch.randn(9, 7) if transposed else torch.randn(7, 9)
    everything, positive = torch.ones(7, 9), x.detach() > 0
    for matrix, elements in (
        (BSRMatrix.from_dense(x, (2, 3)), everything),
        (BSRMatrix.from_mask(x, keep, (2, 3)), everything),
        (BSRMatrix.from_element_mask(x, positive, (2, 3)), positive),
    ):
        x.grad = None
        dense = (matrix.T if transposed else matrix).to_dense()
        (dense * weight).sum().backward()
        kept = BSRMatrix._from_parts(matrix.pattern, torch.ones_like(matrix.storage)).to_dense()
        expected = kept * elements * (weight.T if transposed else weight)
        assert torch.equal(x.grad, expected)


def test_gradient_reaches_storage_through_transposed_data():
    matrix = BSRMatrix.from_dense(torch.ones(4, 6), (2, 3))
    storage = matrix.storage.clone().requires_grad_()
    t = BSRMatrix._from_parts(matrix.pattern, storage).T
    (t.data * torch.arange(4.0)[:, None, None]).sum().backward()
    assert storage.grad[:, 0, 0].tolist() == [0.0, 2.0, 1.0, 3.0]


@pytest.mark.parametrize("transposed", [False, True])
def test_torch_round_trip(transposed, device):
    dense = masked(torch.randn(8, 12, device=device), keep_of((8, 12), (2, 3)), (2, 3))
    matrix = BSRMatrix.from_torch(dense.to_sparse_bsr((2, 3)))
    assert torch.equal(matrix.to_dense(), dense)
    seen = matrix.T if transposed else matrix
    assert torch.equal(seen.to_torch().to_dense(), seen.to_dense())


def test_torch_refusals():
    with pytest.raises(InvalidType, match=r"t has a wrong layout; expected torch.sparse_bsr"):
        BSRMatrix.from_torch(torch.eye(4).to_sparse_csr())
    with pytest.raises(InvalidType, match="t has a wrong layout"):
        BSRMatrix.from_torch(torch.eye(4))
    with pytest.raises(InvalidType, match="t is not a tensor"):
        BSRMatrix.from_torch("t")
    with pytest.raises(Unsupported, match="t has batch or dense dimensions"):
        BSRMatrix.from_torch(torch.eye(4).expand(2, 4, 4).contiguous().to_sparse_bsr((2, 2)))
    with pytest.raises(InvalidInput, match=r"to_torch: shape has ragged edge blocks.*\[5, 4\]"):
        BSRMatrix.from_dense(torch.ones(5, 4), (2, 2)).to_torch()


@pytest.mark.parametrize("transposed", [False, True])
def test_scipy_round_trip(transposed):
    sparse = pytest.importorskip("scipy.sparse")
    dense = masked(torch.randn(8, 12), keep_of((8, 12), (2, 3)), (2, 3))
    m = sparse.bsr_matrix(dense.numpy(), blocksize=(2, 3))
    matrix = BSRMatrix.from_scipy(m)
    assert torch.equal(matrix.to_dense(), dense)
    m.data[:] = 0  # a copy was taken
    assert torch.equal(matrix.to_dense(), dense)
    seen = matrix.T if transposed else matrix
    assert (seen.to_scipy().toarray() == seen.to_dense().numpy()).all()


def test_scipy_refusals():
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(InvalidType, match=r"m is not in BSR format; .*tobsr.*got csr_"):
        BSRMatrix.from_scipy(sparse.csr_matrix(torch.eye(4).numpy()))
    with pytest.raises(InvalidType, match=r"got ndarray"):
        BSRMatrix.from_scipy(torch.eye(4).numpy())
    data = torch.ones(2, 2, 2).numpy()
    unsorted = sparse.bsr_matrix((data, [1, 0], [0, 2]), shape=(2, 4))
    with pytest.raises(InvalidInput, match=r"indices is not sorted at entry 1 \(block row 0\)"):
        BSRMatrix.from_scipy(unsorted)
    with pytest.raises(InvalidType, match="to_scipy: data has an unsupported dtype"):
        BSRMatrix.from_dense(torch.ones(4, 4).bfloat16(), (2, 2)).to_scipy()
    with pytest.raises(InvalidInput, match="to_scipy: shape has ragged edge blocks"):
        BSRMatrix.from_dense(torch.ones(5, 4), (2, 2)).to_scipy()


def test_to_dtype_and_device(device):
    matrix = BSRMatrix.from_dense(torch.eye(6), (2, 3))
    half = matrix.T.to(torch.float16)
    assert half.dtype == torch.float16 and half.is_transposed and half.pattern is matrix.pattern
    moved = matrix.to(device, torch.float64)
    assert moved.device.type == device.type and moved.dtype == torch.float64
    assert moved.pattern.device.type == device.type
    assert torch.equal(moved.to_dense().cpu(), torch.eye(6).double())
    assert matrix.to("meta").pattern.device.type == "meta"
    assert matrix.to("cpu").storage is matrix.storage
    with pytest.raises(InvalidType, match=r"BSRMatrix.to: data has an unsupported dtype"):
        matrix.to(torch.int32)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies(duplicate):
    matrix = BSRMatrix.from_dense(torch.eye(6), (2, 3)).T
    assert matrix.logical_pattern is matrix.pattern.transposed()
    other = duplicate(matrix)
    other.validate()
    assert other.is_transposed and torch.equal(other.to_dense(), torch.eye(6))
    assert torch.equal(other.indices, matrix.indices)
    other.storage.zero_()
    assert matrix.storage.any() == (duplicate is not copy.copy)


def test_repr_and_density():
    matrix = BSRMatrix.from_dense(torch.eye(4), (2, 2))
    assert repr(matrix) == (
        "BSRMatrix(shape=(4, 4), block_shape=(2, 2), nnz_blocks=2, density=0.5, "
        "dtype=torch.float32, device=cpu)"
    )
    assert repr(matrix.pattern).startswith("BSRPattern(shape=(4, 4), block_shape=(2, 2)")
    assert BSRMatrix.from_dense(torch.ones(0, 4), (2, 2)).density == 0.0


def test_pattern_constructor():
    pattern = BSRPattern(torch.tensor([0, 1, 3]), torch.tensor([1, 0, 2]), (3, 5), (2, 2))
    assert pattern.nnz_blocks == 3 and pattern.indices.dtype == torch.int32
    with pytest.raises(InvalidType, match="block_shape is not a pair"):
        BSRPattern(torch.tensor([0]), torch.tensor([]).int(), (0, 5), 2)


def test_compile_closed_over_and_as_argument():
    matrix = BSRMatrix.from_mask(torch.randn(6, 8), torch.eye(3, 4) > 0, (2, 2))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def closed(x):
        return matrix.T.to_dense() * x + matrix.density

    @torch.compile(fullgraph=True, backend="aot_eager")
    def argument(m, x):
        return m.T.to_dense() * x, m.with_data(m.data) if m.shape[0] == 99 else m.T

    expected = matrix.to_dense().T * 2
    two = torch.full((), 2.0)
    assert torch.equal(closed(two), expected + matrix.density)
    for m in (matrix, BSRMatrix.from_mask(torch.randn(6, 8), torch.ones(3, 4) > 0, (2, 2))):
        product, transpose = argument(m, two)
        assert torch.equal(product, m.to_dense().T * 2)
        assert isinstance(transpose, BSRMatrix) and torch.equal(transpose.data, m.T.data)


def test_patterns_made_in_inference_mode_serve_training():
    dense, keep = torch.randn(32, 48), torch.eye(2, 3, dtype=torch.bool)
    matrix = BSRMatrix.from_mask(dense, keep)
    with torch.inference_mode():
        made = BSRMatrix.from_mask(dense, keep)
        patterns = [made.pattern, made.T.logical_pattern, matrix.T.logical_pattern]
        patterns.append(BSRPattern(made.indptr, made.indices, (32, 48), (16, 16)))
    for pattern in (*patterns, matrix.pattern.transposed()):
        assert not any(x.is_inference() for x in (*pattern.tensors(), pattern.row_indices()))
    x = torch.randn(48, 2, requires_grad=True)
    product = BSRMatrix._from_parts(made.pattern, made.storage.clone()) @ x
    product.sum().backward()
    assert torch.equal(x.grad, made.to_dense().sum(0)[:, None].expand(48, 2))


@pytest.mark.parametrize("name", ["indptr", "indices"])
@pytest.mark.parametrize("seen", [lambda m: m, lambda m: m.T])
def test_a_pattern_that_was_written_to_is_refused(name, seen):
    matrix = BSRMatrix.from_dense(torch.ones(6, 8), (2, 4))
    x = torch.ones(8, 3)
    matrix @ x
    getattr(seen(matrix), name).add_(0)
    uses = (
        lambda: matrix @ x,
        lambda: x.T @ matrix.T,
        lambda: sddmm(torch.ones(6, 2), torch.ones(2, 8), matrix),
        lambda: matrix @ matrix.T,
    )
    for use in uses:
        with pytest.raises(InvalidInput, match=r"indptr/indices were written in place.*make a new"):
            use()


def test_traced_patterns_are_not_followed(monkeypatch):
    """Neither where they are made nor where they are used: a tracer has tensors of its own."""
    plain = BSRMatrix.from_dense(torch.ones(6, 8), (2, 4))
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        traced = BSRMatrix.from_dense(torch.ones(6, 8), (2, 4))
        for matrix in (plain, traced):
            matrix.indices.add_(0)
            matrix.pattern.check_unwritten()
    traced.pattern.check_unwritten()
    with pytest.raises(InvalidInput, match="were written in place"):
        plain.pattern.check_unwritten()


def test_optimizer_steps_on_the_values_are_no_writes_to_the_pattern():
    matrix = BSRMatrix.from_dense(torch.ones(6, 8), (2, 4))
    matrix @ torch.ones(8, 3)
    matrix.storage.mul_(2.0)
    assert torch.equal(matrix @ torch.ones(8, 1), torch.full((6, 1), 16.0))
