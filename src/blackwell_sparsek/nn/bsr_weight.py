"""`BSRWeight`: the base of modules with one block-sparse weight."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..core.checks import check_dtype, check_shape, check_tensor, message
from ..core.errors import BskError, InvalidInput
from ..core.torch_state import usable_in_training
from ..launch.launcher import cdiv
from ..sparse.matrix import BSRMatrix, BSRPattern
from .bsr_state import KEYS, PATTERN_KEYS, adopting, check_state, other_pattern, same_pattern

_DERIVED = ("t_indptr", "t_indices", "t_perm", "row_indices")
_BUFFERS = (*PATTERN_KEYS, *_DERIVED)
# In the order of `BSRPattern.tensors()`.
_OPERANDS = ("indptr", "indices", "t_indptr", "t_indices", "t_perm")


class BSRWeight(nn.Module):
    """A module that owns the blocks of a weight as one Parameter and their pattern as buffers.

    The buffers are what the operators take, so that nothing is derived in a forward and
    `torch.compile` sees ordinary buffers. Those of the transpose are not saved: they follow from
    the others.
    """

    values: torch.Tensor
    weight_shape: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    row_indices: torch.Tensor
    # The pattern of the buffers and where they are, so that products find what was kept for it.
    _known_pattern: tuple[BSRPattern, list[tuple[int, int]]] | None = None

    def _set_weight(self, pattern: BSRPattern, values: torch.Tensor) -> None:
        self._shape = pattern.shape
        self.block_shape = pattern.block_shape
        self.values = nn.Parameter(values)
        for name in _BUFFERS:
            self.register_buffer(name, None, persistent=name in PATTERN_KEYS)
        self._set_pattern(pattern)

    def _set_pattern(self, pattern: BSRPattern) -> None:
        shape = torch.tensor(pattern.shape, dtype=torch.int64, device="cpu").to(pattern.device)
        indptr, indices, *transpose = pattern.tensors()
        tensors = (shape, indptr, indices, *transpose, pattern.row_indices())
        for name, tensor in zip(_BUFFERS, tensors, strict=True):
            setattr(self, name, tensor)
        self._pattern_known = not pattern.indptr.is_meta

    @property
    def pattern(self) -> BSRPattern:
        """Which blocks exist."""
        if not self._pattern_known and not self.indptr.is_meta:
            problem = "was made on the meta device and has no pattern yet"
            expected = "load_state_dict before the first use"
            raise InvalidInput(message(type(self).__name__, "the module", problem, expected, "use"))
        tensors: list[Any] = [self._buffers[name] for name in _OPERANDS]
        if torch.compiler.is_compiling() or any(type(x) is not torch.Tensor for x in tensors):
            return self._pattern_of(tensors)
        # Launches recorded with a pattern hold the addresses of its tensors.
        places = [(id(x), x.data_ptr()) for x in tensors]
        if self._known_pattern is None or self._known_pattern[1] != places:
            self._known_pattern = (self._pattern_of(tensors), places)
        return self._known_pattern[0]

    def _pattern_of(self, tensors: list[Any]) -> BSRPattern:
        pattern = BSRPattern.__new__(BSRPattern)
        pattern._set(tensors, self.row_indices, self._shape, self.block_shape)
        return pattern

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known_pattern": None}

    @property
    def weight(self) -> BSRMatrix:
        """The matrix, sharing `values`; gradients reach them."""
        return BSRMatrix._from_parts(self.pattern, self.values)

    @property
    def nnz_blocks(self) -> int:
        """Blocks that exist."""
        return self.indices.shape[0]

    @property
    def blocks(self) -> int:
        """All blocks, whether they exist or not."""
        (rows, cols), (bh, bw) = self._shape, self.block_shape
        return cdiv(rows, bh) * cdiv(cols, bw)

    @property
    def density(self) -> float:
        """Blocks that exist over all blocks; 0 without any."""
        return self.nnz_blocks / max(1, self.blocks)

    @usable_in_training
    def keep_blocks_(self, entries: torch.Tensor) -> nn.Parameter:
        """Keep only some of the existing blocks.

        Parameters
        ----------
        entries : Tensor bool [nnz_blocks]
            In the order of `values`.

        Returns
        -------
        Parameter
            The new `values`. Optimisers that hold the old ones do not know of it: see
            `blackwell_sparsek.prune.shrink_`, which tells them. The old gradient is carried over.
        """
        op = "BSRWeight.keep_blocks_"
        check_tensor(op, "entries", entries)
        check_dtype(op, "entries", entries, (torch.bool,))
        check_shape(op, "entries", entries, (self.nnz_blocks,))
        entries = entries.to(self.indices.device)
        before = nn.functional.pad(entries.cumsum(0, dtype=torch.int32), (1, 0))
        indptr, indices = before[self.indptr.long()], self.indices[entries]
        old = self.values
        values = nn.Parameter(old.detach()[entries], requires_grad=old.requires_grad)
        if old.grad is not None:
            values.grad = old.grad[entries]
        self._set_pattern(BSRPattern._from_parts(indptr, indices, self._shape, self.block_shape))
        self.values = values
        return values

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = {name: self._buffers[name] for name in _BUFFERS}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is None or new is None or new is old:
                continue
            if old.is_meta:
                self._pattern_known = False
            else:
                # `to_empty` hands out uninitialised memory, which must never be a pattern.
                self._buffers[name] = old.to(new.device)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        found = {key: state_dict[prefix + key] for key in KEYS if prefix + key in state_dict}
        if any(key in found for key in PATTERN_KEYS):
            try:
                self._prepare_for(found, local_metadata.get("assign_to_params_buffers", False))
            except BskError as error:
                error_msgs.append(f"{prefix.rstrip('.') or 'the module'}: {error}")
                return
            for key in PATTERN_KEYS:
                # What is loaded is what was checked, even if the checkpoint changes later.
                state_dict[prefix + key] = getattr(self, key)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _prepare_for(self, state: dict[str, Any], assign: bool) -> None:
        """Take over the pattern of a checkpoint, if it may be, before its values are copied."""
        loaded = check_state(state, self._shape, self.block_shape)
        is_same = self._pattern_known and same_pattern(self.pattern, loaded)
        fits = is_same if self._pattern_known else self.values.shape == loaded.values_shape
        if not fits and not adopting():
            raise other_pattern(self.nnz_blocks, self.blocks, loaded)
        # Assigning takes the tensors of the checkpoint and so its device.
        device = state["values"].device if assign else self.values.device
        if not is_same or device != self.indptr.device:
            parts = (loaded.indptr, loaded.indices, self._shape, self.block_shape)
            self._set_pattern(BSRPattern._from_parts(*parts).to(device))
        if self.values.shape != loaded.values_shape:
            self.values = nn.Parameter(
                self.values.new_empty(loaded.values_shape), requires_grad=self.values.requires_grad
            )
