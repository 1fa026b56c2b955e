"""Kernels under `interpreter_checks` (switched on by conftest) and, for contrast, without."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.testing import interpreter
from blackwell_sparsek.testing.inputs import integers, normal
from blackwell_sparsek.testing.interpreter import interpreter_checks
from blackwell_sparsek.testing.tolerance import assert_within_budget

pytestmark = pytest.mark.usefixtures("interpreted")


@triton.jit
def _product_kernel(out_ptr, a, b, WIDE: tl.constexpr):
    if WIDE:
        a = a.to(tl.int64)
    tl.store(out_ptr, a * b)


@triton.jit
def _assert_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "x must be positive")


@triton.jit
def _dot_kernel(out_ptr, a_ptr, b_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(a_ptr + offs), tl.load(b_ptr + offs), input_precision="ieee")
    tl.store(out_ptr + offs, product.to(out_ptr.dtype.element_ty))


@triton.jit
def _copy_kernel(out_ptr, x_ptr, keep, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs, mask=offs < keep, other=0.0)
    tl.store(out_ptr + offs, tl.where(offs < keep, x, 0.0).to(out_ptr.dtype.element_ty))


@triton.jit
def _misuse_kernel(out_ptr, x_ptr, HOW: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    if HOW == "add":
        x = x + x
    elif HOW == "sum":
        x = tl.sum(x, 0) + tl.zeros_like(x)
    elif HOW == "compare":
        x = tl.where(x > x, x, x)
    tl.store(out_ptr + offs, x)


@triton.jit
def _count_kernel(out_ptr, n):
    total = 0
    for i in range(0, n):
        total += i
    tl.store(out_ptr, total)


def test_int32_overflow_is_an_error():
    out = torch.zeros(1, dtype=torch.int64)
    _product_kernel[(1,)](out, 2**16, 2**15 - 1, False)
    assert out.item() == 2**16 * (2**15 - 1)
    with pytest.raises(Exception, match="int32 overflow detected for operation mul"):
        _product_kernel[(1,)](out, 2**16, 2**15, False)
    _product_kernel[(1,)](out, 2**16, 2**15, True)
    assert out.item() == 2**31


@triton.jit
def _compute_kernel(out_ptr, x_ptr, y_ptr, OPERATION: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    if OPERATION == "add":
        out = x + y
    elif OPERATION == "sub":
        out = x - y
    else:
        out = x * y
    tl.store(out_ptr + offs, out)


@pytest.mark.parametrize(
    ("operation", "dtype", "x", "y", "over"),
    [
        ("add", torch.int32, 2**31 - 9, 8, 9),
        ("add", torch.int32, -(2**31) + 9, -9, -10),
        ("sub", torch.int32, -(2**31) + 9, 9, 10),
        ("sub", torch.uint32, 9, 9, 10),
        ("mul", torch.int32, 2**16, -(2**15), 2**15),
        ("mul", torch.uint32, 2**16, 2**16 - 1, 2**16),
        ("add", torch.int16, 2**15 - 9, 8, 9),
        ("add", torch.uint8, 200, 55, 56),
    ],
)
def test_overflow_of_one_element_of_a_tile_is_an_error(operation, dtype, x, y, over):
    first = torch.full((4,), 1, dtype=dtype)
    second, out = first.clone(), torch.zeros_like(first)
    # through numpy, because torch cannot index all of these dtypes
    first.numpy()[2], second.numpy()[2] = x, y
    _compute_kernel[(1,)](out, first, second, operation, 4)
    exact = {"add": x + y, "sub": x - y, "mul": x * y}[operation]
    assert out.numpy()[2] == exact
    second.numpy()[2] = over
    bits = 8 * dtype.itemsize
    with pytest.raises(Exception, match=f"int{bits} overflow detected for operation {operation}"):
        _compute_kernel[(1,)](out, first, second, operation, 4)


@pytest.mark.parametrize("operation", ["add", "mul"])
def test_sums_and_products_of_64_bits_are_not_checked(operation):
    x = torch.full((4,), 2**62)
    _compute_kernel[(1,)](x, x, x, operation, 4)
    assert x.tolist() == [{"add": -(2**63), "mul": 0}[operation]] * 4


@triton.jit
def _shapes_kernel(out_ptr, N: tl.constexpr, M: tl.constexpr):
    x = tl.zeros([N, M], tl.float32)
    tl.static_assert(x.shape[0] == N and x.shape[1] == M and x.numel == N * M)
    tl.static_assert(x.to(tl.int8).dtype == tl.int8)
    x = tl.reshape(x, x.shape[:-1] + [M // 2, 2])  # noqa: RUF005
    tl.static_assert(len(x.shape) == 3 and x.type.shape[1] == M // 2)
    tl.store(out_ptr, tl.sum(tl.sum(tl.sum(x + 1, 2), 1), 0))


def test_tiles_of_many_shapes():
    out = torch.zeros(1)
    for n, m in ((2, 4), (4, 2), (8, 8), (2, 4)):
        _shapes_kernel[(1,)](out, n, m)
        assert out.item() == n * m


def test_device_assert_is_an_error():
    _assert_kernel[(1,)](torch.ones(1))
    with pytest.raises(Exception, match="x must be positive"):
        _assert_kernel[(1,)](torch.zeros(1))


def test_bf16_products_are_exact_in_fp32():
    a, b = (integers(16, 16, seed=i, dtype=torch.bfloat16) for i in (0, 1))
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](out, a, b, 16)
    assert torch.equal(out, a.float() @ b.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dot_meets_the_budget(dtype):
    a, b = (normal(32, 32, seed=i, dtype=dtype) for i in (0, 1))
    out = torch.empty(32, 32, dtype=dtype)
    _dot_kernel[(1,)](out, a, b, 32)
    plain = (a.float() @ b.float()).to(dtype)
    assert_within_budget(out, a.double() @ b.double(), plain)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_casts_round_as_torch_does(source, target):
    x = torch.cat([normal(60, seed=0), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])]).to(source)
    out = torch.empty(64, dtype=target)
    _copy_kernel[(1,)](out, x, 64, 64)
    assert torch.equal(out, x.to(target))


def test_rounding_to_bf16_agrees_with_torch_on_ties_and_specials():
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 3.4e38, 1e-40, torch.nan])
    bits = interpreter.fp32_to_bf16(ties.numpy())
    expected = ties.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bits[:-1], expected[:-1])
    assert np.isnan(interpreter.bf16_to_fp32(bits[-1:]))


@pytest.mark.parametrize("how", ["add", "sum", "compare"])
def test_bf16_arithmetic_is_refused(how):
    x = torch.ones(16)
    _misuse_kernel[(1,)](torch.empty(16), x, how, 16)
    with pytest.raises(Exception, match=r"bf16 values.*cast to fp32 first"):
        _misuse_kernel[(1,)](torch.empty(16).bfloat16(), x.bfloat16(), how, 16)


@triton.jit
def _scalar_in_mask_kernel(out_ptr, x_ptr, keep, N: tl.constexpr):
    offs = tl.arange(0, N)
    live = (tl.load(x_ptr) > 0) & (offs < keep)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, live, other=7), ~(live & (keep < 0)))


def test_comparisons_of_scalars_make_masks(monkeypatch):
    """Triton 3.9 refuses a mask of int32; older releases take one, so its type is looked at."""
    from triton.runtime import interpreter as upstream

    masks = set()

    def noting(access, place):
        def noted(self, *args):
            masks.add((str(args[place].data.dtype), str(args[place].dtype)))
            return access(self, *args)

        return noted

    builder = type(upstream.interpreter_builder)
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        monkeypatch.setattr(builder, name, noting(getattr(builder, name), place))
    x, out = torch.arange(1, 9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    _scalar_in_mask_kernel[(1,)](out, x, 5, 8)
    assert out.tolist() == [1, 2, 3, 4, 5, 7, 7, 7]
    assert masks == {("bool", "int1")}


def test_range_over_an_argument_works():
    out = torch.zeros(1, dtype=torch.int32)
    _count_kernel[(1,)](out, 5)
    assert out.item() == 10


def test_without_the_checks_the_faults_are_silent():
    """The contrast that gives the tests above their meaning, in a process without conftest."""
    code = """
