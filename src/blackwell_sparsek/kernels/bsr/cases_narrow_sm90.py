"""What is compiled without a GPU: the configurations of Hopper's products with few columns."""

from collections.abc import Iterator

import torch

from ...core.compile_cases import CompileCase, compile_cases
from ..sm90 import descriptor_type
from .config_narrow_sm90 import NarrowSm90Config, stages_that_fit
from .spmm_narrow_sm90 import _spmm_narrow_sm90_kernel


def narrow_sm90_case(
    config: NarrowSm90Config, dtype: torch.dtype = torch.bfloat16, extras: bool = False
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias and residual."""
    tiles = f"{config.TILE_M}x{config.TILE_N}x{config.TILE_K}-stages{config.STAGES}"
    parts = [f"{config.BLOCK_H}x{config.BLOCK_W}", tiles, f"programs{config.PROGRAMS}"]
    parts += ["extras"] if extras else []
    return CompileCase(
        name=f"bsr_spmm_narrow_sm90/{'-'.join(parts)}",
        kernel=_spmm_narrow_sm90_kernel,
        args={
            "out_ptr": dtype,
            "out_strides": (1, 4096),
            "values_ptr": dtype,
            "a_desc": descriptor_type(config.a_block(), dtype),
            "x_desc": descriptor_type(config.x_block(), dtype),
            "bias_ptr": dtype if extras else None,
            "residual_ptr": dtype if extras else None,
            "residual_strides": (1, 4096) if extras else None,
            "records_ptr": torch.int32,
            "n_rows": 4096,
            "n_cols": 64,
            "items": 3,
            "width": 33,
            "CFG": config,
        },
        archs=(90,),
        num_warps=4,
        options={"maxnreg": config.max_registers, "launch_pdl": True},
        expect={"wgmma.mma_async": 1, "griddepcontrol.wait": 1},
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    for tile_m, tile_n, tile_k, programs in (
        *((64, 64, 128, 1), (64, 16, 128, 1), (64, 64, 64, 2), (64, 16, 64, 2), (64, 32, 64, 4)),
        *((32, 64, 128, 1), (32, 16, 128, 1), (16, 16, 128, 2)),
    ):
        stages = stages_that_fit(tile_m, tile_n, tile_k, programs)
        yield narrow_sm90_case(NarrowSm90Config(128, 128, tile_m, tile_n, tile_k, stages, programs))
    flat = NarrowSm90Config(64, 32, 64, 64, 32, 8, 2, 1, "gelu")
    yield narrow_sm90_case(flat, torch.float16, extras=True)
