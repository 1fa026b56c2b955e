"""Conversions between dense matrices, other sparse formats, and (pattern, block values)."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..core.checks import (
    check_dtype,
    check_has_data,
    check_rank,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)
from ..core.errors import InvalidInput, InvalidType, Unsupported
from ..core.fp8 import E4M3, finite_magnitude, scales_of, within_range
from ..launch.launcher import cdiv
from .pattern import BSRPattern
from .validate import VALUE_DTYPES, check_block_shape

if TYPE_CHECKING:
    from scipy.sparse import bsr_matrix


def check_dense(op: str, x: Any) -> None:
    """Check that `x` is a floating matrix."""
    check_tensor(op, "x", x)
    check_dtype(op, "x", x, VALUE_DTYPES)
    check_rank(op, "x", x, "[M, K]")


def as_blocks(x: torch.Tensor, block_shape: tuple[int, int]) -> torch.Tensor:
    """[M, K] as [rows_b, cols_b, bh, bw]; a view unless the edges need zero padding."""
    (m, k), (bh, bw) = x.shape, block_shape
    if m % bh or k % bw:
        x = F.pad(x, (0, -k % bw, 0, -m % bh))
    lines = torch.unflatten(x, 1, (cdiv(k, bw), bw))
    return torch.unflatten(lines, 0, (cdiv(m, bh), bh)).transpose(1, 2)


def blocks_of(
    x: torch.Tensor, block_keep: torch.Tensor, block_shape: tuple[int, int]
) -> tuple[BSRPattern, torch.Tensor]:
    """The pattern of `block_keep` and the kept blocks of `x` (one synchronization)."""
    counts = block_keep.sum(1, dtype=torch.int32)
    indptr = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    rows, cols = block_keep.nonzero(as_tuple=True)
    shape = (x.shape[0], x.shape[1])
    pattern = BSRPattern._from_parts(indptr, cols.int(), shape, block_shape)
    return pattern, as_blocks(x, block_shape)[rows, cols]


def from_dense(op: str, x: Any, block_shape: Any) -> tuple[BSRPattern, torch.Tensor]:
    """Keep the blocks that have any nonzero element; a NaN is nonzero."""
    check_dense(op, x)
    check_has_data(op, "x", x)
    block_shape = check_block_shape(op, block_shape)
    keep = (as_blocks(x.detach(), block_shape) != 0).flatten(2).any(2)
    return blocks_of(x, keep, block_shape)


def from_element_mask(
    op: str, x: Any, mask: Any, block_shape: Any
) -> tuple[BSRPattern, torch.Tensor]:
    """Keep the blocks where `mask` has any true element; elements outside it become zero."""
    check_dense(op, x)
    check_tensor(op, "mask", mask)
    check_dtype(op, "mask", mask, (torch.bool,))
    check_shape(op, "mask", mask, x.shape)
    check_same_device(op, {"x": x, "mask": mask})
    check_has_data(op, "mask", mask)
    block_shape = check_block_shape(op, block_shape)
    keep = as_blocks(mask, block_shape).flatten(2).any(2)
    return blocks_of(x.masked_fill(~mask, 0), keep, block_shape)


def from_mask(
    op: str, x: Any, block_keep: Any, block_shape: Any
) -> tuple[BSRPattern, torch.Tensor]:
    """Keep exactly the blocks of `block_keep`."""
    check_dense(op, x)
    check_tensor(op, "block_keep", block_keep)
    check_dtype(op, "block_keep", block_keep, (torch.bool,))
    check_rank(op, "block_keep", block_keep, "[rows_b, cols_b]")
    check_same_device(op, {"x": x, "block_keep": block_keep})
    check_has_data(op, "block_keep", block_keep)
    if block_shape is None:
        block_shape = _infer_block_shape(op, x, block_keep)
    bh, bw = check_block_shape(op, block_shape)
    check_shape(op, "block_keep", block_keep, (cdiv(x.shape[0], bh), cdiv(x.shape[1], bw)))
    return blocks_of(x, block_keep, (bh, bw))


def _infer_block_shape(op: str, x: torch.Tensor, block_keep: torch.Tensor) -> tuple[int, int]:
    sizes = []
    for size, blocks in zip(x.shape, block_keep.shape, strict=True):
        if blocks == 0 or size == 0 or size % blocks:
            raise InvalidInput(
                message(
                    op,
                    "block_shape",
                    "cannot be inferred",
                    "block_shape=(bh, bw), or sizes that are a multiple of the blocks",
                    f"{list(x.shape)} elements over {list(block_keep.shape)} blocks",
                )
            )
        sizes.append(size // blocks)
    return sizes[0], sizes[1]


def to_dense(pattern: BSRPattern, values: torch.Tensor) -> torch.Tensor:
    """The stored matrix as [M, K]."""
    (m, k), (bh, bw) = pattern.shape, pattern.block_shape
    blocks = values.new_zeros(pattern.rows_b, pattern.cols_b, bh, bw)
    at = (pattern.row_indices().long(), pattern.indices.long())
    blocks = blocks.index_put(at, values)
    full = blocks.transpose(1, 2).reshape(pattern.rows_b * bh, pattern.cols_b * bw)
    return full[:m, :k].contiguous()


def rounded_blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [nnzb, bh, bw] in e4m3, and the scale of each, fp32 [nnzb]."""
    exact = values.detach().float()
    largest = finite_magnitude(exact).flatten(1).amax(1)
    descale = scales_of(largest, E4M3)
    scaled = exact * descale.reciprocal()[:, None, None]
    return within_range(scaled, E4M3).to(E4M3, memory_format=torch.contiguous_format), descale


