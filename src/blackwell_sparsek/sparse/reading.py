"""Patterns read from tensors that others write to: the buffers of a module.

Distributed checkpoints, broadcasts and `Tensor.copy_` change buffers in place, behind the back of
everything derived from them. Kernels therefore never read buffers. They read a `BSRPattern`, a
checked copy that never changes, so that whatever is cached for its tensors stays right; when the
buffers have been written to, they are read again, and another pattern takes its place.
"""

import weakref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.torch_state import usable_in_training
from ..core.transfer import is_capturing
from ..launch.workspace import made_outside_pool
from .pattern import BSRPattern, rows_of_entries
from .validate import check_metadata

# By the row pointers that were read. Operators see tensors, not the module that owns them.
_READINGS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class PatternReading:
    """The pattern that `indptr` and `indices` held when they were read.

    `pattern` has the same contents and shares no memory with them; `before` is the last reading.
    """

    __slots__ = ("_addresses", "_before", "_indices", "_indptr", "_version", "pattern")

    def __init__(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        pattern: BSRPattern,
        before: "PatternReading | None" = None,
    ):
        self.pattern: BSRPattern = pattern
        # weak, because a reading is found by `indptr` and must not keep it alive
        self._indptr, self._indices = weakref.ref(indptr), weakref.ref(indices)
        self._addresses = (indptr.data_ptr(), indices.data_ptr())
        # tensors made in inference mode do not count their writes: never known to be current
        counted = not (indptr.is_inference() or indices.is_inference())
        self._version = indptr._version + indices._version if counted else None
        # CUDA graphs captured earlier still read the patterns before this one
        self._before: list[BSRPattern] = []
        if before is not None and before.pattern.device == pattern.device:
            self._before = before._before
            if before.pattern is not pattern and pattern.device.type == "cuda":
                self._before = [*self._before, before.pattern]

    def is_current(self, indptr: torch.Tensor, indices: torch.Tensor) -> bool:
        """Whether it was read from these tensors, and nothing was written to them since."""
        return (
            self._version is not None
            and self._indptr() is indptr
            and self._indices() is indices
            and indptr._version + indices._version == self._version
            # `Tensor.data = ...` does not count as a write
            and (indptr.data_ptr(), indices.data_ptr()) == self._addresses
        )

    def holds(self, indptr: torch.Tensor, indices: torch.Tensor) -> bool:
        """Whether the contents are the same all the same (one synchronization)."""
        pattern = self.pattern
        pairs = ((pattern.indptr, indptr), (pattern.indices, indices))
        if any(a.shape != b.shape or a.device != b.device for a, b in pairs):
            return False
        return not bool(torch.stack([(a != b).any() for a, b in pairs]).any())


@usable_in_training
def read_pattern(
    op: str,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    shape: tuple[int, int],
    block_shape: tuple[int, int],
) -> PatternReading:
    """Read a pattern from tensors, or return the last reading if it is current.

    Contents are checked, which synchronizes. While a CUDA graph is captured, they cannot be: the
    graph then copies the tensors and derives from them what it needs at every replay.
    """
    known: PatternReading | None = _READINGS.get(indptr)
    if known is not None:
        if (known.pattern.shape, known.pattern.block_shape) != (shape, block_shape):
            known = None
        elif known.is_current(indptr, indices):
            return known
    parts = (shape, block_shape)
    if is_capturing(indptr.device):
        return PatternReading(indptr, indices, _copied(indptr, indices, *parts))
    if known is not None and known.holds(indptr, indices):
        pattern = known.pattern
    else:
        check_metadata(op, indptr, indices, *parts)
        device = indptr.device
        pattern = made_outside_pool(lambda: _copied(indptr, indices, *parts), device)
        if device.type == "cuda":
            # the next product with this pattern may run on another stream
            torch.cuda.current_stream(device).synchronize()
    return remember(indptr, PatternReading(indptr, indices, pattern, known))


def remember(indptr: torch.Tensor, reading: PatternReading) -> PatternReading:
    """Let operators that are given `indptr` find this reading; return it."""
    _READINGS[indptr] = reading
    return reading


def _copied(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    shape: tuple[int, int],
    block_shape: tuple[int, int],
) -> BSRPattern:
    indptr, indices = (x.to(torch.int32, copy=True) for x in (indptr, indices))
    return BSRPattern._from_parts(indptr, indices, shape, block_shape)


class UnreadPattern(BSRPattern):
    """A pattern that only the operators read, each time they run.

    For buffers without contents to read now: those of a module that is traced, by `torch.compile`
    or `torch.export`, and fake or meta tensors. Operators get `indptr` and `indices` alone, so that
    compiled code follows what is written to these. Everything else is derived where it is used.
    """

    def __init__(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        shape: tuple[int, int],
        block_shape: tuple[int, int],
    ):
        self._indptr, self._indices = indptr, indices
        self._shape, self._block_shape = shape, block_shape
        self._launches, self._families = {}, {}

    def _derived(self) -> BSRPattern:
        return BSRPattern._from_parts(self._indptr, self._indices, self._shape, self._block_shape)

    def check_unwritten(self) -> None:
        """Writes are followed."""

    def row_indices(self) -> torch.Tensor:
        """int32 [nnzb], block row of each entry."""
        return rows_of_entries(self._indptr, self.nnz_blocks)

    @property
    def transpose_perm(self) -> torch.Tensor:
        """int32 [nnzb]: entry t of the transpose is entry transpose_perm[t] of this pattern."""
        return self._derived().transpose_perm

    def transposed(self) -> BSRPattern:
        """The pattern of the transpose."""
        return self._derived().transposed()

    def tensors(self) -> list[torch.Tensor]:
        """[indptr, indices]: operators look up the others."""
        return [self._indptr, self._indices]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BSRPattern:
        """This pattern on `device`."""
        return self._derived().to(device, non_blocking)
