import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

from blackwell_sparsek.core.activations import ACTIVATIONS  # noqa: E402
from blackwell_sparsek.core.activations import activate as torch_activate  # noqa: E402
from blackwell_sparsek.device.epilogue import activate, finish, slope  # noqa: E402
from blackwell_sparsek.device.tiles import offsets_2d  # noqa: E402
from blackwell_sparsek.testing.tolerance import assert_within_budget  # noqa: E402


@triton.jit
def _activate_kernel(out_ptr, x_ptr, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(out_ptr + offs, activate(tl.load(x_ptr + offs), ACTIVATION))


@triton.jit
def _slope_kernel(out_ptr, x_ptr, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(out_ptr + offs, slope(tl.load(x_ptr + offs), ACTIVATION))


@triton.jit
def _finish_kernel(
    out_ptr, acc_ptr, bias_ptr, residual_ptr, ACTIVATION: tl.constexpr, SIZE: tl.constexpr
):
    offs = tl.arange(0, SIZE)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs)
    residual = None
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offs)
    acc = tl.load(acc_ptr + offs)
    out = finish(acc, bias, residual, ACTIVATION, out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs, out)


@triton.jit
def _offsets_kernel(out_ptr, row_stride, col_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    offsets = offsets_2d(rows, cols, row_stride, col_stride)
    tl.store(out_ptr + rows[:, None] * COLS + cols[None, :], offsets)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_torch(device, activation):
    x = torch.cat([torch.linspace(-12, 12, 1016), torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    x = torch.cat([x, torch.tensor([80.0, -80.0, 1e30, -1e30])]).to(device)
    out = torch.full_like(x, float("nan"))
    _activate_kernel[(1,)](out, x, activation, 1024)
    assert_within_budget(out, torch_activate(x.double(), activation), torch_activate(x, activation))


@pytest.mark.parametrize("kernel", [_activate_kernel, _slope_kernel])
def test_an_activation_that_is_not_known_does_not_run(interpreted, kernel):
    """It must not pass for the identity."""
    out = torch.ones(2)
    with pytest.raises(InterpreterError, match="unknown activation"):
        kernel[(1,)](out, out.clone(), "tanh", 2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_keep_what_is_not_finite(device, activation):
    x = torch.tensor([float("nan"), float("inf")], device=device)
    out = torch.zeros_like(x)
    _activate_kernel[(1,)](out, x, activation, 2)
    assert out[0].isnan() and out[1] == float("inf")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("extras", [(), ("bias",), ("residual",), ("bias", "residual")])
def test_finish_rounds_once(device, activation, extras):
    acc = torch.randn(256, device=device) * 4
    bias = torch.randn(256, device=device).half() if "bias" in extras else None
    residual = torch.randn(256, device=device).half() if "residual" in extras else None
    out = torch.full((256,), float("nan"), dtype=torch.float16, device=device)
    _finish_kernel[(1,)](out, acc, bias, residual, activation, 256)
    exact = acc.double() + (bias if bias is not None else 0)
    exact = torch_activate(exact, activation) + (residual if residual is not None else 0)
    assert_within_budget(out, exact, exact.half())


def test_offsets_pass_2_to_the_31(device):
    out = torch.empty(4, 8, dtype=torch.int64, device=device)
    _offsets_kernel[(1,)](out, 2**30, 2**29, 4, 8)
    rows, cols = torch.arange(4)[:, None], torch.arange(8)[None, :]
    assert torch.equal(out.cpu(), rows * 2**30 + cols * 2**29)
