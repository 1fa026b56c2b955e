"""Launches of the Hopper kernels made again with other lengths."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ...calls.attention import AttnProblem, AttnSpec, ResizedCall, lse_dtype
from ...core.compat import empty_on_gpu, raw_stream
from ...device.records import Strides
from ...launch.descriptors import packed_sizes
from ...launch.recording import Launch
from ...launch.replay import keep
from ...launch.resize import MapSource, ResizableLaunch
from ...launch.workspace import counters_of_stream, zeroed_counters
from ...masks.band import EVERYTHING
from ..operands import token_strides
from .backward_preprocess import ROW_TILE
from .config import SUM_COLUMNS, AttnBwdSm90Config, AttnFwdSm90Config
from .schedule import (
    BackwardSchedule,
    ForwardSchedule,
    backward_schedule,
    forward_schedule,
    forward_work_tiles,
    padded_queries,
)
from .tuning import (
    Tiling,
    attn_bwd_sm90_passed_over,
    attn_bwd_sm90_raster_group,
    attn_fwd_sm90_lengths_unsupported,
    attn_fwd_sm90_passed_over,
    attn_fwd_sm90_raster_group,
    new_attn_fwd_sm90_config,
    tiling_of,
)

# Plans that a family of calls keeps at most.
MAX_PLANS = 4096

# Parameters of the kernel that every launch sets anew.
_SIZES = (
    "lse_head_stride", "q_len", "kv_len", "num_batch_heads", "raster_group", "dynamic",
    "tail_share", "lse_ptr", "workspace.counters",
)  # fmt: skip


class _ForwardPlan(NamedTuple):
    """How calls of one tiling are launched."""

    launch: ResizableLaunch
    schedule: ForwardSchedule
    raster_group: int
    split_tail: bool
    parts_shape: tuple[int, int, int]


class ForwardLaunches:
    """Launches of calls that differ only in their lengths, by configuration.

    Parameters
    ----------
    problem, spec : of one of these calls
    device : of all of them
    """

    def __init__(self, problem: AttnProblem, spec: AttnSpec, device: torch.device):
        self._problem = problem
        self._band = spec.band
        self._even = spec.band == EVERYTHING and not spec.is_varlen
        self._device = device
        self._launches: dict[int, ResizableLaunch] = {}
        # held, so that nothing else gets its id
        self._configs: list[AttnFwdSm90Config] = []
        self._plans: dict[Tiling, _ForwardPlan] = {}

    def learn(self, launch: Launch) -> None:
        """Add a launch of the kernel, if its configuration is not known yet."""
        config: AttnFwdSm90Config = launch.args[-1]
        if id(config) in self._launches:
            return
        names = [*_SIZES]
        names += ["workspace.parts"] if config.SPLIT_TAIL else []
        names += ["sinks_ptr"] if self._problem.sinks else []
        names += ["cu_seqlens.q", "cu_seqlens.kv"] if self._problem.varlen else []
        self._launches[id(config)] = ResizableLaunch(launch, names)
        self._configs.append(config)

    def run(self, call: ResizedCall) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Output and lse, or None if the kernel does not run such a call or no launch fits.

        The device is current.
        """
        q, k, v, sinks, cu_q, cu_k, batch, max_q, max_k = call
        tokens = (q.shape[0], k.shape[0]) if cu_q else None
        plan = self._plan(batch, max_q, max_k, tokens)
        if plan is None:
            return None
        launch, schedule, raster_group, split_tail, parts_shape = plan
        problem = self._problem
        heads, dim_v, dtype = problem.heads_q, problem.head_dim_v, problem.dtype
        shape, strides = out_layout(q, dim_v)
        out = empty_on_gpu(shape, strides, dtype)
        rows = (batch, heads, max_q) if tokens is None else (heads, tokens[0])
        lse = empty_on_gpu(rows, _contiguous(rows), lse_dtype(dtype))
        stream, capturing = raw_stream(self._device.index), torch.cuda.is_current_stream_capturing()
        counters = counters_of_stream(schedule.counters, self._device, stream, capturing)
        lse_address = lse.data_ptr()
        values = [
            *(rows[-1], max_q, max_k, batch * heads),
            raster_group,
            *(schedule.dynamic, schedule.tail_share, lse_address, counters.data_ptr()),
        ]
        parts = lse
        if split_tail:
            if schedule.tail_share > 0:
                parts = empty_on_gpu(parts_shape, _contiguous(parts_shape), torch.float32)
            values.append(parts.data_ptr())
        if sinks:
            values.append(sinks)
        if cu_q:
            values += (cu_q, cu_k)
        tensors = [MapSource(out.data_ptr(), shape, strides), q, k, v]
        if tokens is not None:
            tensors = [MapSource(x.address, *packed_sizes(x.shape, x.strides)) for x in tensors]
        launch.run(schedule.programs, stream, values, tensors)
        return out, lse

    def _plan(
        self, batch: int, max_q: int, max_k: int, tokens: tuple[int, int] | None
    ) -> _ForwardPlan | None:
        """How to launch such a call; None if the kernel does not run it or no launch fits."""
        tiling = tiling_of(batch, max_q, max_k, tokens)
        plan = self._plans.get(tiling)
        if plan is None:
            plan = self._new_plan(batch, max_q, max_k, tokens)
            if plan is not None:
                keep(self._plans, tiling, plan, MAX_PLANS)
        return plan

    def _new_plan(
        self, batch: int, max_q: int, max_k: int, tokens: tuple[int, int] | None
    ) -> _ForwardPlan | None:
        problem = self._problem.with_lengths(batch, max_q, max_k, tokens)
        if attn_fwd_sm90_lengths_unsupported(problem) or attn_fwd_sm90_passed_over(problem):
            return None
        config = new_attn_fwd_sm90_config(problem)
        launch = self._launches.get(id(config))
        if launch is None:
            return None
        all_queries = None if tokens is None else tokens[0]
        work_tiles = forward_work_tiles(config, batch, problem.heads_q, max_q, all_queries)
        schedule = forward_schedule(config, problem.arch.num_sms, work_tiles, max_k, self._even)
        raster_group = attn_fwd_sm90_raster_group(problem, self._band, config)
        parts_shape = schedule.parts_shape(config)
        return _ForwardPlan(launch, schedule, raster_group, config.SPLIT_TAIL, parts_shape)


