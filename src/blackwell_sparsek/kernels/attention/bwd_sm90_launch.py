"""Launching the Hopper backward: scratch memory, descriptors, order of work, grid."""

from typing import Any

import torch

from ...core.arch import arch_of
from ...core.launch import cdiv, launch, on_device_of, scratch
from ...formats.attention_spec import AttnSpec
from ..sm90 import tensor_descriptor
from .bwd_config_sm90 import QUERY_PADDING, SUM_COLUMNS, AttnBwdSm90Config
from .bwd_sm90 import _attn_bwd_sm90_kernel
from .bwd_sm90_rows import ROW_TILE, launch_attn_bwd_round, launch_attn_bwd_rows
from .fwd_sm90_launch import tma_strides
from .operands import gradient_factors, kernel_operands, transposed_mask


def launch_attn_bwd_sm90(
    dq: torch.Tensor | None,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: AttnSpec,
    order: torch.Tensor | None,
    turns: torch.Tensor | None,
    visits: torch.Tensor | None,
    section: int,
    config: AttnBwdSm90Config,
) -> torch.Tensor:
    """Fill dq, dk and dv; returns delta, fp32 [B, Hq, padded Sq].

    Parameters
    ----------
    dq, dk, dv : like q, k and v; all of each is written. Without dq only the sums are formed
    dout, out : [B, Hq, Sq, Dv], dout with strides and an address that TMA takes
    dlse : [B, Hq, Sq] with any strides, or None where nothing comes back for lse
    q, k, v : [B, H, S, D | Dv], at least one query and key, as TMA takes them
    lse : fp32 [B, Hq, Sq] contiguous
    spec : options of the call, validated; no packed sequences
    order : int32 [B * Hkv * tiles], tiles of 128 keys in the order to take them, or None, which
        goes through the keys in sections. With `visits` int32 [SMs + 1 + B * Hkv * tiles], as
        `formats.block_turns.pieces_of_programs` makes it
    turns : int32, under a mask and with `config.ORDERED`: when each tile of keys adds to dq of each
        query block, as `formats.block_turns.turns_of_blocks` makes them for `order`
    visits : int32 [nnz or more, 1 or heads of a group], first the query blocks of the transposed
        lists in the order that turns are for, as `bwd_visits.plan_visits` makes them, or None,
        which leaves them as they are
    section : planes (batch and KV head) whose queries stay in L2 together
    config : tiles
    """
    operands, mask = kernel_operands(q, k, v, spec), transposed_mask(spec.block_mask)
    q_len, kv_len = operands.lengths
    planes = operands.batch * operands.heads[0]
    padded = cdiv(q_len, QUERY_PADDING) * QUERY_PADDING
    lse_log2, delta = (scratch((planes, padded), torch.float32, q.device) for _ in range(2))
    sums = scratch((planes, padded, config.TILE_D), torch.float32, q.device)
    sums_turn = None
    if config.ORDERED:
        sums_turn = scratch((planes, padded // ROW_TILE, 2), torch.int32, q.device)
    with on_device_of(q):
        launch_attn_bwd_rows(lse_log2, delta, sums, sums_turn, out, dout, lse, dlse)
        row_block = config.row_block()
        rows = tuple(tensor_descriptor(x, row_block) for x in (lse_log2, delta))
        kv_planes = planes // operands.heads[1]
        pieces = kv_planes * cdiv(kv_len, config.tile_n)
        programs, planned = arch_of(q.device).num_sms, visits is not None
        programs = programs if planned else min(programs, pieces)
        # in order, pieces come from the counter whatever their number
        counted = not planned and (pieces > programs or config.ORDERED)
        counter = scratch((1,), torch.int32, q.device, zero=counted)
        args = (
            tensor_descriptor(sums.view(planes, -1, SUM_COLUMNS), config.dq_block()),
            _descriptor(dk, config.k_block()),
            _descriptor(dv, config.v_block()),
            _descriptor(dout, config.dout_block()),
            _descriptor(q, config.q_block()),
            _descriptor(k, config.k_block()),
            _descriptor(v, config.v_block()),
            *rows,
            (counter, order, sums_turn, turns, visits),
            mask.lists,
            *mask.steps,
            q_len,
            kv_len,
            *operands.band,
            kv_planes,
            section,
            1 if visits is None else visits.shape[1],
            *operands.heads,
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            config,
        )
        options = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}
        # they wait for each other, whatever comes first
        options["launch_cooperative_grid"] = planned
        launch(_attn_bwd_sm90_kernel, programs, args, **options)
        if dq is not None:
            unit = max(config.UNIT, ROW_TILE)
            launch_attn_bwd_round(dq, sums, sums_turn, unit, float(spec.scale))
    return delta.view(operands.batch, operands.heads[0], padded)


def _descriptor(x: torch.Tensor, block: tuple[int, int, int, int]) -> Any:
    return tensor_descriptor(x, block, tma_strides(x))
