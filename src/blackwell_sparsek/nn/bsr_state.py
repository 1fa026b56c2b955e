"""Loading the state of a block-sparse weight: a checkpoint is checked before anything trusts it.

A kernel reads where the pattern says; a pattern from a file may say anything. What does not fit is
refused with the module's state untouched.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from ..core.checks import check_dtype, check_shape, check_tensor, message
from ..core.errors import InvalidInput
from ..sparse.pattern import BSRPattern
from ..sparse.validate import VALUE_DTYPES, check_metadata, check_padding

# What a state dict holds for one layer, besides the bias.
PATTERN_KEYS = ("weight_shape", "indptr", "indices")
KEYS = (*PATTERN_KEYS, "values")

_adopting: ContextVar[bool] = ContextVar("bsk_adopt_patterns", default=False)


@contextmanager
def adopt_patterns() -> Iterator[None]:
    """Inside, `load_state_dict` gives each `BSRLinear` the pattern of the checkpoint.

    Otherwise a checkpoint with another pattern is an error, since values of one pattern mean
    nothing in another. Sizes and block shapes must agree in any case. Where the number of blocks
    differs, `values` becomes a new Parameter: make optimisers afterwards.

    To load a pruned checkpoint into a model as its class makes it, first give it block-sparse
    layers of any pattern: `sparsify_(model, block_shape, 0.9, method="random")`.

    Examples
    --------
    >>> from blackwell_sparsek.nn import BSRLinear, adopt_patterns
    >>> trained = BSRLinear(64, 64, (16, 16), sparsity=0.75)
    >>> other = BSRLinear(64, 64, (16, 16), sparsity=0.5)
    >>> with adopt_patterns():
    ...     other.load_state_dict(trained.state_dict())
    <All keys matched successfully>
    >>> other.nnz_blocks
    4
    """
    token = _adopting.set(True)
    try:
        yield
    finally:
        _adopting.reset(token)


def adopting() -> bool:
    """Whether a pattern may be replaced by that of a checkpoint."""
    return _adopting.get()


class LoadedState(NamedTuple):
    """The checked metadata of a checkpoint: int32 copies, and the shape of the values."""

    indptr: torch.Tensor
    indices: torch.Tensor
    values_shape: torch.Size


def check_state(
    state: Mapping[str, Any],
    shape: tuple[int, int],
    block_shape: tuple[int, int],
) -> LoadedState:
    """Check all of `state` (keys `KEYS`) for a weight of `shape`; raise `InvalidInput`."""
    op = "BSRLinear.load_state_dict"
    missing = [key for key in KEYS if key not in state]
    if missing:
        got = ", ".join(key for key in KEYS if key in state)
        expected = f"all of {', '.join(KEYS)}"
        raise InvalidInput(message(op, "state_dict", "is incomplete", expected, got))
    for key in KEYS:
        x = state[key]
        # Sharded values (FSDP) are not plain tensors; of these only the shape is checked.
        if key != "values":
            check_tensor(op, key, x)
        if x.is_meta:
            problem = "has no contents to check"
            raise InvalidInput(message(op, key, problem, "a real device", "the meta device"))
    check_dtype(op, "weight_shape", state["weight_shape"], (torch.int32, torch.int64))
    check_shape(op, "weight_shape", state["weight_shape"], (2,))
    found = tuple(state["weight_shape"].tolist())
    if found != shape:
        problem = "is that of another layer"
        raise InvalidInput(message(op, "weight_shape", problem, list(shape), list(found)))
    check_metadata(op, state["indptr"], state["indices"], shape, block_shape)
    values = state["values"]
    check_shape(op, "values", values, (state["indices"].numel(), *block_shape))
    indptr = state["indptr"].to(torch.int32, copy=True)
    indices = state["indices"].to(torch.int32, copy=True)
    if isinstance(values, torch.Tensor) and type(values).__name__ != "DTensor":
        check_tensor(op, "values", values)
        check_dtype(op, "values", values, VALUE_DTYPES)
        pattern = BSRPattern._from_parts(indptr, indices, shape, block_shape).to(values.device)
        check_padding(op, values, shape, pattern.row_indices(), pattern.indices)
    return LoadedState(indptr, indices, values.shape)


def same_pattern(current: BSRPattern, loaded: LoadedState) -> bool:
    """Whether a checkpoint has the pattern of the module."""
    return current.indices.shape == loaded.indices.shape and all(
        torch.equal(ours.to(theirs.device), theirs)
        for ours, theirs in ((current.indptr, loaded.indptr), (current.indices, loaded.indices))
    )


def other_pattern(nnz_blocks: int, blocks: int, loaded: LoadedState) -> InvalidInput:
    """The error for a checkpoint that has not."""
    return InvalidInput(
        message(
            "BSRLinear.load_state_dict",
            "the checkpoint",
            "has another pattern",
            f"the pattern of this module ({nnz_blocks} of {blocks} blocks), or loading "
            "inside blackwell_sparsek.nn.adopt_patterns()",
            f"{loaded.indices.numel()} of {blocks} blocks",
        )
    )