# The same for the kernels of the backward.
_PREPROCESS = (
    "lse_log2_ptr", "delta_ptr", "out_ptr", "dout_ptr", "lse_ptr", "q_len", "padded",
    *(f"{x}_strides.{part}" for x in ("out", "dout") for part in Strides._fields),
)  # fmt: skip
_BACKWARD = ("work_ptrs.counter", "q_len", "kv_len", "num_batch_heads", "raster_group")
_POSTPROCESS = (
    "dq_ptr", "sums_ptr", "q_len", "padded", *(f"dq_strides.{part}" for part in Strides._fields),
)  # fmt: skip


class _BackwardPlan(NamedTuple):
    """How gradients of one tiling are launched."""

    schedule: BackwardSchedule
    raster_group: int


class BackwardLaunches:
    """The three launches of dense gradients without a mask, for calls that differ in lengths.

    Parameters
    ----------
    problem : of one of these calls
    device : of all of them
    launches : what it launched: preprocess, backward, postprocess
    """

    def __init__(self, problem: AttnProblem, device: torch.device, launches: Sequence[Launch]):
        self._problem = problem
        self._device = device
        preprocess, backward, postprocess = launches
        self._config: AttnBwdSm90Config = backward.args[-1]
        self._plans: dict[Tiling, _BackwardPlan] = {}
        # unordered, the preprocess zeroes the sums; ordered, the semaphores
        zeroed = "semaphores_ptr" if self._config.ORDERED else "sums_ptr"
        ordered = self._config.ORDERED
        self._preprocess = ResizableLaunch(preprocess, (*_PREPROCESS, zeroed))
        self._backward = ResizableLaunch(
            backward, (*_BACKWARD, *(("work_ptrs.semaphore",) if ordered else ()))
        )
        self._postprocess = ResizableLaunch(
            postprocess, (*_POSTPROCESS, *(("semaphores_ptr",) if ordered else ()))
        )

    def run(
        self,
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, ...] | None:
        """Gradients of q, k and v, or None if the kernels do not run such a call.

        The device is current; TMA takes all tensors, and 16 divides the strides of dout and out.
        """
        batch, heads, q_len, _ = q.shape
        kv_len, kv_batch_heads = k.shape[2], batch * k.shape[1]
        plan = self._plan(batch, q_len, kv_len)
        if plan is None:
            return None
        schedule, raster_group = plan
        config, ordered = self._config, self._config.ORDERED
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        dq, dk, dv = gradients
        stream, capturing = raw_stream(self._device.index), torch.cuda.is_current_stream_capturing()

        padded = padded_queries(q_len)
        rows = batch * heads * padded
        row_bytes, sums_bytes = 4 * rows, 4 * rows * config.TILE_D
        # One allocation: 16 divides all addresses, since 128 divides `padded`. There are two
        # semaphores of 4 bytes for 64 rows.
        sizes = (row_bytes, row_bytes, sums_bytes, rows // 8, 4)
        memory = empty_on_gpu((sum(sizes),), (1,), torch.uint8)
        lse_log2, delta, sums, semaphores, counter = accumulate(
            sizes[:-1], initial=memory.data_ptr()
        )
        owner = memory
        if schedule.counted:
            counter, owner = zeroed_counters(1, self._device, stream, capturing)

        row_tiles = rows // ROW_TILE
        strides = (*token_strides(out), *token_strides(dout))
        self._preprocess.run(
            row_tiles,
            stream,
            [
                *(lse_log2, delta, out.data_ptr(), dout.data_ptr(), lse.data_ptr(), q_len, padded),
                *(*strides, semaphores if ordered else sums),
            ],
            (),
        )
        values = [counter, q_len, kv_len, kv_batch_heads, raster_group]
        order = [semaphores] if ordered else []
        columns = padded * config.TILE_D // SUM_COLUMNS
        tensors = [
            MapSource(
                sums,
                (batch * heads, columns, SUM_COLUMNS),
                (padded * config.TILE_D, SUM_COLUMNS, 1),
            ),
            *(_source(x) for x in (dk, dv, dout, q, k, v)),
            *(MapSource(at, (batch * heads, padded), (padded, 1)) for at in (lse_log2, delta)),
        ]
        self._backward.run(schedule.programs, stream, values + order, tensors)
        values = [dq.data_ptr(), sums, q_len, padded, *token_strides(dq), *order]
        self._postprocess.run(row_tiles, stream, values, ())
        # until here nobody else may have the memory
        del memory, owner
        return dq, dk, dv

    def _plan(self, batch: int, q_len: int, kv_len: int) -> _BackwardPlan | None:
        tiling = tiling_of(batch, q_len, kv_len)
        plan = self._plans.get(tiling)
        if plan is not None:
            return plan
        problem = self._problem.with_lengths(batch, q_len, kv_len, None)
        if attn_fwd_sm90_lengths_unsupported(problem) or attn_bwd_sm90_passed_over(problem):
            return None
        sms, heads = problem.arch.num_sms, batch * problem.heads_kv
        schedule = backward_schedule(self._config, sms, heads, kv_len)
        plan = _BackwardPlan(schedule, attn_bwd_sm90_raster_group(problem))
        keep(self._plans, tiling, plan, MAX_PLANS)
        return plan


def _source(x: torch.Tensor) -> MapSource:
    return MapSource(x.data_ptr(), x.shape, x.stride())


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def out_layout(q: MapSource, dim_v: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the output for such queries, as `empty_out` makes it."""
    shape = (*q.shape[:-1], dim_v)
    if len(shape) == 4:
        _, heads, rows, _ = shape
        _, head_stride, row_stride, _ = q.strides
        if head_stride < row_stride:
            return shape, (rows * heads * dim_v, dim_v, heads * dim_v, 1)
    return shape, _contiguous(shape)
