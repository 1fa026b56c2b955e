"""Implementation `sm90` of `bsk::bsr_matmul`: which Hopper kernel makes a product, and its launch.

`matmul` tries the kernels in this order: strips of narrow blocks and the kernel for few columns;
one block row of 16 rows per warp, if that is estimated to be faster; otherwise tiles of blocks of
at least 64 rows, into which lower ones are packed.
"""

from typing import Any, NamedTuple

import torch

from ...calls.matmul import BsrProblem, MatmulCall
from ...core.arch import arch_of
from ...core.compat import hopper_options, warps_may_part
from ...launch.descriptors import tensor_descriptor
from ...launch.launcher import cdiv, launch, on_device_of
from ...launch.workspace import scratch, self_resetting_counters
from ..estimate import takes_warp_rows
from ..plan import SpmmPlan, spmm_plan
from ..rows import RowsProduct, Views, rows_product
from ..triton.finish import addends_of, empty_partial, launch_spmm_reduce
from ..triton.pack import launch_pack, packed_pattern
from ..triton.tuning import narrow_is_even, spmm_sizes
from .config import PAIR, SLAB_COLUMNS, WARP_ROWS, SpmmSm90Config, WarpRowsConfig
from .fp8_config import SpmmFp8Config
from .layouts import fragment_columns, in_fragments, launch_transpose
from .narrow import launch_spmm_narrow_sm90
from .row_pairs import PairPlan, row_pairs
from .row_schedule import row_schedule, row_table
from .spmm import _spmm_sm90_kernel
from .strips import launch_spmm_strips
from .tuning import (
    BEARABLE_CHUNKS,
    narrow_sm90_config,
    spmm_sm90_chunk,
    spmm_sm90_config,
    spmm_sm90_paired,
    strips_config,
)
from .warps import launch_spmm_warps

# Registers per thread the kernel is compiled for; the roles then redistribute them.
MAX_REGISTERS = 168
# Panels of the dense operand that run together, a raster group: they share blocks through the L2
# (50 MB) and stay in it themselves. One panel after the other read 780 MB from memory where 300
# would do.
RASTER_BYTES = 16 * 2**20


class TallBlocks(NamedTuple):
    """Blocks as the kernel copies them, contiguous, with the pattern of the result's rows."""

    values: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    perm: torch.Tensor | None


def matmul(call: MatmulCall) -> torch.Tensor:
    """op(A) @ dense, or dense @ op(A) where `dense_left`, with its epilogue."""
    product = rows_product(call)
    if product.out.numel() and (_by_strips(product, call) or _by_few_columns(product, call)):
        return product.out
    for views in product.parts:
        x, x_transposed = _readable(views.x, product.rows.blocks.shape[2])
        views = views._replace(x=x)
        if warps_may_part() and takes_warp_rows(product.problem, x_transposed):
            _by_warps(product, call, views)
        else:
            _by_tiles(product, call, views, x_transposed)
    return product.out


def _by_strips(product: RowsProduct, call: MatmulCall) -> bool:
    """Compute the product by strips of narrow blocks; False if that does not apply."""
    rows, config = product.rows, strips_config(product.problem)
    if config is None:
        return False
    table = row_table(rows.indptr, rows.indices, rows.perm)
    if table is None or not narrow_is_even(product.problem, config, table.width):
        return False
    for part in product.parts:
        for out, x, residual in part.entries():
            launch_spmm_strips(out, call.values, table, x, call.bias, residual, config)
    return True


def _by_few_columns(product: RowsProduct, call: MatmulCall) -> bool:
    """Compute the product by the kernel for few columns; False if that does not apply."""
    rows, config = product.rows, narrow_sm90_config(product.problem)
    if config is None:
        return False
    # one program fills the shared memory of an SM
    programs, columns = product.problem.arch.num_sms, product.problem.n
    schedule = row_schedule(rows.indptr, rows.indices, config, columns, programs)
    if schedule is None or not narrow_is_even(product.problem, config, schedule.width):
        return False
    for part in product.parts:
        for out, x, residual in part.entries():
            launch_spmm_narrow_sm90(out, call.values, schedule, x, call.bias, residual, config)
    return True


