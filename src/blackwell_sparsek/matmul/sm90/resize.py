"""Launches of the kernels for many rows, made again for other rows (see `matmul.resize`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...calls.matmul import BsrProblem, MatmulCall, ResizedProduct
from ...core.sizes import cdiv, contiguous_strides
from ...core.torch_private import empty_on_gpu, raw_stream
from ...dispatch.dispatcher import Dispatcher
from ...launch.descriptors import GROUP_ROWS
from ...launch.recording import Launch
from ...launch.replay import keep
from ...launch.resize import MapSource, ResizableLaunch
from ...launch.workspace import counters_of_stream
from ..choice import matmul_dispatch
from ..fp8_op import fp8_matmul_dispatch
from ..plan import SpmmPlan
from ..rows import block_rows
from .config import SpmmSm90Config
from .fp8_config import SpmmFp8Config
from .fp8_launch import fp8_work
from .row_pairs import PairPlan
from .spmm import _spmm_sm90_kernel
from .spmm_fp8 import _spmm_fp8_sm90_kernel
from .spmm_launch import TallBlocks, spmm_grid, tiles_of_work
from .tuning import narrow_fp8_config, narrow_sm90_config, spmm_sm90_config, strips_config

# The most plans that a family of products keeps.
MAX_PLANS = 4096


class Work(NamedTuple):
    """How a product is divided into tiles."""

    plan: SpmmPlan | PairPlan
    config: SpmmSm90Config | SpmmFp8Config

    @property
    def identity(self) -> tuple[SpmmSm90Config | SpmmFp8Config, int]:
        """Work of one identity takes one launch. It holds as long as the plan exists."""
        return self.config, id(self.plan)


class TilesKernel(NamedTuple):
    """A kernel for many rows, and when it makes a product."""

    kernel: Any
    dispatch: Dispatcher
    takes: Callable[[BsrProblem], bool]
    """Whether nothing comes before it: no packing of blocks, no copy of x."""
    has_few_rows: Callable[[BsrProblem], bool]
    """Whether a kernel for few rows makes a product instead."""
    work: Callable[[BsrProblem, int, TallBlocks], Work]
    scales: tuple[str, ...]
    """The parameters that take scales of blocks and of x."""


def _takes(problem: BsrProblem) -> bool:
    width, height = problem.block_shape
    tall = height % GROUP_ROWS == 0 and width % 32 == 0
    return problem.tma and tall and problem.nnz_blocks > 0 and problem.dense_left


def _has_few_rows(problem: BsrProblem) -> bool:
    return (strips_config(problem) or narrow_sm90_config(problem)) is not None


def _work(problem: BsrProblem, cols_b: int, blocks: TallBlocks) -> Work:
    config = spmm_sm90_config(problem, x_transposed=True)
    _, plan, config = tiles_of_work(problem, cols_b, blocks, config)
    return Work(plan, config)


def _takes_fp8(problem: BsrProblem) -> bool:
    return problem.tma and problem.nnz_blocks > 0


def _has_few_rows_fp8(problem: BsrProblem) -> bool:
    return narrow_fp8_config(problem) is not None


def _work_fp8(problem: BsrProblem, cols_b: int, blocks: TallBlocks) -> Work:
    return Work(*fp8_work(problem, cols_b, blocks.indptr))


TILES = TilesKernel(_spmm_sm90_kernel, matmul_dispatch, _takes, _has_few_rows, _work, ())
FP8_TILES = TilesKernel(
    _spmm_fp8_sm90_kernel,
    fp8_matmul_dispatch,
    _takes_fp8,
    _has_few_rows_fp8,
    _work_fp8,
    ("block_scale_ptr", "x_scale_ptr"),
)


class _Learned(NamedTuple):
    launch: ResizableLaunch
    work: Work
    """Keeps the plan alive, so that its id stays unique."""


class _Plan(NamedTuple):
    """How products with as many tiles of rows are launched."""

    work: Work
    launch: ResizableLaunch | None
    """None until one has been learned."""


class ProductLaunches:
    """The launches of products that differ only in the rows of x.

    Parameters
    ----------
    call : one of them, x @ op(A), which `kernel.takes`
    impl : as given to the public function
    kernel : `TILES` or `FP8_TILES`
    """

    def __init__(self, call: MatmulCall, impl: str, kernel: TilesKernel):
        self._problem, self._impl, self._kernel = call.problem, impl, kernel
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
        self._learned: dict[Any, _Learned] = {}
        self._plans: dict[tuple[int, int], _Plan | None] = {}

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
        if launch.kernel is not self._kernel.kernel or launch.args[-1] != plan.work.config:
            return
        names = ["n_cols", "n_tiles", "counter_ptr", *self._kernel.scales]
        names += ["bias_ptr"] if self._problem.bias else []
        names += ["residual_ptr"] if self._problem.residual else []
        made = _Learned(ResizableLaunch(launch, names), plan.work)
        self._learned[plan.work.identity] = made
        for tiling, other in self._plans.items():
            if other is not None and other.work.identity == plan.work.identity:
                self._plans[tiling] = other._replace(launch=made.launch)

    def run(self, product: ResizedProduct) -> torch.Tensor | None:
        """The result, or None if no launch fits. The device is current."""
        plan = self._plan(product.lead)
        if plan is None or plan.launch is None:
            return None
        at_values, at_dense, at_scales, at_bias, at_residual, lead = product
        rows, features, inner = _rows(lead), self._features, self._inner
        work, device = plan.work, self._device
        grid = spmm_grid(work.plan, work.config, rows, self._problem.arch.num_sms)
        shape = (*lead, features)
        out = empty_on_gpu(shape, contiguous_strides(shape), self._out_dtype)
        stream, capturing = raw_stream(device.index), torch.cuda.is_current_stream_capturing()
        counters = counters_of_stream(1, device, stream, capturing)
        values = [rows, grid.panels, counters.data_ptr(), *at_scales]
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
        chosen = self._kernel.dispatch.choose(self._impl, problem)
        problem = problem.merged
        if chosen is None or chosen.name != "sm90" or self._kernel.has_few_rows(problem):
            return None
        work = self._kernel.work(problem, self._cols_b, self._blocks)
        if isinstance(work.plan, SpmmPlan) and work.plan.n_split_rows:
            return None
        learned = self._learned.get(work.identity)
        return _Plan(work, None if learned is None else learned.launch)


def _rows(lead: Sequence[int]) -> int:
    rows = 1
    for size in lead:
        rows *= size
    return rows
