"""matmul and sddmm as users call them: results, gradients, errors, autocast, compilation."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from blackwell_sparsek.core.errors import InvalidInput, InvalidType, Unsupported
from blackwell_sparsek.dispatch.dispatcher import explain
from blackwell_sparsek.matmul.api import matmul, sddmm
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.testing.inputs import block_pattern, integers, normal
from blackwell_sparsek.testing.layouts import strided_like

IMPLS = ["auto", "eager", "reference"]


def matrix(shape=(20, 28), block_shape=(4, 8), seed=0, dtype=torch.float32, device="cpu"):
    rows, cols = (-(-s // b) for s, b in zip(shape, block_shape, strict=True))
    keep = block_pattern(rows, cols, density=0.5, seed=seed)
    x = integers(*shape, seed=seed, dtype=dtype)
    return BSRMatrix.from_mask(x, keep, block_shape).to(device)


def trainable(a, transposed=False):
    """The same matrix, and the storage that its gradient will reach."""
    storage = a.storage.detach().clone().requires_grad_()
    return BSRMatrix._from_parts(a.pattern, storage, transposed), storage


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("transposed", [False, True])
def test_three_operand_combinations(impl, transposed, device):
    a = matrix(device=device)
    a = a.T if transposed else a
    dense = a.to_dense()
    x = integers(3, a.shape[1], 5, seed=1, device=device)
    y = integers(3, 5, a.shape[0], seed=2, device=device)
    assert torch.equal(matmul(a, x, impl=impl), dense @ x)
    assert torch.equal(matmul(y, a, impl=impl), y @ dense)
    product = matmul(a, a.T, impl=impl)
    assert isinstance(product, BSRMatrix)
    product.validate()
    assert torch.equal(product.to_dense(), dense @ dense.T)


def test_operators(device):
    a = matrix(device=device)
    x = integers(28, 5, seed=1, device=device)
    assert torch.equal(a @ x, a.to_dense() @ x)
    assert torch.equal(x.mT @ a.T, (a.to_dense() @ x).mT)
    assert torch.equal((a @ a.T).to_dense(), a.to_dense() @ a.to_dense().T)
    with pytest.raises(TypeError):
        a @ 3
    with pytest.raises(TypeError):
        3 @ a


@pytest.mark.parametrize("impl", IMPLS)
def test_vectors(impl):
    a = matrix()
    x, y = integers(28, seed=1), integers(20, seed=2)
    bias = integers(20, seed=3)
    assert torch.equal(matmul(a, x, impl=impl), a.to_dense() @ x)
    assert torch.equal(matmul(y, a, impl=impl), y @ a.to_dense())
    expected = F.relu(a.to_dense() @ x + bias) + y
    assert torch.equal(matmul(a, x, bias=bias, activation="relu", residual=y, impl=impl), expected)


@pytest.mark.parametrize("dense_left", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_training_equals_dense_torch(dense_left, activation, impl, device):
    a, storage = trainable(matrix(dtype=torch.float64, device=device))
    m, k = a.shape
    options = {"dtype": torch.float64, "device": device}
    x = normal(2, *((5, m) if dense_left else (k, 5)), seed=1, **options)
    bias = normal(k if dense_left else m, seed=2, **options)
    residual = normal(2, *((5, k) if dense_left else (m, 5)), seed=3, **options)
    mine = [t.clone().requires_grad_() for t in (x, bias, residual)]
    theirs = [t.clone().requires_grad_() for t in (x, bias, residual)]
    weight = a.to_dense().detach().requires_grad_()

    operands = (mine[0], a) if dense_left else (a, mine[0])
    extras = {"bias": mine[1], "residual": mine[2], "activation": activation, "impl": impl}
    actual = matmul(*operands, **extras)
    product = theirs[0] @ weight if dense_left else weight @ theirs[0]
    product = product + (theirs[1] if dense_left else theirs[1][:, None])
    expected = (getattr(F, activation)(product) if activation else product) + theirs[2]
    torch.testing.assert_close(actual, expected)
    actual.square().sum().backward()
    expected.square().sum().backward()
    for ours, reference in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.grad, reference.grad)
    kept = BSRMatrix._from_parts(a.pattern, storage.grad).to_dense()
    stored = BSRMatrix._from_parts(a.pattern, torch.ones_like(storage)).to_dense()
    torch.testing.assert_close(kept, weight.grad * stored)
    a.with_data(storage.grad)
    with torch.no_grad():
        fused = matmul(*operands, **extras)
    torch.testing.assert_close(fused, actual)


def test_sparse_sparse_training(device):
    a, sa = trainable(matrix((10, 13), (3, 4), 1, torch.float64, device))
    b, sb = trainable(matrix((7, 13), (2, 4), 2, torch.float64, device), transposed=True)
    product = matmul(a, b)
    product.validate()
    weight = normal(10, 7, seed=3, dtype=torch.float64, device=device)
    (product.to_dense() * weight).sum().backward()
    da, db = a.to_dense().detach().requires_grad_(), b.to_dense().detach().requires_grad_()
    ((da @ db) * weight).sum().backward()
    for m, storage, expected in ((a, sa, da.grad), (b.T, sb, db.grad.T)):
        grad = BSRMatrix._from_parts(m.pattern, storage.grad)
        grad.validate()
        stored = BSRMatrix._from_parts(m.pattern, torch.ones_like(storage)).to_dense()
        torch.testing.assert_close(grad.to_dense(), expected * stored)


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize(
    ("shape", "dense", "left"),
    [
        ((20, 28), (28, 0), False),
        ((20, 28), (0, 28, 3), False),
        ((20, 28), (0, 20), True),
        ((20, 28), (2, 0, 20), True),
        ((0, 28), (28, 3), False),
        ((20, 0), (0, 3), False),
        ((20, 0), (3, 20), True),
    ],
)
def test_empty_with_gradients(shape, dense, left, impl, device):
    a, storage = trainable(matrix(shape, device=device))
    x = torch.randn(dense, device=device, requires_grad=True)
    out = matmul(x, a, impl=impl) if left else matmul(a, x, impl=impl)
    expected = x @ a.to_dense() if left else a.to_dense() @ x
    assert torch.equal(out, expected)
    out.sum().backward()
    assert x.grad.eq(0).all() and storage.grad.eq(0).all()


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_no_stored_blocks(impl, device):
    a, storage = trainable(BSRMatrix.from_dense(torch.zeros(20, 28, device=device), (4, 8)))
    x = torch.full((28, 3), float("nan"), device=device, requires_grad=True)
    bias = torch.arange(20.0, device=device)
    out = matmul(a, x, bias=bias, impl=impl)
    assert torch.equal(out, bias[:, None].expand(20, 3))
    out.sum().backward()
    assert x.grad.eq(0).all() and storage.grad.shape == (0, 4, 8)
    assert matmul(a, matrix((28, 4), (8, 4), device=device), impl=impl).nnz_blocks == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_all_operands(dtype, device):
    a, storage = trainable(matrix(device=device))
    x = integers(28, 5, seed=1, device=device).requires_grad_()
    with torch.autocast(device.type, dtype):
        y = matmul(a, x)
        s = sddmm(x, x.mT, matrix((28, 28), device=device))
        c = matmul(a, a.T)
        unchanged = matmul(a.to(torch.float64), x.double())
    assert y.dtype == s.dtype == c.dtype == dtype and unchanged.dtype == torch.float64
    assert torch.equal(y, (a.to_dense() @ x).to(dtype))
    y.sum().backward()
    assert storage.grad.dtype == x.grad.dtype == torch.float32


def test_inference_mode(device):
    with torch.inference_mode():
        a = matrix(device=device)
        x = integers(28, 5, seed=1, device=device)
        for _ in range(2):
            assert torch.equal(matmul(a, x, activation="relu"), F.relu(a.to_dense() @ x))
        assert torch.equal(matmul(a, a.T).to_dense(), a.to_dense() @ a.to_dense().T)


def test_repeated_products_are_bitwise_equal(device):
    a = BSRMatrix.from_dense(normal(65, 70, seed=0, device=device), (16, 16))
    x = normal(70, 33, seed=1, device=device)
    first = matmul(a, x)
    assert all(torch.equal(matmul(a, x), first) for _ in range(5))


def test_out_dtype():
    a = matrix(dtype=torch.float16)
    x = integers(28, 5, seed=1, dtype=torch.float16)
    assert matmul(a, x).dtype == torch.float16
    assert torch.equal(matmul(a, x, out_dtype=torch.float32), a.to_dense().float() @ x.float())
    assert matmul(a, a.T, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_sddmm(impl, device):
    p = matrix((21, 30), device=device)
    a = integers(2, 21, 5, seed=1, device=device).requires_grad_()
    b = integers(2, 5, 30, seed=2, device=device).requires_grad_()
    keep = BSRMatrix._from_parts(p.pattern, torch.ones_like(p.storage)).to_dense()
    expected = (a @ b).sum(0) * keep
    for pattern, result in ((p, expected), (p.pattern, expected)):
        out = sddmm(a, b, pattern, impl=impl)
        out.validate()
        assert torch.equal(out.to_dense(), result)
    out_t = sddmm(b.mT, a.mT, p.T, impl=impl)
    assert out_t.shape == (30, 21) and torch.equal(out_t.to_dense(), expected.T)
    grads = torch.autograd.grad(out.to_dense().square().sum(), (a, b))
    for mine, theirs in zip(
        grads, torch.autograd.grad(expected.square().sum(), (a, b)), strict=True
    ):
        assert torch.equal(mine, theirs)


def closed_over(a):
    return lambda x, bias: matmul(a, x, bias=bias, activation="gelu")


@pytest.mark.parametrize("transposed", [False, True])
def test_compile_fullgraph(transposed):
    a, storage = trainable(matrix(), transposed)
    x = normal(a.shape[1], 5, seed=1).requires_grad_()
    bias = normal(a.shape[0], seed=2)
    expected = matmul(a, x, bias=bias, activation="gelu")
    grads = torch.autograd.grad(expected.sum(), (x, storage))

    compiled = torch.compile(closed_over(a), fullgraph=True, backend="aot_eager")
    as_argument = torch.compile(
        lambda m, x, bias: matmul(m, x) + matmul(x.mT, m.T).mT + bias[:, None],
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(x, bias), expected)
    compiled_grads = torch.autograd.grad(compiled(x, bias).sum(), (x, storage))
    for mine, theirs in zip(compiled_grads, grads, strict=True):
        torch.testing.assert_close(mine, theirs)
    for m in (a, matrix((20, 28), seed=9), matrix((20, 28), seed=10)):
        x = normal(m.shape[1], 5, seed=1)
        bias = normal(m.shape[0], seed=2)
        torch.testing.assert_close(as_argument(m, x, bias), 2 * (m @ x) + bias[:, None])


def test_compile_returns_a_matrix_and_takes_dynamic_sizes():
    p = matrix().pattern
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def step(a, b):
        return sddmm(a, b, p)

    for k in (33, 34, 70):
        a, b = integers(20, k, seed=1), integers(k, 28, seed=2)
        assert torch.equal(step(a, b).to_dense(), sddmm(a, b, p).to_dense())
    assert counter.frame_count == 1


def test_explain():
    a = matrix()
    decision = explain(matmul, a, torch.ones(28, 2), activation="relu")
    assert decision.chosen == "eager"
    assert "only runs when asked for" in decision.reasons["reference"]
    assert "A @ X on cpu" in str(decision) and "relu" in str(decision)


def test_meta_tensors_give_shapes_only():
    a = matrix().to("meta")
    out = matmul(torch.empty(3, 20, device="meta"), a)
    assert out.shape == (3, 28) and out.device.type == "meta"


GOOD = torch.ones(28, 5)


@pytest.mark.parametrize(
    ("dense", "options", "error", "expected"),
    [
        ([1.0], {}, InvalidType, "b is not a tensor; expected torch.Tensor, got list"),
        (GOOD.int(), {}, InvalidType, "b has an unsupported dtype; .*torch.int32"),
        (GOOD.to_sparse(), {}, InvalidType, "b has a sparse layout"),
        (torch.nested.nested_tensor([GOOD]), {}, Unsupported, "b is a tensor subclass"),
        (GOOD.half(), {}, InvalidType, "b/a have different dtypes; .*autocast.*float16.*float32"),
        (GOOD[:27], {}, InvalidInput, r"b does not fit; expected 28 rows, got \[27, 5\] for"),
        (GOOD[0, 0], {}, InvalidInput, "b has a wrong rank"),
        (GOOD.to("meta"), {}, InvalidInput, "different devices; expected one, got b on meta, a on"),
        (
            strided_like(torch.ones(28, 5).T.contiguous(), "last_gap").T,
            {},
            InvalidInput,
            r"b is contiguous in neither of its last two dimensions; .*strides \(2, 56\)",
        ),
        (GOOD, {"activation": "tanh"}, InvalidInput, "activation is unknown; .*'gelu'.*'tanh'"),
        (GOOD, {"out_dtype": torch.int8}, InvalidType, "out_dtype is unsupported; .*torch.int8"),
        (GOOD, {"bias": torch.ones(28)}, InvalidInput, r"bias has a wrong shape; expected \[20\]"),
        (GOOD, {"bias": torch.ones(20).to("meta")}, InvalidInput, "different devices; .*bias on"),
        (GOOD, {"bias": 1.0}, InvalidType, "bias is not a tensor"),
        (GOOD, {"bias": torch.ones(20).double()}, InvalidType, "bias has an unsupported dtype"),
        (GOOD, {"residual": torch.ones(5, 20)}, InvalidInput, r"residual .* expected \[20, 5\]"),
        (GOOD, {"impl": "fast"}, InvalidInput, "impl is unknown; expected one of 'auto'"),
        (GOOD, {"impl": "sm90"}, Unsupported, "impl='sm90' cannot run this"),
    ],
)
def test_errors(dense, options, error, expected):
    a = matrix()
    matmul(a, GOOD, bias=torch.ones(20), residual=torch.ones(20, 5))
    # which implementations there are is for the operator to say
    name = "bsr_matmul" if "cannot run this" in expected else "matmul"
    with pytest.raises(error, match=rf"^{name}: .*{expected}"):
        matmul(a, dense, **options)


def test_errors_name_the_dense_operand_on_the_left():
    a = matrix()
    assert matmul(torch.ones(1, 20), a).shape == (1, 28)
    with pytest.raises(InvalidInput, match=r"matmul: a does not fit; expected 20 columns"):
        matmul(torch.ones(1, 21), a)
    with pytest.raises(InvalidType, match=r"matmul: a/b are both dense; .*got Tensor and Tensor"):
        matmul(GOOD, GOOD)


def test_errors_of_two_sparse_operands():
    a, b = matrix(), matrix((28, 12), (8, 3))
    assert matmul(a, b).block_shape == (4, 3)
    for option in ({"bias": torch.ones(20)}, {"activation": "relu"}, {"residual": torch.ones(1)}):
        (name,) = option
        with pytest.raises(InvalidInput, match=f"{name} is not available for two block-sparse"):
            matmul(a, b, **option)
    with pytest.raises(InvalidInput, match=r"a/b do not fit; .*\[20, 28\] and \[27, 12\]"):
        matmul(a, matrix((27, 12), (8, 3)))
    with pytest.raises(InvalidInput, match=r"blocks that do not fit; .*\[4, 8\] and \[7, 3\]"):
        matmul(a, matrix((28, 12), (7, 3)))
    with pytest.raises(InvalidType, match="a/b have different dtypes"):
        matmul(a, b.to(torch.float16))


@pytest.mark.parametrize(
    ("a", "b", "error", "expected"),
    [
        (torch.ones(20, 5), torch.ones(6, 28), InvalidInput, r"b has a wrong shape; .*\[5, 28\]"),
        (torch.ones(19, 5), torch.ones(5, 28), InvalidInput, r"a has a wrong shape; .*\[20, 5\]"),
        (torch.ones(2, 20, 5), torch.ones(5, 28), InvalidInput, r"expected \[2, 5, 28\]"),
        (torch.ones(20), torch.ones(5, 28), InvalidInput, "a has a wrong rank"),
        (torch.ones(20, 5).half(), torch.ones(5, 28), InvalidType, "a/b have different dtypes"),
        (torch.ones(20, 10)[:, ::2], torch.ones(5, 28), InvalidInput, "a is contiguous in neither"),
        (None, torch.ones(5, 28), InvalidType, "a is not a tensor; .*NoneType"),
    ],
)
def test_sddmm_errors(a, b, error, expected):
    p = matrix()
    sddmm(torch.ones(20, 5), torch.ones(5, 28), p)
    with pytest.raises(error, match=r"^sddmm: .*" + expected):
        sddmm(a, b, p)
    with pytest.raises(InvalidType, match="pattern has a wrong type; expected BSRPattern or BSRM"):
        sddmm(torch.ones(20, 5), torch.ones(5, 28), torch.ones(5, 4))
    with pytest.raises(InvalidInput, match=r"^sddmm: impl is unknown; expected one of 'auto'"):
        sddmm(torch.ones(20, 5), torch.ones(5, 28), p, impl="fast")
