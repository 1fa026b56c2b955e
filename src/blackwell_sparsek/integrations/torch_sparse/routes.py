"""Products of `torch.sparse_bsr` tensors through this package, on request.

`torch.mm`, `torch.addmm` and what is made of them (`@`, `F.linear`, `torch.sparse.mm`, a
`torch.nn.Linear` with a BSR weight) reach the dispatch key SparseCsrCPU or SparseCsrCUDA of a few
ATen operators. Kernels there are replaced by ones that take what this package can compute and
leave the rest to torch's own. Torch's derivative formulas stay in place above them.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ...core.compat import torch_version
from ...core.errors import Unsupported
from ...matmul.api import matmul
from ...sparse.matrix import BSRMatrix
from ...sparse.validate import VALUE_DTYPES
from .pattern_cache import PatternCache

_KEYS = ("SparseCsrCPU", "SparseCsrCUDA")
_BLOCK_LAYOUTS = (torch.sparse_bsr, torch.sparse_bsc)

_cache = PatternCache()
_lock = threading.RLock()
_users = 0
_library: Any = None


class enable_torch_sparse:
    """Compute products of `torch.sparse_bsr` tensors with this package until disabled.

    Call it once, or use it as a context manager. Off by default; nothing changes at import.

    Routed are `bsr @ dense`, `dense @ bsr` and their transposes, `torch.mm`, `torch.mv`,
    `torch.addmm`, `torch.sparse.mm` and `torch.nn.functional.linear(x, bsr, bias)`, also with
    `out=`, for matrices (no batch dimensions) of float16, bfloat16, float32 or float64, on CPU and
    CUDA, with blocks of any shape. Gradients of the dense operand and of the bias take the same
    way. Everything else goes to torch as before: other layouts and dtypes, two sparse operands,
    batches of sparse matrices.

    Torch's gradient of a sparse operand is a dense matrix; train with
    `blackwell_sparsek.nn.BSRLinear` instead.

    The metadata of a sparse tensor is checked and converted once, at its first product (with a
    synchronisation), and kept as long as its index tensors live. After a change in place, of values
    or indices alike, it is compared once (again with a synchronisation); torch counts no changes of
    tensors made in inference mode, so changed indices of these are not noticed. Malformed metadata
    raises `InvalidInput`.

    Examples
    --------
    >>> import torch
    >>> from blackwell_sparsek.integrations.torch_sparse import enable_torch_sparse
    >>> w = torch.eye(32).to_sparse_bsr((16, 16))
    >>> x = torch.randn(4, 32)
    >>> with enable_torch_sparse():
    ...     y = torch.nn.functional.linear(x, w)
    >>> torch.equal(x, y)
    True

    For the rest of a program, or until `disable()`:

    >>> routes = enable_torch_sparse()
    >>> torch.equal(w @ x.T, x.T)
    True
    >>> routes.disable()
    """

    def __init__(self) -> None:
        self._active = True
        _acquire()

    def disable(self) -> None:
        """Undo this call. Torch's kernels are back once every call was undone."""
        if self._active:
            self._active = False
            _release()

    def __enter__(self) -> "enable_torch_sparse":
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()


def is_enabled() -> bool:
    """Whether products of `torch.sparse_bsr` tensors come here now."""
    return _users > 0


def _acquire() -> None:
    global _users, _library
    with _lock:
        if _users == 0:
            _library = _install()
        _users += 1


def _release() -> None:
    global _users, _library
    with _lock:
        _users -= 1
        if _users == 0:
            _library._destroy()
            _library = None
            _cache.clear()


def _install() -> Any:
    get_kernel = getattr(torch.library, "get_kernel", None)
    if get_kernel is None:
        installed = ".".join(map(str, torch_version()))
        raise Unsupported(
            f"enable_torch_sparse: torch {installed} has no torch.library.get_kernel, without "
            "which torch's own kernels could not be kept"
        )
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    kernels = [
        (name, key, _routed(route, get_kernel(f"aten::{name}", key)))
        for key in _KEYS
        # A build without CUDA has no sparse kernels for it.
        if has_kernel("aten::addmm.out", key)
        for name, route in _ROUTES.items()
    ]
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # That a kernel is replaced is what was asked for.
        warnings.simplefilter("ignore")
        for name, key, kernel in kernels:
            library.impl(name, kernel, key, with_keyset=True)
    return library


def _routed(route: Callable[..., Any], original: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            result = route(*args, **kwargs)
        return original.call_boxed(keyset, *args, **kwargs) if result is None else result

    return kernel


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    operands = _operands(a, b)
    return None if operands is None else matmul(*operands)


def _mv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    return _mm(a, b) if b.dim() == 1 else None


def _addmm(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor | None:
    """beta * c + alpha * (a @ b), c broadcast to the result; c is not read where beta is 0."""
    operands = _operands(a, b)
    scalars = (alpha, beta)
    if operands is None or any(isinstance(s, complex) for s in scalars):
        return None
    if beta == 0 and alpha == 1:
        return matmul(*operands)
    shape = (a.shape[0], b.shape[1])
    if c.layout != torch.strided or c.dtype != a.dtype or c.device != a.device:
        return None
    if beta == 1 and alpha == 1:
        # The sparse operand's features are the rows of A @ X and the columns of X @ A.
        as_bias = (shape[0], 1) if isinstance(operands[0], BSRMatrix) else (1, shape[1])
        if c.shape == as_bias or (as_bias[0] == 1 and c.shape == (shape[1],)):
            return matmul(*operands, bias=c.reshape(-1))
        if c.shape == shape:
            return matmul(*operands, residual=c)
    wide = torch.promote_types(a.dtype, torch.float32)
    product = matmul(*operands, out_dtype=wide).mul_(alpha)
    if beta != 0:
        product.add_(c.expand(shape), alpha=beta)
    return product.to(a.dtype)


def _into(route: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """The variant with `out=`."""

    def route_out(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
        expected = (args[-2].shape[0], args[-1].shape[1])
        if out.layout != torch.strided or out.shape != expected or out.dtype != args[-1].dtype:
            return None
        result = route(*args, **kwargs)
        return None if result is None else out.copy_(result)

    return route_out


_ROUTES: dict[str, Callable[..., torch.Tensor | None]] = {
    "mm": _mm,
    "mv": _mv,
    "addmm": _addmm,
    "mm.out": _into(_mm),
    "addmm.out": _into(_addmm),
}


def _operands(a: torch.Tensor, b: torch.Tensor) -> tuple[Any, Any] | None:
    """The operands of a product that `matmul` takes, or None."""
    if (a.layout in _BLOCK_LAYOUTS) == (b.layout in _BLOCK_LAYOUTS):
        return None
    sparse, dense = (a, b) if a.layout in _BLOCK_LAYOUTS else (b, a)
    fits = (
        dense.layout == torch.strided
        and sparse.dim() == 2
        and dense.dim() in (1, 2)
        and sparse.values().dim() == 3
        and sparse.dtype == dense.dtype
        and sparse.dtype in VALUE_DTYPES
        and sparse.device == dense.device
        and a.shape[-1] == b.shape[0]
    )
    if not fits:
        return None
    if dense.numel() > 0 and 1 not in _strides(dense):
        # Gradients come expanded, and torch's products take any strides by copying too.
        dense = dense.contiguous()
    matrix = _cache.matrix_of(sparse)
    return (matrix, dense) if sparse is a else (dense, matrix)


def _strides(x: torch.Tensor) -> list[int]:
    """Strides, with 1 for dimensions of one element, where they mean nothing."""
    return [1 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
