"""Checks that block-sparse-row metadata is well formed, with one device synchronization.

Every error names the row or the entry at fault. torch.sparse_bsr_tensor checks none of this unless
asked to, and a kernel that trusts a bad index reads out of bounds.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..core.checks import (
    check_dtype,
    check_has_data,
    check_rank,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)
from ..core.errors import InvalidInput, InvalidType
from ..core.fp8 import E4M3
from ..launch.launcher import cdiv

VALUE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
MAX_INDEX = 2**31 - 1
# Block rows or columns. A pattern and its transpose have an int32 for each, 256 MiB, also where few
# blocks or none are stored.
MOST_BLOCKS = 2**26


def check_pair(op: str, arg: str, value: Any, smallest: int) -> tuple[int, int]:
    """Check for two integers, each at least `smallest` and within int32."""
    expected = f"two integers of at least {smallest}"
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidType(message(op, arg, "is not a pair", expected, type(value).__name__))
    if len(value) != 2:
        raise InvalidInput(message(op, arg, "is not a pair", expected, list(value)))
    if not all(isinstance(v, int | torch.SymInt) and not isinstance(v, bool) for v in value):
        raise InvalidType(message(op, arg, "is not a pair of integers", expected, list(value)))
    if any(v > MAX_INDEX for v in value):
        expected = f"two integers of at most {MAX_INDEX}"
    if not all(smallest <= v <= MAX_INDEX for v in value):
        raise InvalidInput(message(op, arg, "is out of range", expected, list(value)))
    return value[0], value[1]


def check_block_shape(op: str, value: Any) -> tuple[int, int]:
    """Check for a block shape; an integer is a square block."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value, value)
    try:
        return check_pair(op, "block_shape", value, 1)
    except InvalidInput as error:
        raise type(error)(str(error).replace("two integers", "one or two integers")) from None


def check_values(op: str, data: Any, descale: Any = None) -> None:
    """Check block values: a floating tensor [nnzb, bh, bw] with blocks of at least 1 x 1.

    Those in e4m3 have a scale for each block, and no others do.
    """
    check_tensor(op, "data", data)
    if descale is None and data.dtype == E4M3:
        expected = "descale, a scale for each block (BSRMatrix.to_fp8 makes both)"
        raise InvalidInput(message(op, "data", "is in fp8 without scales", expected, "None"))
    check_dtype(op, "data", data, VALUE_DTYPES if descale is None else (E4M3,))
    check_rank(op, "data", data, "[nnzb, bh, bw]")
    check_pair(op, "block_shape", tuple(data.shape[1:]), 1)
    if descale is not None:
        check_tensor(op, "descale", descale)
        check_dtype(op, "descale", descale, (torch.float32,))
        check_shape(op, "descale", descale, (data.shape[0],))
        check_same_device(op, {"data": data, "descale": descale})


def check_metadata(
    op: str,
    indptr: Any,
    indices: Any,
    shape: tuple[int, int],
    block_shape: tuple[int, int],
) -> None:
    """Check `indptr` and `indices`, including their contents (one synchronization)."""
    check_index_tensors(op, indptr, indices)
    check_has_data(op, "indptr", indptr)
    rows, cols = cdiv(shape[0], block_shape[0]), cdiv(shape[1], block_shape[1])
    if max(rows, cols) > MOST_BLOCKS:
        expected = f"at most {MOST_BLOCKS} block rows and columns (take larger blocks)"
        problem = f"has too many blocks of {block_shape[0]} x {block_shape[1]}"
        raise InvalidInput(message(op, "shape", problem, expected, f"{rows} and {cols}"))
    if indptr.numel() != rows + 1:
        expected = f"{rows + 1} ({rows} block rows of {block_shape[0]} in {shape[0]}, plus 1)"
        raise InvalidInput(message(op, "indptr", "has a wrong length", expected, indptr.numel()))
    if indices.numel() > MAX_INDEX:
        raise InvalidInput(
            message(op, "indices", "is too long", f"at most {MAX_INDEX}", indices.numel())
        )
    _check_contents(op, indptr.to(torch.int64), indices.to(torch.int64), cols)


def check_index_tensors(op: str, indptr: Any, indices: Any) -> None:
    """Check types, ranks and devices, which tensors without data have as well."""
    for arg, x in (("indptr", indptr), ("indices", indices)):
        check_tensor(op, arg, x)
        check_dtype(op, arg, x, INDEX_DTYPES)
        check_rank(op, arg, x, "[n]")
    if indptr.dtype != indices.dtype:
        got = f"indptr {indptr.dtype}, indices {indices.dtype}"
        raise InvalidType(message(op, "indptr/indices", "have different dtypes", "one dtype", got))
    check_same_device(op, {"indptr": indptr, "indices": indices})