def _by_warps(product: RowsProduct, call: MatmulCall, views: Views) -> None:
    """Fill the results of one part with warps that have a block row each."""
    rows, problem = product.rows, product.problem
    config = WarpRowsConfig(OUT_TRANSPOSED=problem.dense_left, ACTIVATION=problem.activation)
    # no row is longer than this, so none is split
    plan = spmm_plan(rows.indptr, call.values.shape[0], rows.cols_b, rows.cols_b)
    block_w = rows.blocks.shape[2]
    per_block = block_w // WARP_ROWS
    fragments = in_fragments(call.values, block_w, rows.perm, config.AHEAD)
    columns = fragment_columns(rows.indptr, rows.indices, per_block)
    for out, x, residual in views.entries():
        operands = (out, fragments, columns, x)
        launch_spmm_warps(*operands, call.bias, residual, plan, per_block, config)


def _by_tiles(product: RowsProduct, call: MatmulCall, views: Views, x_transposed: bool) -> None:
    """Fill the results of one part with tiles of tall blocks, in pairs of rows where that helps."""
    config = spmm_sm90_config(product.problem, x_transposed)
    blocks = _tall_blocks(product, call.values, config.BLOCK_H)
    work = tiles_of_work(product.problem, product.rows.cols_b, blocks, config)
    for entry in views.entries():
        launch_spmm_sm90(entry, work.blocks, call.bias, work.plan, work.config)


class TilesOfWork(NamedTuple):
    """How a product is divided into tiles."""

    blocks: TallBlocks
    plan: SpmmPlan | PairPlan
    config: SpmmSm90Config


def tiles_of_work(
    problem: BsrProblem, cols_b: int, blocks: TallBlocks, config: SpmmSm90Config
) -> TilesOfWork:
    """The work list of tall blocks, by pairs of rows where that helps."""
    count = blocks.values.shape[0]
    sizes = spmm_sizes(problem)._replace(block_h=config.BLOCK_H, nnz_blocks=count)
    chunk = spmm_sm90_chunk(problem.arch, sizes, config)
    plan = spmm_plan(blocks.indptr, count, cols_b, chunk, BEARABLE_CHUNKS)
    paired = spmm_sm90_paired(problem, config)
    # rows that were split are too unequal to be paired
    if paired is not None and plan.n_split_rows == 0 and problem.nnz_blocks > 0:
        pairs = row_pairs(blocks.indptr, blocks.indices, blocks.perm, cols_b)
        if pairs is not None:
            blocks = blocks._replace(indices=pairs.cols, perm=pairs.entries)
            return TilesOfWork(blocks, pairs, paired)
    return TilesOfWork(blocks, plan, config)


def _readable(x: torch.Tensor, block_w: int) -> tuple[torch.Tensor, bool]:
    """The dense operand [B, K, N] as the kernel reads it, and whether its columns are contiguous.

    Narrow blocks would make many short copies of contiguous columns; those are transposed first.
    """
    if x.stride(-1) == 1:
        return x, False
    if block_w % 32 == 0 or x.shape[2] % 8:
        return x, True
    by_rows = scratch(x.shape, x.dtype, x.device)
    for i in range(x.shape[0]):
        launch_transpose(by_rows[i], x[i].mT)
    return by_rows, False


