"""Launching the Hopper kernels: workspaces, descriptors, order of work, grid."""

from typing import Any, NamedTuple

import torch

from ...calls.attention import (
    AttentionCall,
    AttnGradients,
    BackwardCall,
    empty_lse,
    tma_takes,
)
from ...core.arch import arch_of
from ...core.compat import hopper_options
from ...device.gates import KeyGates
from ...launch.descriptors import tensor_descriptor
from ...launch.launcher import cdiv, launch, on_device_of
from ...launch.workspace import scratch, self_resetting_counters
from ...masks.derived_lists import derived_list
from ...masks.order import longest_columns_first, longest_first
from ..operands import gradient_factors, kernel_operands, transposed_mask
from ..triton.delta import launch_attn_delta, launch_sink_gradients
from .backward import _attn_bwd_sm90_kernel
from .backward_preprocess import (
    ROW_TILE,
    KeySums,
    launch_attn_bwd_postprocess,
    launch_attn_bwd_preprocess,
    launch_attn_bwd_round_keys,
)
from .backward_shared import WorkPointers
from .backward_split import _attn_bwd_dkdv_sm90_kernel, _attn_bwd_dq_sm90_kernel
from .backward_wide import _attn_bwd_wide_sm90_kernel
from .backward_wide_queries import _attn_bwd_wide_dq_sm90_kernel
from .config import SUM_COLUMNS, AttnBwdSm90Config, AttnFwdSm90Config
from .config_split import AttnBwdDqSm90Config
from .dq_order import Columns, DqOrder, Walk, dq_order
from .forward_plan import descriptor_of, plan_attn_fwd_sm90, schedule_of_call
from .forward_producer import Workspace
from .schedule import (
    BackwardSchedule,
    backward_schedule,
    packed_backward_schedule,
    packed_rows,
    padded_rows,
)
from .tuning import (
    attn_bwd_dkdv_config,
    attn_bwd_dkdv_raster_group,
    attn_bwd_dq_config,
    attn_bwd_sm90_config,
    attn_bwd_sm90_front,
    attn_bwd_sm90_head_splits,
    attn_bwd_sm90_is_split,
    attn_bwd_sm90_raster_group,
    attn_bwd_wide_dkdv_config,
    attn_bwd_wide_dkdv_raster_group,
    attn_bwd_wide_dq_config,
    attn_fwd_sm90_config,
    attn_fwd_sm90_raster_group,
)