def _first(bad: torch.Tensor) -> torch.Tensor:
    """Position of the first true entry, or -1."""
    if bad.numel() == 0:
        return torch.full((), -1, dtype=torch.int64, device=bad.device)
    return torch.where(bad.any(), bad.to(torch.int8).argmax(), -1)


def _check_contents(op: str, indptr: torch.Tensor, indices: torch.Tensor, cols: int) -> None:
    nnzb = indices.numel()
    starts_row = torch.zeros(nnzb + 1, dtype=torch.bool, device=indices.device)
    starts_row[indptr.clamp(0, nnzb)] = True
    not_increasing = (indices[1:] <= indices[:-1]) & ~starts_row[1:nnzb]
    start, end, decrease, out_of_range, unordered = torch.stack(
        [
            indptr[0],
            indptr[-1],
            _first(indptr[1:] < indptr[:-1]),
            _first((indices < 0) | (indices >= cols)),
            _first(not_increasing),
        ]
    ).tolist()
    if start != 0:
        raise InvalidInput(message(op, "indptr", "has a wrong start", "indptr[0] = 0", start))
    if decrease >= 0:
        got = f"{int(indptr[decrease])} then {int(indptr[decrease + 1])}"
        problem = f"decreases at row {decrease}"
        raise InvalidInput(message(op, "indptr", problem, "a non-decreasing sequence", got))
    if end != nnzb:
        expected = f"indptr[-1] = {nnzb}, the number of blocks in indices"
        raise InvalidInput(message(op, "indptr", "has a wrong end", expected, end))
    if out_of_range >= 0:
        problem = f"is out of range at entry {out_of_range} ({_row_of(indptr, out_of_range)})"
        expected = f"block columns in [0, {cols})"
        column = int(indices[out_of_range])
        raise InvalidInput(message(op, "indices", problem, expected, column))
    if unordered >= 0:
        before, after = int(indices[unordered]), int(indices[unordered + 1])
        kind = "has a duplicate" if before == after else "is not sorted"
        problem = f"{kind} at entry {unordered + 1} ({_row_of(indptr, unordered + 1)})"
        expected = "strictly increasing block columns within a row"
        raise InvalidInput(message(op, "indices", problem, expected, f"{before} then {after}"))


def _row_of(indptr: torch.Tensor, entry: int) -> str:
    return f"block row {int((indptr <= entry).sum()) - 1}"


def padding_masks(
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    row_indices: torch.Tensor,
    indices: torch.Tensor,
) -> list[torch.Tensor]:
    """Masks [nnzb, bh, 1] and [nnzb, 1, bw] of elements beyond `shape`, for ragged sides only."""
    masks = []
    for dim, position in ((0, row_indices), (1, indices)):
        size, block = shape[dim], block_shape[dim]
        if size % block:
            beyond = torch.arange(block, device=position.device) >= size % block
            mask = (position == size // block)[:, None] & beyond
            masks.append(mask.unsqueeze(2 - dim))
    return masks


def zero_padding(
    values: torch.Tensor,
    shape: tuple[int, int],
    row_indices: torch.Tensor,
    indices: torch.Tensor,
) -> torch.Tensor:
    """`values` with zeros beyond `shape`; selected, not multiplied, so that a NaN goes too."""
    block_shape = (values.shape[1], values.shape[2])
    for mask in padding_masks(shape, block_shape, row_indices, indices):
        values = values.masked_fill(mask, 0)
    return values


def check_padding(
    op: str,
    data: torch.Tensor,
    shape: tuple[int, int],
    row_indices: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """Check that edge blocks are zero beyond `shape` (one synchronization if there are any)."""
    block_shape = (data.shape[1], data.shape[2])
    masks = padding_masks(shape, block_shape, row_indices, indices)
    if not masks or data.numel() == 0:
        return
    nonzero = data.detach() != 0
    bad = torch.stack([(nonzero & mask).flatten(1).any(1) for mask in masks]).any(0)
    entry = int(_first(bad))
    if entry >= 0:
        where = f"block row {int(row_indices[entry])}, block column {int(indices[entry])}"
        problem = f"is not zero beyond the shape at entry {entry} ({where})"
        expected = f"zero padding outside {list(shape)}"
        raise InvalidInput(message(op, "data", problem, expected, "a nonzero or NaN value"))
