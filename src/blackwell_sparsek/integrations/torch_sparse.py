"""Routes products of `torch.sparse_bsr` tensors through this package, on request.

`torch.mm`, `torch.addmm` and functions built on them (`@`, `F.linear`, `torch.sparse.mm`, a
`torch.nn.Linear` with a BSR weight) reach the dispatch key SparseCsrCPU or SparseCsrCUDA of a few
ATen operators. This module replaces the kernels there by ones that compute what this package
supports and leave the rest to torch's kernels. Torch's derivative formulas above them still apply.
"""

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.compat import torch_version
from ..core.errors import Unsupported
from ..matmul.api import matmul
from ..sparse.matrix import BSRMatrix, BSRPattern
from ..sparse.validate import VALUE_DTYPES

__all__ = ["enable_torch_sparse", "is_enabled"]


class _Entry(NamedTuple):
    """A pattern, and the means to tell whether its index tensors still exist and are unchanged."""

    pattern: BSRPattern
    storages: tuple[StorageWeakRef, StorageWeakRef]
    versions: tuple[int, int]

    def is_dead(self) -> bool:
        return any(storage.expired() for storage in self.storages)

    def describes(self, indptr: torch.Tensor, indices: torch.Tensor) -> bool:
        """Whether the contents are still the same (synchronizes)."""
        ours = (self.pattern.indptr, self.pattern.indices)
        return all(torch.equal(a, b.int()) for a, b in zip(ours, (indptr, indices), strict=True))


def _tracking_versions() -> AbstractContextManager[object]:
    """Let views share the version counter of their base, which they do not inside a kernel."""
    c = torch._C
    views = c.DispatchKeySet(c.DispatchKey.ADInplaceOrView)
    excluded = c._dispatch_tls_local_exclude_set()
    guard: AbstractContextManager[object] = c._ForceDispatchKeyGuard(
        c._dispatch_tls_local_include_set(), excluded - views
    )
    return guard


def _version_of(x: torch.Tensor) -> int:
    """Count of in-place changes; tensors made in inference mode have no such count."""
    return -1 if x.is_inference() else x._version


class PatternCache:
    """A cache of patterns, keyed by the identity of index storages.

    A sparse tensor returns new Python objects for its parts at every call, and `weight.t()` in each
    forward is a new tensor; only the storages of the indices persist. A weak reference to a storage
    keeps its address from being reused, so a key cannot come to mean another storage. Values are
    never cached: each product reads them from the tensor.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[object, ...], _Entry] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._entries.clear()

    def matrix_of(self, t: torch.Tensor) -> BSRMatrix:
        """`t` (sparse_bsr or sparse_bsc [M, K]) as a matrix that shares its values."""
        values = t.values().detach()
        shape = (t.shape[0], t.shape[1])
        if t.layout == torch.sparse_bsr:
            with _tracking_versions():
                parts = (t.crow_indices(), t.col_indices())
            pattern = self._pattern_of(*parts, shape, (values.shape[1], values.shape[2]))
            return BSRMatrix._from_parts(pattern, values)
        # Compressed columns are the compressed rows of the transpose.
        with _tracking_versions():
            parts = (t.ccol_indices(), t.row_indices())
        pattern = self._pattern_of(*parts, shape[::-1], (values.shape[2], values.shape[1]))
        return BSRMatrix._from_parts(pattern, values.mT, is_transposed=True)

    def _pattern_of(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
    ) -> BSRPattern:
        parts = (indptr, indices)
        key = (
            *(part.untyped_storage()._cdata for part in parts),
            *(part.storage_offset() for part in parts),
            *(part.stride() for part in parts),
            indices.numel(),
            indices.dtype,
            shape,
            block_shape,
        )
        versions = (_version_of(indptr), _version_of(indices))
        with self._lock:
            entry = self._entries.get(key)
        pattern = None
        if entry is not None and not entry.is_dead():
            if entry.versions == versions:
                return entry.pattern
            # Values and indices share a version counter, so an optimizer step also leads here.
            if entry.describes(indptr, indices):
                pattern = entry.pattern
        if pattern is None:
            pattern = BSRPattern(indptr, indices, shape, block_shape)
        storages = (
            StorageWeakRef(indptr.untyped_storage()),
            StorageWeakRef(indices.untyped_storage()),
        )
        with self._lock:
            # New tensors often replace old ones: drop the patterns of tensors that are gone.
            for old in [k for k, e in self._entries.items() if e.is_dead()]:
                del self._entries[old]
            self._entries[key] = _Entry(pattern, storages, versions)
        return pattern


_KEYS = ("SparseCsrCPU", "SparseCsrCUDA")
_BLOCK_LAYOUTS = (torch.sparse_bsr, torch.sparse_bsc)

_cache = PatternCache()
_lock = threading.RLock()
_users = 0
_library: Any = None


class enable_torch_sparse:
    """Compute products of `torch.sparse_bsr` tensors with this package until disabled.

    Call it once, or use it as a context manager. Off by default; nothing changes at import.

    This routes products of a BSR matrix and a dense tensor (`@`, `torch.mm`, `mv`, `addmm`,
    `torch.sparse.mm`, `torch.nn.functional.linear`, transposes and `out=` included) in float16,
    bfloat16, float32 or float64, and the gradients of the dense operand and the bias. Everything
    else goes to torch as before: other layouts and dtypes, two sparse operands, batches of sparse
    matrices.

    Torch's gradient of a sparse operand is a dense matrix; train with
    `blackwell_sparsek.nn.BSRLinear` instead.

    The metadata of a sparse tensor is checked at its first product and after every in-place change
    of its values or indices; both wait for the device. Torch does not count changes of tensors made
    in inference mode, so changed indices of these go unnoticed.
    Malformed metadata raises `InvalidInput`.

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
        """Undo this call. Torch's kernels are restored once every call is undone."""
        if self._active:
            self._active = False
            _release()

    def __enter__(self) -> "enable_torch_sparse":
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()


def is_enabled() -> bool:
    """Whether products of `torch.sparse_bsr` tensors are currently routed here."""
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
        # Replacing a kernel is intended here; no warning is needed.
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
    """beta * c + alpha * (a @ b), with c broadcast to the result; c is not read if beta is 0."""
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
        is_left = isinstance(operands[0], BSRMatrix)
        as_bias = [(shape[0], 1)] if is_left else [(1, shape[1]), (shape[1],)]
        if c.shape in as_bias:
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
        # Gradients may be expanded tensors; torch's products, too, copy to accept any strides.
        dense = dense.contiguous()
    matrix = _cache.matrix_of(sparse)
    return (matrix, dense) if sparse is a else (dense, matrix)


def _strides(x: torch.Tensor) -> list[int]:
    """Strides, with 1 for dimensions of one element, whose strides mean nothing."""
    return [1 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