import torch, triton, triton.language as tl
import test_interpreter as t
out = torch.zeros(1, dtype=torch.int64)
t._product_kernel[(1,)](out, 2**16, 2**15, False)
print(out.item() != 2**31)
a, b = (t.integers(16, 16, seed=i, dtype=torch.bfloat16) for i in (0, 1))
c = torch.empty(16, 16)
t._dot_kernel[(1,)](c, a, b, 16)
print(not torch.equal(c, a.float() @ b.float()))
"""
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, *filter(None, sys.path)])
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_everything_is_put_back():
    from triton.runtime import interpreter as upstream

    builder = upstream.interpreter_builder
    before = (builder.options, type(builder).create_dot, upstream._patch_lang_tensor)
    with pytest.raises(KeyError), interpreter_checks():
        assert (builder.options, type(builder).create_dot, upstream._patch_lang_tensor) != before
        raise KeyError
    assert (builder.options, type(builder).create_dot, upstream._patch_lang_tensor) == before


def test_an_interpreter_without_the_switches_is_refused(monkeypatch):
    from triton.runtime import interpreter as upstream

    @dataclasses.dataclass(frozen=True)
    class Options:
        debug: bool = False

    monkeypatch.setattr(upstream.interpreter_builder, "options", Options())
    with (
        pytest.raises(RuntimeError, match=r"lacks options\.sanitize_overflow"),
        interpreter_checks(),
    ):
        pass
