"""q, k and v in the shapes of batched products, and the sizes of the steps over them."""

import math
from typing import NamedTuple

import torch

from ...calls.attention import AttnSpec, compute_dtype
from ...launch.launcher import cdiv
from ...masks.block_mask import BlockMask
from .added import AddedScores, added_scores
from .softmax import LN_2, LOG2_E
from .visits import Extent


class StepSizes(NamedTuple):
    """The most that one step computes."""

    tile_q: int
    keys: int
    scores: int
    """Elements of the largest temporary tensor."""


# on a CPU the scores of a step stay in the L2; elsewhere fewer and larger launches matter more
CPU_STEPS = StepSizes(tile_q=128, keys=1024, scores=2**19)
DEVICE_STEPS = StepSizes(tile_q=512, keys=4096, scores=2**25)


def step_sizes(device: torch.device) -> StepSizes:
    """Step sizes for a device."""
    return CPU_STEPS if device.type == "cpu" else DEVICE_STEPS


class Scores(NamedTuple):
    """How products become scores: `q` is scaled by `before`, the product finished by `finish`."""

    before: float
    softcap: float

    @classmethod
    def of(cls, spec: AttnSpec) -> "Scores":
        """Base-2 scores, or arguments of tanh when there is a softcap."""
        if spec.softcap:
            return cls(spec.scale / spec.softcap, spec.softcap)
        return cls(spec.scale * LOG2_E, 0.0)

    def finish(self, products: torch.Tensor) -> torch.Tensor:
        """Base-2 scores of products with scaled queries, in place."""
        return products.tanh_().mul_(self.softcap * LOG2_E) if self.softcap else products

    @property
    def slope(self) -> float:
        """d(natural score) / d(product), up to `bend`."""
        return self.softcap or LN_2

    def bend(self, products: torch.Tensor) -> torch.Tensor | None:
        """The other factor of the slope, 1 - tanh^2, or None without a softcap."""
        return torch.tanh(products).square_().neg_().add_(1.0) if self.softcap else None


class Operands(NamedTuple):
    """The operands of one dense problem, n = B * Hkv, in the dtype of computation."""

    q: torch.Tensor
    """[n, G, Sq, D], times `Scores.before`: the queries of each KV head's group."""
    kt: torch.Tensor
    """[n, D, Sk]"""
    v: torch.Tensor
    """[n, Sk, Dv]"""
    scores: Scores
    sinks_log2: torch.Tensor | None
    """[n, G]"""
    guarded: bool
    """Whether q, k or v may hold NaN or inf, which must reach only the queries that see them."""
    added: AddedScores | None
    """Terms to add to the scores, None without any."""


def operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttnSpec,
    extent: Extent,
    guarded: bool,
) -> Operands:
    """Bring q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] into shape: O(S * D) copies."""
    batch, heads_q, sq, dim = q.shape
    heads_kv, sk = k.shape[1:3]
    group = heads_q // heads_kv
    dtype = compute_dtype(q.dtype)
    scores = Scores.of(spec)
    kt = k.to(dtype).transpose(2, 3)
    sinks = None
    if spec.sinks is not None:
        sinks = (spec.sinks.to(dtype) * LOG2_E).expand(batch, -1).reshape(-1, group)
    return Operands(
        (q.to(dtype) * scores.before).reshape(batch * heads_kv, group, sq, dim),
        # products with contiguous rows of k^T run a third faster on CPUs
        kt.contiguous().view(batch * heads_kv, dim, sk),
        v.to(dtype).reshape(batch * heads_kv, sk, v.shape[3]),
        scores,
        sinks,
        guarded,
        added_scores(spec, extent, batch, (heads_q, heads_kv), dtype),
    )


def may_be_nonfinite(*tensors: torch.Tensor) -> bool:
    """Whether any tensor may hold NaN or inf. Reads the data on a CPU only, where nothing waits.

    A sum is finite only if every element is, and costs a tenth of `isfinite().all()`. It may
    overflow for elements near the end of the range, which then pay for a guard they do not need.
    """
    if tensors[0].device.type != "cpu":
        return True
    return not all(math.isfinite(x.sum(dtype=compute_dtype(x.dtype)).item()) for x in tensors)


class BlockRows(NamedTuple):
    """How the rows of a block mask, its query blocks, are laid out for computation.

    A row holds the queries of one query block, of all heads of a group when they share a mask.
    Rows are `head_row * q_blocks + q_block`, with `head_row` counting KV heads or query heads.
    """

    heads: int
    """Query heads stacked in one row."""
    q_blocks: int
    mask_row: torch.Tensor
    """int64 [rows]: the row of the block mask that each row obeys."""
    kv_head: torch.Tensor
    """int64 [rows]: which of the n heads of k and v each row reads."""
    k_blocks: int


