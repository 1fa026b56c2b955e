"""Launches of the portable decode kernel that are built without a GPU.

The tiles are those that `tuning.attn_decode_config` picks on each GPU; a test compares them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..attention.operands import score_factors
from ..core.compile_cases import CompileCase, compile_cases
from ..device.records import Strides
from .triton import (
    DecodeHeads,
    DecodeInputs,
    DecodeLayout,
    DecodeResults,
    DecodeScoring,
    DecodeTables,
    DecodeWorkspace,
    _attn_decode_kernel,
)
from .tuning import DecodeConfig

KV_HEADS, GROUP, TOKENS, PROGRAMS = 8, 4, 4096, 264


class Call(NamedTuple):
    """What one launch differs in from others. `everything`: sinks, a softcap, lists of blocks."""

    dtype: torch.dtype
    head_dim: int
    page_size: int | None = None
    cache: torch.dtype | None = None
    everything: bool = False
    rows: int = 4
    batch: int = 1

    def name(self, sm: int) -> str:
        """Name of the case."""
        parts = [str(self.dtype).split(".")[-1], f"d{self.head_dim}"]
        parts += [f"pages{self.page_size}"] if self.page_size else []
        parts += ["fp8"] if self.cache else []
        parts += [f"rows{self.rows}"] if self.rows != GROUP else []
        parts += ["everything"] if self.everything else []
        parts += [f"batch{self.batch}"] if self.batch != 1 else []
        return f"attn_decode/{'-'.join(parts)}-sm_{sm}"


HALF, BRAIN, FLOAT, FP8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
DOWN = DecodeConfig(16, 64, 4, 3, PROGRAMS)
ACROSS = DecodeConfig(16, 64, 4, 3, PROGRAMS, across=True)
WORDS = DecodeConfig(16, 64, 4, 3, PROGRAMS, across=True, words=True)
THREE = DecodeConfig(16, 64, 4, 4, PROGRAMS, across=True, words=True, registers=168)
PLAIN = DecodeConfig(16, 32, 8, 2, PROGRAMS)
WIDE = DecodeConfig(64, 64, 8, 3, PROGRAMS)
DEEP = DecodeConfig(32, 32, 4, 3, PROGRAMS)

BUILDS: Mapping[Call, Mapping[int, DecodeConfig]] = {
    Call(BRAIN, 128): {80: DOWN, 89: DOWN, 90: ACROSS, 100: DOWN, 120: DOWN},
    Call(BRAIN, 128, 16): {80: DOWN, 90: ACROSS},
    Call(BRAIN, 128, 64): {90: ACROSS},
    Call(BRAIN, 128, 256): {90: ACROSS},
    Call(BRAIN, 128, 64, FP8): {89: DOWN, 90: WORDS, 100: DOWN, 120: DOWN},
    Call(BRAIN, 128, None, FP8, batch=16): {90: THREE},
    Call(BRAIN, 128, 16, FP8, batch=16): {90: THREE},
    Call(HALF, 80, 48, everything=True): {80: DOWN, 90: ACROSS},
    Call(FLOAT, 128): {80: PLAIN, 90: PLAIN},
    Call(BRAIN, 128, rows=32): {90: DecodeConfig(32, 64, 4, 3, PROGRAMS)},
    Call(BRAIN, 128, rows=64): {80: WIDE, 89: WIDE, 90: WIDE},
    Call(HALF, 256, rows=64): {89: DEEP, 90: DEEP},
}


def _arguments(call: Call, words: bool) -> dict[str, Any]:
    dim = call.head_dim
    row = KV_HEADS * dim
    slab = TOKENS * row if call.page_size is None else call.page_size * row
    cache = torch.int32 if words else call.cache or call.dtype
    packed = 4 if words else 1
    scale = torch.float32 if call.cache else None
    return {
        "results": DecodeResults(call.dtype, torch.float32),
        "inputs": DecodeInputs(call.dtype, cache, cache),
        "tables": DecodeTables(
            torch.int32,
            None if call.page_size is None else torch.int32,
            torch.int32 if call.everything else None,
        ),
        "scoring": DecodeScoring(
            *score_factors(0.1, 30.0 if call.everything else 0.0),
            torch.float32 if call.everything else None,
            scale,
            scale,
        ),
        "workspace": DecodeWorkspace(torch.float32, torch.int32),
        "layout": DecodeLayout(
            Strides(row * GROUP, dim, 0),
            Strides(row * GROUP, dim, 0),
            Strides(slab // packed, dim // packed, row // packed),
            Strides(slab // packed, dim // packed, row // packed),
            1,
            1,
            DecodeHeads(KV_HEADS, GROUP),
        ),
        "page_row_stride": TOKENS,
        "list_batch_stride": TOKENS * KV_HEADS,
        "list_head_stride": TOKENS,
        "batch": call.batch,
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


def _case(call: Call, sm: int, config: DecodeConfig) -> CompileCase:
    return CompileCase(
        call.name(sm),
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
        options={} if config.registers is None else {"maxnreg": config.registers},
        # three programs on an SM, and a page for each key: spilled outside of the loop
        max_spill_bytes=64 if config.registers and call.page_size == 16 else 0,
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    for call, configs in BUILDS.items():
        for sm, config in configs.items():
            yield _case(call, sm, config)
