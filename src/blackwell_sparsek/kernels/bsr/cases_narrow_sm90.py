"""What is compiled without a GPU: the configurations of Hopper's products with few columns."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...core.compat import warps_may_part
from ...core.compile_cases import CompileCase, compile_cases
from ..sm90 import descriptor_type
from .config_narrow_sm90 import NarrowSm90Config, stages_that_fit
from .spmm_narrow_sm90 import _spmm_narrow_sm90_kernel


def narrow_sm90_case(
    config: NarrowSm90Config, dtype: torch.dtype = torch.bfloat16, extras: bool = False
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias and residual."""
    tiles = f"{config.TILE_M}x{config.TILE_N}x{config.TILE_K}-stages{config.STAGES}"
    parts = [f"{config.BLOCK_H}x{config.BLOCK_W}", tiles]
    parts += [f"parts{config.PARTS}"] if config.PARTS > 1 else []
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
            "items": 3,
            "width": 33,
            "early": 4,
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
        | ({"st.async": 1} if config.PARTS > 1 else {}),
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    for block, tile_m, tile_k, units in (
        ((128, 128), 64, 128, 1),
        ((256, 256), 64, 128, 1),
        ((128, 64), 64, 64, 2),
        ((64, 32), 64, 32, 4),
        ((32, 32), 32, 32, 4),
        ((16, 16), 16, 16, 4),
    ):
        for tile_n in (16, 64, 128) if tile_m == 64 else (16, 64):
            stages = stages_that_fit(tile_m, tile_n, tile_k * units, False)
            config = NarrowSm90Config(*block, tile_m, tile_n, tile_k, units, stages)
            yield narrow_sm90_case(config)
            yield narrow_sm90_case(replace(config, ACTIVATION="gelu"), torch.float16, extras=True)


@compile_cases
def _parted_cases() -> Iterator[CompileCase]:
    # with other releases of Triton no tile is cut, and not every one could build it
    if not warps_may_part():
        return
    for block, tile_n, units in (
        *(((128, 128), tile_n, 1) for tile_n in (16, 32, 64)),
        ((64, 64), 64, 2),
        ((64, 32), 32, 4),
        ((128, 16), 16, 4),
    ):
        tile_k = block[1]
        stages = stages_that_fit(64, tile_n, tile_k * units, False, parts=2)
        config = NarrowSm90Config(*block, 64, tile_n, tile_k, units, stages, PARTS=2)
        yield narrow_sm90_case(config)
        yield narrow_sm90_case(replace(config, ACTIVATION="gelu"), torch.float16, extras=True)
