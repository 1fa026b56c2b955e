"""What is compiled without a GPU: the main configurations of the Hopper product, as launched."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...core.compat import warps_may_part
from ...core.compile_cases import CompileCase, compile_cases
from ..sm90 import descriptor_type
from .config_sm90 import SpmmSm90Config, stages_that_fit
from .spmm_sm90 import _spmm_sm90_kernel
from .spmm_sm90_launch import MAX_REGISTERS


def spmm_sm90_case(
    name: str,
    config: SpmmSm90Config,
    dtype: torch.dtype = torch.float16,
    out_dtype: torch.dtype | None = None,
    extras: bool = False,
    max_spill_bytes: int = 0,
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias, residual and rows that were cut."""
    return CompileCase(
        name=f"bsr_spmm_sm90/{name}",
        kernel=_spmm_sm90_kernel,
        args={
            "a_desc": descriptor_type(config.a_block(), dtype),
            "x_desc": descriptor_type(config.x_block(), dtype),
            "out_desc": descriptor_type(config.out_block(), out_dtype or dtype),
            "part_ptr": torch.float32 if extras else None,
            "bias_ptr": dtype if extras else None,
            "residual_ptr": dtype if extras else None,
            "residual_strides": (4096, 1) if extras else None,
            "items_ptr": torch.int32,
            "cols_ptr": torch.int32,
            "perm_ptr": torch.int32 if config.A_TRANSPOSED or config.PAIRED else None,
            "counter_ptr": torch.int32,
            "n_rows": 4096,
            "n_cols": 4096,
            "row_pieces": 32,
            "panels": 16,
            "section": 4,
            "CFG": config,
        },
        archs=(90,),
        num_warps=4,
        options={"maxnreg": MAX_REGISTERS},
        expect={"wgmma": 1} | ({"multicast::cluster": 2} if config.PAIRED else {}),
        max_spill_bytes=max_spill_bytes,
    )


def _config(block_h: int, block_w: int, tile_k: int, out_bytes: int = 2) -> SpmmSm90Config:
    split_n = block_h == 64
    chunks = out_bytes
    stages = stages_that_fit(256, tile_k, split_n, out_bytes, chunks)
    return SpmmSm90Config(block_h, block_w, 256, tile_k, stages, split_n, chunks)


@compile_cases
def _cases() -> Iterator[CompileCase]:
    tall, flat = _config(128, 128, 64), _config(64, 64, 32)
    yield spmm_sm90_case("128x128", tall)
    yield spmm_sm90_case("128x128-wide", replace(tall, WIDE=True))
    yield spmm_sm90_case("128x16-wide", replace(_config(128, 16, 16), WIDE=True))
    yield spmm_sm90_case("64x64-wide", replace(flat, WIDE=True))
    yield spmm_sm90_case("128x128-bf16", tall, torch.bfloat16)
    yield spmm_sm90_case("128x128-fp32-out", _config(128, 128, 64, 4), out_dtype=torch.float32)
    yield spmm_sm90_case("128x16", _config(128, 16, 16))
    yield spmm_sm90_case("256x32", _config(256, 32, 32))
    yield spmm_sm90_case("64x64", flat)
    yield spmm_sm90_case("64x16", _config(64, 16, 16))
    linear = replace(tall, X_TRANSPOSED=True, OUT_TRANSPOSED=True, ACTIVATION="silu")
    yield spmm_sm90_case("128x128-linear-silu", linear, extras=True)
    gelu = replace(tall, ACTIVATION="gelu", OUT_CHUNKS=4)
    # a few registers of the erf, once for each tile; the loop has none
    yield spmm_sm90_case("128x128-gelu", gelu, extras=True, max_spill_bytes=64)
    yield spmm_sm90_case("128x128-transposed", replace(tall, A_TRANSPOSED=True))
    yield spmm_sm90_case("64x64-transposed", replace(flat, A_TRANSPOSED=True, X_TRANSPOSED=True))
    for group_n in (64, 128):
        narrow = replace(tall, GROUP_N=group_n, STAGES=4)
        yield spmm_sm90_case(f"128x128-narrow-{group_n}", narrow)


@compile_cases
def _paired_cases() -> Iterator[CompileCase]:
    # with other releases of Triton no product goes in pairs, and not every one could build it
    if not warps_may_part():
        return
    paired = replace(_config(64, 64, 32), PAIRED=True)
    yield spmm_sm90_case("64x64-paired", paired)
    yield spmm_sm90_case("64x64-paired-wide", replace(paired, WIDE=True))
    layer = replace(paired, X_TRANSPOSED=True, OUT_TRANSPOSED=True, ACTIVATION="silu")
    yield spmm_sm90_case("64x64-paired-linear-silu", layer)
    yield spmm_sm90_case(
        "64x32-paired-transposed", replace(layer, BLOCK_W=32, A_TRANSPOSED=True), torch.bfloat16
    )
