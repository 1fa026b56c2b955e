"""The pattern and the scale that a new `BSRLinear` starts with."""

import torch
import torch.nn.functional as F

from ..core.checks import check_dtype, check_shape, check_tensor, message
from ..core.errors import InvalidInput
from ..launch.launcher import cdiv
from ..sparse.pattern import BSRPattern


def initial_pattern(
    op: str,
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    keep: torch.Tensor | None,
    sparsity: float,
) -> BSRPattern:
    """The blocks of `keep`, or random ones."""
    # `prune` stands beside this package and imports it.
    from ..prune.scores import check_sparsity, random_blocks

    check_sparsity(op, sparsity)
    blocks = (cdiv(shape[0], block_shape[0]), cdiv(shape[1], block_shape[1]))
    if keep is None:
        keep = random_blocks(*blocks, sparsity)
    elif sparsity:
        got = f"keep and sparsity={sparsity}"
        raise InvalidInput(message(op, "keep/sparsity", "are both given", "one of them", got))
    check_tensor(op, "keep", keep)
    check_dtype(op, "keep", keep, (torch.bool,))
    check_shape(op, "keep", keep, blocks)
    indptr = F.pad(keep.sum(1).cumsum(0, dtype=torch.int32), (1, 0))
    indices = keep.nonzero(as_tuple=True)[1].int()
    return BSRPattern._from_parts(indptr, indices, shape, block_shape)


def initial_bounds(pattern: BSRPattern) -> torch.Tensor:
    """float32 [rows_b]: 1/sqrt(inputs that a row of outputs reads), 0 where it reads none."""
    width = pattern.block_shape[1]
    inputs = pattern.indices.new_full((pattern.nnz_blocks,), width)
    if ragged := pattern.shape[1] % width:
        inputs.masked_fill_(pattern.indices == pattern.cols_b - 1, ragged)
    fan_in = inputs.new_zeros(pattern.rows_b).index_add_(0, pattern.row_indices(), inputs)
    return torch.where(fan_in > 0, fan_in.float().rsqrt(), 0.0)
