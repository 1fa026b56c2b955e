"""The facts about a block-sparse product that the choice of an implementation may depend on."""

from dataclasses import dataclass, replace

import torch

from ..core.arch import Arch


@dataclass(frozen=True)
class BsrProblem:
    """One block-sparse product, as predicates and `explain` see it.

    `kind` is matmul, sddmm or pairs. `shape` is that of the sparse operand as seen (rows, columns),
    `n` the extent of the dense operand along the result (of the contraction for sddmm), `batch`
    the product of its leading dimensions. `row_major` tells whether the dense operand (both, for
    sddmm) has a contiguous last dimension, `tma` whether addresses and strides of all matrices
    suit the copy engine of Hopper. `other_block_shape` is that of the second operand of
    pairs; both block shapes are as seen.
    """

    kind: str
    arch: Arch
    dtype: torch.dtype
    out_dtype: torch.dtype
    shape: tuple[int, int]
    block_shape: tuple[int, int]
    nnz_blocks: int
    n: int
    batch: int = 1
    dense_left: bool = False
    transposed: bool = False
    row_major: bool = True
    tma: bool = False
    bias: bool = False
    residual: bool = False
    activation: str | None = None
    other_block_shape: tuple[int, int] = (0, 0)

    @property
    def ragged(self) -> bool:
        """Whether edge blocks reach beyond the shape."""
        return any(size % b != 0 for size, b in zip(self.shape, self.block_shape, strict=True))

    @property
    def merged(self) -> "BsrProblem":
        """With the rows of all batch entries as rows of one matrix."""
        return replace(self, n=self.n * self.batch, batch=1)

    def __str__(self) -> str:
        operand = "X @ A" if self.dense_left else "A @ X"
        what = {"matmul": operand, "sddmm": "sddmm", "pairs": "A @ B"}[self.kind]
        extras = [name for name in ("bias", "residual", "transposed") if getattr(self, name)]
        extras += [self.activation] if self.activation else []
        return (
            f"{what} on {self.arch}, {self.dtype} -> {self.out_dtype}, shape {self.shape}, "
            f"blocks {self.block_shape}, {self.nnz_blocks} stored, n {self.n}, batch {self.batch}"
            + (f", {' '.join(extras)}" if extras else "")
        )
