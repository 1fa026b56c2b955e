"""Products with blocks and activations in e4m3 against fp64 on what they stand for."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.fp8 import Quantized
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.matmul import plan
from blackwell_sparsek.matmul.fp8_op import bsr_matmul_fp8, fp8_matmul_dispatch, why_not_triton
from blackwell_sparsek.matmul.triton import spmm
from blackwell_sparsek.testing import poison
from blackwell_sparsek.testing.bsr import random_bsr
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

E4M3 = torch.float8_e4m3fn
KERNELS = pytest.mark.parametrize("impl", ["triton", "eager"])


def matrix(shape, block_shape, device, seed=1):
    """A matrix in fp8 whose blocks differ in size by up to a thousand."""
    wide = random_bsr(shape, block_shape, seed=seed, device=device)
    sizes = torch.logspace(-2, 1, max(wide.nnz_blocks, 1), device=device)[: wide.nnz_blocks]
    return wide.with_data(wide.data * sizes[:, None, None]).to_fp8()


def activations(*shape, device, seed=2):
    """Rounded rows, some of whose channels are much larger than others."""
    x = normal(*shape, seed=seed, device=device)
    return bsk.fp8.quantize(x * torch.logspace(0, 2, shape[-1], device=device), "1x128")


def check(x, w, impl, out_dtype=torch.float32, **options):
    """Within the budget of the same products summed by plain PyTorch in fp32."""
    with poison.poisoned_empty():
        out = bsk.matmul(x, w, out_dtype=out_dtype, impl=impl, **options)
    assert out.dtype == out_dtype and out.is_contiguous()
    exact = bsk.matmul(x, w, out_dtype=torch.float32, impl="reference", **options)
    plain = dense_product(x, w, **options).to(out_dtype)
    assert_within_budget(out, exact.double(), plain)
    return out


def dense_product(x, w, bias=None, residual=None, activation=None):
    """The formula on dense fp32 matrices, without any code of the products."""
    out = x.dequantize() @ w.to_dense()
    out = out if bias is None else out + bias.float()
    functions = {"relu": torch.relu, "silu": torch.nn.functional.silu}
    functions["gelu"] = torch.nn.functional.gelu
    out = out if activation is None else functions[activation](out)
    return out if residual is None else out + residual.float()


@KERNELS
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32), (16, 128), (128, 16)])
@pytest.mark.parametrize("tokens", [1, 17, 65])
def test_layers_of_awkward_sizes(impl, block, tokens, device):
    bh, bw = block
    w = matrix((3 * bh - 7, 2 * bw + 5), block, device)
    check(activations(tokens, w.shape[1], device=device), w.T, impl)


@KERNELS
def test_a_matrix_that_is_not_transposed(impl, device):
    w = matrix((150, 70), (64, 32), device)
    check(activations(19, 150, device=device), w, impl)


@KERNELS
@pytest.mark.parametrize("width", [128, 256])
def test_the_scale_of_channels_changes_within_a_block(impl, width, device):
    w = matrix((40, 300), (16, width), device)
    check(activations(9, 300, device=device), w.T, impl)


def scales_beside_nan(x):
    """The same activations, with NaN behind the scales of each token."""
    beside = torch.full((*x.descale.shape[:-1], x.descale.shape[-1] + 1), torch.nan)
    beside = beside.to(x.descale.device)
    beside[..., :-1] = x.descale
    return x._replace(descale=beside[..., :-1])


@KERNELS
def test_steps_beyond_the_channels_read_no_scale(impl, device):
    w = matrix((40, 300), (16, 256), device)
    x = activations(9, 300, device=device)
    assert torch.equal(check(scales_beside_nan(x), w.T, impl), check(x, w.T, impl))


@KERNELS
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16])
def test_epilogue(impl, activation, out_dtype, device):
    w = matrix((70, 90), (32, 32), device)
    bias = normal(70, seed=3, dtype=out_dtype, device=device)
    residual = normal(2, 19, 70, seed=4, device=device)
    x = activations(2, 19, 90, device=device)
    options = {"bias": bias, "residual": residual, "activation": activation}
    check(x, w.T, impl, out_dtype, **options)


@KERNELS
def test_batches_that_do_not_merge(impl, device):
    w = matrix((40, 50), (16, 16), device)
    x = activations(3, 2, 7, 50, device=device)
    apart = x._replace(data=x.data.transpose(0, 1), descale=x.descale.transpose(0, 1))
    together = check(x, w.T, impl)
    assert torch.equal(check(apart, w.T, impl), together.transpose(0, 1))


def test_rows_that_are_cut(device):
    w = matrix((48, 16 * 40), (16, 16), device)
    x = activations(5, w.shape[1], device=device)
    small = replace(spmm.spmm_fp8_config(problem()), tile_m=16, tile_n=16, tile_k=16, chunk=3)
    made = []
    planned = plan.spmm_plan

    def cut(*args):
        made.append(planned(*args))
        return made[-1]

    with (
        mock.patch.object(spmm, "spmm_fp8_config", lambda p: small),
        mock.patch.object(plan, "spmm_plan", cut),
    ):
        check(x, w.T, "triton")
    assert made[0].n_split_rows > 0


@KERNELS
def test_no_blocks_and_no_tokens(impl, device):
    bias = normal(40, seed=5, device=device)
    keep = torch.zeros(3, 4, dtype=torch.bool, device=device)
    empty = bsk.BSRMatrix.from_mask(torch.zeros(40, 50, device=device), keep, (16, 16)).to_fp8()
    x = activations(3, 50, device=device)
    assert torch.equal(check(x, empty.T, impl, bias=bias), bias.expand(3, 40))
    w = matrix((40, 50), (16, 16), device)
    none = bsk.fp8.quantize(torch.zeros(0, 50, device=device), "1x128")
    assert bsk.matmul(none, w.T, impl=impl).shape == (0, 40)


@KERNELS
def test_nan_reaches_its_token_and_only_that(impl, device):
    w = matrix((32, 32), (16, 16), device)
    x = normal(4, 32, seed=6, device=device)
    x[2, 5] = torch.nan
    out = bsk.matmul(bsk.fp8.quantize(x, "1x128"), w.T, impl=impl)
    rows = out.isnan().any(1).tolist()
    assert rows == [False, False, True, False]


@KERNELS
@pytest.mark.parametrize("shape", [(50,), (3, 50), (2, 3, 50), (1, 2, 1, 2, 3, 50)])
def test_rounding_on_the_fly(impl, shape, device):
    w = matrix((40, 50), (16, 16), device).T
    x = normal(*shape, seed=7, dtype=torch.float16, device=device)
    residual = normal(*shape[:-1], 40, seed=8, dtype=torch.float16, device=device)
    out = bsk.fp8.matmul(x, w, residual=residual, activation="relu", impl=impl)
    rows = bsk.fp8.quantize(x.view(-1, 50), "1x128")
    given = {"residual": residual.view(-1, 40), "activation": "relu", "impl": impl}
    exact = bsk.matmul(rows, w, out_dtype=torch.float16, **given)
    assert out.dtype == torch.float16 and torch.equal(out, exact.view(*shape[:-1], 40))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (1, 2, 1, 2, 3, 0), (1, 2, 0, 2, 3, 0)])
def test_rounding_no_channels(shape):
    w = bsk.BSRMatrix.from_dense(torch.zeros(32, 0), (16, 16)).to_fp8().T
    out = bsk.fp8.matmul(torch.zeros(shape), w)
    assert torch.equal(out, torch.zeros(*shape[:-1], 32))


def test_a_gradient_of_the_bias_inside_of_vmap_is_refused():
    w, bias = matrix((40, 50), (16, 16), "cpu").T, torch.zeros(2, 40, requires_grad=True)
    with pytest.raises(bsk.InvalidInput, match="bias requires gradients"):
        torch.vmap(lambda bias: bsk.fp8.matmul(torch.zeros(3, 50), w, bias=bias))(bias)


def test_error_of_rounding_stays_within_that_of_e4m3(device):
    x = normal(64, 512, seed=9, device=device)
    w = random_bsr((256, 512), (128, 128), seed=10, device=device)
    exact = x.double() @ w.to_dense().double().T
    out = bsk.fp8.matmul(x, w.to_fp8().T)
    # values of both operands are off by at most 2^-4 of themselves, each independently
    error = float((out.double() - exact).norm() / exact.norm())
    assert 0 < error < 2**0.5 * 2**-4


def problem(**changes):
    w = bsk.BSRMatrix.from_dense(torch.ones(256, 256), (128, 128)).to_fp8()
    x = bsk.fp8.quantize(torch.ones(8, 256), "1x128")
    found = []
    stop = mock.patch.object(
        fp8_matmul_dispatch, "run", lambda impl, call: found.append(call) or call.given.empty_out()
    )
    with stop:
        bsk.matmul(x, w.T)
    return replace(found[0].problem, arch=Arch("cuda", 90, 132, 232448, False), **changes)


def test_what_the_portable_kernel_refuses():
    assert why_not_triton(problem()) is None
    assert "divides 128" in why_not_triton(problem(block_shape=(96, 96)))
    assert "multiples of 16" in why_not_triton(problem(block_shape=(8, 16)))
    assert "needs float16" in why_not_triton(problem(out_dtype=torch.float64))


def test_explain_of_products_that_round_is_about_the_product():
    w = matrix((32, 32), (16, 16), "cpu").T
    assert bsk.explain(bsk.fp8.matmul, torch.randn(4, 32), w).op == "bsr_matmul_fp8"
    layer = bsk.nn.BSRLinear(64, 32, 16, sparsity=0.5).to_fp8()
    assert bsk.explain(layer, torch.randn(4, 64)).op == "bsr_matmul_fp8"
    (found,) = bsk.explain(torch.nn.Sequential(layer)).layers
    assert found.chosen == {1: "eager", 4096: "eager"}


def test_explain_and_compile(device):
    w = matrix((32, 32), (16, 16), device)
    x = activations(4, 32, device=device)
    decision = bsk.explain(bsk.matmul, x, w.T)
    assert decision.op == "bsr_matmul_fp8"
    assert decision.chosen == ("triton" if device.type == "cuda" else "eager")

    def layer(data, descale):
        return bsk.matmul(Quantized(data, descale, "1x128", 128, None, False), w.T)

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x.data, x.descale), layer(x.data, x.descale))


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_opcheck(impl):
    w, x = matrix((40, 50), (16, 16), "cpu"), activations(3, 50, device="cpu")
    bias, residual = normal(40, seed=3), normal(3, 40, seed=4)
    stored = (w.storage, list(w.pattern.tensors()), list(w.pattern.shape), True)
    options = (bias, residual, "relu", torch.bfloat16, impl)
    arguments = (w.stored_descale, x.descale, *stored, x.data, True, *options)
    # the other tests compare tensors in fp8, which torch does not do on a CPU
    torch.library.opcheck(bsr_matmul_fp8, arguments, test_utils="test_faketensor")


def wide(**options):
    return torch.randn(4, 32, **options)


def learnt_scales(w):
    """A matrix in fp8 whose scales require gradients."""
    return w.with_data(w.data, w.descale.clone().requires_grad_())


W = bsk.BSRMatrix.from_dense(torch.ones(16, 32), (16, 16))
X8 = bsk.fp8.quantize(torch.ones(4, 32), "1x128")
E5M2_X8 = bsk.fp8.quantize(torch.ones(4, 32), "1x128", dtype=torch.float8_e5m2)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: bsk.matmul(wide(), W.to_fp8().T),
            TypeError,
            r"a is not in fp8.*bsk\.fp8\.matmul.*, got torch.float32$",
        ),
        (lambda: bsk.matmul(X8, W.T), TypeError, r"b is not in fp8.*to_fp8\(\)"),
        (lambda: bsk.matmul(W.to_fp8(), X8), ValueError, r"x @ w\.T, with the quantized operand"),
        (lambda: W.to_fp8() @ wide().T, TypeError, "b is not in fp8"),
        (
            lambda: bsk.matmul(bsk.fp8.quantize(wide(), "tensor"), W.to_fp8().T),
            ValueError,
            "a has other scales.*1x128.*got 'tensor'",
        ),
        (
            lambda: bsk.matmul(bsk.fp8.quantize(wide(), "1x128", smooth=True), W.to_fp8().T),
            ValueError,
            "a was smoothed",
        ),
        (
            lambda: bsk.matmul(E5M2_X8, W.to_fp8().T),
            TypeError,
            "a.data.*float8_e4m3fn",
        ),
        (lambda: bsk.matmul(X8, W.to_fp8()), ValueError, r"a does not fit.*\[\.\.\., tokens, 16\]"),
        (
            lambda: bsk.matmul(X8._replace(descale=X8.descale[:2]), W.to_fp8().T),
            ValueError,
            "a.descale",
        ),
        (lambda: bsk.matmul(X8, W.to_fp8().T, out_dtype=torch.float64), ValueError, "out_dtype"),
        (
            lambda: bsk.matmul(X8, W.to_fp8().T, bias=torch.ones(16, requires_grad=True)),
            ValueError,
            r"bias requires gradients.*before to_fp8\(\)",
        ),
        (
            lambda: bsk.matmul(
                X8._replace(descale=X8.descale.clone().requires_grad_()), W.to_fp8().T
            ),
            ValueError,
            r"a\.descale requires gradients.*before to_fp8\(\)",
        ),
        (lambda: bsk.matmul(X8, learnt_scales(W.to_fp8()).T), ValueError, r"b\.descale requires"),
        (lambda: bsk.matmul(X8, W.to_fp8().T, bias=torch.ones(15)), ValueError, "bias"),
        (lambda: bsk.matmul(W.to_fp8().T, W.to_fp8()), ValueError, r"a is in fp8.*dequantize\(\)"),
        (lambda: bsk.fp8.matmul(wide(), W.T), TypeError, r"w is not in fp8.*w\.to_fp8\(\)"),
        (lambda: bsk.fp8.matmul(wide(), W.to_dense()), TypeError, "w has a wrong type"),
        (lambda: bsk.fp8.matmul(wide(), W.to_fp8()), ValueError, "x does not fit"),
        (
            lambda: bsk.fp8.matmul(wide(requires_grad=True), W.to_fp8().T),
            ValueError,
            "x requires gradients",
        ),
        (
            lambda: bsk.fp8.matmul(
                wide().expand(2, 2, 2, 2, 4, 32).transpose(0, 4), W.to_fp8().T
            ),
            ValueError,
            "x cannot be seen as rows",
        ),
        (
            lambda: bsk.fp8.matmul(wide()[0], W.to_fp8().T, residual=torch.ones(1, 16)),
            ValueError,
            "residual has a wrong shape",
        ),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()
