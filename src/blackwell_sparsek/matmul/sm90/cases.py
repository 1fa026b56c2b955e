"""Compile cases of the Hopper products: the main configurations of each kernel, as launched."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...core.compat import warps_may_part
from ...core.compile_cases import CompileCase, compile_cases
from ...launch.descriptors import descriptor_type
from .config import (
    NarrowSm90Config,
    SpmmSm90Config,
    StripsConfig,
    WarpRowsConfig,
    narrow_stages_that_fit,
    stages_that_fit,
)
from .narrow import _spmm_narrow_sm90_kernel
from .spmm import _spmm_sm90_kernel
from .spmm_launch import MAX_REGISTERS
from .strips import _spmm_strips_kernel
from .warps import MAX_REGISTERS as WARPS_MAX_REGISTERS
from .warps import _spmm_warps_kernel


def spmm_sm90_case(
    name: str,
    config: SpmmSm90Config,
    dtype: torch.dtype = torch.float16,
    out_dtype: torch.dtype | None = None,
    extras: bool = False,
    max_spill_bytes: int = 0,
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias, residual and split rows."""
    return CompileCase(
        name=f"bsr_spmm_sm90/{name}",
        kernel=_spmm_sm90_kernel,
        args={
            "a_desc": descriptor_type(config.a_block(), dtype),
            "x_desc": descriptor_type(config.x_block(), dtype),
            "out_desc": descriptor_type(config.out_block(), out_dtype or dtype),
            "partial_ptr": torch.float32 if extras else None,
            "bias_ptr": dtype if extras else None,
            "residual_ptr": dtype if extras else None,
            "residual_strides": (4096, 1) if extras else None,
            "items_ptr": torch.int32,
            "cols_ptr": torch.int32,
            "perm_ptr": torch.int32 if config.A_TRANSPOSED or config.PAIRED else None,
            "counter_ptr": torch.int32,
            "n_rows": 4096,
            "n_cols": 4096,
            "m_tiles": 32,
            "n_tiles": 16,
            "raster_group": 4,
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
def _spmm_cases() -> Iterator[CompileCase]:
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
    # the erf spills a few registers, once for each tile; the loop has no spills
    yield spmm_sm90_case("128x128-gelu", gelu, extras=True, max_spill_bytes=64)
    yield spmm_sm90_case("128x128-transposed", replace(tall, A_TRANSPOSED=True))
    yield spmm_sm90_case("64x64-transposed", replace(flat, A_TRANSPOSED=True, X_TRANSPOSED=True))
    for group_n in (64, 128):
        narrow = replace(tall, GROUP_N=group_n, STAGES=4)
        yield spmm_sm90_case(f"128x128-narrow-{group_n}", narrow)


@compile_cases
def _paired_cases() -> Iterator[CompileCase]:
    # with other releases of Triton no rows are paired, and not every one could build it
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


# Few columns.


def narrow_sm90_case(
    config: NarrowSm90Config, dtype: torch.dtype = torch.bfloat16, extras: bool = False
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias and residual."""
    tiles = f"{config.TILE_M}x{config.TILE_N}x{config.TILE_K}-stages{config.STAGES}"
    parts = [f"{config.BLOCK_H}x{config.BLOCK_W}", tiles]
    parts += [f"parts{config.SPLIT_K}"] if config.SPLIT_K > 1 else []
    parts += ["extras"] if extras else []
    return CompileCase(
        name=f"bsr_spmm_narrow_sm90/{'-'.join(parts)}",
        kernel=_spmm_narrow_sm90_kernel,
        args={
            "out_ptr": dtype,
            "out_strides": (1, 4096),
            "a_desc": descriptor_type(config.a_block(), dtype),
            "x_desc": descriptor_type(config.x_block(), dtype),
            "values_ptr": dtype,
            "bias_ptr": dtype if extras else None,
            "residual_ptr": dtype if extras else None,
            "residual_strides": (1, 4096) if extras else None,
            "records_ptr": torch.int32,
            "n_rows": 4096,
            "n_cols": 64,
            "tiles_each": 3,
            "width": 33,
            "prefetch": 4,
            "CFG": config,
        },
        archs=(90,),
        num_warps=4,
        options={"maxnreg": config.max_registers, "launch_pdl": True},
        # rows of the result are stored 16 bytes at a time
        expect={
            "wgmma.mma_async": 1,
            "griddepcontrol.wait": 1,
            "st.global.v4": 1,
            "cp.async.bulk.prefetch.L2.global": 1,
        }
        | ({"st.async": 1} if config.SPLIT_K > 1 else {}),
    )


@compile_cases
def _narrow_cases() -> Iterator[CompileCase]:
    for block, tile_m, tile_k, stage_blocks in (
        ((128, 128), 64, 128, 1),
        ((256, 256), 64, 128, 1),
        ((128, 64), 64, 64, 2),
        ((64, 32), 64, 32, 4),
        ((32, 32), 32, 32, 4),
        ((16, 16), 16, 16, 4),
    ):
        for tile_n in (16, 64, 128) if tile_m == 64 else (16, 64):
            stages = narrow_stages_that_fit(tile_m, tile_n, tile_k * stage_blocks, False)
            config = NarrowSm90Config(*block, tile_m, tile_n, tile_k, stage_blocks, stages)
            yield narrow_sm90_case(config)
            yield narrow_sm90_case(replace(config, ACTIVATION="gelu"), torch.float16, extras=True)


@compile_cases
def _split_cases() -> Iterator[CompileCase]:
    # with other releases of Triton no tile is split, and not every one could build it
    if not warps_may_part():
        return
    for block, tile_n, stage_blocks in (
        *(((128, 128), tile_n, 1) for tile_n in (16, 32, 64)),
        ((64, 64), 64, 2),
        ((64, 32), 32, 4),
        ((128, 16), 16, 4),
    ):
        tile_k = block[1]
        stages = narrow_stages_that_fit(64, tile_n, tile_k * stage_blocks, False, split_k=2)
        config = NarrowSm90Config(*block, 64, tile_n, tile_k, stage_blocks, stages, SPLIT_K=2)
        yield narrow_sm90_case(config)
        yield narrow_sm90_case(replace(config, ACTIVATION="gelu"), torch.float16, extras=True)


# Few columns and blocks 16 columns wide.


def strips_case(
    config: StripsConfig, dtype: torch.dtype = torch.bfloat16, extras: bool = False
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias and residual."""
    parts = [
        f"{config.BLOCK_H}x16x{config.TILE_N}",
        f"warps{config.WARPS}",
        f"units{config.K_TILES}",
    ]
    parts += ["extras"] if extras else []
    return CompileCase(
        name=f"bsr_spmm_strips/{'-'.join(parts)}",
        kernel=_spmm_strips_kernel,
        args={
            "out_ptr": dtype,
            "out_strides": (1, 4096),
            "values_ptr": dtype,
            "x_ptr": dtype,
            "x_stride": 4096,
            "bias_ptr": dtype if extras else None,
            "residual_ptr": dtype if extras else None,
            "residual_strides": (1, 4096) if extras else None,
            "records_ptr": torch.int32,
            "n_rows": 4096,
            "n_cols": 13,
            "width": 33,
            "CFG": config,
        },
        archs=(90,),
        num_warps=config.WARPS,
        options={"launch_pdl": True},
        # operands come 16 bytes at a time, in and in front of the loop, and so does the result go
        expect={
            "mma.sync": 4 * config.K_TILES * config.TILE_N // 8,
            "ld.global.cg.v4": 8 * config.K_TILES,
            "ld.global.v4": config.K_TILES * config.TILE_N // 2,
            "st.global.v4": 1,
            "griddepcontrol.wait": 1,
            "cp.async.bulk.prefetch.L2.global": 1,
        },
    )


@compile_cases
def _strips_cases() -> Iterator[CompileCase]:
    # other releases of Triton are not given it
    if not warps_may_part():
        return
    for height, tile_n, warps, k_tiles in (
        (16, 8, 1, 2),
        (16, 16, 1, 1),
        (16, 16, 4, 2),
        (128, 16, 8, 1),
        (16, 32, 2, 1),
    ):
        config = StripsConfig(height, tile_n, warps, k_tiles)
        yield strips_case(config)
        yield strips_case(replace(config, ACTIVATION="gelu"), torch.float16, extras=True)


# One block row per warp.


def warp_rows_case(
    name: str,
    config: WarpRowsConfig,
    dtype: torch.dtype = torch.float16,
    out_dtype: torch.dtype | None = None,
    extras: bool = False,
    max_spill_bytes: int = 0,
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias and residual."""
    return CompileCase(
        name=f"bsr_spmm_warps/{name}",
        kernel=_spmm_warps_kernel,
        args={
            "out_ptr": out_dtype or dtype,
            "out_stride": 4096,
            "bias_ptr": dtype if extras else None,
            "residual_ptr": dtype if extras else None,
            "residual_strides": (4096, 1) if extras else None,
            "fragments_ptr": torch.int32,
            "x_desc": descriptor_type(config.x_block(), dtype),
            "items_ptr": torch.int32,
            "cols_ptr": torch.int32,
            "n_items": 256,
            "n_rows": 4096,
            "n_cols": 4096,
            "per_block": 1,
            "m_tiles": 16,
            "n_tiles": 32,
            "raster_group": 8,
            "chunks": 32,
            "CFG": config,
        },
        archs=(90,),
        num_warps=config.WARPS,
        options={"maxnreg": WARPS_MAX_REGISTERS},
        expect={"sass:HMMA": 16, "sass:LDSM": 8},
        max_spill_bytes=max_spill_bytes,
    )


@compile_cases
def _warp_rows_cases() -> Iterator[CompileCase]:
    # other releases of Triton are not given it, and not every one could build it
    if not warps_may_part():
        return
    plain = WarpRowsConfig()
    yield warp_rows_case("16x16", plain)
    yield warp_rows_case("16x16-bf16", plain, torch.bfloat16)
    yield warp_rows_case("16x16-fp32-out", plain, out_dtype=torch.float32)
    linear = replace(plain, OUT_TRANSPOSED=True, ACTIVATION="silu")
    # addresses of the residual spill, once for each tile; the loop has no spills
    yield warp_rows_case("16x16-linear-silu", linear, extras=True, max_spill_bytes=192)
    gelu = replace(plain, ACTIVATION="gelu")
    yield warp_rows_case("16x16-gelu", gelu, extras=True, max_spill_bytes=208)
