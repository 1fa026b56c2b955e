"""Launches of the Hopper kernels made again with other lengths."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ...calls.attention import AttnProblem, AttnSpec, ResizedCall, lse_dtype
from ...core.torch_private import empty_on_gpu, raw_stream
from ...device.records import Strides
from ...launch.descriptors import packed_sizes
from ...launch.recording import Launch
from ...launch.replay import keep
from ...launch.resize import MapSource, ResizableLaunch
from ...launch.workspace import counters_of_stream, zeroed_counters
from ...masks.band import EVERYTHING, Band
from ..operands import token_strides
from .backward_preprocess import ROW_TILE, ZEROED
from .config import SUM_COLUMNS, AttnBwdSm90Config, AttnFwdSm90Config
from .schedule import (
    BackwardSchedule,
    ForwardSchedule,
    backward_schedule,
    forward_schedule,
    forward_work_tiles,
    padded_rows,
)
from .tuning import (
    Tiling,
    attn_bwd_sm90_config,
    attn_bwd_sm90_head_splits,
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
# Where work tiles share query heads, also these, and another kernel.
_ZEROED_KEYS = ("k_sums_ptr", "v_sums_ptr", "k_chunks", "v_chunks")
_SHARED_HEADS = ("group_size", "head_splits")
_ROUND_KEYS = (
    "dk_ptr", "dv_ptr", "k_sums_ptr", "v_sums_ptr", "kv_len", "padded", "splits",
    *(f"{x}_strides.{part}" for x in ("dk", "dv") for part in Strides._fields),
)  # fmt: skip


class _BackwardKernels:
    """The launches of gradients with one configuration: preprocess, backward, postprocess.

    Where work tiles share query heads, a fourth rounds dk and dv.
    """

    def __init__(self, launches: Sequence[Launch]):
        preprocess, backward, postprocess, *round_keys = launches
        self.config: AttnBwdSm90Config = backward.args[-1]
        ordered, split = self.config.ORDERED, self.config.SPLIT_HEADS
        # unordered, the preprocess zeroes the sums; ordered, the semaphores
        zeroed = ["semaphores_ptr" if ordered else "sums_ptr"]
        zeroed += _ZEROED_KEYS if split and not ordered else ()
        semaphore = ["work_ptrs.semaphore"] if ordered else []
        shares = _SHARED_HEADS if split else ()
        # wide heads add dq by address, the others by tensor map
        sums = ["sums_ptr"] if self.config.SHARED_KEYS else []
        self.preprocess = ResizableLaunch(preprocess, (*_PREPROCESS, *zeroed))
        self.backward = ResizableLaunch(backward, (*_BACKWARD, *semaphore, *shares, *sums))
        semaphore = ["semaphores_ptr"] if ordered else []
        self.postprocess = ResizableLaunch(postprocess, (*_POSTPROCESS, *semaphore))
        self.round_keys = [ResizableLaunch(x, _ROUND_KEYS) for x in round_keys]


class _BackwardPlan(NamedTuple):
    """How gradients of one tiling are launched."""

    kernels: _BackwardKernels
    schedule: BackwardSchedule
    raster_group: int
    head_splits: int


class BackwardLaunches:
    """The launches of dense gradients without a mask, for calls that differ only in lengths.

    Parameters
    ----------
    problem, band : of one of these calls
    device : of all of them
    """

    def __init__(self, problem: AttnProblem, band: Band, device: torch.device):
        self._problem = problem
        self._band = band
        self._device = device
        self._kernels: dict[AttnBwdSm90Config, _BackwardKernels] = {}
        self._plans: dict[Tiling, _BackwardPlan] = {}

    def knows(self, problem: AttnProblem) -> bool:
        """Whether `learn` had launches with the configuration of such a call."""
        head_splits = attn_bwd_sm90_head_splits(problem, self._band)
        return attn_bwd_sm90_config(problem, head_splits) in self._kernels

    def learn(self, launches: Sequence[Launch]) -> None:
        """Add what a call launched: preprocess, backward, postprocess, and rounding if any."""
        kernels = _BackwardKernels(launches)
        self._kernels[kernels.config] = kernels

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
        kernels, schedule, raster_group, head_splits = plan
        config = kernels.config
        ordered, split = config.ORDERED, config.SPLIT_HEADS
        dq, dk, dv = _empty_like(q), _empty_like(k), _empty_like(v)
        stream, capturing = raw_stream(self._device.index), torch.cuda.is_current_stream_capturing()

        padded, padded_keys = padded_rows(q_len), padded_rows(kv_len)
        rows = batch * heads * padded
        row_bytes, sums_bytes = 4 * rows, 4 * rows * config.TILE_D
        # sums of dk and dv: those of all work tiles, or one for each share of the query heads
        copies = (head_splits if ordered else 1) if split else 0
        key_rows = kv_batch_heads * copies * padded_keys
        # One allocation: 16 divides all addresses, since 128 divides `padded`. There are two
        # semaphores of 4 bytes for 64 rows.
        sizes = (
            *(row_bytes, row_bytes, sums_bytes, rows // 8),
            *(4 * key_rows * config.TILE_D, 4 * key_rows * config.TILE_DV, 4),
        )
        memory = empty_on_gpu((sum(sizes),), (1,), torch.uint8)
        lse_log2, delta, sums, semaphores, k_sums, v_sums, counter = accumulate(
            sizes[:-1], initial=memory.data_ptr()
        )
        owner = memory
        if schedule.counted:
            counter, owner = zeroed_counters(1, self._device, stream, capturing)

        row_tiles = rows // ROW_TILE
        strides = (*token_strides(out), *token_strides(dout))
        values = [
            *(lse_log2, delta, out.data_ptr(), dout.data_ptr(), lse.data_ptr(), q_len, padded),
            *(*strides, semaphores if ordered else sums),
        ]
        if split and not ordered:
            chunks = (key_rows * width // ZEROED for width in (config.TILE_D, config.TILE_DV))
            values += (k_sums, v_sums, *chunks)
        kernels.preprocess.run(row_tiles, stream, values, ())
        order = [semaphores] if ordered else []
        values = [counter, q_len, kv_len, kv_batch_heads * head_splits, raster_group, *order]
        tensors = []
        if config.SHARED_KEYS:
            values.append(sums)
        else:
            tensors.append(_sums_source(sums, batch * heads, padded, config.TILE_D))
        if split:
            values += (heads // k.shape[1] // head_splits, head_splits)
            tensors.append(
                _sums_source(k_sums, kv_batch_heads * copies, padded_keys, config.TILE_D)
            )
            tensors.append(
                _sums_source(v_sums, kv_batch_heads * copies, padded_keys, config.TILE_DV)
            )
        else:
            tensors += (_source(dk), _source(dv))
        tensors += (
            *(_source(x) for x in (dout, q, k, v)),
            *(MapSource(at, (batch * heads, padded), (padded, 1)) for at in (lse_log2, delta)),
        )
        kernels.backward.run(schedule.programs, stream, values, tensors)
        values = [dq.data_ptr(), sums, q_len, padded, *token_strides(dq), *order]
        kernels.postprocess.run(row_tiles, stream, values, ())
        for launch in kernels.round_keys:
            values = [dk.data_ptr(), dv.data_ptr(), k_sums, v_sums, kv_len, padded_keys, copies]
            values += (*token_strides(dk), *token_strides(dv))
            launch.run(kv_batch_heads * padded_keys // ROW_TILE, stream, values, ())
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
        head_splits = attn_bwd_sm90_head_splits(problem, self._band)
        kernels = self._kernels.get(attn_bwd_sm90_config(problem, head_splits))
        if kernels is None:
            return None
        sms, heads = problem.arch.num_sms, batch * problem.heads_kv * head_splits
        schedule = backward_schedule(kernels.config, sms, heads, kv_len)
        raster_group = attn_bwd_sm90_raster_group(problem, head_splits)
        plan = _BackwardPlan(kernels, schedule, raster_group, head_splits)
        keep(self._plans, tiling, plan, MAX_PLANS)
        return plan


def _sums_source(address: int, heads: int, rows: int, width: int) -> MapSource:
    """Sums of gradients of `heads` heads, as `launch._sums_descriptor` describes them."""
    size = rows * width
    return MapSource(address, (heads, size // SUM_COLUMNS, SUM_COLUMNS), (size, SUM_COLUMNS, 1))


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """`torch.empty_like` without its dispatch, where memory has no gaps."""
    if x.is_contiguous():
        return empty_on_gpu(tuple(x.shape), x.stride(), x.dtype)
    return torch.empty_like(x)


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
