"""The block-sparse operators: registration, fakes, derivatives, compilation."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from blackwell_sparsek.core.errors import InvalidInput, Unsupported
from blackwell_sparsek.matmul.op import bsr_matmul, bsr_pair_products, bsr_sddmm
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.sparse.product import product_pattern
from blackwell_sparsek.testing.inputs import block_pattern, normal

IMPLS = ["reference", "eager"]


def matrix(shape=(10, 13), block_shape=(3, 4), seed=0, dtype=torch.float64, device="cpu"):
    rows, cols = (-(-s // b) for s, b in zip(shape, block_shape, strict=True))
    keep = block_pattern(rows, cols, density=0.5, seed=seed)
    x = normal(*shape, seed=seed, dtype=dtype)
    return BSRMatrix.from_mask(x, keep, block_shape).to(device)


def leaf(x):
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_()


LAYOUTS = {
    "row major": lambda *s: normal(*s, seed=1),
    "column major": lambda *s: normal(*s[:-2], s[-1], s[-2], seed=1).mT,
    "row gap": lambda *s: normal(*s[:-1], s[-1] + 3, seed=1)[..., : s[-1]],
    "batch": lambda *s: normal(2, 3, *s, seed=1),
    "expanded batch": lambda *s: normal(*s, seed=1).expand(2, 3, *s),
    "permuted batch": lambda *s: normal(2, s[0], 3, s[1], seed=1).transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dense_left", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_opcheck_matmul(layout, transposed, dense_left, impl):
    a = matrix(dtype=torch.float32)
    m, k = a.shape[::-1] if transposed else a.shape
    dense = LAYOUTS[layout](*((5, m) if dense_left else (k, 5)))
    tail = (5, k) if dense_left else (m, 5)
    bias = normal(tail[1] if dense_left else tail[0], seed=2)
    residual = normal(*dense.shape[:-2], *tail, seed=3)
    if "expanded" not in layout:
        dense = dense.requires_grad_()
    torch.library.opcheck(
        bsr_matmul,
        (
            leaf(a.storage),
            a.pattern.tensors(),
            list(a.pattern.shape),
            transposed,
            dense,
            dense_left,
            leaf(bias),
            leaf(residual),
            None,
            torch.bfloat16 if layout == "row gap" else None,
            impl,
        ),
    )


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_opcheck_matmul_with_activation(activation):
    a = matrix(dtype=torch.float32)
    arguments = (a.pattern.tensors(), list(a.pattern.shape), False, normal(13, 5, seed=1), False)
    torch.library.opcheck(
        bsr_matmul, (leaf(a.storage), *arguments, None, None, activation, None, "eager")
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("impl", IMPLS)
def test_opcheck_sddmm(layout, impl):
    p = matrix().pattern
    a, b = LAYOUTS[layout](10, 6), LAYOUTS[layout](6, 13)
    if "expanded" not in layout:
        a, b = a.requires_grad_(), b.requires_grad_()
    torch.library.opcheck(bsr_sddmm, (a, b, p.tensors(), [10, 13], [3, 4], None, impl))


def pair_arguments(a_transposed, b_transposed, dtype=torch.float64, device="cpu"):
    a = matrix((13, 10), (4, 3), dtype=dtype, device=device).T
    a = a if a_transposed else matrix(dtype=dtype, device=device)
    b = matrix((7, 13), (2, 4), 5, dtype=dtype, device=device).T
    b = b if b_transposed else matrix((13, 7), (4, 2), 5, dtype=dtype, device=device)
    _, pairs = product_pattern(a.pattern, b.pattern, a_transposed, b_transposed)
    return leaf(a.storage), leaf(b.storage), list(pairs), a_transposed, b_transposed


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_opcheck_pair_products(a_transposed, b_transposed, impl):
    arguments = pair_arguments(a_transposed, b_transposed, torch.float32)
    torch.library.opcheck(bsr_pair_products, (*arguments, None, impl))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dense_left", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_gradcheck_matmul(transposed, dense_left, batch, impl, activation, device):
    a = matrix((5, 7), (2, 3), device=device)
    m, k = a.shape[::-1] if transposed else a.shape
    options = {"dtype": torch.float64, "device": device}
    dense = normal(*batch, *((3, m) if dense_left else (k, 3)), seed=1, **options)
    bias = normal(k if dense_left else m, seed=2, **options)
    residual = normal(*batch, *((3, k) if dense_left else (m, 3)), seed=3, **options)

    def product(values, dense, bias, residual):
        # padding is no input: a gradient check must not move it
        values = BSRMatrix._from_parts(a.pattern, values).to_dense()
        keep = BSRMatrix._from_parts(a.pattern, torch.ones_like(a.storage)).to_dense() != 0
        values = BSRMatrix.from_element_mask(values, keep, (2, 3)).storage
        return bsr_matmul(
            values,
            a.pattern.tensors(),
            list(a.pattern.shape),
            transposed,
            dense,
            dense_left,
            bias,
            residual,
            activation,
            None,
            impl,
        )

    inputs = (leaf(a.storage), leaf(dense), leaf(bias), leaf(residual))
    assert gradcheck(product, inputs, fast_mode=True)
    if batch:
        assert gradgradcheck(product, inputs, fast_mode=True)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("impl", IMPLS)
def test_gradcheck_sddmm(batch, impl, device):
    p = matrix((5, 7), (2, 3), device=device).pattern
    options = {"dtype": torch.float64, "device": device}
    a = leaf(normal(*batch, 5, 4, seed=1, **options))
    b = leaf(normal(*batch, 4, 7, seed=2, **options))

    def product(a, b):
        return bsr_sddmm(a, b, p.tensors(), [5, 7], [2, 3], None, impl)

    assert gradcheck(product, (a, b), fast_mode=True)
    assert gradgradcheck(product, (a, b), fast_mode=True)


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_gradcheck_pair_products(a_transposed, b_transposed, impl, device):
    first, second, *rest = pair_arguments(a_transposed, b_transposed, device=device)
    first, second = leaf(first[:, :2, :2]), leaf(second[:, :2, :2])

    def product(first, second):
        return bsr_pair_products(first, second, *rest, None, impl)

    assert gradcheck(product, (first, second), fast_mode=True)
    assert gradgradcheck(product, (first, second), fast_mode=True)


def test_gradients_of_values_are_zero_in_the_padding(device):
    a = BSRMatrix.from_mask(torch.ones(5, 5), torch.ones(2, 2) > 0, (3, 3)).to(device)
    for transposed in (False, True):
        values = leaf(a.storage)
        x = torch.full((5, 2), 1e38, device=device)
        tensors = a.pattern.tensors()
        rest = (tensors, [5, 5], transposed, x, False, None, None, None, None, "eager")
        (bsr_matmul(values, *rest) * 1e30).sum().backward()
        a.with_data(values.grad)
        assert values.grad.isinf().sum() == 25


@pytest.mark.parametrize("grad_layout", ["expanded", "strided", "transposed"])
def test_any_layout_of_the_incoming_gradient(grad_layout):
    a = matrix()
    values, x = leaf(a.storage), leaf(normal(13, 6, seed=1, dtype=torch.float64))
    out = bsr_matmul(
        values, a.pattern.tensors(), [10, 13], False, x, False, None, None, None, None, "eager"
    )
    grad = {
        "expanded": torch.ones((), dtype=torch.float64).expand(10, 6),
        "strided": normal(20, 12, seed=2, dtype=torch.float64)[::2, ::2],
        "transposed": normal(6, 10, seed=2, dtype=torch.float64).mT,
    }[grad_layout]
    d_values, d_x = torch.autograd.grad(out, (values, x), grad)
    torch.testing.assert_close(d_x, a.to_dense().T @ grad)
    expected = a.with_data(d_values).to_dense()
    keep = a.with_data((a.storage != 0).double()).to_dense()
    torch.testing.assert_close(expected, (grad @ x.T).detach() * keep)


def test_gradient_dtypes_follow_the_inputs():
    a = matrix(dtype=torch.bfloat16)
    values, x = leaf(a.storage), leaf(normal(13, 6, seed=1, dtype=torch.bfloat16))
    bias, residual = leaf(normal(10, seed=2)), leaf(normal(10, 6, seed=3, dtype=torch.bfloat16))
    rest = (None, torch.float32, "eager")
    out = bsr_matmul(values, a.pattern.tensors(), [10, 13], False, x, False, bias, residual, *rest)
    assert out.dtype == torch.float32
    out.sum().backward()
    grads = [t.grad.dtype for t in (values, x, bias, residual)]
    assert grads == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("train_values", "train_dense"), [(True, False), (False, True)])
def test_only_what_a_gradient_needs_is_kept(train_values, train_dense):
    a = matrix(dtype=torch.float32)
    values = a.storage.clone().requires_grad_(train_values)
    dense = normal(13, 6, seed=1).requires_grad_(train_dense)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = bsr_matmul(
            *(values, a.pattern.tensors(), [10, 13], False, dense, False),
            *(None, None, None, None, "eager"),
        )
    assert (dense.shape in kept) == train_values
    assert (values.shape in kept) == train_dense
    out.sum().backward()


def test_unused_blocks_of_a_pair_product_get_zero_gradients():
    a = BSRMatrix.from_dense(torch.ones(2, 4), (2, 2))
    b = BSRMatrix.from_mask(torch.ones(4, 2), torch.tensor([[True], [False]]))
    _, pairs = product_pattern(a.pattern, b.pattern, False, False)
    first = leaf(a.storage)
    bsr_pair_products(first, b.storage, list(pairs), False, False, None, "eager").sum().backward()
    assert first.grad[0].eq(2).all() and first.grad[1].eq(0).all()


def test_explicit_implementations_do_not_fall_back():
    a = matrix()
    rest = (a.pattern.tensors(), [10, 13], False, normal(13, 2, seed=1), False)
    with pytest.raises(Unsupported, match="bsr_matmul: impl='sm90' cannot run this"):
        bsr_matmul(a.storage, *rest, None, None, None, None, "sm90")
    with pytest.raises(InvalidInput, match="bsr_matmul: impl is unknown; expected one of 'auto'"):
        bsr_matmul(a.storage, *rest, None, None, None, None, "fast")
