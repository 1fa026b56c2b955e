"""The weight of a block-sparse layer: its state, and loading a checkpoint into it.

Kernels follow the indices of a pattern, and a pattern from a file may hold anything:
`load_state_dict` checks it first and refuses one that does not fit, leaving the module unchanged.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from ..core.checks import check_dtype, check_shape, check_tensor, message
from ..core.errors import BskError, InvalidInput, InvalidType
from ..core.fp8 import E4M3
from ..core.torch_state import usable_in_training
from ..core.transfer import is_capturing
from ..fp8.api import DTYPES as INPUT_DTYPES
from ..launch.launcher import cdiv
from ..sparse.matrix import BSRMatrix
from ..sparse.pattern import BSRPattern
from ..sparse.reading import PatternReading, UnreadPattern, read_pattern, remember
from ..sparse.validate import VALUE_DTYPES, check_metadata, check_padding, check_values

# Keys of one layer in a state dict, besides the bias.
PATTERN_KEYS = ("weight_shape", "indptr", "indices")
KEYS = (*PATTERN_KEYS, "values")
# Of a weight in fp8 besides: a scale for each block.
SCALES_KEY = "descale"

_strict: ContextVar[bool] = ContextVar("bsk_strict_patterns", default=False)


@contextmanager
def strict_patterns() -> Iterator[None]:
    """A context manager in which `load_state_dict` refuses patterns other than the layers' own.

    Outside of it, `BSRLinear` loads the pattern like the values. Sizes and block shapes must agree
    in any case.

    To load a pruned checkpoint into a newly made dense model, first give it block-sparse layers of
    any pattern: `sparsify_(model, block_shape, 0.9, method="random")`.

    Raises
    ------
    RuntimeError
        By `load_state_dict`, if a pattern differs.

    Examples
    --------
    >>> from blackwell_sparsek.nn import BSRLinear, strict_patterns
    >>> trained = BSRLinear(64, 64, 16, sparsity=0.75)
    >>> other = BSRLinear(64, 64, 16, sparsity=0.5)
    >>> with strict_patterns():
    ...     other.load_state_dict(trained.state_dict())
    Traceback (most recent call last):
    RuntimeError: Error(s) in loading state_dict for BSRLinear:
    ...
    >>> other.load_state_dict(trained.state_dict())
    <All keys matched successfully>
    >>> other.nnz_blocks
    4
    """
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def is_strict() -> bool:
    """Whether a checkpoint must have the pattern of the module."""
    return _strict.get()


class LoadedState(NamedTuple):
    """The checked metadata of a checkpoint: int32 copies, and the shape of the values."""

    indptr: torch.Tensor
    indices: torch.Tensor
    values_shape: torch.Size


def check_state(
    state: Mapping[str, Any],
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    in_fp8: bool = False,
) -> LoadedState:
    """Check all of `state` (keys `KEYS`) for a weight of `shape`; raise `InvalidInput`."""
    op = "BSRLinear.load_state_dict"
    keys = (*KEYS, SCALES_KEY) if in_fp8 else KEYS
    missing = [key for key in keys if key not in state]
    if missing:
        got = ", ".join(key for key in keys if key in state)
        expected = f"all of {', '.join(keys)}"
        if in_fp8 and SCALES_KEY in missing:
            expected += " (to_fp8() makes an fp8 layer from one with wider values)"
        raise InvalidInput(message(op, "state_dict", "is incomplete", expected, got))
    for key in keys:
        x = state[key]
        # Sharded values (FSDP) are not plain tensors; only their shape is checked.
        if key != "values" or not isinstance(x, torch.Tensor):
            check_tensor(op, key, x)
        if x.is_meta:
            problem = "has no contents to check"
            raise InvalidInput(message(op, key, problem, "a real device", "the meta device"))
    check_weight_shape(op, state["weight_shape"], shape)
    check_metadata(op, state["indptr"], state["indices"], shape, block_shape)
    values = state["values"]
    check_shape(op, "values", values, (state["indices"].numel(), *block_shape))
    indptr = state["indptr"].to(torch.int32, copy=True)
    indices = state["indices"].to(torch.int32, copy=True)
    if isinstance(values, torch.Tensor) and type(values).__name__ != "DTensor":
        check_tensor(op, "values", values)
        if in_fp8:
            check_values(op, values, state[SCALES_KEY])
        else:
            check_dtype(op, "values", values, VALUE_DTYPES)
        pattern = BSRPattern._from_parts(indptr, indices, shape, block_shape).to(values.device)
        check_padding(op, values, shape, pattern.row_indices(), pattern.indices)
    return LoadedState(indptr, indices, values.shape)


def check_weight_shape(op: str, found: torch.Tensor, shape: tuple[int, int]) -> None:
    """Check that the buffer `weight_shape` of a checkpoint names the shape of the layer."""
    check_dtype(op, "weight_shape", found, (torch.int32, torch.int64))
    check_shape(op, "weight_shape", found, (2,))
    if found.tolist() != list(shape):
        problem = "is that of another layer"
        raise InvalidInput(message(op, "weight_shape", problem, list(shape), found.tolist()))


def other_pattern(nnz_blocks: int, blocks: int, loaded: LoadedState) -> InvalidInput:
    """The error for a checkpoint with another pattern."""
    return InvalidInput(
        message(
            "BSRLinear.load_state_dict",
            "the checkpoint",
            "has another pattern",
            f"the pattern of this module ({nnz_blocks} of {blocks} blocks), or loading "
            "outside of blackwell_sparsek.nn.strict_patterns()",
            f"{loaded.indices.numel()} of {blocks} blocks",
        )
    )


def _has_no_contents(x: torch.Tensor) -> bool:
    """Whether only an operator can read `x`: a fake, meta or wrapped tensor."""
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return type(x) is not torch.Tensor or x.is_meta or wrapped


class BSRWeight(nn.Module):
    """A module that owns the blocks of a weight as one Parameter and their pattern as buffers.

    Anything may write to the buffers in place, so products get a copy of the pattern that follows
    them (`sparse.reading`). While it is traced, they get the buffers themselves: `torch.compile`
    sees ordinary buffers, and compiled code follows them as well.
    """

    block_shape: tuple[int, int]
    values: torch.Tensor
    descale: torch.Tensor | None
    weight_shape: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    _reading: PatternReading | None = None

    def _set_weight(
        self, pattern: BSRPattern, values: torch.Tensor, descale: torch.Tensor | None = None
    ) -> None:
        self._shape = pattern.shape
        self.block_shape = pattern.block_shape
        self.values = nn.Parameter(values, requires_grad=descale is None)
        for name in PATTERN_KEYS:
            self.register_buffer(name, None)
        self.register_buffer(SCALES_KEY, descale)
        self._set_pattern(pattern)

    @usable_in_training
    def _set_pattern(self, pattern: BSRPattern) -> None:
        """Store `pattern` in new buffers, which share no memory with it or with another layer."""
        shape = torch.tensor(pattern.shape, dtype=torch.int64, device="cpu")
        self.weight_shape = shape.to(pattern.device)
        self.indptr, self.indices = pattern.indptr.clone(), pattern.indices.clone()
        # names of buffers without contents yet, with their versions from when they were allocated
        self._uninitialized: dict[str, int] = {}
        self._reading = None
        if not pattern.indptr.is_meta:
            reading = PatternReading(self.indptr, self.indices, pattern)
            self._reading = remember(self.indptr, reading)

    def _missing(self) -> list[str]:
        """Buffers that were allocated for a module from the meta device and not written since."""
        versions = self._uninitialized.items()
        return [name for name, version in versions if getattr(self, name)._version == version]

    @property
    def pattern(self) -> BSRPattern:
        """Which blocks exist."""
        # not as attributes, which a module looks up slowly: this runs in every forward
        buffers: dict[str, Any] = self._buffers
        indptr, indices = buffers["indptr"], buffers["indices"]
        traced = torch.compiler.is_compiling()
        if not traced:
            reading = self._reading
            if reading is not None and reading.is_current(indptr, indices):
                return reading.pattern
        if traced or any(map(_has_no_contents, (indptr, indices))):
            return UnreadPattern(indptr, indices, self._shape, self.block_shape)
        return self._read().pattern

    def _read(self) -> PatternReading:
        """Read the pattern from buffers that were replaced or written to."""
        op = f"{type(self).__name__}, whose buffers were replaced or written in place"
        if self._missing():
            problem = "was made on the meta device and has no pattern yet"
            expected = "a checkpoint before the first use"
            got = f"nothing written to {', '.join(self._missing())}"
            raise InvalidInput(message(type(self).__name__, "the module", problem, expected, got))
        if not is_capturing(self.indptr.device):
            check_weight_shape(op, self.weight_shape, self._shape)
        reading = read_pattern(op, self.indptr, self.indices, self._shape, self.block_shape)
        if not is_capturing(self.indptr.device):
            self._reading, self._uninitialized = reading, {}
        return reading

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_reading": None}
        if self.descale is not None:
            # as bytes: torch fails to read tensors in fp8 that Python has serialised
            values = nn.Parameter(self.values.detach().view(torch.uint8), requires_grad=False)
            state["_parameters"] = {**self._parameters, "values": values}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # copies that were saved before there were layers in fp8
        self._buffers.setdefault(SCALES_KEY, None)
        if self.descale is not None:
            self.values = nn.Parameter(self.values.detach().view(E4M3), requires_grad=False)

    @property
    def weight(self) -> BSRMatrix:
        """The matrix, which shares `values`; gradients reach them."""
        # not as an attribute, as `pattern`
        return BSRMatrix._from_parts(
            self.pattern, self.values, stored_descale=self._buffers[SCALES_KEY]
        )

    @property
    def nnz_blocks(self) -> int:
        """Number of blocks that exist."""
        return self.indices.shape[0]

    @property
    def blocks(self) -> int:
        """Number of all blocks, whether they exist or not."""
        (rows, cols), (bh, bw) = self._shape, self.block_shape
        return cdiv(rows, bh) * cdiv(cols, bw)

    @property
    def density(self) -> float:
        """Blocks that exist over all blocks; 0 for a weight without blocks."""
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
            The new `values`. Optimisers still hold the old ones; use
            `blackwell_sparsek.prune.shrink_` to update them too. The old gradient is carried over.
            Values with hooks are refused: the new ones would not have them.
        """
        op = "BSRWeight.keep_blocks_"
        check_tensor(op, "entries", entries)
        check_dtype(op, "entries", entries, (torch.bool,))
        check_shape(op, "entries", entries, (self.nnz_blocks,))
        old = self.values
        if old._backward_hooks or old._post_accumulate_grad_hooks:
            # what they do would silently end, such as the steps of an optimizer in the backward
            problem = "have hooks, which the smaller Parameter would not have"
            expected = "values without hooks (remove them, and register them again afterwards)"
            raise InvalidInput(message(op, "values", problem, expected, "hooks"))
        entries = entries.to(self.indices.device)
        before = nn.functional.pad(entries.cumsum(0, dtype=torch.int32), (1, 0))
        indptr, indices = before[self.indptr.long()], self.indices[entries]
        values = nn.Parameter(old.detach()[entries], requires_grad=old.requires_grad)
        if old.grad is not None:
            values.grad = old.grad[entries]
        self._set_pattern(BSRPattern._from_parts(indptr, indices, self._shape, self.block_shape))
        self.values = values
        if self.descale is not None:
            self.descale = self.descale[entries]
        return values

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = {name: self._buffers[name] for name in PATTERN_KEYS}
        missing, reading = self._missing(), self._reading
        if reading is not None and not reading.is_current(self.indptr, self.indices):
            reading = None
        super()._apply(self._moved_by(fn), recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is None or new is None or new is old:
                continue
            if old.is_meta:
                missing.append(name)
            else:
                # `to_empty` allocates uninitialised memory, which must never become a pattern.
                with torch.inference_mode(False):
                    self._buffers[name] = old.to(new.device)
        self._uninitialized = {name: getattr(self, name)._version for name in missing}
        if reading is not None and not self.indptr.is_meta:
            pattern = reading.pattern.to(self.indptr.device)
            reading = PatternReading(self.indptr, self.indices, pattern, reading)
            self._reading = remember(self.indptr, reading)
        return self

    def _moved_by(
        self, fn: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """`fn`, which moves values in fp8 and their scales, but does not cast them.

        `model.half()` is meant for the other layers of a model: in another dtype, values without
        their scales would be another weight. A dtype that inputs of the layer cannot have is
        refused here, because calls with such inputs would fail later.
        """
        if self.descale is None:
            return fn
        kept = (self.values, self.descale)

        def moved(x: torch.Tensor) -> torch.Tensor:
            made = fn(x)
            if made.dtype == x.dtype:
                return made
            if made.dtype not in INPUT_DTYPES:
                dtypes = ", ".join(map(str, INPUT_DTYPES))
                instead = "BSRLinear.from_matrix(layer.weight.dequantize(), layer.bias)"
                expected = f"one of {dtypes} (to compute in another, use {instead})"
                problem = "is cast to a dtype that products in fp8 do not take"
                op = type(self).__name__
                raise InvalidType(message(op, "a layer in fp8", problem, expected, made.dtype))
            return x.to(made.device) if any(x is y for y in kept) else made

        return moved

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
        names = (*KEYS, SCALES_KEY)
        found = {key: state_dict[prefix + key] for key in names if prefix + key in state_dict}
        if any(key in found for key in PATTERN_KEYS):
            try:
                self._prepare_for(found, local_metadata.get("assign_to_params_buffers", False))
            except BskError as error:
                error_msgs.append(f"{prefix.rstrip('.') or 'the module'}: {error}")
                return
            for key in PATTERN_KEYS:
                # Load the checked copy, even if the checkpoint changes later.
                state_dict[prefix + key] = getattr(self, key)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _has_buffers(self, state: dict[str, Any]) -> bool:
        """Whether a checkpoint has all buffers of the pattern, with the contents of the module."""
        for key in PATTERN_KEYS:
            ours, theirs = getattr(self, key), state.get(key)
            if type(theirs) is not torch.Tensor or theirs.is_meta or theirs.shape != ours.shape:
                return False
            if not bool((theirs.to(ours.device) == ours).all()):
                return False
        return True

    def _prepare_for(self, state: dict[str, Any], assign: bool) -> None:
        """Take the pattern of a checkpoint, if that is allowed, before its values are copied."""
        if "values" not in state and self._has_buffers(state):
            # Tied layers share values, which a checkpoint may store once; the caller of
            # `load_state_dict` decides whether they may be missing.
            return
        loaded = check_state(state, self._shape, self.block_shape, self.descale is not None)
        has_pattern = not (self.indptr.is_meta or self._missing())
        pattern = {"indptr": loaded.indptr, "indices": loaded.indices}
        is_same = has_pattern and self._has_buffers({**state, **pattern})
        fits = is_same if has_pattern else self.values.shape == loaded.values_shape
        if not fits and is_strict():
            raise other_pattern(self.nnz_blocks, self.blocks, loaded)
        # Assigning takes the tensors of the checkpoint, and with them its device.
        device = state["values"].device if assign else self.values.device
        if not is_same or device != self.indptr.device:
            parts = (loaded.indptr, loaded.indices, self._shape, self.block_shape)
            self._set_pattern(BSRPattern._from_parts(*parts).to(device))
        if self.values.shape != loaded.values_shape:
            self._resize_values(loaded.values_shape)
            if self.descale is not None:
                self.descale = self.descale.new_empty(loaded.values_shape[0])

    def _resize_values(self, shape: torch.Size) -> None:
        """Make room for another number of blocks, in the same Parameter if it is a plain one."""
        empty = self.values.detach().new_empty(shape)
        if type(self.values.detach()) is torch.Tensor:
            # an optimizer made before this goes on holding it
            self.values.grad = None
            self.values.data = empty
        else:
            self.values = nn.Parameter(empty, requires_grad=self.values.requires_grad)
