"""Launches of the forward kernel that are built without a GPU, with the tiles of each GPU."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...core.arch import Arch
from ...core.compile_cases import ALL_ARCHS, CompileCase, compile_cases
from ...tuning.attention import attn_fwd_config
from ...tuning.problem_attention import AttnProblem
from .fwd import _attn_fwd_kernel
from .operands import AttnStrides, score_factors

HEADS, KV_HEADS, TOKENS = 32, 8, 4096


class _Call(NamedTuple):
    """What sets a launch apart. `everything`: packed sequences, sinks and a softcap."""

    dtype: torch.dtype
    head_dim: int
    block_size: tuple[int, int] | None = None
    everything: bool = False
    precision: str = "ieee"

    def name(self, sm: int) -> str:
        parts = [str(self.dtype).split(".")[-1], f"d{self.head_dim}"]
        parts += [f"blocks{self.block_size[0]}x{self.block_size[1]}"] if self.block_size else []
        parts += ["everything"] if self.everything else []
        parts += [self.precision] if self.dtype == torch.float32 else []
        return f"attn_fwd/{'-'.join(parts)}-sm_{sm}"


# on every architecture
MAIN = (
    _Call(torch.bfloat16, 64),
    _Call(torch.bfloat16, 128),
    _Call(torch.bfloat16, 128, (128, 128)),
    _Call(torch.float16, 256),
)
# where there are machines to run them on
FURTHER = (
    _Call(torch.bfloat16, 64, (128, 16)),
    _Call(torch.bfloat16, 128, (128, 16)),
    _Call(torch.bfloat16, 128, (64, 64)),
    _Call(torch.bfloat16, 128, (16, 16)),
    _Call(torch.float16, 80, everything=True),
    _Call(torch.float32, 128, precision="tf32"),
    _Call(torch.float32, 128),
)
FURTHER_ARCHS = (80, 90)


def _problem(call: _Call, sm: int) -> AttnProblem:
    return AttnProblem(
        arch=Arch("cuda", sm, 132, 0, False),
        dtype=call.dtype,
        batch=1,
        heads_q=HEADS,
        heads_kv=KV_HEADS,
        max_q=TOKENS,
        max_k=TOKENS,
        head_dim=call.head_dim,
        head_dim_v=call.head_dim,
        varlen=call.everything,
        banded=True,
        mask_block=call.block_size,
        element_bits=call.block_size is not None,
        softcap=call.everything,
        sinks=call.everything,
    )


def _arguments(call: _Call) -> dict[str, Any]:
    def strides(heads: int) -> tuple[int, int, int]:
        row = heads * call.head_dim
        return (0 if call.everything else TOKENS * row, call.head_dim, row)

    lists = None
    if call.block_size is not None:
        lists = (*(torch.int32,) * 5, call.block_size[0])
    data = {f"{name}_ptr": call.dtype for name in ("out", "q", "k", "v")}
    return {
        **data,
        "lse_ptr": torch.float32,
        "sinks_ptr": torch.float32 if call.everything else None,
        "cu_seqlens": (torch.int32, torch.int32) if call.everything else (None, None),
        "block_lists": lists,
        "strides": AttnStrides(*(strides(heads) for heads in (HEADS, HEADS, KV_HEADS, KV_HEADS))),
        "lse_head_stride": TOKENS,
        "q_len": TOKENS,
        "kv_len": TOKENS,
        "left": 2**30,
        "right": 0,
        "mask_batch_step": 0,
        "mask_head_step": 0,
        "heads": (HEADS, HEADS // KV_HEADS),
        "score": score_factors(0.1, 30.0 if call.everything else 0.0),
        "HEAD_DIM": call.head_dim,
        "HEAD_DIM_V": call.head_dim,
        "BLOCK_KV": None if call.block_size is None else call.block_size[1],
    }


def _accepted_spills(call: _Call, sm: int) -> int:
    # padding, softcap and packed sequences at once are rare
    if call.everything:
        return 128
    # two registers around the loop with mask code, where blocks are packed several to a tile
    return 8 if sm < 90 and call.block_size == (128, 16) else 0


@compile_cases
def _cases() -> Iterator[CompileCase]:
    for sm in ALL_ARCHS:
        for call in (*MAIN, *(FURTHER if sm in FURTHER_ARCHS else ())):
            config = attn_fwd_config(_problem(call, sm), call.precision)
            tiles = {"TILE_M": config.tile_m, "TILE_N": config.tile_n}
            # Hopper's own products, wherever rows fill a warp group
            wide = sm == 90 and config.tile_m >= 64 and call.dtype != torch.float32
            yield CompileCase(
                call.name(sm),
                _attn_fwd_kernel,
                {**_arguments(call), **tiles, "PRECISION": config.precision},
                archs=(sm,),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                max_spill_bytes=_accepted_spills(call, sm),
                expect={"wgmma.mma_async": 1} if wide else {},
            )