def _tall_blocks(product: RowsProduct, values: torch.Tensor, block_h: int) -> TallBlocks:
    """Blocks of `block_h` rows with their pattern: as stored, or packed from lower ones."""
    rows = product.rows
    height, width = rows.blocks.shape[1:]
    if values.shape[0] == 0:
        # TMA cannot describe an empty tensor; this one is never read
        empty = values.new_empty((1, *values.shape[1:]))
        return TallBlocks(empty, rows.indptr, rows.indices, rows.perm)
    if height >= block_h:
        return TallBlocks(values, rows.indptr, rows.indices, rows.perm)
    packed = packed_pattern(rows.indptr, rows.indices, rows.cols_b, block_h // height)
    shape = (packed.indices.shape[0], block_h, width)
    blocks = scratch(shape, values.dtype, values.device)
    launch_pack(blocks, values, packed.source, rows.perm)
    return TallBlocks(blocks, packed.indptr, packed.indices, None)


def _descriptor(x: torch.Tensor, block: list[int], transposed: bool) -> Any:
    """TMA descriptor of a matrix, of its transpose where that is what lies row by row."""
    return tensor_descriptor(x.mT if transposed else x, block)


def _x_descriptor(x: torch.Tensor, config: SpmmSm90Config) -> Any:
    """TMA descriptor of X [K, N]; of its slabs of columns [N / 64, K, 64] for wide copies."""
    if not config.WIDE:
        return _descriptor(x, config.x_block(), config.X_TRANSPOSED)
    slabs = x.view(x.shape[0], -1, SLAB_COLUMNS).transpose(0, 1)
    return tensor_descriptor(slabs, config.x_block())


class SpmmGrid(NamedTuple):
    """Work tiles of a product, and the clusters that share them."""

    row_tiles: int
    panels: int
    cluster: int
    programs: int


def spmm_grid(
    plan: SpmmPlan | PairPlan, config: SpmmSm90Config | SpmmFp8Config, n: int, num_sms: int
) -> SpmmGrid:
    """The grid for `n` columns."""
    row_tiles, panels = plan.n_items * config.row_tiles, cdiv(n, config.tile_n)
    cluster = PAIR if config.PAIRED else 1
    return SpmmGrid(row_tiles, panels, cluster, min(num_sms // cluster, row_tiles * panels))


def launch_spmm_sm90(
    views: Views,
    blocks: TallBlocks,
    bias: torch.Tensor | None,
    plan: SpmmPlan | PairPlan,
    config: SpmmSm90Config,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    views : out [M, N] and x [K, N], rows contiguous, or columns where the configuration says
        transposed; residual [M, N], any strides, or None
    blocks : of A; for pairs of rows with `cols` and `entries` of the plan
    bias : [M] contiguous, or None
    """
    out, x, residual = views
    m, n = out.shape
    # the kernel has no batch dimension; the second pass does
    out_b = out.unsqueeze(0)
    partial = empty_partial(out_b, plan, config.BLOCK_H)
    grid = spmm_grid(plan, config, n, arch_of(out.device).num_sms)
    raster = max(1, RASTER_BYTES // (x.shape[0] * config.tile_n * x.element_size()))
    counter = self_resetting_counters(1, out.device)
    a_matrix = blocks.values.view(-1, blocks.values.shape[2])
    with on_device_of(out):
        args = (
            _descriptor(a_matrix, config.a_block(), False),
            _x_descriptor(x, config),
            _descriptor(out, config.out_block(), config.OUT_TRANSPOSED),
            partial,
            bias,
            residual,
            None if residual is None else residual.stride(),
            plan.items,
            blocks.indices,
            blocks.perm,
            counter,
            m,
            n,
            grid.row_tiles,
            grid.panels,
            raster,
            config,
        )
        options = {"num_warps": 4, "maxnreg": MAX_REGISTERS, **hopper_options()}
        launch(_spmm_sm90_kernel, grid.programs, args, cluster=grid.cluster, **options)
        if partial is not None and isinstance(plan, SpmmPlan):
            residual_b = None if residual is None else residual.unsqueeze(0)
            addends = addends_of(bias, residual_b)
            launch_spmm_reduce(out_b, partial, addends, config.ACTIVATION, plan)
