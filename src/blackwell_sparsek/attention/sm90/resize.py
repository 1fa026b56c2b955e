"""Replays of Hopper attention launches with other lengths (see `attention.resize`)."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ...calls.attention import (
    AttnProblem,
    AttnSpec,
    ResizedCall,
    ResizedGradients,
    lse_dtype,
)
from ...core.sizes import cdiv, contiguous_strides
from ...core.torch_private import empty_on_gpu, raw_stream
from ...device.records import Strides
from ...launch.descriptors import GROUP_ROWS, packed_sizes
from ...launch.recording import Launch
from ...launch.replay import keep
from ...launch.resize import MapSource, ResizableLaunch
from ...launch.workspace import counters_of_stream, zeroed_counters
from ...masks.band import EVERYTHING, Band
from .backward_preprocess import ROW_TILE, ZEROED
from .config import SUM_COLUMNS, AttnBwdSm90Config, AttnFwdSm90Config
from .schedule import (
    backward_schedule,
    forward_schedule,
    forward_work_tiles,
    packed_backward_schedule,
    packed_rows,
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

# The most plans that a family of calls keeps.
MAX_PLANS = 4096

# Kernel parameters that a replay replaces: parameters of a plan, and parameters of a call.
_OF_PLAN = ("num_batch_heads", "raster_group", "dynamic", "tail_share")
_OF_CALL = ("lse_head_stride", "q_len", "kv_len", "lse_ptr", "workspace.counters")


class _ForwardPlan(NamedTuple):
    """How calls of one tiling are launched."""

    launch: ResizableLaunch
    programs: int
    counters: int
    values: tuple[int, ...]
    """Values of `_OF_PLAN`."""
    takes_parts: bool
    """Whether the kernel has a parameter for the parts of a split tail."""
    parts_shape: tuple[int, int, int] | None
    """None if no tail is split."""


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
        self._lse_dtype = lse_dtype(problem.dtype)
        self._launches: dict[int, ResizableLaunch] = {}
        # kept alive, so that their ids stay unique
        self._configs: list[AttnFwdSm90Config] = []
        self._plans: dict[Tiling, _ForwardPlan] = {}

    def learn(self, launch: Launch) -> None:
        """Add a launch of the kernel, if its configuration is not known yet."""
        config: AttnFwdSm90Config = launch.args[-1]
        if id(config) in self._launches:
            return
        names = [*_OF_PLAN, *_OF_CALL]
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
        _, shape_q, strides_q = q
        tokens = None
        if cu_q:
            _, shape_k, _ = k
            tokens = (shape_q[0], shape_k[0])
        plan = self._plan(batch, max_q, max_k, tokens)
        if plan is None:
            return None
        launch, programs, count, values, takes_parts, parts_shape = plan
        problem = self._problem
        heads = problem.heads_q
        shape, strides = out_layout(shape_q, strides_q, problem.head_dim_v)
        out = empty_on_gpu(shape, strides, problem.dtype)
        if tokens is None:
            rows = max_q
            lse = empty_on_gpu((batch, heads, rows), (heads * rows, rows, 1), self._lse_dtype)
        else:
            rows, _ = tokens
            lse = empty_on_gpu((heads, rows), (rows, 1), self._lse_dtype)
        device = self._device
        stream, capturing = raw_stream(device.index), torch.cuda.is_current_stream_capturing()
        counters = counters_of_stream(count, device, stream, capturing)
        at_lse = lse.data_ptr()
        given = [*values, rows, max_q, max_k, at_lse, counters.data_ptr()]
        parts = lse
        if takes_parts:
            if parts_shape is not None:
                parts = empty_on_gpu(parts_shape, contiguous_strides(parts_shape), torch.float32)
            given.append(parts.data_ptr())
        if sinks:
            given.append(sinks)
        tensors: tuple[MapSource, ...] = ((out.data_ptr(), shape, strides), q, k, v)
        if tokens is not None:
            given += (cu_q, cu_k)
            tensors = _packed(tensors)
        launch.run(programs, stream, given, tensors)
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
        share = schedule.tail_share
        values = (batch * problem.heads_q, raster_group, schedule.dynamic, share)
        parts_shape = schedule.parts_shape(config) if share > 0 else None
        sizes = (schedule.programs, schedule.counters, values)
        return _ForwardPlan(launch, *sizes, config.SPLIT_TAIL, parts_shape)


# The same for the kernels of the backward.
_STRIDES = Strides._fields
_PREPROCESS = (
    "out_ptr", "dout_ptr", "lse_ptr", "q_len", *(f"out_strides.{x}" for x in _STRIDES),
    *(f"dout_strides.{x}" for x in _STRIDES), "padded", "lse_log2_ptr", "delta_ptr",
)  # fmt: skip
_BACKWARD = ("q_len", "kv_len", "work_ptrs.counter", "num_batch_heads", "raster_group")
_POSTPROCESS = ("dq_ptr", "q_len", *(f"dq_strides.{x}" for x in _STRIDES), "padded", "sums_ptr")
# Of packed sequences also these: of the kernels around the backward, and of the backward.
_OFFSETS = ("cu_seqlens_ptr", "num_sequences")
_BOTH_OFFSETS = ("cu_seqlens.q", "cu_seqlens.kv", "head_rows")
# Where work tiles share query heads, also these, and another kernel.
_ZEROED_KEYS = ("k_sums_ptr", "v_sums_ptr", "k_chunks", "v_chunks")
_SHARED_HEADS = ("group_size", "head_splits")
_ROUND_KEYS = (
    "dk_ptr", "dv_ptr", "kv_len", *(f"dk_strides.{x}" for x in _STRIDES),
    *(f"dv_strides.{x}" for x in _STRIDES), "padded", "splits", "k_sums_ptr", "v_sums_ptr",
)  # fmt: skip


class _BackwardKernels:
    """The launches of gradients with one configuration: preprocess, backward, postprocess.

    Where work tiles share query heads, a fourth rounds dk and dv.
    """

    def __init__(self, launches: Sequence[Launch], packed: bool):
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
        offsets, both = (_OFFSETS, _BOTH_OFFSETS) if packed else ((), ())
        self.preprocess = ResizableLaunch(preprocess, (*_PREPROCESS, *zeroed, *offsets))
        names = (*_BACKWARD, *shares, *semaphore, *sums, *both)
        self.backward = ResizableLaunch(backward, names)
        semaphore = ["semaphores_ptr"] if ordered else []
        self.postprocess = ResizableLaunch(postprocess, (*_POSTPROCESS, *semaphore, *offsets))
        self.round_keys = [ResizableLaunch(x, _ROUND_KEYS) for x in round_keys]


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Shape and strides of a tensor.
_Layout = tuple[tuple[int, ...], tuple[int, ...]]


class _BackwardPlan(NamedTuple):
    """How gradients of one tiling are launched: everything that exact lengths do not change.

    Workspaces are parts of one allocation.
    """

    kernels: _BackwardKernels
    programs: int
    counted: bool
    row_tiles: int
    """Programs of preprocess and postprocess."""
    key_tiles: int
    """Programs that round dk and dv."""
    padded: int
    """Rows of a head in workspaces."""
    padded_keys: int
    copies: int
    """Sums of dk and dv for each KV head: one, or if ordered one for each share of its queries."""
    chunks: tuple[int, ...]
    """Pieces of these sums that the preprocess zeroes."""
    values: tuple[int, ...]
    """Of the backward: (batch, KV head) with their shares, raster group, and those shares."""
    memory_shape: tuple[int]
    starts: tuple[int, ...]
    """Bytes at which lse, delta, sums, semaphores, sums of dk and dv, and a counter begin."""
    rows: _Layout
    """Layout of lse and of delta in tensor maps; likewise below."""
    sums: _Layout
    k_sums: _Layout
    v_sums: _Layout


class BackwardLaunches:
    """The launches of gradients without a mask, for calls that differ only in lengths.

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
        """Add the launches of a call: preprocess, backward, postprocess, and rounding if any."""
        kernels = _BackwardKernels(launches, self._problem.varlen)
        self._kernels[kernels.config] = kernels

    def run(self, call: ResizedGradients, tensors: tuple[torch.Tensor, ...]) -> Gradients | None:
        """Gradients of q, k and v, or None if the kernels do not run such a call.

        The device is current; TMA takes all tensors, and 16 divides the strides of dout and out.
        `tensors` are q, k and v.
        """
        dout, q, k, v, out, at_lse, cu_q, cu_k, batch, max_q, max_k = call
        _, shape_q, strides_q = q
        _, shape_k, strides_k = k
        _, shape_v, strides_v = v
        rows, tokens = max_q, None
        if cu_q:
            rows, *_ = shape_q
            tokens = (rows, shape_k[0])
        plan = self._plan(batch, max_q, max_k, tokens)
        if plan is None:
            return None
        kernels, config = plan.kernels, plan.kernels.config
        ordered, split = config.ORDERED, config.SPLIT_HEADS
        of_q, of_k, of_v = tensors
        dq = _empty_like(of_q, shape_q, strides_q)
        dk = _empty_like(of_k, shape_k, strides_k)
        dv = _empty_like(of_v, shape_v, strides_v)
        device = self._device
        stream, capturing = raw_stream(device.index), torch.cuda.is_current_stream_capturing()
        memory = empty_on_gpu(plan.memory_shape, (1,), torch.uint8)
        start = memory.data_ptr()
        lse_log2, delta, sums, semaphores, k_sums, v_sums, counter = [
            start + offset for offset in plan.starts
        ]
        owner = memory
        if plan.counted:
            counter, owner = zeroed_counters(1, device, stream, capturing)

        at_out, shape_out, strides_out = out
        at_dout, shape_dout, strides_dout = dout
        offsets = (cu_q, batch) if cu_q else ()
        values = [
            *(at_out, at_dout, at_lse, rows),
            *_token_strides(shape_out, strides_out),
            *_token_strides(shape_dout, strides_dout),
            *(plan.padded, lse_log2, delta, semaphores if ordered else sums),
        ]
        if split and not ordered:
            values += (k_sums, v_sums, *plan.chunks)
        values += offsets
        kernels.preprocess.run(plan.row_tiles, stream, values, ())

        values = [max_q, max_k, counter, *plan.values]
        if ordered:
            values.append(semaphores)
        maps: list[MapSource] = []
        if config.SHARED_KEYS:
            values.append(sums)
        else:
            maps.append((sums, *plan.sums))
        at_dk, at_dv = dk.data_ptr(), dv.data_ptr()
        strides_dk, strides_dv = dk.stride(), dv.stride()
        made: tuple[MapSource, ...] = ((at_dk, shape_k, strides_dk), (at_dv, shape_v, strides_dv))
        given: tuple[MapSource, ...] = (dout, q, k, v)
        if tokens is not None:
            values += (cu_q, cu_k, plan.padded)
            made, given = _packed(made), _packed(given)
        maps += ((k_sums, *plan.k_sums), (v_sums, *plan.v_sums)) if split else made
        maps += (*given, (lse_log2, *plan.rows), (delta, *plan.rows))
        kernels.backward.run(plan.programs, stream, values, maps)

        values = [dq.data_ptr(), rows, *_token_strides(shape_q, dq.stride()), plan.padded, sums]
        if ordered:
            values.append(semaphores)
        values += offsets
        kernels.postprocess.run(plan.row_tiles, stream, values, ())
        for launch in kernels.round_keys:
            values = [
                *(at_dk, at_dv, max_k),
                *_token_strides(shape_k, strides_dk),
                *_token_strides(shape_v, strides_dv),
                *(plan.padded_keys, plan.copies, k_sums, v_sums),
            ]
            launch.run(plan.key_tiles, stream, values, ())
        # until here the memory must not be reused
        del memory, owner
        return dq, dk, dv

    def _plan(
        self, batch: int, max_q: int, max_k: int, tokens: tuple[int, int] | None
    ) -> _BackwardPlan | None:
        tiling = tiling_of(batch, max_q, max_k, tokens)
        if tokens is not None:
            # the raster group depends on the longest query too, the grid on all keys
            tiling += (cdiv(max_q, GROUP_ROWS), tokens[1] // GROUP_ROWS)
        plan = self._plans.get(tiling)
        if plan is None:
            plan = self._new_plan(batch, max_q, max_k, tokens)
            if plan is not None:
                keep(self._plans, tiling, plan, MAX_PLANS)
        return plan

    def _new_plan(
        self, batch: int, max_q: int, max_k: int, tokens: tuple[int, int] | None
    ) -> _BackwardPlan | None:
        problem = self._problem.with_lengths(batch, max_q, max_k, tokens)
        if attn_fwd_sm90_lengths_unsupported(problem) or attn_bwd_sm90_passed_over(problem):
            return None
        head_splits = attn_bwd_sm90_head_splits(problem, self._band)
        kernels = self._kernels.get(attn_bwd_sm90_config(problem, head_splits))
        if kernels is None:
            return None
        config, heads_kv = kernels.config, problem.heads_kv
        kv_heads = batch * heads_kv
        sms, shares = problem.arch.num_sms, kv_heads * head_splits
        if tokens is None:
            heads, padded = batch * problem.heads_q, padded_rows(max_q)
            schedule = backward_schedule(config, sms, shares, max_k)
        else:
            # heads of all sequences lie behind each other
            heads, padded = problem.heads_q, packed_rows(tokens[0], batch)
            schedule = packed_backward_schedule(config, sms, batch, heads_kv, tokens[1])
        values: tuple[int, ...] = (shares, attn_bwd_sm90_raster_group(problem, head_splits))
        copies = 0
        if config.SPLIT_HEADS:
            values += (problem.heads_q // heads_kv // head_splits, head_splits)
            copies = head_splits if config.ORDERED else 1
        padded_keys = padded_rows(max_k)
        rows, key_rows = heads * padded, kv_heads * copies * padded_keys
        # 16 divides all addresses, since 128 divides `padded`. There are two semaphores of 4 bytes
        # for 64 rows.
        sizes = (
            *(4 * rows, 4 * rows, 4 * rows * config.TILE_D, rows // 8),
            *(4 * key_rows * config.TILE_D, 4 * key_rows * config.TILE_DV, 4),
        )
        return _BackwardPlan(
            kernels,
            programs=schedule.programs,
            counted=schedule.counted,
            row_tiles=rows // ROW_TILE,
            key_tiles=kv_heads * padded_keys // ROW_TILE,
            padded=padded,
            padded_keys=padded_keys,
            copies=copies,
            chunks=tuple(key_rows * width // ZEROED for width in (config.TILE_D, config.TILE_DV)),
            values=values,
            memory_shape=(sum(sizes),),
            starts=tuple(accumulate(sizes[:-1], initial=0)),
            rows=((heads, padded), (padded, 1)),
            sums=_sums_layout(heads, padded, config.TILE_D),
            k_sums=_sums_layout(kv_heads * copies, padded_keys, config.TILE_D),
            v_sums=_sums_layout(kv_heads * copies, padded_keys, config.TILE_DV),
        )


def _sums_layout(heads: int, rows: int, width: int) -> _Layout:
    """Sums of gradients of `heads` heads, as `launch._sums_descriptor` describes them."""
    size = rows * width
    return (heads, size // SUM_COLUMNS, SUM_COLUMNS), (size, SUM_COLUMNS, 1)


def _packed(tensors: Sequence[MapSource]) -> tuple[MapSource, ...]:
    """Sources of the tensor maps of packed sequences."""
    return tuple([(at, *packed_sizes(*sizes)) for at, *sizes in tensors])


def _empty_like(x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """`torch.empty_like` without its dispatch, where x or each batch has no gaps."""
    *_, rows, dim = shape
    size = x.numel() // shape[0]
    if len(shape) == 3:
        usual = strides == (size, dim, 1)
    else:
        heads = shape[1]
        usual = strides in ((size, rows * dim, dim, 1), (size, dim, heads * dim, 1))
    return empty_on_gpu(tuple(shape), strides, x.dtype) if usual else torch.empty_like(x)


def _token_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """`operands.token_strides` by sizes."""
    if len(shape) == 3:
        tokens, heads, _ = shape
        of_token, of_head, _ = strides
        of_batch = 0
    else:
        batch, heads, tokens, _ = shape
        of_batch, of_head, of_token, _ = strides
        of_batch = of_batch if batch > 1 else 0
    return (of_batch, of_head if heads > 1 else 0, of_token if tokens > 1 else 0)


def out_layout(
    shape_q: Sequence[int], strides_q: Sequence[int], dim_v: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the output for such queries, as `empty_out` makes it."""
    if len(shape_q) == 3:
        tokens, heads, _ = shape_q
        return (tokens, heads, dim_v), (heads * dim_v, dim_v, 1)
    batch, heads, rows, _ = shape_q
    _, head_stride, row_stride, _ = strides_q
    size = rows * heads * dim_v
    if head_stride < row_stride:
        return (batch, heads, rows, dim_v), (size, dim_v, heads * dim_v, 1)
    return (batch, heads, rows, dim_v), (size, rows * dim_v, dim_v, 1)
