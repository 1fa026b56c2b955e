"""What is compiled without a GPU: products of blocks 16 columns wide with few columns."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...core.compat import warps_may_part
from ...core.compile_cases import CompileCase, compile_cases
from .config_strips import StripsConfig
from .spmm_strips import _spmm_strips_kernel


def strips_case(
    config: StripsConfig, dtype: torch.dtype = torch.bfloat16, extras: bool = False
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias and residual."""
    parts = [f"{config.BLOCK_H}x16x{config.TILE_N}", f"warps{config.WARPS}", f"units{config.UNITS}"]
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
            "mma.sync": 4 * config.UNITS * config.TILE_N // 8,
            "ld.global.cg.v4": 8 * config.UNITS,
            "ld.global.v4": config.UNITS * config.TILE_N // 2,
            "st.global.v4": 1,
            "griddepcontrol.wait": 1,
            "cp.async.bulk.prefetch.L2.global": 1,
        },
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    # other releases of Triton are not given it
    if not warps_may_part():
        return
    for height, tile_n, warps, units in (
        (16, 8, 1, 2),
        (16, 16, 1, 1),
        (16, 16, 4, 2),
        (128, 16, 8, 1),
        (16, 32, 2, 1),
    ):
        config = StripsConfig(height, tile_n, warps, units)
        yield strips_case(config)
        yield strips_case(replace(config, ACTIVATION="gelu"), torch.float16, extras=True)