def forward(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, in the tensor that the call gives or as `empty_out` lays it out, and lse."""
    q, spec, problem = call.q, call.spec, call.problem
    out, lse = call.empty_out(), empty_lse(q)
    config = attn_fwd_sm90_config(problem)
    raster_group = attn_fwd_sm90_raster_group(problem, spec.band)
    order = None
    # an order of mask rows knows nothing of the lengths of packed sequences
    if (mask := spec.block_mask) is not None and not spec.is_varlen:
        order = derived_list(mask, longest_first, q.shape[0], q.shape[1], spec.band, raster_group)
    launch_attn_fwd_sm90(call, out, lse, order, raster_group, config)
    return out, lse


def launch_attn_fwd_sm90(
    call: AttentionCall,
    out: torch.Tensor,
    lse: torch.Tensor,
    order: torch.Tensor | None,
    raster_group: int,
    config: AttnFwdSm90Config,
    gates: KeyGates | None = None,
) -> None:
    """Fill `out` and `lse`.

    Parameters
    ----------
    call : q, k and v [B, H, S, D | Dv] or packed [T, H, D | Dv], at least one query and one key,
        strides and addresses that TMA takes
    out : [B, Hq, Sq, Dv], lse : fp32 [B, Hq, Sq] contiguous; all of both is written. Packed:
        [Tq, Hq, Dv] and [Hq, Tq], of which the tokens of sequences are written
    order : int32 [B * Hq * rows], the rows of the block mask in the order in which programs take
        them, from `masks.order.longest_first`; None takes the queries in raster groups. Must be
        None for packed sequences
    raster_group : (batch, head) pairs whose work tiles run together; with packed sequences, an
        upper bound: each sequence has its own, which follows from its length
    config : tiles; without half tiles if there are slopes, a bias or gates
    gates : scores of keys and thresholds of queries, of dense batches only
    """
    device = call.q.device
    assert (gates is not None) == config.GATED, f"{config=}"
    assert not (config.HALF_TILES and call.spec.is_biased), f"{config=}"
    schedule = schedule_of_call(call, order, config, arch_of(device).num_sms)
    if schedule is None:
        return
    parts = None
    if config.SPLIT_TAIL:
        # any pointer will do if the tail is not split: it is not read
        parts = lse
        if schedule.tail_share > 0:
            parts = scratch(schedule.parts_shape(config), torch.float32, device)
    with on_device_of(call.q):
        workspace = Workspace(self_resetting_counters(schedule.counters, device), order, parts)
        plan = plan_attn_fwd_sm90(call, out, lse, workspace, raster_group, schedule, config, gates)
        launch(plan.kernel, plan.programs, plan.args, **plan.options)


def backward(call: BackwardCall) -> None:
    """Fill the gradients that are needed, with one kernel or two (see `attn_bwd_sm90_is_split`).

    dk and dv are computed together: if only one is needed, the other goes to scratch memory.
    """
    # the gradient of an expanded or sliced output may be laid out in ways that TMA cannot read
    dout = call.dout if tma_takes(call.dout) else call.dout.contiguous()
    dq, dk, dv, dsinks = call.gradients
    problem, given = call.problem, call.forward
    split = attn_bwd_sm90_is_split(problem)
    if not split or dk is not None or dv is not None:
        dk, dv = (
            scratch(x.shape, x.dtype, x.device) if gradient is None else gradient
            for x, gradient in ((given.k, dk), (given.v, dv))
        )
    gradients = AttnGradients(dq, dk, dv, dsinks)
    call = BackwardCall(given, dout, call.dlse, call.out, call.lse, gradients)
    if split:
        delta = _backward_split(call)
    else:
        head_splits = attn_bwd_sm90_head_splits(problem, given.spec.band)
        config = attn_bwd_sm90_config(problem, head_splits)
        raster_group = attn_bwd_sm90_raster_group(problem, head_splits)
        order = _order_of_dq(call, config, raster_group)
        delta = launch_attn_bwd_sm90(call, *order, raster_group, config, head_splits)
    if dsinks is not None and given.spec.sinks is not None:
        offsets = given.spec.cu_seqlens_q
        if offsets is not None:
            # this delta has gaps between sequences
            delta = scratch(call.lse.shape, torch.float32, dout.device)
            launch_attn_delta(delta, dout, call.out, call.dlse, call.lse)
        launch_sink_gradients(dsinks, given.spec.sinks.contiguous(), call.lse, delta, offsets)


def _order_of_dq(call: BackwardCall, config: AttnBwdSm90Config, raster_group: int) -> DqOrder:
    """The order in which KV tiles run and add to dq; raster order without a mask."""
    given, mask = call.forward, call.forward.spec.block_mask
    if mask is None:
        return DqOrder(None, None, None)
    batch, heads_q = given.q.shape[:2]
    heads_kv = given.k.shape[1]
    group_size = heads_q // heads_kv
    sizes = (batch, heads_kv, group_size, given.spec.band, raster_group, config.tile_n)
    walk = Walk(config.parts, attn_bwd_sm90_front(call.problem, raster_group))
    return dq_order(mask, Columns(*sizes), walk, given.deterministic)


def _backward_split(call: BackwardCall) -> torch.Tensor:
    """Fill the gradients with two kernels, one for dk and dv and one for dq; deterministic.

    Wide heads must have no mask. Returns delta, fp32 [B, Hq, padded Sq].
    """
    given, problem, wanted = call.forward, call.problem, call.gradients
    q, k, band, mask = given.q, given.k, given.spec.band, given.spec.block_mask
    terms = launch_attn_bwd_terms(call)
    group_size = q.shape[1] // k.shape[1]
    if mask is None:
        if wanted.dk is not None:
            raster_group = attn_bwd_wide_dkdv_raster_group(problem)
            config = attn_bwd_wide_dkdv_config(problem)
            launch_attn_bwd_wide_dkdv_sm90(call, terms, raster_group, config)
        if wanted.dq is not None:
            # as in the forward pass, which reads the same keys and values
            raster_group = attn_fwd_sm90_raster_group(problem, band)
            config_q = attn_bwd_wide_dq_config(problem)
            launch_attn_bwd_wide_dq_sm90(call, terms, raster_group, config_q)
    if mask is not None and wanted.dk is not None:
        config, raster_group = attn_bwd_dkdv_config(problem), attn_bwd_dkdv_raster_group(problem)
        sizes = (q.shape[0], k.shape[1], group_size, band, raster_group, config.tile_n)
        order = derived_list(mask, longest_columns_first, *sizes)
        launch_attn_bwd_dkdv_sm90(call, terms, order, config)
    if mask is not None and wanted.dq is not None:
        # as in the forward pass: the heads that share keys run together
        order = derived_list(mask, longest_first, q.shape[0], q.shape[1], band, group_size)
        launch_attn_bwd_dq_sm90(call, terms, order, attn_bwd_dq_config(problem))
    return terms.delta.view(*call.lse.shape[:2], -1)


def launch_attn_bwd_sm90(
    call: BackwardCall,
    order: torch.Tensor | None,
    ranks: torch.Tensor | None,
    visits: torch.Tensor | None,
    raster_group: int,
    config: AttnBwdSm90Config,
    head_splits: int = 1,
) -> torch.Tensor:
    """Fill dq, dk and dv; returns delta, fp32 [B, Hq, padded Sq], packed [1, Hq, rows].

    Parameters
    ----------
    call : at least one query and key; dout, q, k and v with strides and addresses that TMA takes,
        lse contiguous. dq, dk and dv are written completely; packed, the tokens of sequences.
        Without dq only the sums are formed. Packed: no mask, no `head_splits`
    order : int32 [B * Hkv * tiles], tiles of keys in the order in which programs take them; None
        for raster order. With `visits`, int32 [SMs + 1 + B * Hkv * tiles] from
        `dq_order.program_tiles`
    ranks : int32 from `dq_order.block_ranks` for `order`: when each KV tile adds to dq of each
        query block. Only under a mask and with `config.ORDERED`
    visits : int32 [nnz or more, 1 or heads of a group] from `dq_order_kernel.plan_visits`: begins
        with the query blocks of the transposed lists, in the order that the ranks are for. None
        leaves the lists in their order
    raster_group : (batch, KV head) pairs that run together, so that their queries stay in L2; with
        `head_splits`, shares of pairs
    config : tiles
    head_splits : work tiles that share the query heads of a KV tile, with `config.SPLIT_HEADS`
    """
    assert (head_splits > 1) == config.SPLIT_HEADS, f"{config=}, {head_splits=}"
    given, spec = call.forward, call.forward.spec
    q, k, v, dout, lse = given.q, given.k, given.v, call.dout, call.lse
    dq, dk, dv, _ = call.gradients
    assert dk is not None and dv is not None
    operands, mask = kernel_operands(given), transposed_mask(spec.block_mask)
    q_len, kv_len = operands.lengths
    packed, batch = spec.is_varlen, operands.batch
    # heads of all sequences lie behind each other in workspaces, packed or not
    batch_heads = operands.heads.q if packed else batch * operands.heads.q
    padded = packed_rows(q.shape[0], batch) if packed else padded_rows(q_len)
    lse_log2, delta = (scratch((batch_heads, padded), torch.float32, q.device) for _ in range(2))
    sums = scratch((batch_heads, padded, config.TILE_D), torch.float32, q.device)
    semaphores = None
    if config.ORDERED:
        semaphores = scratch((batch_heads, padded // ROW_TILE, 2), torch.int32, q.device)
    group_size = operands.heads.group_size // head_splits
    kv_batch_heads = batch * (operands.heads.q // group_size)
    key_sums = None
    if config.SPLIT_HEADS:
        heads = kv_batch_heads if config.ORDERED else kv_batch_heads // head_splits
        shape = (heads, padded_rows(kv_len))
        widths = (config.TILE_D, config.TILE_DV)
        key_sums = KeySums(*(scratch((*shape, x), torch.float32, q.device) for x in widths))
    sms, planned = arch_of(q.device).num_sms, visits is not None
    schedule = backward_schedule(config, sms, kv_batch_heads, kv_len)
    if packed:
        schedule = packed_backward_schedule(config, sms, batch, k.shape[1], k.shape[0])
    if planned:
        schedule = BackwardSchedule(sms, counted=False)
    early = not planned
    with on_device_of(q):
        # PDL: a kernel starts before the previous one has ended. The counter is zeroed before all
        # launches, because a memset between two of them would keep the second from starting early.
        counter = scratch((1,), torch.int32, q.device, zero=schedule.counted)
        launch_attn_bwd_preprocess(
            *(lse_log2, delta, sums, semaphores, call.out, dout, lse, call.dlse),
            # ordered sums are stored, not added to, so they need no zeros
            None if config.ORDERED else key_sums,
            spec.cu_seqlens_q,
            pdl=early,
        )
        row_block = config.row_block()
        rows = tuple(tensor_descriptor(x, row_block) for x in (lse_log2, delta))
        kernel: Any = _attn_bwd_sm90_kernel
        sums_arg: Any = sums
        if config.SHARED_KEYS:
            kernel = _attn_bwd_wide_sm90_kernel
        else:
            sums_arg = _sums_descriptor(sums, config)
        if key_sums is None:
            blocks = (config.k_block(), config.v_block())
            gradients = tuple(map(descriptor_of, (dk, dv), blocks))
        else:
            gradients = tuple(_sums_descriptor(x, config) for x in key_sums)
        args = (
            sums_arg,
            *gradients,
            descriptor_of(dout, config.dout_block()),
            descriptor_of(q, config.q_block()),
            descriptor_of(k, config.k_block()),
            descriptor_of(v, config.v_block()),
            *rows,
            WorkPointers(counter, order, semaphores, ranks, visits),
            mask.lists,
            *mask.steps,
            q_len,
            kv_len,
            *operands.band,
            kv_batch_heads,
            raster_group,
            1 if visits is None else visits.shape[1],
            operands.heads.q,
            group_size,
            *(() if config.SHARED_KEYS else (head_splits,)),
            *((operands.cu_seqlens, padded) if packed else (None, None)),
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            config,
        )
        options: dict[str, Any] = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}
        options |= hopper_options()
        # planned programs wait for each other, so all of them must be resident
        options["launch_cooperative_grid"] = planned
        options["launch_pdl"] = early
        launch(kernel, schedule.programs, args, **options)
        if dq is not None:
            block_q = max(config.BLOCK_Q, ROW_TILE)
            launch_attn_bwd_postprocess(
                *(dq, sums, semaphores, block_q, float(spec.scale), spec.cu_seqlens_q),
                pdl=early,
            )
        if key_sums is not None:
            launch_attn_bwd_round_keys(dk, dv, key_sums, float(spec.scale))
    return delta.view(-1, operands.heads.q, padded)


def _sums_descriptor(sums: torch.Tensor, config: AttnBwdSm90Config) -> Any:
    return tensor_descriptor(sums.view(sums.shape[0], -1, SUM_COLUMNS), config.sums_block())


# Launching the split backward: preprocess, then a kernel for dk and dv and one for dq.

# Programs that share an SM, in either kernel.
PROGRAMS_PER_SM = 2


class RowTerms(NamedTuple):
    """lse in base 2 and delta of all queries, fp32 [B * Hq, padded Sq]."""

    lse_log2: torch.Tensor
    delta: torch.Tensor


def launch_attn_bwd_terms(call: BackwardCall) -> RowTerms:
    """Compute lse in base 2 and delta, which both kernels read for each query."""
    lse = call.lse
    batch_heads = lse.shape[0] * lse.shape[1]
    padded = padded_rows(lse.shape[2])
    lse_log2, delta = (scratch((batch_heads, padded), torch.float32, lse.device) for _ in range(2))
    with on_device_of(lse):
        launch_attn_bwd_preprocess(lse_log2, delta, None, None, call.out, call.dout, lse, call.dlse)
    return RowTerms(lse_log2, delta)


def launch_attn_bwd_dkdv_sm90(
    call: BackwardCall, terms: RowTerms, order: torch.Tensor, config: AttnBwdSm90Config
) -> None:
    """Fill dk and dv.

    Parameters
    ----------
    call : with a mask; dout, q, k and v with strides and addresses that TMA takes; dk and dv are
        written completely
    terms : from `launch_attn_bwd_terms`
    order : int32 [B * Hkv * tiles], tiles of 64 keys in the order in which programs take them, from
        `masks.order.longest_columns_first`
    """
    q, k, spec = call.forward.q, call.forward.k, call.forward.spec
    dk, dv = call.gradients.dk, call.gradients.dv
    assert dk is not None and dv is not None
    operands, mask = kernel_operands(call.forward), transposed_mask(spec.block_mask)
    rows = tuple(tensor_descriptor(x, config.row_block()) for x in terms)
    batch_heads = operands.batch * k.shape[1]
    work_tiles = batch_heads * cdiv(operands.lengths.kv, config.tile_n)
    programs = min(PROGRAMS_PER_SM * arch_of(q.device).num_sms, work_tiles)
    with on_device_of(q):
        args = (
            descriptor_of(dk, config.k_block()),
            descriptor_of(dv, config.v_block()),
            *_inputs(call, config),
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


def launch_attn_bwd_dq_sm90(
    call: BackwardCall, terms: RowTerms, order: torch.Tensor, config: AttnBwdDqSm90Config
) -> None:
    """Fill dq; arguments as above, with an `order` from `masks.order.longest_first`."""
    q, dq, spec = call.forward.q, call.gradients.dq, call.forward.spec
    assert dq is not None
    operands = kernel_operands(call.forward)
    assert spec.block_mask is not None
    work_tiles = order.numel() * (spec.block_mask.block_size[0] // config.tile_m)
    programs = min(PROGRAMS_PER_SM * arch_of(q.device).num_sms, work_tiles)
    with on_device_of(q):
        args = (
            descriptor_of(dq, config.q_block()),
            *_inputs(call, config),
            *terms,
            self_resetting_counters(1, q.device),
            order,
            operands.block_lists,
            *operands.mask_steps,
            *operands.lengths,
            *operands.band,
            operands.batch * operands.heads.q,
            int(work_tiles > programs),
            *operands.heads,
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            config,
        )
        launch(_attn_bwd_dq_sm90_kernel, programs, args, **_options(config))


def launch_attn_bwd_wide_dkdv_sm90(
    call: BackwardCall, terms: RowTerms, raster_group: int, config: AttnBwdSm90Config
) -> None:
    """Fill dk and dv of wide heads without a mask; arguments as above.

    `raster_group` is the number of (batch, KV head) pairs that run together.
    """
    q, k, spec = call.forward.q, call.forward.k, call.forward.spec
    dk, dv = call.gradients.dk, call.gradients.dv
    assert dk is not None and dv is not None
    operands = kernel_operands(call.forward)
    batch_heads = operands.batch * k.shape[1]
    sms = arch_of(q.device).num_sms
    schedule = backward_schedule(config, sms, batch_heads, operands.lengths.kv)
    counter = scratch((1,), torch.int32, q.device, zero=schedule.counted)
    with on_device_of(q):
        args = (
            None,
            descriptor_of(dk, config.k_block()),
            descriptor_of(dv, config.v_block()),
            *_inputs(call, config),
            *(tensor_descriptor(x, config.row_block()) for x in terms),
            WorkPointers(counter),
            *(None, 0, 0),
            *operands.lengths,
            *operands.band,
            batch_heads,
            raster_group,
            1,
            *operands.heads,
            *(None, 0),
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            config,
        )
        launch(_attn_bwd_wide_sm90_kernel, schedule.programs, args, **_options(config))


def launch_attn_bwd_wide_dq_sm90(
    call: BackwardCall, terms: RowTerms, raster_group: int, config: AttnBwdDqSm90Config
) -> None:
    """Fill dq of wide heads without a mask; `raster_group` (batch, head) pairs run together."""
    q, dq, spec = call.forward.q, call.gradients.dq, call.forward.spec
    assert dq is not None
    operands = kernel_operands(call.forward)
    batch_heads = operands.batch * operands.heads.q
    work_tiles = batch_heads * cdiv(operands.lengths.q, config.tile_m)
    programs = min(arch_of(q.device).num_sms, work_tiles)
    with on_device_of(q):
        args = (
            descriptor_of(dq, config.q_block()),
            *_inputs(call, config),
            *terms,
            self_resetting_counters(1, q.device),
            *operands.lengths,
            *operands.band,
            batch_heads,
            raster_group,
            int(work_tiles > programs),
            *operands.heads,
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            config,
        )
        launch(_attn_bwd_wide_dq_sm90_kernel, programs, args, **_options(config))


def _options(config: AttnBwdSm90Config | AttnBwdDqSm90Config) -> dict[str, Any]:
    return {"num_warps": 4, "maxnreg": config.MAX_REGISTERS, **hopper_options()}


def _inputs(call: BackwardCall, config: AttnBwdSm90Config | AttnBwdDqSm90Config) -> tuple[Any, ...]:
    """Descriptors of dout, q, k and v, which both kernels read."""
    tensors = (call.dout, call.forward.q, call.forward.k, call.forward.v)
    blocks = (config.dout_block(), config.q_block(), config.k_block(), config.v_block())
    return tuple(map(descriptor_of, tensors, blocks))
