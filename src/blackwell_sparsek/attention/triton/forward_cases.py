"""Launches of the forward kernel that are built without a GPU.

The tiles are those that `tuning.attention` picks on each GPU; a test of the tuning compares them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...core.compile_cases import CompileCase, compile_cases
from ...device.records import CuSeqlens, Heads, MaskLists, Strides
from ..operands import AttnStrides, score_factors
from .forward import _attn_fwd_kernel
from .tuning import AttnFwdConfig

HEADS, KV_HEADS, TOKENS = 32, 8, 4096


class Call(NamedTuple):
    """What sets a launch apart.

    `everything`: packed sequences, sinks and a softcap. `head_dim_v`: of narrower values, and rows
    of one head next to each other, which leaves them at no address that 16 divides.
    """

    dtype: torch.dtype
    head_dim: int
    block_size: tuple[int, int] | None = None
    everything: bool = False
    precision: str = "ieee"
    head_dim_v: int | None = None

    def name(self, sm: int) -> str:
        """Name of the case."""
        parts = [str(self.dtype).split(".")[-1], f"d{self.head_dim}"]
        parts += [f"dv{self.head_dim_v}"] if self.head_dim_v else []
        parts += [f"blocks{self.block_size[0]}x{self.block_size[1]}"] if self.block_size else []
        parts += ["everything"] if self.everything else []
        parts += [self.precision] if self.dtype == torch.float32 else []
        return f"attn_fwd/{'-'.join(parts)}-sm_{sm}"


HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
WIDE, TALL, SQUARE = (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2)
TALL_IN_99_KIB = (128, 64, 8, 2)

# tile_m, tile_n, num_warps, num_stages by architecture: the main calls on all of them, the others
# on one with each kind of tensor core
BUILDS: Mapping[Call, Mapping[int, tuple[int, int, int, int]]] = {
    Call(BRAIN, 64): {80: TALL, 89: TALL, 90: WIDE, 100: WIDE, 120: TALL},
    Call(BRAIN, 128): {80: TALL, 89: TALL_IN_99_KIB, 90: TALL, 100: TALL, 120: TALL_IN_99_KIB},
    Call(BRAIN, 128, (128, 128)): {
        80: TALL_IN_99_KIB,
        89: TALL_IN_99_KIB,
        90: TALL,
        100: TALL,
        120: TALL_IN_99_KIB,
    },
    Call(HALF, 256): {
        80: SQUARE,
        89: (64, 32, 8, 2),
        90: SQUARE,
        100: SQUARE,
        120: (64, 32, 8, 2),
    },
    Call(BRAIN, 64, (128, 16)): {80: (128, 32, 8, 3), 90: TALL},
    Call(BRAIN, 128, (128, 16)): {80: TALL_IN_99_KIB, 90: TALL},
    Call(BRAIN, 128, (64, 64)): {80: (64, 64, 4, 2), 90: (64, 64, 4, 3)},
    Call(BRAIN, 128, (16, 16)): {80: (16, 64, 2, 2), 90: (16, 64, 2, 2)},
    Call(HALF, 80, everything=True): {80: TALL, 90: TALL},
    Call(BRAIN, 40, head_dim_v=8): {90: WIDE},
    Call(BRAIN, 24, (128, 64), head_dim_v=8): {90: TALL},
    Call(BRAIN, 72, (64, 256), head_dim_v=8): {90: (64, 64, 4, 3)},
    Call(FLOAT, 128, precision="tf32"): {80: (64, 32, 8, 2), 90: (64, 32, 8, 2)},
    Call(FLOAT, 128): {80: (32, 32, 8, 1), 90: (32, 32, 8, 1)},
}


def _arguments(call: Call) -> dict[str, Any]:
    def strides(heads: int, dim: int) -> Strides:
        if call.head_dim_v is not None:
            return Strides(heads * TOKENS * dim, TOKENS * dim, dim)
        row = heads * dim
        return Strides(0 if call.everything else TOKENS * row, dim, row)

    d, dv = call.head_dim, call.head_dim_v or call.head_dim
    lists = None
    if call.block_size is not None:
        lists = MaskLists(*(torch.int32,) * 5, call.block_size[0])
    data = {f"{name}_ptr": call.dtype for name in ("out", "q", "k", "v")}
    return {
        **data,
        "lse_ptr": torch.float32,
        "sinks_ptr": torch.float32 if call.everything else None,
        "cu_seqlens": CuSeqlens(*((torch.int32 if call.everything else None),) * 2),
        "block_lists": lists,
        "strides": AttnStrides(
            strides(HEADS, dv), strides(HEADS, d), strides(KV_HEADS, d), strides(KV_HEADS, dv)
        ),
        "lse_head_stride": TOKENS,
        "q_len": TOKENS,
        "kv_len": TOKENS,
        "left": 2**30,
        "right": 0,
        "mask_batch_step": 0,
        "mask_head_step": 0,
        "heads": Heads(HEADS, HEADS // KV_HEADS),
        "score": score_factors(0.1, 30.0 if call.everything else 0.0),
        "HEAD_DIM": call.head_dim,
        "HEAD_DIM_V": dv,
        "BLOCK_KV": None if call.block_size is None else call.block_size[1],
    }


def _accepted_spills(call: Call, sm: int) -> int:
    # padding, softcap and packed sequences at once are rare; so are narrow values, see the kernel
    if call.everything or call.head_dim_v is not None:
        return 128 if call.everything else 2400
    # two registers around the loop with mask code, where blocks are packed several to a tile
    return 8 if sm < 90 and call.block_size == (128, 16) else 0


@compile_cases
def _cases() -> Iterator[CompileCase]:
    for call, tiles in BUILDS.items():
        for sm, tile in tiles.items():
            config = AttnFwdConfig(*tile, call.precision)
            # Hopper's own products, wherever rows fill a warp group
            wide = sm == 90 and config.tile_m >= 64 and call.dtype != torch.float32
            yield CompileCase(
                call.name(sm),
                _attn_fwd_kernel,
                {
                    **_arguments(call),
                    "TILE_M": config.tile_m,
                    "TILE_N": config.tile_n,
                    "PRECISION": config.precision,
                },
                archs=(sm,),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                max_spill_bytes=_accepted_spills(call, sm),
                expect={"wgmma.mma_async": 1} if wide else {},
            )
