"""Accesses of interpreted kernels outside of their tensors, under the checks that conftest sets."""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.testing.interpreter_bounds import bounds_checked

pytestmark = pytest.mark.usefixtures("interpreted")

N = 8


class Pair(NamedTuple):
    """Tensors of one argument."""

    first: torch.Tensor
    second: torch.Tensor


@triton.jit
def _copy_kernel(pair, start, count, N: tl.constexpr):
    offs = tl.arange(0, N)
    live = offs < count
    tl.store(pair.first + offs, tl.load(pair.second + start + offs, live, other=0), live)


@triton.jit
def _store_kernel(out_ptr, place):
    tl.store(out_ptr + place, 1)


@triton.jit
def _add_kernel(out_ptr, start, count, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.atomic_add(out_ptr + start + offs, 1, offs < count)


@triton.jit
def _swap_kernel(out_ptr, place):
    tl.atomic_cas(out_ptr + place, 0, 1)


@triton.jit
def _column_kernel(out_ptr, x_ptr, stride, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs * stride))


def refused(outside, of):
    """The error of `outside` of `of` accesses."""
    return pytest.raises(
        Exception, match=f"IndexError.*{outside} of {of} accesses .* outside of the tensors"
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32, torch.int64], ids=str)
def test_reads_end_with_the_tensor(dtype):
    memory = torch.arange(3 * N).to(dtype)
    x, out = memory[N : 2 * N], torch.zeros(N, dtype=dtype)
    _copy_kernel[(1,)](Pair(out, x), 0, N, N)
    assert torch.equal(out, x)
    for start, count, outside in ((1, N, 1), (-2, N, 2), (N, 3, 3), (-N, 1, 1)):
        with refused(outside, count):
            _copy_kernel[(1,)](Pair(out, x), start, count, N)


def test_what_a_mask_hides_is_not_accessed():
    x, out = torch.arange(N), torch.zeros(N, dtype=torch.int64)
    _copy_kernel[(1,)](Pair(out[:3], x), 5, 3, N)
    assert out.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    with refused(1, 4):
        _copy_kernel[(1,)](Pair(out[:3], x), 0, 4, N)
    _copy_kernel[(1,)](Pair(out, x), 10**6, 0, N)


@pytest.mark.parametrize("place", [-1, N])
def test_writes_and_atomics_end_with_the_tensor(place):
    memory = torch.zeros(3 * N, dtype=torch.int32)
    out = memory[N : 2 * N]
    with refused(1, 1):
        _store_kernel[(1,)](out, place)
    with refused(1, 1):
        _swap_kernel[(1,)](out, place)
    with refused(1, N):
        _add_kernel[(1,)](out, 1 if place > 0 else -1, N, N)
    assert not memory.any()
    _store_kernel[(1,)](out, 1)
    _swap_kernel[(1,)](out, 0)
    _add_kernel[(1,)](out, 0, 2, N)
    assert out.tolist() == [2, 2, *[0] * (N - 2)]


def test_gaps_between_the_elements_of_a_tensor_are_inside():
    memory = torch.arange(4 * N)
    x, out = memory.view(N, 4)[:, 1], torch.zeros(N, dtype=torch.int64)
    for stride in (4, 2, 0):
        _column_kernel[(1,)](out, x, stride, N)
        assert out.tolist() == [1 + i * stride for i in range(N)]
    with refused(1, N):
        _column_kernel[(1,)](out, x[:-1], 4, N)
    # the elements of an expanded tensor are one
    with refused(N - 1, N):
        _column_kernel[(1,)](out, x[0].expand(N), 1, N)


def test_pieces_of_one_tensor_join():
    x, out = torch.arange(N), torch.zeros(N, dtype=torch.int64)
    _copy_kernel[(1,)](Pair(x[4:], x[:5]), 0, 4, N)
    assert x.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    _column_kernel[(1,)](x[:4], x[4:], 1, 4)
    with refused(3, 4):
        _column_kernel[(1,)](out, x[:1], 1, 4)


def test_tensors_without_elements_have_no_memory():
    x = torch.arange(N)
    with refused(1, 1):
        _store_kernel[(1,)](x[3:3], 0)
    assert x.tolist() == list(range(N))


def test_everything_is_put_back():
    from triton.runtime import interpreter

    def hooks():
        builder, launches = type(interpreter.interpreter_builder), interpreter.GridExecutor
        return builder.create_masked_load, builder.create_atomic_rmw, launches._init_args_hst

    before = hooks()
    with pytest.raises(KeyError), bounds_checked():
        assert all(x is not y for x, y in zip(hooks(), before, strict=True))
        raise KeyError
    assert hooks() == before