def block_rows(ops: Operands, mask: BlockMask, extent: Extent, heads_kv: int) -> BlockRows:
    """Lay out the query blocks of `ops` under `mask`."""
    n, group = ops.q.shape[:2]
    bq, bk = mask.block_size
    device = ops.q.device
    stacked = group if mask.heads in (1, heads_kv) else 1
    q_blocks, k_blocks = cdiv(extent.sq, bq), cdiv(extent.sk, bk)
    head_row = torch.arange(n * group // stacked, device=device)
    heads_per_batch = heads_kv * group // stacked
    batch = head_row // heads_per_batch if mask.batch > 1 else torch.zeros_like(head_row)
    if extent.sequence is not None and mask.batch > 1:
        batch = torch.full_like(head_row, extent.sequence)
    head = head_row % heads_per_batch if mask.heads > 1 else torch.zeros_like(head_row)
    first_row = (batch * mask.heads + head) * cdiv(mask.seq_lengths[0], bq)
    mask_row = first_row[:, None] + torch.arange(q_blocks, device=device)
    kv_head = (head_row // (group // stacked))[:, None].expand(-1, q_blocks)
    return BlockRows(stacked, q_blocks, mask_row.flatten(), kv_head.flatten(), k_blocks)


def added_to_blocks(
    ops: Operands,
    layout: BlockRows,
    rows: torch.Tensor,
    column: torch.Tensor,
    block: tuple[int, int],
) -> torch.Tensor | None:
    """The terms added to the scores of `rows` and their key blocks `column` [rows, blocks]."""
    if ops.added is None:
        return None
    bq, bk = block
    q_index = (rows % layout.q_blocks)[:, None] * bq + torch.arange(bq, device=rows.device)
    kv_pos = column[:, :, None] * bk + torch.arange(bk, device=rows.device)
    return ops.added.of_blocks(rows // layout.q_blocks, layout.heads, q_index, kv_pos.flatten(1))


class KeyBlocks:
    """The rows of k or v, [n, Sk, D], cut into key blocks for gathering."""

    def __init__(self, x: torch.Tensor, block: int):
        self.rows: torch.Tensor = _padded(x, 1, block).reshape(-1, block, x.shape[2])

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """Blocks `index` [rows, blocks] of all heads, [rows, blocks * bk, D]."""
        return self.rows.index_select(0, index.flatten()).view(
            index.shape[0], -1, self.rows.shape[2]
        )


class KeyColumns:
    """The columns of k^T or v^T, [n, D, Sk], cut into key blocks for gathering.

    Gathering a transposed block row by row costs more than gathering a block, but a product with
    small transposed operands is up to 30 times slower on some CPUs.
    """

    def __init__(self, xt: torch.Tensor, block: int):
        self.dim: int = xt.shape[1]
        padded = _padded(xt, 2, block)
        self.blocks: int = padded.shape[2] // block
        self.rows: torch.Tensor = padded.reshape(-1, block)

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """Blocks `index` [rows, blocks] of all heads, [rows, D, blocks * bk]."""
        head, column = index // self.blocks, index % self.blocks
        feature = head[:, None] * self.dim + torch.arange(self.dim, device=index.device)[:, None]
        wanted = feature * self.blocks + column[:, None]
        return self.rows.index_select(0, wanted.flatten()).view(index.shape[0], self.dim, -1)


def _padded(x: torch.Tensor, dim: int, block: int) -> torch.Tensor:
    """`x` with zeros after the end of `dim`, up to whole blocks."""
    missing = -x.shape[dim] % block
    if not missing:
        return x
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))


def to_query_rows(x: torch.Tensor, rows: BlockRows, block: int) -> torch.Tensor:
    """[n, G, Sq, D] as [rows, heads * block, D], zeros after the end."""
    n, group, _, dim = x.shape
    head_rows = n * group // rows.heads
    x = _padded(x, 2, block)
    x = x.reshape(head_rows, rows.heads, rows.q_blocks, block, dim).transpose(1, 2)
    return x.reshape(head_rows * rows.q_blocks, rows.heads * block, dim)


def from_query_rows(x: torch.Tensor, rows: BlockRows, block: int, like: torch.Size) -> torch.Tensor:
    """The inverse of `to_query_rows`; `like` is [n, G, Sq, any]."""
    n, group, sq, _ = like
    head_rows = n * group // rows.heads
    x = x.view(head_rows, rows.q_blocks, rows.heads, block, -1).transpose(1, 2)
    return x.reshape(n, group, rows.q_blocks * block, -1)[:, :, :sq]
