"""Launching the Hopper forward: descriptors, order of work, grid."""

from typing import Any

import torch

from ...core.arch import arch_of
from ...core.launch import cdiv, launch, on_device_of, resting_words, scratch
from ...formats.attention_spec import AttnSpec
from ...formats.band import EVERYTHING
from ..sm90 import GROUP_ROWS, packed_descriptor, tensor_descriptor
from .config_sm90 import AttnFwdSm90Config
from .fwd_sm90 import _attn_fwd_sm90_kernel
from .operands import kernel_operands

# Pieces of the same size are dealt out to programs in turn while there are few: to deal them out as
# programs get free would save nothing.
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
    if config.SHARED_TAIL:
        share = config.shared_tail(pieces, programs, cdiv(k.shape[-2], config.TILE_N))
        words += programs * config.CONSUMERS
        # where nothing is shared nobody looks at it
        parts = lse
        if share > 0:
            slots = 2 * programs * config.CONSUMERS
            parts = scratch((slots, GROUP_ROWS, config.TILE_DV + 2), torch.float32, q.device)
    with on_device_of(q):
        args = (
            _descriptor(out, config.out_block()),
            lse,
            _descriptor(q, config.q_block()),
            _descriptor(k, config.k_block()),
            _descriptor(v, config.v_block()),
            operands.sinks,
            operands.cu_seqlens,
            (resting_words(words, q.device), order, parts),
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
        options = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS, "launch_pdl": config.OVERLAP}
        launch(_attn_fwd_sm90_kernel, programs, args, **options)


def _descriptor(x: torch.Tensor, block: tuple[int, int, int, int]) -> Any:
    if x.dim() == 3:
        return packed_descriptor(x, block)
    return tensor_descriptor(x, block, tma_strides(x))


def tma_strides(x: torch.Tensor) -> list[int]:
    """Strides for a descriptor: a dimension of size 1 may carry any, which TMA would refuse."""
    row = x.shape[-1]
    return [stride if size > 1 else row for size, stride in zip(x.shape, x.stride(), strict=True)]
