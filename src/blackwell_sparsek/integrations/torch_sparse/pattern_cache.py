"""The patterns of `torch.sparse_bsr` tensors that were converted, as long as these live."""

import threading
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...sparse.matrix import BSRMatrix, BSRPattern


class _Entry(NamedTuple):
    """A pattern, and what shows that the index tensors it came from are still there, unchanged."""

    pattern: BSRPattern
    storages: tuple[StorageWeakRef, StorageWeakRef]
    versions: tuple[int, int]

    def is_dead(self) -> bool:
        return any(storage.expired() for storage in self.storages)

    def describes(self, indptr: torch.Tensor, indices: torch.Tensor) -> bool:
        """Whether the contents are still the same (synchronises)."""
        ours = (self.pattern.indptr, self.pattern.indices)
        return all(torch.equal(a, b.int()) for a, b in zip(ours, (indptr, indices), strict=True))


def _tracking_versions() -> AbstractContextManager[object]:
    """Let views share the version counter of their base, which they do not inside of a kernel."""
    c = torch._C
    views = c.DispatchKeySet(c.DispatchKey.ADInplaceOrView)
    excluded = c._dispatch_tls_local_exclude_set()
    guard: AbstractContextManager[object] = c._ForceDispatchKeyGuard(
        c._dispatch_tls_local_include_set(), excluded - views
    )
    return guard


def _version_of(x: torch.Tensor) -> int:
    """Count of changes in place; tensors made in inference mode have none."""
    return -1 if x.is_inference() else x._version


class PatternCache:
    """Patterns by the identity of index storages.

    A sparse tensor hands out new Python objects for its parts at every call, and `weight.t()` in
    each forward is a new tensor; the storages of the indices are what stays. A weak reference to a
    storage keeps its address from being used again, so a key cannot come to mean something else.
    Values are never kept: they are read from the tensor at each product.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[object, ...], _Entry] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget everything."""
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
            # Values and indices count their changes together: an optimiser step looks like this.
            if entry.describes(indptr, indices):
                pattern = entry.pattern
        if pattern is None:
            pattern = BSRPattern(indptr, indices, shape, block_shape)
        storages = (
            StorageWeakRef(indptr.untyped_storage()),
            StorageWeakRef(indices.untyped_storage()),
        )
        with self._lock:
            # New tensors come when old ones go: a good moment to let go of their patterns.
            for old in [k for k, e in self._entries.items() if e.is_dead()]:
                del self._entries[old]
            self._entries[key] = _Entry(pattern, storages, versions)
        return pattern
