"""Launching the Hopper backward: scratch memory, descriptors, order of work, grid."""

from typing import Any

import torch

from ...calls.attention import AttnSpec
from ...core.arch import arch_of
from ...launch.descriptors import GROUP_ROWS, packed_descriptor, tensor_descriptor
from ...launch.launcher import cdiv, launch, on_device_of, resting_words, scratch
from ...masks.band import EVERYTHING
from ..operands import gradient_factors, kernel_operands, transposed_mask
from .backward import _attn_bwd_sm90_kernel
from .backward_preprocess import (
    ROW_TILE,
    launch_attn_bwd_postprocess,
    launch_attn_bwd_preprocess,
)
from .backward_shared import WorkPointers
from .backward_split import _attn_bwd_dkdv_sm90_kernel, _attn_bwd_dq_sm90_kernel
from .config import (
    QUERY_PADDING,
    SUM_COLUMNS,
    AttnBwdDqSm90Config,
    AttnBwdSm90Config,
    AttnFwdSm90Config,
)
from .forward import _attn_fwd_sm90_kernel
from .forward_producer import Workspace

# Launching the Hopper forward: descriptors, order of work, grid.

# Work tiles of the same size are dealt out to programs in turn while there are few: to deal them
# out as programs get free would save nothing.
EVEN_ROUNDS = 4


