"""Derivatives that operators do not have are refused, not taken for zero; vmap calls one by one."""

import pytest
import torch
from torch.autograd import forward_ad

import blackwell_sparsek as bsk

F64 = torch.float64


def _random(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=F64)


Q = _random(1, 2, 8, 4)
PACKED = _random(8, 2, 4)
OFFSETS = torch.tensor([0, 8], dtype=torch.int32)
LENGTHS = torch.tensor([8], dtype=torch.int32)
WEIGHT = bsk.BSRMatrix.from_mask(_random(8, 8), torch.eye(2, dtype=torch.bool))
X = _random(8, 4)
LSE = torch.zeros(1, 2, 8, dtype=F64)
CALLS = {
    "attention": (lambda x: bsk.attention(x, Q, Q), Q),
    "attention_varlen": (
        lambda x: bsk.attention_varlen(
            x, PACKED, PACKED, OFFSETS, OFFSETS, max_seqlen_q=8, max_seqlen_k=8
        ),
        PACKED,
    ),
    "attention_decode": (
        lambda x: bsk.attention_decode(x, Q, Q, cache_seqlens=LENGTHS),
        Q[:, :, :1].clone(),
    ),
    "scaled_dot_product_attention": (lambda x: bsk.scaled_dot_product_attention(Q, Q, x), Q),
    "merge_states": (lambda x: bsk.merge_states(x, LSE, Q, LSE)[0], Q),
    "matmul": (lambda x: bsk.matmul(WEIGHT, x), X),
    "matmul, sparse": (lambda x: bsk.matmul(WEIGHT.with_data(x), X), WEIGHT.storage),
    "matmul, two sparse": (
        lambda x: bsk.matmul(WEIGHT, bsk.BSRMatrix._from_parts(WEIGHT.pattern, x)).storage,
        WEIGHT.storage,
    ),
    "sddmm": (lambda x: bsk.sddmm(x, X.T, WEIGHT).storage, X),
}


@pytest.mark.parametrize("call", CALLS)
def test_forward_mode_is_refused(call):
    function, x = CALLS[call]
    with pytest.raises(bsk.Unsupported, match=r"has a forward-mode derivative .*; expected \.back"):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))
    with (
        forward_ad.dual_level(),
        pytest.raises(bsk.Unsupported, match=r"has a forward-mode derivative .*; expected \.back"),
    ):
        function(forward_ad.make_dual(x, torch.ones_like(x)))


def test_an_operator_called_directly_refuses_as_well():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(WEIGHT.storage, torch.ones_like(WEIGHT.storage))
        pattern = WEIGHT.pattern
        rest = (pattern.tensors(), pattern.shape, False, X, False, None, None, None, None, "auto")
        with pytest.raises(bsk.Unsupported, match="bsr_matmul: an argument has a forward-mode"):
            torch.ops.bsk.bsr_matmul(dual, *rest)
        with pytest.raises(bsk.Unsupported, match="bsr_matmul: an argument has a forward-mode"):
            torch.ops.bsk.bsr_matmul(WEIGHT.storage, *rest[:3], dual[0], *rest[4:])


ATTENTION = ("attention", "attention_varlen", "scaled_dot_product_attention")
PRODUCTS = ("matmul", "matmul, sparse", "matmul, two sparse", "sddmm")


@pytest.mark.parametrize("call", sorted(set(CALLS) - {*ATTENTION, *PRODUCTS}))
def test_derivatives_of_torch_func_are_refused(call):
    function, x = CALLS[call]
    with pytest.raises(bsk.Unsupported, match=r"is differentiated by torch\.func .*; expected \."):
        torch.func.grad(lambda y: function(y).sum())(x)
    with pytest.raises(bsk.Unsupported, match=r"is differentiated by torch\.func .*; expected \."):
        torch.func.vjp(function, x)
    several = torch.stack([x, -x])
    with pytest.raises(bsk.Unsupported, match=r"is differentiated by torch\.func .*; expected \."):
        torch.func.grad(lambda y: torch.vmap(function)(y).sum())(several)


def _gradient(function, x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x).square().sum(), x)[0]