def check_torch(op: str, t: Any) -> None:
    """Check that `t` is a plain (unbatched, scalar-valued) torch.sparse_bsr tensor."""
    if not isinstance(t, torch.Tensor):
        raise InvalidType(message(op, "t", "is not a tensor", "torch.Tensor", type(t).__name__))
    if t.layout != torch.sparse_bsr:
        raise InvalidType(message(op, "t", "has a wrong layout", torch.sparse_bsr, t.layout))
    if t.dim() != 2 or t.values().dim() != 3:
        raise Unsupported(
            message(op, "t", "has batch or dense dimensions", "[M, K]", list(t.shape))
        )


def to_torch(
    indptr: torch.Tensor, indices: torch.Tensor, data: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """A torch.sparse_bsr tensor; that format cannot have ragged edges."""
    if shape[0] % data.shape[1] or shape[1] % data.shape[2]:
        raise InvalidInput(
            message(
                "BSRMatrix.to_torch",
                "shape",
                "has ragged edge blocks, which torch.sparse_bsr lacks",
                f"a multiple of {list(data.shape[1:])}",
                list(shape),
            )
        )
    return torch.sparse_bsr_tensor(indptr, indices, data, shape, check_invariants=True)


def check_scipy(op: str, m: Any) -> None:
    """Check that `m` is a SciPy block-sparse-row matrix or array."""
    import scipy.sparse

    if not scipy.sparse.issparse(m) or m.format != "bsr":
        kind = f"{type(m).__name__}"
        hint = "scipy.sparse.bsr_matrix or bsr_array (call .tobsr(blocksize))"
        raise InvalidType(message(op, "m", "is not in BSR format", hint, kind))


def to_scipy(
    indptr: torch.Tensor, indices: torch.Tensor, data: torch.Tensor, shape: tuple[int, int]
) -> "bsr_matrix":
    """scipy.sparse.bsr_matrix with copies of the data on the CPU."""
    import scipy.sparse

    op = "BSRMatrix.to_scipy"
    check_dtype(op, "data", data, (torch.float32, torch.float64))
    if shape[0] % data.shape[1] or shape[1] % data.shape[2]:
        expected = f"a multiple of {list(data.shape[1:])}"
        problem = "has ragged edge blocks, which SciPy lacks"
        raise InvalidInput(message(op, "shape", problem, expected, list(shape)))
    arrays = tuple(x.detach().cpu().numpy() for x in (data, indices, indptr))
    return scipy.sparse.bsr_matrix(arrays, shape=shape, copy=True)
