"""Launching the Hopper decode kernel: descriptors of the caches, memory for parts."""

from typing import Any, NamedTuple

import torch

from ..attention.operands import score_factors, token_strides
from ..attention.sm90.launch import tma_strides
from ..calls.decode import DecodeSpec, capacity, kv_heads, page_size
from ..launch.descriptors import tensor_descriptor
from ..launch.launcher import cdiv, launch, on_device_of, resting_words, scratch
from .sm90 import _attn_decode_sm90_kernel
from .tuning import DecodeSm90Config


class DecodeSm90Strides(NamedTuple):
    """Strides (batch, head, token) of q and out."""

    out: tuple[int, int, int]
    q: tuple[int, int, int]


def launch_attn_decode_sm90(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    spec: DecodeSpec,
    config: DecodeSm90Config,
    programs: int,
) -> None:
    """Fill `out` and `lse`.

    Takes `2 * programs * ROWS * (Dv + 2)` floats of memory, whatever the lengths are.

    Parameters
    ----------
    out : [B, Hq, Sq, Dv], contiguous in the last dimension; all of it is written
    lse : fp32 [B, Hq, Sq], contiguous
    q : [B, Hq, Sq, D]
    k_cache, v_cache : [B, Hkv, S, D], or [pages, page_size, Hkv, D] with a page table; strides and
        addresses that TMA takes, at least one slot
    spec : options of the call, validated
    config : tiles; SINGLE for a batch of one
    programs : how many programs share the tiles of all sequences and heads
    """
    batch, heads_q, q_len, _ = q.shape
    if batch * heads_q * q_len == 0:
        return
    assert batch == 1 or not config.SINGLE, f"{batch=} {config=}"
    heads, pages = kv_heads(k_cache, spec), page_size(k_cache, spec)
    planes = heads * cdiv(heads_q // heads * q_len, config.ROWS)
    if config.WORDS:
        k_cache, v_cache = k_cache.view(torch.int32), v_cache.view(torch.int32)
    table, blocks = spec.page_table, spec.kv_blocks
    with on_device_of(q):
        args = (
            (out, lse),
            q,
            _descriptor(k_cache, pages, config.k_block()),
            _descriptor(v_cache, pages, config.v_block()),
            spec.cache_seqlens,
            table,
            blocks,
            None if spec.sinks is None else spec.sinks.contiguous(),
            (
                *score_factors(spec.scale, spec.softcap),
                spec.k_scale,
                spec.v_scale,
                _scale_stride(spec.k_scale),
                _scale_stride(spec.v_scale),
            ),
            (
                scratch((2 * programs, config.ROWS, config.TILE_DV + 2), torch.float32, q.device),
                resting_words(programs, q.device),
            ),
            DecodeSm90Strides(token_strides(out), token_strides(q)),
            0 if table is None else table.stride(0),
            *((0, 0) if blocks is None else blocks.stride()[:2]),
            batch,
            q_len,
            capacity(k_cache, spec),
            k_cache.shape[0],
            0 if blocks is None else blocks.shape[2],
            *spec.band.scalars(),
            (heads, heads_q // heads),
            programs // (batch * planes),
            config,
        )
        options = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS, "launch_pdl": config.SINGLE}
        launch(_attn_decode_sm90_kernel, programs, args, **options)


def _scale_stride(scale: torch.Tensor | None) -> int:
    """From head to head; 0 where one number is for all."""
    return 0 if scale is None or scale.numel() == 1 else 1


def _descriptor(cache: torch.Tensor, pages: int | None, block: tuple[int, int, int, int]) -> Any:
    """Of [batch or page, head, token, dim]."""
    cache = cache if pages is None else cache.transpose(1, 2)
    return tensor_descriptor(cache, block, tma_strides(cache))
