"""Launches of the Hopper forward kernel made again with other lengths."""

from collections.abc import Sequence

import torch

from ...calls.attention import AttnProblem, AttnSpec, ResizedCall, lse_dtype
from ...core.compat import empty_on_gpu, raw_stream
from ...launch.descriptors import packed_sizes
from ...launch.recording import Launch
from ...launch.resize import MapSource, ResizableLaunch
from ...launch.workspace import counters_of_stream
from ...masks.band import EVERYTHING
from .config import AttnFwdSm90Config
from .schedule import forward_schedule, forward_work_tiles
from .tuning import (
    attn_fwd_sm90_config,
    attn_fwd_sm90_lengths_unsupported,
    attn_fwd_sm90_passed_over,
    attn_fwd_sm90_raster_group,
)

# Parameters of the kernel that every launch sets anew.
_SIZES = (
    "lse_head_stride", "q_len", "kv_len", "num_batch_heads", "raster_group", "dynamic",
    "tail_share", "lse_ptr", "workspace.counters",
)  # fmt: skip


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
        problem = self._problem.with_lengths(batch, max_q, max_k, tokens)
        if attn_fwd_sm90_lengths_unsupported(problem) or attn_fwd_sm90_passed_over(problem):
            return None
        config = attn_fwd_sm90_config(problem)
        launch = self._launches.get(id(config))
        if launch is None:
            return None
        heads, dim_v, dtype = problem.heads_q, problem.head_dim_v, problem.dtype
        all_queries = None if tokens is None else tokens[0]
        work_tiles = forward_work_tiles(config, batch, heads, max_q, all_queries)
        schedule = forward_schedule(config, problem.arch.num_sms, work_tiles, max_k, self._even)
        shape, strides = out_layout(q, dim_v)
        out = empty_on_gpu(shape, strides, dtype)
        rows = (batch, heads, max_q) if tokens is None else (heads, tokens[0])
        lse = empty_on_gpu(rows, _contiguous(rows), lse_dtype(dtype))
        stream, capturing = raw_stream(self._device.index), torch.cuda.is_current_stream_capturing()
        counters = counters_of_stream(schedule.counters, self._device, stream, capturing)
        lse_address = lse.data_ptr()
        values = [
            *(rows[-1], max_q, max_k, batch * heads),
            attn_fwd_sm90_raster_group(problem, self._band, config),
            *(schedule.dynamic, schedule.tail_share, lse_address, counters.data_ptr()),
        ]
        parts = lse
        if config.SPLIT_TAIL:
            if schedule.tail_share > 0:
                size = schedule.parts_shape(config)
                parts = empty_on_gpu(size, _contiguous(size), torch.float32)
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


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def out_layout(q: MapSource, dim_v: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the output for such queries, as `empty_out` makes it."""
    shape = (*q.shape[:-1], dim_v)
    if len(shape) == 4 and q.strides[1] < q.strides[2]:
        _, heads, rows, _ = shape
        return shape, (rows * heads * dim_v, dim_v, heads * dim_v, 1)
    return shape, _contiguous(shape)
