"""Launching the Hopper backward in two kernels: terms of rows, descriptors, order of work, grid."""

from typing import Any

import torch

from ...core.arch import arch_of
from ...core.launch import cdiv, launch, on_device_of, resting_words, scratch
from ...formats.attention_spec import AttnSpec
from ..sm90 import tensor_descriptor
from .bwd_config_sm90 import QUERY_PADDING, AttnBwdSm90Config
from .bwd_config_sm90_pair import AttnBwdQueriesSm90Config
from .bwd_sm90_keys import _attn_bwd_keys_sm90_kernel
from .bwd_sm90_queries import _attn_bwd_queries_sm90_kernel
from .bwd_sm90_rows import launch_attn_bwd_rows
from .fwd_sm90_launch import tma_strides
from .operands import gradient_factors, kernel_operands, transposed_mask

# Programs that share an SM, in either kernel.
PROGRAMS_PER_SM = 2


def launch_attn_bwd_terms(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """lse in base 2 and delta of all queries, fp32 [B * Hq, padded Sq]."""
    planes, padded = lse.shape[0] * lse.shape[1], cdiv(lse.shape[2], QUERY_PADDING) * QUERY_PADDING
    lse_log2, delta = (scratch((planes, padded), torch.float32, lse.device) for _ in range(2))
    with on_device_of(lse):
        launch_attn_bwd_rows(lse_log2, delta, None, None, out, dout, lse, dlse)
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
        `formats.block_order.longest_columns_first` makes it
    """
    operands, mask = kernel_operands(q, k, v, spec), transposed_mask(spec.block_mask)
    rows = tuple(tensor_descriptor(x, config.row_block()) for x in terms)
    planes = operands.batch * k.shape[1]
    pieces = planes * cdiv(operands.lengths[1], config.tile_n)
    programs = min(PROGRAMS_PER_SM * arch_of(q.device).num_sms, pieces)
    with on_device_of(q):
        args = (
            _descriptor(dk, config.k_block()),
            _descriptor(dv, config.v_block()),
            *_inputs(dout, q, k, v, config),
            *rows,
            scratch((1,), torch.int32, q.device, zero=pieces > programs),
            order,
            mask.lists,
            *mask.steps,
            *operands.lengths,
            *operands.band,
            planes,
            *operands.heads,
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            config,
        )
        launch(_attn_bwd_keys_sm90_kernel, programs, args, **_options(config))


def launch_attn_bwd_queries_sm90(
    dq: torch.Tensor,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    terms: tuple[torch.Tensor, torch.Tensor],
    spec: AttnSpec,
    order: torch.Tensor,
    config: AttnBwdQueriesSm90Config,
) -> None:
    """Fill dq; arguments are as above, `order` as `formats.block_order.longest_first` makes it."""
    operands = kernel_operands(q, k, v, spec)
    assert spec.block_mask is not None
    pieces = order.numel() * (spec.block_mask.block_size[0] // config.tile_m)
    programs = min(PROGRAMS_PER_SM * arch_of(q.device).num_sms, pieces)
    with on_device_of(q):
        args = (
            _descriptor(dq, config.q_block()),
            *_inputs(dout, q, k, v, config),
            *terms,
            resting_words(1, q.device),
            order,
            operands.block_lists,
            *operands.mask_steps,
            *operands.lengths,
            *operands.band,
            operands.batch * operands.heads[0],
            int(pieces > programs),
            *operands.heads,
            gradient_factors(spec.scale, spec.softcap, q.dtype),
            config,
        )
        launch(_attn_bwd_queries_sm90_kernel, programs, args, **_options(config))


def _options(config: AttnBwdSm90Config | AttnBwdQueriesSm90Config) -> dict[str, int]:
    return {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}


def _inputs(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    config: AttnBwdSm90Config | AttnBwdQueriesSm90Config,
) -> tuple[Any, ...]:
    """Descriptors of what both kernels read."""
    blocks = (config.dout_block(), config.q_block(), config.k_block(), config.v_block())
    return tuple(map(_descriptor, (dout, q, k, v), blocks))


def _descriptor(x: torch.Tensor, block: tuple[int, int, int, int]) -> Any:
    return tensor_descriptor(x, block, tma_strides(x))
