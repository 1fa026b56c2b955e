"""Launches of the kernel for tiles, made again for other columns (see `matmul.resize`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ...calls.matmul import BsrProblem, MatmulCall, ResizedProduct
from ...core.sizes import cdiv, contiguous_strides
from ...core.torch_private import empty_on_gpu, raw_stream
from ...launch.descriptors import GROUP_ROWS
from ...launch.recording import Launch
from ...launch.replay import keep
from ...launch.resize import MapSource, ResizableLaunch
from ...launch.workspace import counters_of_stream
from ..choice import matmul_dispatch
from ..plan import SpmmPlan
from ..rows import block_rows
from .config import SpmmSm90Config
from .spmm import _spmm_sm90_kernel
from .spmm_launch import TallBlocks, TilesOfWork, spmm_grid, tiles_of_work
from .tuning import narrow_sm90_config, spmm_sm90_config, strips_config

# The most plans that a family of products keeps.
MAX_PLANS = 4096


class _Learned(NamedTuple):
    launch: ResizableLaunch
    work: TilesOfWork
    """Keeps the work list alive, so that its id stays unique."""


class _Plan(NamedTuple):
    """How products with as many tiles of columns are launched."""

    work: TilesOfWork
    launch: ResizableLaunch | None
    """None until one has been learned."""


class ProductLaunches:
    """The launches of products that differ only in the rows of x.

    Parameters
    ----------
    call : one of them, x @ op(A), with blocks that `takes` accepts
    impl : as given to the public function
    """

    def __init__(self, call: MatmulCall, impl: str):
        self._problem, self._impl = call.problem, impl
        self._device = call.values.device
        self._features, self._inner = call.features, call.inner
        self._out_dtype = call.result_dtype
        count, height, width = call.values.shape
        self._a_sizes = ((count * height, width), (width, 1))
        rows = block_rows(call)
        self._cols_b = rows.cols_b
        # blocks themselves may be replaced at any time
        none = call.values.new_empty(0)
        self._blocks = TallBlocks(none, rows.indptr, rows.indices, rows.perm)
        self._learned: dict[tuple[SpmmSm90Config, int], _Learned] = {}
        self._plans: dict[tuple[int, int], _Plan | None] = {}

    @staticmethod
    def takes(problem: BsrProblem) -> bool:
        """Whether nothing comes before the kernel for tiles: no packing of blocks, no copy of x."""
        width, height = problem.block_shape
        tall = height % GROUP_ROWS == 0 and width % 32 == 0
        return problem.tma and tall and problem.nnz_blocks > 0 and problem.dense_left

    def lacks(self, lead: Sequence[int]) -> bool:
        """Whether a product with such an x could be resized if its launch were learned."""
        plan = self._plan(lead)
        return plan is not None and plan.launch is None

    def learn(self, launches: Sequence[Launch], lead: Sequence[int]) -> None:
        """Add the launch of a product with such an x, which `lacks` one."""
        plan = self._plan(lead)
        if plan is None or len(launches) != 1:
            return
        (launch,) = launches
        if launch.kernel is not _spmm_sm90_kernel or launch.args[-1] != plan.work.config:
            return
        names = ["n_cols", "n_tiles", "counter_ptr"]
        names += ["bias_ptr"] if self._problem.bias else []
        names += ["residual_ptr"] if self._problem.residual else []
        made = _Learned(ResizableLaunch(launch, names), plan.work)
        self._learned[_identity(plan.work)] = made
        for tiling, other in self._plans.items():
            if other is not None and _identity(other.work) == _identity(plan.work):
                self._plans[tiling] = other._replace(launch=made.launch)

    def run(self, product: ResizedProduct) -> torch.Tensor | None:
        """The result, or None if no launch fits. The device is current."""
        plan = self._plan(product.lead)
        if plan is None or plan.launch is None:
            return None
        at_values, at_dense, at_bias, at_residual, lead = product
        rows, features, inner = _rows(lead), self._features, self._inner
        work, device = plan.work, self._device
        grid = spmm_grid(work.plan, work.config, rows, self._problem.arch.num_sms)
        shape = (*lead, features)
        out = empty_on_gpu(shape, contiguous_strides(shape), self._out_dtype)
        stream, capturing = raw_stream(device.index), torch.cuda.is_current_stream_capturing()
        counters = counters_of_stream(1, device, stream, capturing)
        values = [rows, grid.panels, counters.data_ptr()]
        if self._problem.bias:
            values.append(at_bias)
        if self._problem.residual:
            values.append(at_residual)
        tensors: tuple[MapSource, ...] = (
            (at_values, *self._a_sizes),
            (at_dense, (rows, inner), (inner, 1)),
            (out.data_ptr(), (rows, features), (features, 1)),
        )
        plan.launch.run(grid.programs, stream, values, tensors)
        return out

    def _plan(self, lead: Sequence[int]) -> _Plan | None:
        """How such a product is launched; None if another kernel or torch makes it."""
        rows = _rows(lead)
        # the choice compares estimates, which are accurate to a tenth, for the first such product
        tiling = (rows // lead[-1], cdiv(rows, GROUP_ROWS))
        if tiling not in self._plans:
            keep(self._plans, tiling, self._new_plan(rows, lead[-1]), MAX_PLANS)
        return self._plans[tiling]

    def _new_plan(self, rows: int, n: int) -> _Plan | None:
        problem = replace(self._problem, n=n, batch=rows // n)
        chosen = matmul_dispatch.choose(self._impl, problem)
        problem = problem.merged
        few = strips_config(problem) or narrow_sm90_config(problem)
        if chosen is None or chosen.name != "sm90" or few is not None:
            return None
        config = spmm_sm90_config(problem, x_transposed=True)
        work = tiles_of_work(problem, self._cols_b, self._blocks, config)
        if isinstance(work.plan, SpmmPlan) and work.plan.n_split_rows:
            return None
        learned = self._learned.get(_identity(work))
        return _Plan(work, None if learned is None else learned.launch)


def _identity(work: TilesOfWork) -> tuple[SpmmSm90Config, int]:
    return work.config, id(work.plan)


def _rows(lead: Sequence[int]) -> int:
    rows = 1
    for size in lead:
        rows *= size
    return rows
