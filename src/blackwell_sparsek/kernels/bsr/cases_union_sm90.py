"""What is compiled without a GPU: the Hopper product over unions of block rows, as launched."""

from collections.abc import Iterator

import torch

from ...core.compile_cases import CompileCase, compile_cases
from ..sm90 import descriptor_type
from .config_union_sm90 import SLIM_N, UnionSm90Config, union_stages_that_fit
from .spmm_union_sm90 import _spmm_union_sm90_kernel


def spmm_union_sm90_case(
    name: str,
    config: UnionSm90Config,
    dtype: torch.dtype = torch.float16,
    out_dtype: torch.dtype | None = None,
    extras: bool = False,
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias, residual and rows that were cut."""
    return CompileCase(
        name=f"bsr_spmm_union_sm90/{name}",
        kernel=_spmm_union_sm90_kernel,
        args={
            "out_desc": descriptor_type(config.out_block(), out_dtype or dtype),
            "part_ptr": torch.float32 if extras else None,
            "a_desc": descriptor_type(config.a_block(), dtype),
            "x_desc": descriptor_type(config.x_block(), dtype),
            "slim_x_desc": descriptor_type(config.x_block(SLIM_N), dtype),
            "bias_ptr": dtype if extras else None,
            "residual_ptr": dtype if extras else None,
            "residual_strides": (4096, 1) if extras else None,
            "items_ptr": torch.int32,
            "entries_ptr": torch.int32,
            "own_ptr": torch.int32,
            "ranks_ptr": torch.int32,
            "counter_ptr": torch.int32,
            "n_rows": 4096,
            "n_cols": 4096,
            "num_entries": 4096,
            "pieces_per_panel": 32,
            "total": 512,
            "CFG": config,
        },
        archs=(90,),
        num_warps=4,
        options={"maxnreg": config.MAX_REGISTERS},
        expect={"wgmma": 1},
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    for block_w, tile_k in ((64, 32), (32, 32), (16, 16)):
        stages = union_stages_that_fit(tile_k, 2)
        config = UnionSm90Config(block_w, tile_k, stages)
        yield spmm_union_sm90_case(f"64x{block_w}", config)
    linear = UnionSm90Config(64, 32, union_stages_that_fit(32, 2), True, True, True, "silu")
    yield spmm_union_sm90_case("64x64-transposed-linear-silu", linear, extras=True)
    wide = UnionSm90Config(64, 32, union_stages_that_fit(32, 4))
    yield spmm_union_sm90_case("64x64-fp32-out", wide, torch.bfloat16, torch.float32)