@pytest.mark.parametrize("call", [*ATTENTION, *PRODUCTS])
def test_derivatives_of_torch_func(call):
    function, x = CALLS[call]
    several = torch.stack([x, 2 * x, -x])
    expected = torch.stack([_gradient(function, one) for one in several])
    gradient = torch.func.grad(lambda y: function(y).square().sum())
    torch.testing.assert_close(gradient(x), expected[0])
    if call == "matmul, sparse":
        return  # `with_data` reads its argument, which `torch.vmap` does not allow
    # a gradient for each of several inputs, in both orders
    torch.testing.assert_close(torch.func.vmap(gradient)(several), expected)
    together = torch.func.grad(lambda y: torch.vmap(function)(y).square().sum())(several)
    torch.testing.assert_close(together, expected)
    out, pull = torch.func.vjp(function, x)
    torch.testing.assert_close(pull(2 * out)[0], expected[0])
    jacobian = torch.func.jacrev(function)(x)
    torch.testing.assert_close(torch.tensordot(2 * out, jacobian, out.dim()), expected[0])


def test_torch_func_over_a_mask_sinks_and_lse():
    mask, sinks = bsk.masks.causal(8, 16), _random(2)

    def function(q, k, sinks):
        out, lse = bsk.attention(
            q, k, k, causal=True, block_mask=mask, sinks=sinks, return_lse=True
        )
        return (out.sum(-1) * lse).sum()

    inputs = [x.clone().requires_grad_() for x in (Q, -Q, sinks)]
    expected = torch.autograd.grad(function(*inputs), inputs)
    found = torch.func.grad(function, argnums=(0, 1, 2))(Q, -Q, sinks)
    torch.testing.assert_close(found, expected)
    per_sample = torch.func.vmap(torch.func.grad(function, argnums=2), in_dims=(0, None, None))
    torch.testing.assert_close(per_sample(Q[None], -Q, sinks)[0], expected[2])


def test_second_derivatives_of_torch_func_are_refused():
    def function(x):
        return bsk.attention(x, Q, Q).sum()

    with pytest.raises(bsk.Unsupported, match="no backward of the backward"):
        torch.func.jacrev(torch.func.jacrev(function))(Q)
    with pytest.raises(bsk.Unsupported, match="no forward-mode derivative"):
        torch.func.hessian(function)(Q)


# Edge blocks with padding, on both sides; half of the blocks stored.
SHAPE, BLOCK = (10, 13), (3, 4)
KEEP = torch.arange(16).view(4, 4) % 3 > 0
EDGES = bsk.BSRMatrix.from_mask(_random(*SHAPE), KEEP, BLOCK)
STORED = bsk.BSRMatrix.from_mask(torch.ones(SHAPE, dtype=F64), KEEP, BLOCK).to_dense()


