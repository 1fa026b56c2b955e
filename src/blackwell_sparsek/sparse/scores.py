"""Which blocks of a weight to keep: a score for each block, and the choice of the best."""

from typing import Any

import torch

from ..core.checks import (
    check_choice,
    check_dtype,
    check_rank,
    check_same_device,
    check_tensor,
    message,
)
from ..core.errors import InvalidInput, InvalidType
from ..launch.launcher import cdiv
from .convert import as_blocks
from .validate import VALUE_DTYPES, check_block_shape

NORMS = {"l1": 1, "l2": 2}
METHODS = ("magnitude", "wanda", "random")


def block_magnitude(
    w: torch.Tensor,
    block_shape: int | tuple[int, int],
    sparsity: float,
    *,
    norm: str = "l2",
    per_row: bool = False,
) -> torch.Tensor:
    """Keep the blocks of `w` with the largest norm.

    Parameters
    ----------
    w : Tensor [M, K], float16, bfloat16, float32 or float64
        A weight; for a `torch.nn.Linear`, M is `out_features`.
    block_shape : (bh, bw)
        Need not divide the shape. An edge block is scored by the elements that it has.
    sparsity : float in [0, 1]
        Fraction of the blocks to drop. Of n blocks exactly `n - round(sparsity * n)` are kept.
    norm : "l2" or "l1"
        Summed over the block, in float32 (float64 for a float64 `w`).
    per_row : bool
        Rank within each block row, so that the numbers of blocks kept per row differ by at most
        one: no output loses all its inputs, and rows take equal time. The remaining blocks go to
        the rows whose next block scores highest.

    Returns
    -------
    Tensor [ceil(M / bh), ceil(K / bw)], bool, on the device of `w`
        True where a block is kept. Of equal scores the first in row-major order wins. Synchronises.

    Raises
    ------
    InvalidInput
        If `w` is not finite or `sparsity` is outside of 0 to 1.

    Examples
    --------
    >>> import torch
    >>> from blackwell_sparsek.prune import block_magnitude
    >>> w = torch.tensor([[3.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    >>> block_magnitude(w, (2, 2), 0.5)
    tensor([[ True, False]])
    >>> block_magnitude(w, (2, 2), 0.5, norm="l1")
    tensor([[False,  True]])
    """
    op = "block_magnitude"
    block_shape = _check_weight(op, w, block_shape)
    check_choice(op, "norm", norm, tuple(NORMS))
    scores = block_norms(as_blocks(w.detach(), block_shape), norm)
    return keep_best(op, scores, sparsity, per_row=per_row)


def wanda(
    w: torch.Tensor,
    inputs: torch.Tensor,
    block_shape: int | tuple[int, int],
    sparsity: float,
    *,
    norm: str = "l1",
    per_row: bool = True,
) -> torch.Tensor:
    """Keep the blocks of `w` with the largest norm of `|w[i, j]| * ||x_j||`.

    This is the score of Wanda (Sun et al., 2023), summed over blocks; `x_j` holds the values of
    input feature j on a sample of data.

    Parameters
    ----------
    w : Tensor [M, K], float16, bfloat16, float32 or float64
        The weight of a linear layer with K inputs.
    inputs : Tensor [K] of norms, or Tensor [..., K] of activations with two or more dimensions
        Norms are taken of each feature over all samples; see `input_norms`. Any floating dtype, on
        the device of `w`.
    block_shape, sparsity, norm, per_row : as in `block_magnitude`
        As in the paper, blocks compete within a row of outputs by default.

    Returns
    -------
    Tensor [ceil(M / bh), ceil(K / bw)], bool, as from `block_magnitude`

    Raises
    ------
    InvalidInput
        As in `block_magnitude`, or if `inputs` does not fit `w`.

    Examples
    --------
    >>> import torch
    >>> from blackwell_sparsek.prune import wanda
    >>> w = torch.tensor([[3.0, 3.0, 1.0, 1.0]])
    >>> wanda(w, torch.tensor([0.1, 0.1, 9.0, 9.0]), (1, 2), 0.5)
    tensor([[False,  True]])
    """
    op = "wanda"
    block_shape = _check_weight(op, w, block_shape)
    check_choice(op, "norm", norm, tuple(NORMS))
    norms = _feature_norms(op, w, inputs)
    weighted = w.detach().to(norms.dtype) * norms
    return keep_best(op, block_norms(as_blocks(weighted, block_shape), norm), sparsity, per_row)


