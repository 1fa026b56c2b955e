"""Launches of the decode kernel that are built without a GPU.

The tiles are those that `tuning.decode` picks on each GPU; a test of the tuning compares them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...core.compile_cases import CompileCase, compile_cases
from .config_decode import DecodeConfig
from .decode import DecodeLayout, _attn_decode_kernel
from .operands import score_factors

KV_HEADS, GROUP, TOKENS, PROGRAMS = 8, 4, 4096, 264


class Call(NamedTuple):
    """What sets a launch apart. `everything`: sinks, a softcap, lists of blocks."""

    dtype: torch.dtype
    head_dim: int
    page_size: int | None = None
    cache: torch.dtype | None = None
    everything: bool = False
    rows: int = 4

    def name(self, sm: int) -> str:
        """Name of the case."""
        parts = [str(self.dtype).split(".")[-1], f"d{self.head_dim}"]
        parts += [f"pages{self.page_size}"] if self.page_size else []
        parts += ["fp8"] if self.cache else []
        parts += [f"rows{self.rows}"] if self.rows != GROUP else []
        parts += ["everything"] if self.everything else []
        return f"attn_decode/{'-'.join(parts)}-sm_{sm}"


HALF, BRAIN, FLOAT, FP8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
TALL, PLAIN = (16, 64, 4, 3), (16, 32, 8, 2)

# tile_m, tile_n, num_warps, num_stages by architecture
BUILDS: Mapping[Call, Mapping[int, tuple[int, int, int, int]]] = {
    Call(BRAIN, 128): {80: TALL, 89: TALL, 90: TALL, 100: TALL, 120: TALL},
    Call(BRAIN, 128, 16): {80: TALL, 90: TALL},
    Call(BRAIN, 128, 64): {90: TALL},
    Call(BRAIN, 128, 256): {90: TALL},
    Call(BRAIN, 128, 64, FP8): {89: TALL, 90: TALL, 100: TALL, 120: TALL},
    Call(HALF, 80, 48, everything=True): {80: TALL, 90: TALL},
    Call(FLOAT, 128): {80: PLAIN, 90: PLAIN},
    Call(BRAIN, 128, rows=32): {90: (32, 64, 4, 3)},
    Call(BRAIN, 128, rows=64): {80: (64, 64, 8, 3), 89: (64, 64, 8, 3), 90: (64, 64, 8, 3)},
    Call(HALF, 256, rows=64): {89: (32, 32, 4, 3), 90: (32, 32, 4, 3)},
}


def _arguments(call: Call, words: bool) -> dict[str, Any]:
    dim = call.head_dim
    row = KV_HEADS * dim
    slab = TOKENS * row if call.page_size is None else call.page_size * row
    cache = torch.int32 if words else call.cache or call.dtype
    packed = 4 if words else 1
    scale = torch.float32 if call.cache else None
    return {
        "results": (call.dtype, torch.float32),
        "inputs": (call.dtype, cache, cache),
        "tables": (
            torch.int32,
            None if call.page_size is None else torch.int32,
            torch.int32 if call.everything else None,
        ),
        "scoring": (
            *score_factors(0.1, 30.0 if call.everything else 0.0),
            torch.float32 if call.everything else None,
            scale,
            scale,
        ),
        "workspace": (torch.float32, torch.int32),
        "layout": DecodeLayout(
            (row * GROUP, dim, 0),
            (row * GROUP, dim, 0),
            (slab // packed, dim // packed, row // packed),
            (slab // packed, dim // packed, row // packed),
            (1, 1),
            (KV_HEADS, GROUP),
        ),
        "page_row_stride": TOKENS,
        "list_batch_stride": TOKENS * KV_HEADS,
        "list_head_stride": TOKENS,
        "batch": 16,
        "q_len": 1,
        "capacity": TOKENS,
        "num_pages": 1000,
        "num_blocks": 100,
        "left": 2**30,
        "right": 0,
        "HEAD_DIM": dim,
        "HEAD_DIM_V": dim,
        "PAGE_SIZE": call.page_size,
        "BLOCK_KV": call.page_size if call.everything else None,
    }


# Keys down and rows across.
ACROSS: Mapping[Call, tuple[int, ...]] = {
    Call(BRAIN, 128): (90,),
    Call(BRAIN, 128, 16): (90,),
    Call(BRAIN, 128, 64, FP8): (90,),
    Call(HALF, 80, 48, everything=True): (90,),
}


def _case(name: str, call: Call, sm: int, config: DecodeConfig, spill: int) -> CompileCase:
    return CompileCase(
        name,
        _attn_decode_kernel,
        {
            **_arguments(call, config.words),
            "TILE_M": config.tile_m,
            "TILE_N": config.tile_n,
            "PRECISION": config.precision,
            "ACROSS": config.across,
        },
        archs=(sm,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_spill_bytes=spill,
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    for call, tiles in BUILDS.items():
        for sm, tile in tiles.items():
            # four registers: 64 rows of fp32 sums leave sm_80 none to spare
            spill = 16 if sm == 80 and call.rows == 64 else 0
            yield _case(call.name(sm), call, sm, DecodeConfig(*tile, PROGRAMS), spill)
    for call, archs in ACROSS.items():
        for sm in archs:
            config = DecodeConfig(*TALL, PROGRAMS, across=True, words=call.cache is not None)
            yield _case(f"{call.name(sm)}-across", call, sm, config, 0)
