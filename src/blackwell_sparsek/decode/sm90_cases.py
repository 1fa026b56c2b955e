"""Launches of the Hopper decode kernel that are built without a GPU: the choices of `tuning`."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..attention.operands import score_factors
from ..core.compile_cases import CompileCase, compile_cases
from ..device.records import Strides
from ..launch.descriptors import descriptor_type
from .sm90 import DecodeSm90Scoring, DecodeSm90Strides, _attn_decode_sm90_kernel
from .triton import DecodeHeads, DecodeResults, DecodeWorkspace
from .tuning import DecodeSm90Config, make_config

KV_HEADS, GROUP = 8, 4


class Call(NamedTuple):
    """What one launch differs in from others."""

    config: DecodeSm90Config
    name: str
    everything: bool = False
    dtype: torch.dtype = torch.bfloat16
    max_spill_bytes: int = 0


# The spills of 64 rows are of numbers that wait for the end of the loop, those of eight copies of
# coordinates that wait for a stage.
CALLS = (
    Call(make_config(8, 128, 128), "d128"),
    Call(make_config(8, 128, 128, single=True), "d128-single"),
    Call(make_config(8, 64, 64), "d64"),
    Call(make_config(8, 128, 128, 16), "d128-pages16"),
    Call(make_config(8, 128, 128, 64), "d128-pages64"),
    Call(make_config(8, 128, 128, 64, 64, single=True), "d128-pages64-lists"),
    Call(make_config(8, 128, 128, 16, 16), "d128-pages16-lists"),
    Call(make_config(8, 128, 128, None, 32), "d128-lists32"),
    Call(make_config(16, 128, 64, 48), "d128-64-pages48", everything=True),
    Call(make_config(8, 128, 128, words=True, single=True), "d128-fp8-single"),
    Call(make_config(8, 128, 128, tile_n=128, words=True), "d128-fp8"),
    Call(
        make_config(8, 128, 128, 16, tile_n=128, words=True), "d128-fp8-pages16", max_spill_bytes=64
    ),
    Call(make_config(8, 128, 128, 64, tile_n=128, words=True), "d128-fp8-pages64"),
    Call(make_config(16, 128, 128, 64, 64, words=True), "d128-fp8-lists", everything=True),
    Call(make_config(32, 128, 128), "d128-rows32"),
    Call(make_config(64, 128, 128, 256), "d128-rows64", dtype=torch.float16, max_spill_bytes=1024),
)


def decode_sm90_case(call: Call) -> CompileCase:
    """A launch of the kernel."""
    config = call.config
    copied = torch.int32 if config.WORDS else call.dtype
    out_row, q_row = GROUP * KV_HEADS * config.TILE_DV, GROUP * KV_HEADS * config.TILE_D
    return CompileCase(
        name=f"attn_decode_sm90/{call.name}",
        kernel=_attn_decode_sm90_kernel,
        args={
            "results": DecodeResults(call.dtype, torch.float32),
            "q_ptr": call.dtype,
            "k_desc": descriptor_type(config.k_block(), copied),
            "v_desc": descriptor_type(config.v_block(), copied),
            "seqlens_ptr": torch.int32,
            "page_table_ptr": None if config.PAGE_SIZE is None else torch.int32,
            "list_ptr": None if config.BLOCK_KV is None else torch.int32,
            "sinks_ptr": torch.float32 if call.everything else None,
            "score": DecodeSm90Scoring(
                *score_factors(0.1, 30.0 if call.everything else 0.0),
                *((torch.float32, torch.float32, 1, 1) if config.WORDS else (None, None, 0, 0)),
            ),
            "workspace": DecodeWorkspace(torch.float32, torch.int32),
            "strides": DecodeSm90Strides(
                Strides(out_row, config.TILE_DV, 0), Strides(q_row, config.TILE_D, 0)
            ),
            "page_row_stride": 4096,
            "list_batch_stride": 4096,
            "list_head_stride": 512,
            "batch": 16,
            "q_len": 1,
            "capacity": 4096,
            "num_pages": 1000,
            "num_blocks": 100,
            "left": 2**30,
            "right": 0,
            "heads": DecodeHeads(KV_HEADS, GROUP),
            "num_splits": 0,
            "CFG": config,
        },
        archs=(90,),
        num_warps=4,
        options={"maxnreg": config.MAX_REGISTERS, "launch_pdl": config.SINGLE},
        expect={"wgmma.mma_async": 1},
        max_spill_bytes=call.max_spill_bytes,
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    for call in CALLS:
        yield decode_sm90_case(call)
