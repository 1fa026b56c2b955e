"""Launching the Hopper forward in fp8: tiles, descriptors, order of work, grid."""

from functools import lru_cache
from typing import Any

import torch

from ...calls.fp8 import Fp8AttentionCall, Fp8AttnProblem
from ...core.arch import arch_of
from ...core.compat import hopper_options
from ...launch.descriptors import GROUP_ROWS, tensor_descriptor
from ...launch.launcher import launch, on_device_of
from ...launch.workspace import self_resetting_counters
from ...masks.band import EVERYTHING
from ...masks.derived_lists import derived_list
from ...masks.order import longest_first
from ..operands import kernel_operands
from ..triton.forward_fp8 import scale_strides
from .config import AttnFwdSm90Config, make_fp8_config, tile_width
from .forward_fp8 import _attn_fwd_fp8_sm90_kernel
from .forward_plan import tma_strides
from .forward_producer import Workspace
from .schedule import forward_schedule, forward_work_tiles
from .tuning import attn_fwd_sm90_raster_group, fastest_consumers


@lru_cache(maxsize=1024)
def attn_fwd_fp8_sm90_config(problem: Fp8AttnProblem, k_blocks: bool) -> AttnFwdSm90Config:
    """Tiles of a problem; `k_blocks`: keys have a scale for every 128 of them."""
    tile_d, tile_dv = tile_width(problem.head_dim), tile_width(problem.head_dim_v)
    if problem.mask_block is None:
        consumers, block_kv = fastest_consumers(problem, max(tile_d, tile_dv), 2), None
    else:
        block_q, block_kv = problem.mask_block
        # a work tile stays within one row of the mask, so rows of 64 take one consumer
        consumers = min(block_q // GROUP_ROWS, 2)
    return make_fp8_config(consumers, tile_d, tile_dv, block_kv, k_blocks)


def forward(call: Fp8AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of a call."""
    out, lse = call.empty_results()
    k_blocks = call.k_descale is not None and call.k_descale.shape[2] > 1
    config = attn_fwd_fp8_sm90_config(call.problem, k_blocks)
    q, spec = call.given.q, call.given.spec
    raster_group = attn_fwd_sm90_raster_group(call.problem, spec.band, config)
    order = None
    if (mask := spec.block_mask) is not None:
        order = derived_list(mask, longest_first, q.shape[0], q.shape[1], spec.band, raster_group)
    launch_attn_fwd_fp8_sm90(call, out, lse, order, raster_group, config)
    return out, lse


def launch_attn_fwd_fp8_sm90(
    call: Fp8AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    order: torch.Tensor | None,
    raster_group: int,
    config: AttnFwdSm90Config,
) -> None:
    """Fill `out` and `lse`.

    Parameters
    ----------
    call : e4m3 [B, H, S, D], at least one query and one key, v contiguous along its tokens;
        strides and addresses that TMA takes
    out : fp16 or bf16 [B, Hq, Sq, Dv], lse : fp32 [B, Hq, Sq] contiguous; all of both is written
    order, raster_group : as `launch.launch_attn_fwd_sm90` takes them
    config : tiles
    """
    given, spec = call.given, call.given.spec
    q, k, v = given.q, given.k, given.v.mT
    operands = kernel_operands(given)
    batch, heads = operands.batch, operands.heads.q
    work_tiles = forward_work_tiles(config, batch, heads, operands.lengths.q, None)
    mask = spec.block_mask
    if order is not None and mask is not None:
        work_tiles = order.numel() * (mask.block_size[0] // config.tile_m)
    if work_tiles == 0:
        return
    even = mask is None and spec.band == EVERYTHING
    sms = arch_of(q.device).num_sms
    schedule = forward_schedule(config, sms, work_tiles, k.shape[-2], even)
    with on_device_of(q):
        args = (
            tensor_descriptor(out, config.out_block(), tma_strides(out)),
            lse,
            tensor_descriptor(q, config.q_block(), tma_strides(q)),
            tensor_descriptor(k, config.k_block(), tma_strides(k)),
            tensor_descriptor(v, config.v_block(), tma_strides(v)),
            call.q_descale,
            call.k_descale,
            call.v_descale,
            *scale_strides(call.q_descale),
            *scale_strides(call.k_descale),
            *scale_strides(call.v_descale),
            operands.sinks,
            Workspace(self_resetting_counters(schedule.counters, q.device), order, None),
            operands.block_lists,
            *operands.mask_steps,
            lse.stride(-2),
            *operands.lengths,
            given.v.shape[-1],
            *operands.band,
            batch * heads,
            raster_group,
            schedule.dynamic,
            *operands.heads,
            operands.score,
            config,
        )
        options: dict[str, Any] = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}
        options |= hopper_options()
        launch(_attn_fwd_fp8_sm90_kernel, schedule.programs, args, **options)