def choose_blocks(
    op: str,
    w: torch.Tensor,
    block_shape: int | tuple[int, int],
    sparsity: float,
    method: str,
    inputs: torch.Tensor | None,
) -> torch.Tensor:
    """Which blocks to keep, chosen by the method of that name."""
    check_choice(op, "method", method, METHODS)
    if (inputs is not None) != (method == "wanda"):
        expected = "activations or their norms for method 'wanda', and only for that"
        got = f"method {method!r} and {'no ' if inputs is None else ''}inputs"
        raise InvalidInput(message(op, "inputs", "does not fit the method", expected, got))
    if inputs is not None:
        return wanda(w, inputs, block_shape, sparsity)
    if method == "magnitude":
        return block_magnitude(w, block_shape, sparsity)
    bh, bw = _check_weight(op, w, block_shape)
    return random_blocks(cdiv(w.shape[0], bh), cdiv(w.shape[1], bw), sparsity).to(w.device)


def _check_weight(op: str, w: Any, block_shape: Any) -> tuple[int, int]:
    check_tensor(op, "w", w)
    check_dtype(op, "w", w, VALUE_DTYPES)
    check_rank(op, "w", w, "[M, K]")
    if w.is_meta:
        raise InvalidInput(message(op, "w", "has no values", "a real device", "the meta device"))
    return check_block_shape(op, block_shape)


def _feature_norms(op: str, w: torch.Tensor, inputs: Any) -> torch.Tensor:
    check_tensor(op, "inputs", inputs)
    check_dtype(op, "inputs", inputs, VALUE_DTYPES)
    check_same_device(op, {"w": w, "inputs": inputs})
    if inputs.dim() == 0 or inputs.shape[-1] != w.shape[1]:
        expected = f"[{w.shape[1]}] norms or [..., {w.shape[1]}] activations"
        problem = "does not fit the weight"
        raise InvalidInput(message(op, "inputs", problem, expected, list(inputs.shape)))
    wide = torch.promote_types(torch.promote_types(w.dtype, inputs.dtype), torch.float32)
    if inputs.dim() == 1:
        norms = inputs.detach().to(wide)
    else:
        norms = torch.linalg.vector_norm(inputs.detach().flatten(0, -2), dim=0, dtype=wide)
    if not bool(torch.isfinite(norms).all()):
        problem = "gives a norm that is not finite"
        raise InvalidInput(message(op, "inputs", problem, "finite values", "inf or NaN"))
    return norms


def block_norms(blocks: torch.Tensor, norm: str) -> torch.Tensor:
    """The norm over the last two dimensions, in float32 or wider."""
    wide = torch.promote_types(blocks.dtype, torch.float32)
    return torch.linalg.vector_norm(blocks, NORMS[norm], dim=(-2, -1), dtype=wide)


def check_sparsity(op: str, sparsity: Any) -> float:
    """Check that `sparsity` is a number in [0, 1]."""
    expected = "a number in [0, 1]"
    if not isinstance(sparsity, int | float) or isinstance(sparsity, bool):
        got = type(sparsity).__name__
        raise InvalidType(message(op, "sparsity", "is not a number", expected, got))
    if not 0 <= sparsity <= 1:
        raise InvalidInput(message(op, "sparsity", "is out of range", expected, sparsity))
    return float(sparsity)


def kept_count(sparsity: float, blocks: int) -> int:
    """How many of `blocks` remain."""
    return blocks - round(sparsity * blocks)


def keep_best(op: str, scores: torch.Tensor, sparsity: float, per_row: bool) -> torch.Tensor:
    """Mark the best `kept_count` of `scores` [rows, cols]; ties go to the first.

    A negative score means that there is no block. With `per_row`, rows keep equally many blocks as
    far as they have them.
    """
    count = kept_count(check_sparsity(op, sparsity), scores.numel())
    if not bool(torch.isfinite(scores).all()):
        problem = "gives a block score that is not finite"
        raise InvalidInput(message(op, "w", problem, "finite values", "inf or NaN"))
    keep = torch.zeros_like(scores, dtype=torch.bool)
    if not per_row:
        order = torch.sort(scores.flatten(), descending=True, stable=True).indices
        keep.view(-1)[order[:count]] = True
        return keep
    ranked, order = torch.sort(scores, dim=1, descending=True, stable=True)
    # The best block of every row comes before the second best of any; missing blocks come last.
    turn = torch.arange(scores.shape[1], device=scores.device).expand_as(ranked)
    turn = torch.where(ranked < 0, scores.shape[1], turn).flatten()
    by_score = torch.sort(ranked.flatten(), descending=True, stable=True).indices
    taken = by_score[torch.sort(turn[by_score], stable=True).indices[:count]]
    chosen = torch.zeros_like(keep).view(-1).index_fill_(0, taken, True).view_as(keep)
    return keep.scatter_(1, order, chosen)


def random_blocks(rows: int, cols: int, sparsity: float) -> torch.Tensor:
    """A random choice of equally many blocks per row, by torch's CPU generator and on the CPU."""
    scores = torch.rand(rows, cols, device="cpu")
    return keep_best("random_blocks", scores, sparsity, per_row=True)