def _as_dense(values):
    """The matrix of these values, which keeps their gradient."""
    return bsk.BSRMatrix._from_parts(EDGES.pattern, values).to_dense()


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("dense_left", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_products_by_torch_func(transposed, dense_left, activation):
    """Against torch's own gradients of the dense product, of every operand, for each sample."""
    m, k = SHAPE[::-1] if transposed else SHAPE
    x = _random(5, m) if dense_left else _random(k, 5)
    bias = _random(k if dense_left else m)
    residual = _random(5, k) if dense_left else _random(m, 5)
    functions = {
        None: lambda y: y,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
    }

    def ours(values, x, bias, residual):
        w = bsk.BSRMatrix._from_parts(EDGES.pattern, values)
        w = w.T if transposed else w
        a, b = (x, w) if dense_left else (w, x)
        out = bsk.matmul(a, b, bias=bias, residual=residual, activation=activation)
        return out.square().sum()

    def dense(values, x, bias, residual):
        w = _as_dense(values) * STORED
        w = w.mT if transposed else w
        out = x @ w + bias if dense_left else w @ x + bias[:, None]
        return (functions[activation](out) + residual).square().sum()

    every = (0, 1, 2, 3)
    inputs = (EDGES.storage, x, bias, residual)
    expected = torch.func.grad(dense, every)(*inputs)
    torch.testing.assert_close(torch.func.grad(ours, every)(*inputs), expected)
    several = (EDGES.storage, torch.stack([x, -x, 2 * x]), bias, residual)
    dims = (None, 0, None, None)
    expected = torch.func.vmap(torch.func.grad(dense, every), dims)(*several)
    found = torch.func.vmap(torch.func.grad(ours, every), dims)(*several)
    torch.testing.assert_close(found, expected)

    def sum_of(function):
        return lambda *args: torch.func.vmap(function, dims)(*args).sum()

    expected = torch.func.grad(sum_of(dense), every)(*several)
    torch.testing.assert_close(torch.func.grad(sum_of(ours), every)(*several), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_sampled_products_and_pairs_by_torch_func(transposed):
    other = bsk.BSRMatrix.from_mask(_random(13, 6), torch.arange(8).view(4, 2) % 3 < 2, (4, 3))
    a, b = _random(10, 5), _random(5, 13)

    def sampled(a, b):
        return bsk.sddmm(a, b, EDGES).to_dense().pow(3).sum()

    found = torch.func.grad(sampled, (0, 1))(a, b)
    expected = torch.func.grad(lambda a, b: ((a @ b) * STORED).pow(3).sum(), (0, 1))(a, b)
    torch.testing.assert_close(found, expected)

    def pairs(first, second):
        left = bsk.BSRMatrix._from_parts(EDGES.pattern, first)
        right = bsk.BSRMatrix._from_parts(other.pattern, second)
        made = bsk.matmul(right.T, left.T).T if transposed else bsk.matmul(left, right)
        return made.to_dense().pow(3).sum()

    def dense(first, second):
        right = bsk.BSRMatrix._from_parts(other.pattern, second).to_dense()
        return (_as_dense(first) @ right).pow(3).sum()

    inputs = (EDGES.storage, other.storage)
    expected = torch.func.grad(dense, (0, 1))(*inputs)
    torch.testing.assert_close(torch.func.grad(pairs, (0, 1))(*inputs), expected)


def test_higher_derivatives_of_products_by_torch_func():
    def ours(values, x):
        return bsk.matmul(bsk.BSRMatrix._from_parts(EDGES.pattern, values), x).pow(3).sum()

    def dense(values, x):
        return (_as_dense(values) @ x).pow(3).sum()

    x = _random(13, 2)
    for which in ((0, 1), (1, 0), (0, 0), (1, 1)):
        first, second = which
        found, expected = (
            torch.func.jacrev(torch.func.jacrev(f, first), second)(EDGES.storage, x)
            for f in (ours, dense)
        )
        torch.testing.assert_close(found, expected)
    # reverse over vmap over reverse
    found, expected = (
        torch.func.grad(
            lambda x, f=f: (
                torch.func.vmap(torch.func.grad(f, 1), (None, 0))(EDGES.storage, x).square().sum()
            )
        )(torch.stack([x, -x]))
        for f in (ours, dense)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("call", ["matmul", "sddmm", "matmul, two sparse"])
def test_forward_over_reverse_of_products_is_refused(call):
    function, x = CALLS[call]
    with pytest.raises(bsk.Unsupported, match="forward-mode derivative"):
        torch.func.hessian(lambda y: function(y).square().sum())(x)


def test_sinks_of_decoding_have_no_derivative_either():
    with pytest.raises(bsk.Unsupported, match=r"sinks is differentiated by torch\.func"):
        torch.func.grad(
            lambda x: bsk.attention_decode(Q[:, :, :1], Q, Q, cache_seqlens=LENGTHS, sinks=x).sum()
        )(_random(2))


BATCHED = ("attention", "attention_varlen", "scaled_dot_product_attention", "merge_states",
           "matmul", "sddmm")  # fmt: skip


@pytest.mark.parametrize("call", BATCHED)
def test_batched_gradients(call):
    """Gradients for several incoming gradients at once, as gradcheck and jacobian ask for them."""
    function, x = CALLS[call]
    x = x.detach().clone().requires_grad_()
    out = function(x)
    incoming = torch.stack([torch.ones_like(out), torch.rand_like(out), torch.zeros_like(out)])
    (found,) = torch.autograd.grad(out, x, incoming, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(out, x, one, retain_graph=True)[0] for one in incoming]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("call", BATCHED)
def test_gradcheck_with_batched_gradients(call):
    function, x = CALLS[call]
    x = x.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (x,), check_batched_grad=True)


def test_batched_gradients_of_every_input_under_a_mask():
    mask = bsk.masks.causal(8, 16)
    inputs = [x.clone().requires_grad_() for x in (Q, 2 * Q, -Q, _random(2))]

    def function(q, k, v, sinks):
        return bsk.attention(q, k, v, block_mask=mask, sinks=sinks, return_lse=True)

    assert torch.autograd.gradcheck(function, inputs, check_batched_grad=True)


def test_batches_of_gradients_by_kernels(device):
    """Recorded launches, where there are any, do not take a batch for one gradient."""
    x = torch.randn(3, 1, 2, 64, 64, device=device)
    x = x.half() if device.type == "cuda" else x
    q, k = (x[i].clone().requires_grad_() for i in range(2))
    incoming = torch.stack([x[2], x[0]])

    def function(q):
        return bsk.attention(q, k, k, causal=True, deterministic=True)

    for _ in range(3):
        out = function(q)
        one, other = (torch.autograd.grad(out, (q, k), g, retain_graph=True) for g in incoming)
        found = torch.autograd.grad(out, (q, k), incoming, is_grads_batched=True)
        torch.testing.assert_close(found, tuple(map(torch.stack, zip(one, other, strict=True))))
    gradient = torch.func.grad(lambda q: (function(q) * x[2]).sum())
    for got in torch.func.vmap(gradient)(torch.stack([q.detach(), q.detach()])):
        torch.testing.assert_close(got, one[0])


def test_a_jacobian_that_vectorizes():
    found = torch.autograd.functional.jacobian(CALLS["attention"][0], Q, vectorize=True)
    expected = torch.autograd.functional.jacobian(CALLS["attention"][0], Q)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("call", sorted(set(CALLS) - {"matmul, sparse"}))
def test_vmap_over_an_empty_batch(call):
    function, x = CALLS[call]
    found = torch.vmap(function)(x.new_empty((0, *x.shape)))
    one = function(x)
    assert found.shape == (0, *one.shape) and found.dtype == one.dtype


def test_what_is_not_differentiated_takes_part_in_torch_func():
    weight = torch.ones(4, dtype=F64)
    gradient = torch.func.grad(lambda w: (bsk.attention(Q, Q, Q) * w).sum())(weight)
    assert torch.equal(gradient, bsk.attention(Q, Q, Q).sum((0, 1, 2)))


def test_without_a_tangent_a_dual_level_changes_nothing():
    with forward_ad.dual_level():
        assert torch.equal(bsk.attention(Q, Q, Q), bsk.attention(Q, Q, Q, impl="eager"))
        assert bsk.matmul(WEIGHT, X).shape == (8, 4)


@pytest.mark.parametrize("call", sorted(set(CALLS) - {"matmul, sparse"}))
def test_vmap_makes_one_call_after_the_other(call):
    function, x = CALLS[call]
    several = torch.stack([x, 2 * x, -x])
    expected = torch.stack([function(one) for one in several])
    assert torch.equal(torch.vmap(function)(several), expected)
    # along another dimension
    moved = torch.vmap(function, in_dims=1)(several.transpose(0, 1).contiguous())
    assert torch.equal(moved, expected)


def test_vmap_with_a_mask_and_several_results():
    mask = bsk.masks.causal(8, 16)
    both = torch.vmap(lambda x: bsk.attention(x, Q, Q, block_mask=mask, return_lse=True))
    out, lse = both(torch.stack([Q, 2 * Q]))
    again, other = bsk.attention(2 * Q, Q, Q, block_mask=mask, return_lse=True)
    assert torch.equal(out[1], again) and torch.equal(lse[1], other)


@pytest.mark.parametrize("call", ["attention", "matmul", "sddmm", "merge_states"])
def test_gradients_pass_through_vmap(call):
    function, x = CALLS[call]
    several = torch.stack([x, 2 * x]).requires_grad_()
    torch.vmap(function)(several).square().sum().backward()
    again = several.detach().clone().requires_grad_()
    torch.stack([function(one) for one in again]).square().sum().backward()
    torch.testing.assert_close(several.grad, again.grad)
