"""The Hopper kernel as implementation `sm90` of `bsk::attn_bwd`.

Triton and the kernel are imported at the first call.
"""

import torch

from ..core.arch import arch_of
from ..core.launch import scratch, unrecorded
from ..formats.attention_spec import AttnGradients, AttnSpec
from ..formats.band import EVERYTHING, Band
from ..formats.block_mask import BlockMask
from ..formats.block_order import longest_columns_first
from ..formats.block_turns import (
    Groups,
    groups_of_columns,
    pieces_of_programs,
    turns_of_blocks,
)
from ..tuning.attention_bwd_sm90 import (
    attn_bwd_sm90_apart,
    attn_bwd_sm90_config,
    attn_bwd_sm90_front,
    attn_bwd_sm90_passed_over,
    attn_bwd_sm90_section,
    attn_bwd_sm90_unsupported,
)
from ..tuning.problem_attention import AttnProblem, tma_takes
from .attention_bwd_sm90_pair import backward_apart
from .derived_lists import derived_list
from .machine import why_no_kernels


def why_not_backward(problem: AttnProblem) -> str | None:
    """Why the backward kernel cannot run this problem, or None when it can."""
    return why_no_kernels(problem.arch) or attn_bwd_sm90_unsupported(problem)


auto_passes = attn_bwd_sm90_passed_over


def backward(
    gradients: AttnGradients,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spec: AttnSpec,
    deterministic: bool,
) -> None:
    """Fill `gradients`; those of k and v come together, and scratch takes what nobody asked for."""
    from ..kernels.attention.bwd_sinks import launch_sink_gradients
    from ..kernels.attention.bwd_sm90_launch import launch_attn_bwd_sm90

    problem = AttnProblem.of(q, k, v, spec, backward=True, deterministic=deterministic)
    # the gradient of an expanded or sliced output may be laid out in ways that TMA cannot read
    dout = dout if tma_takes(dout) else dout.contiguous()
    if attn_bwd_sm90_apart(problem):
        backward_apart(gradients, dout, dlse, q, k, v, out, lse, spec, problem)
        return
    config, section = attn_bwd_sm90_config(problem), attn_bwd_sm90_section(problem)
    order = turns = visits = None
    if (mask := spec.block_mask) is not None:
        heads, group_size = k.shape[1], q.shape[1] // k.shape[1]
        sizes = (q.shape[0], heads, group_size, spec.band, section, config.tile_n)
        # a band may cut lists, which have to be in order for that
        planned = deterministic and spec.band == EVERYTHING
        tiles = (config.parts, attn_bwd_sm90_front(problem, section))
        if planned:
            visits = derived_list(mask, _plan, *sizes, *tiles)
            order = derived_list(mask, _pieces, *sizes, *tiles)
        else:
            order = derived_list(mask, longest_columns_first, *sizes)
        if deterministic:
            turns = derived_list(mask, _turns, *sizes, *tiles)
    dk, dv = (
        scratch(x.shape, x.dtype, x.device) if gradient is None else gradient
        for x, gradient in ((k, gradients.dk), (v, gradients.dv))
    )
    work = (order, turns, visits, section)
    delta = launch_attn_bwd_sm90(
        gradients.dq, dk, dv, dout, dlse, q, k, v, out, lse, spec, *work, config
    )
    if gradients.dsinks is not None and spec.sinks is not None:
        delta = delta[..., : lse.shape[-1]].contiguous()
        launch_sink_gradients(gradients.dsinks, spec.sinks.contiguous(), lse, delta, None)


def _plan(
    mask: BlockMask,
    batch: int,
    heads: int,
    group_size: int,
    band: Band,
    section: int,
    tile: int,
    pack: int,
    parts: int,
) -> torch.Tensor:
    """Rows of one number for each head that shares a list: int32 `[n, heads]`.

    The query blocks that columns visit, one row for each of the lists, then when they do, then
    which columns follow each other.
    """
    from ..kernels.attention.bwd_visits import plan_visits

    assert band == EVERYTHING, band
    groups = _groups(mask, batch, heads, group_size, band, section, tile)
    with unrecorded():
        visits, times, lanes = plan_visits(mask, groups, group_size, pack, parts)
    lanes = torch.nn.functional.pad(lanes, (0, -lanes.numel() % len(visits)))
    return torch.cat((visits.t(), times.t(), lanes.view(-1, len(visits))))


def _groups(
    mask: BlockMask, batch: int, heads: int, group_size: int, band: Band, section: int, tile: int
) -> Groups:
    order = derived_list(mask, longest_columns_first, batch, heads, group_size, band, section, tile)
    programs = arch_of(mask.device).num_sms
    return groups_of_columns(mask, order, batch, heads, group_size, section, tile, programs)


def _pieces(
    mask: BlockMask,
    batch: int,
    heads: int,
    group_size: int,
    band: Band,
    section: int,
    tile: int,
    pack: int,
    parts: int,
) -> torch.Tensor:
    """Which tiles of keys each program takes."""
    sizes = (batch, heads, group_size, band, section, tile)
    groups, programs = _groups(mask, *sizes), arch_of(mask.device).num_sms
    lanes = derived_list(mask, _plan, *sizes, pack, parts)[2 * mask.transposed.indices.numel() :]
    lanes = lanes.flatten()[: groups.queue.numel()]
    return pieces_of_programs(mask, groups, lanes, batch, heads, section, tile, programs)


def _turns(
    mask: BlockMask,
    batch: int,
    heads: int,
    group_size: int,
    band: Band,
    section: int,
    tile: int,
    pack: int,
    parts: int,
) -> torch.Tensor:
    """When each tile of keys adds to the gradients of queries."""
    sizes = (batch, heads, group_size, band, section, tile)
    order = derived_list(mask, longest_columns_first, *sizes)
    if band != EVERYTHING:
        return turns_of_blocks(mask, order, heads, group_size, band, tile)
    nnz = mask.transposed.indices.numel()
    plan = derived_list(mask, _plan, *sizes, pack, parts)
    plan = plan[: 2 * nnz].view(2, nnz, plan.shape[1])
    args = (mask, order, heads, group_size, band, tile)
    return torch.stack([turns_of_blocks(*args, *of_head) for of_head in plan.unbind(2)], 1)
