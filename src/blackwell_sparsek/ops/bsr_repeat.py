"""Products that were made before, without checks, operator and kernel lookup a second time.

The launches of a product depend on its pattern and on sizes, strides, dtypes and options alone.
They are recorded at the first call and kept on the pattern; a later call that agrees in all of
these only allocates the result and launches. Gradients, modes and transforms of PyTorch need the
operator, so where one of them could be at work, nothing is recorded or repeated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..core.env import default_impl
from ..core.launch import RecordedLaunches, recording
from ..formats.bsr import BSRMatrix
from .dispatch import is_explaining

# Recordings kept per pattern. A model meets a handful of sizes; a stream of new ones starts over.
MAX_RECORDINGS = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# The precision of float32 products is a global switch, which a recording would not follow.
_DTYPES = (torch.float16, torch.bfloat16)


class _Recorded(NamedTuple):
    launches: RecordedLaunches
    shape: torch.Size
    dtype: torch.dtype


class ProductCall(NamedTuple):
    """A call of `matmul` whose launches may be recorded and repeated."""

    known: dict[Any, _Recorded | None]
    key: Any
    inputs: tuple[torch.Tensor | None, ...]

    def repeat(self) -> torch.Tensor | None:
        """The product by recorded launches, or None where there are none."""
        recorded = self.known.get(self.key)
        if recorded is None:
            return None
        storage = self.inputs[0]
        assert storage is not None
        out = torch.empty(recorded.shape, dtype=recorded.dtype, device=storage.device)
        recorded.launches.repeat((out, *self.inputs))
        return out

    def record(self, product: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Make the product by `product` and keep its launches."""
        if self.key in self.known or torch.cuda.is_current_stream_capturing():
            return product()
        with recording() as record:
            out = product()
        if len(self.known) >= MAX_RECORDINGS:
            self.known.clear()
        launches = RecordedLaunches.make(record, (out, *self.inputs))
        recorded = None if launches is None else _Recorded(launches, out.shape, out.dtype)
        self.known[self.key] = recorded
        return out


def product_call(
    a: Any,
    b: Any,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    impl: str,
) -> ProductCall | None:
    """The call as one that may be repeated; None where it must go through the operator."""
    if torch.compiler.is_compiling():
        return None
    dense_left = isinstance(b, BSRMatrix)
    sparse, dense = (b, a) if dense_left else (a, b)
    if not isinstance(sparse, BSRMatrix) or type(dense) not in _PLAIN or not dense.is_cuda:
        return None
    inputs = (sparse.storage, dense, bias, residual)
    tensors = [x for x in inputs if x is not None]
    if not (_launches_are_all(tensors) and _nothing_else_looks()):
        return None
    key = (
        *(sparse.is_transposed, dense_left, activation, out_dtype),
        default_impl() if impl == "auto" else impl,
        *(None if x is None else (x.shape, x.stride(), x.dtype) for x in inputs),
    )
    return ProductCall(sparse.pattern.launches, key, inputs)


def _launches_are_all(tensors: list[torch.Tensor]) -> bool:
    """Whether launches make the whole of a call with these tensors."""
    device = tensors[0].device
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not needs_grad and all(
        type(x) in _PLAIN and x.device == device and x.dtype in _DTYPES and x.data_ptr() % 16 == 0
        for x in tensors
    )


def _nothing_else_looks() -> bool:
    """Whether no mode, transform or autocast stands between this call and the kernels."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cuda")
        or is_explaining()
    )