def launch_attn_fwd_sm90(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttnSpec,
    order: torch.Tensor | None,
    section: int,
    config: AttnFwdSm90Config,
) -> None:
    """Fill `out` and `lse`.

    Parameters
    ----------
    out : [B, Hq, Sq, Dv], lse : fp32 [B, Hq, Sq] contiguous; all of both is written. Packed:
        [Tq, Hq, Dv] and [Hq, Tq], of which the tokens of sequences are written
    q, k, v : [B, H, S, D | Dv] or packed [T, H, D | Dv], at least one query and one key, strides
        and addresses that TMA takes
    spec : options of the call, validated
    order : int32 [B * Hq * rows], the rows of the block mask in the order to take them, as
        `formats.block_order.longest_first` makes it; None goes through the queries in sections,
        and it must be None when sequences are packed
    section : planes (batch and head) whose pieces run together; packed sequences, taken one after
        the other, find theirs from their own lengths, up to this
    config : tiles
    """
    operands = kernel_operands(q, k, v, spec)
    q_len = operands.lengths[0]
    planes = operands.batch * operands.heads[0]
    pieces = planes * cdiv(q_len, config.tile_m)
    if spec.is_varlen:
        assert order is None
        pieces = planes + operands.heads[0] * (q.shape[0] // config.tile_m)
    if order is not None and spec.block_mask is not None:
        pieces = order.numel() * (spec.block_mask.block_size[0] // config.tile_m)
    if pieces == 0:
        return
    programs = min(arch_of(q.device).num_sms * config.programs_per_sm, pieces)
    even = spec.block_mask is None and spec.band == EVERYTHING and not spec.is_varlen
    dynamic = pieces > programs * (EVEN_ROUNDS if even else 1)
    parts, words, share = None, 1, 0
    if config.SPLIT_TAIL:
        share = config.tail_share(pieces, programs, cdiv(k.shape[-2], config.TILE_N))
        words += programs * config.CONSUMERS
        # where nothing is shared nobody looks at it
        parts = lse
        if share > 0:
            slots = 2 * programs * config.CONSUMERS
            parts = scratch((slots, GROUP_ROWS, config.TILE_DV + 2), torch.float32, q.device)
    with on_device_of(q):
        args = (
            _forward_descriptor(out, config.out_block()),
            lse,
            _forward_descriptor(q, config.q_block()),
            _forward_descriptor(k, config.k_block()),
            _forward_descriptor(v, config.v_block()),
            operands.sinks,
            operands.cu_seqlens,
            Workspace(resting_words(words, q.device), order, parts),
            operands.block_lists,
            *operands.mask_steps,
            lse.stride(-2),
            *operands.lengths,
            *operands.band,
            planes,
            section,
            int(dynamic),
            share,
            *operands.heads,
            operands.score,
            config,
        )
        options = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS, "launch_pdl": config.PDL}
        launch(_attn_fwd_sm90_kernel, programs, args, **options)


def _forward_descriptor(x: torch.Tensor, block: tuple[int, int, int, int]) -> Any:
    if x.dim() == 3:
        return packed_descriptor(x, block)
    return tensor_descriptor(x, block, tma_strides(x))


def tma_strides(x: torch.Tensor) -> list[int]:
    """Strides for a descriptor: a dimension of size 1 may carry any, which TMA would refuse."""
    row = x.shape[-1]
    return [stride if size > 1 else row for size, stride in zip(x.shape, x.stride(), strict=True)]


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
    ranks: torch.Tensor | None,
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
        takes them in raster order. With `visits` int32 [SMs + 1 + B * Hkv * tiles], as
        `dq_order.program_tiles` makes it
    ranks : int32, under a mask and with `config.ORDERED`: when each KV tile adds to dq of each
        query block, as `dq_order.block_ranks` makes them for `order`
    visits : int32 [nnz or more, 1 or heads of a group], first the query blocks of the transposed
        lists in the order that ranks are for, as `dq_order_kernel.plan_visits` makes them, or None,
        which leaves them as they are
    section : raster group, how many (batch, KV head) have their queries in L2 together
    config : tiles
    """
    operands, mask = kernel_operands(q, k, v, spec), transposed_mask(spec.block_mask)
    q_len, kv_len = operands.lengths
    batch_heads = operands.batch * operands.heads[0]
    padded = cdiv(q_len, QUERY_PADDING) * QUERY_PADDING
    lse_log2, delta = (scratch((batch_heads, padded), torch.float32, q.device) for _ in range(2))
    sums = scratch((batch_heads, padded, config.TILE_D), torch.float32, q.device)
    semaphores = None
    if config.ORDERED:
        semaphores = scratch((batch_heads, padded // ROW_TILE, 2), torch.int32, q.device)
    with on_device_of(q):
        launch_attn_bwd_preprocess(lse_log2, delta, sums, semaphores, out, dout, lse, dlse)
        row_block = config.row_block()
        rows = tuple(tensor_descriptor(x, row_block) for x in (lse_log2, delta))
        kv_batch_heads = batch_heads // operands.heads[1]
        work_tiles = kv_batch_heads * cdiv(kv_len, config.tile_n)
        programs, planned = arch_of(q.device).num_sms, visits is not None
        programs = programs if planned else min(programs, work_tiles)
        # ordered, work tiles come from the counter whatever their number
        counted = not planned and (work_tiles > programs or config.ORDERED)
        counter = scratch((1,), torch.int32, q.device, zero=counted)
        args = (
            tensor_descriptor(sums.view(batch_heads, -1, SUM_COLUMNS), config.dq_block()),
            _backward_descriptor(dk, config.k_block()),
            _backward_descriptor(dv, config.v_block()),
            _backward_descriptor(dout, config.dout_block()),
            _backward_descriptor(q, config.q_block()),
            _backward_descriptor(k, config.k_block()),
            _backward_descriptor(v, config.v_block()),
            *rows,
            WorkPointers(counter, order, semaphores, ranks, visits),
            mask.lists,
            *mask.steps,
            q_len,
            kv_len,
            *operands.band,
            kv_batch_heads,
            section,
            1 if visits is None else visits.shape[1],
            *operands.heads,
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            config,
        )
        options = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}
        # planned programs wait for each other: all of them have to be resident
        options["launch_cooperative_grid"] = planned
        launch(_attn_bwd_sm90_kernel, programs, args, **options)
        if dq is not None:
            block_q = max(config.BLOCK_Q, ROW_TILE)
            launch_attn_bwd_postprocess(dq, sums, semaphores, block_q, float(spec.scale))
    return delta.view(operands.batch, operands.heads[0], padded)


def _backward_descriptor(x: torch.Tensor, block: tuple[int, int, int, int]) -> Any:
    return tensor_descriptor(x, block, tma_strides(x))


# Launching the split backward: preprocess, then a kernel for dk and dv and one for dq.

# Programs that share an SM, in either kernel.
PROGRAMS_PER_SM = 2


def launch_attn_bwd_terms(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """lse in base 2 and delta of all queries, fp32 [B * Hq, padded Sq]."""
    batch_heads, padded = (
        lse.shape[0] * lse.shape[1],
        cdiv(lse.shape[2], QUERY_PADDING) * QUERY_PADDING,
    )
    lse_log2, delta = (scratch((batch_heads, padded), torch.float32, lse.device) for _ in range(2))
    with on_device_of(lse):
        launch_attn_bwd_preprocess(lse_log2, delta, None, None, out, dout, lse, dlse)
    return lse_log2, delta


def launch_attn_bwd_keys_sm90(
    dk: torch.Tensor,
    dv: torch.Tensor,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    terms: tuple[torch.Tensor, torch.Tensor],
    spec: AttnSpec,
    order: torch.Tensor,
    config: AttnBwdSm90Config,
) -> None:
    """Fill dk and dv.

    Parameters
    ----------
    dk, dv : like k and v; all of each is written
    dout : [B, Hq, Sq, Dv], like q, k and v as TMA takes it
    terms : what `launch_attn_bwd_terms` gave
    spec : options of the call, with a mask
    order : int32 [B * Hkv * tiles], tiles of 64 keys in the order to take them, as
        `masks.order.longest_columns_first` makes it
    """
    operands, mask = kernel_operands(q, k, v, spec), transposed_mask(spec.block_mask)
    rows = tuple(tensor_descriptor(x, config.row_block()) for x in terms)
    batch_heads = operands.batch * k.shape[1]
    work_tiles = batch_heads * cdiv(operands.lengths[1], config.tile_n)
    programs = min(PROGRAMS_PER_SM * arch_of(q.device).num_sms, work_tiles)
    with on_device_of(q):
        args = (
            _backward_descriptor(dk, config.k_block()),
            _backward_descriptor(dv, config.v_block()),
            *_inputs(dout, q, k, v, config),
            *rows,
            scratch((1,), torch.int32, q.device, zero=work_tiles > programs),
            order,
            mask.lists,
            *mask.steps,
            *operands.lengths,
            *operands.band,
            batch_heads,
            *operands.heads,
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            config,
        )
        launch(_attn_bwd_dkdv_sm90_kernel, programs, args, **_options(config))


def launch_attn_bwd_queries_sm90(
    dq: torch.Tensor,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    terms: tuple[torch.Tensor, torch.Tensor],
    spec: AttnSpec,
    order: torch.Tensor,
    config: AttnBwdDqSm90Config,
) -> None:
    """Fill dq; arguments are as above, `order` as `masks.order.longest_first` makes it."""
    operands = kernel_operands(q, k, v, spec)
    assert spec.block_mask is not None
    work_tiles = order.numel() * (spec.block_mask.block_size[0] // config.tile_m)
    programs = min(PROGRAMS_PER_SM * arch_of(q.device).num_sms, work_tiles)
    with on_device_of(q):
        args = (
            _backward_descriptor(dq, config.q_block()),
            *_inputs(dout, q, k, v, config),
            *terms,
            resting_words(1, q.device),
            order,
            operands.block_lists,
            *operands.mask_steps,
            *operands.lengths,
            *operands.band,
            operands.batch * operands.heads[0],
            int(work_tiles > programs),
            *operands.heads,
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            config,
        )
        launch(_attn_bwd_dq_sm90_kernel, programs, args, **_options(config))


def _options(config: AttnBwdSm90Config | AttnBwdDqSm90Config) -> dict[str, int]:
    return {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}


def _inputs(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    config: AttnBwdSm90Config | AttnBwdDqSm90Config,
) -> tuple[Any, ...]:
    """Descriptors of what both kernels read."""
    blocks = (config.dout_block(), config.q_block(), config.k_block(), config.v_block())
    return tuple(map(_backward_descriptor, (dout, q, k, v), blocks))
