"""What is compiled without a GPU: the main configurations of products with few columns."""

from collections.abc import Iterator
from typing import Any

import torch

from ...core.compile_cases import CompileCase, compile_cases
from .cases import _ORDERS, _SIZE, _addends, _short
from .config import NarrowConfig
from .spmm_narrow import MAX_REGISTERS, _bsr_spmm_narrow_kernel
from .views import Strides

_OLD, _NEW = (80, 89), (90, 100, 120)


def narrow_case(
    config: NarrowConfig,
    dtype: torch.dtype,
    block_shape: tuple[int, int],
    order: str = "X@A.T",
    epilogue: bool = False,
    **options: Any,
) -> CompileCase:
    """A launch of the product. `epilogue` adds bias, gelu, a residual and a ragged K."""
    strides = _ORDERS[order]
    bh, bw = block_shape
    tiles = f"{config.tile_m}x{config.tile_n}x{config.tile_k}-w{config.num_warps}"
    early = f"{'-overlap' if config.overlap else ''}{'-prefetch' if config.prefetch else ''}"
    early_options = {"launch_pdl": True} if config.overlap else {}
    return CompileCase(
        name=(
            f"bsr_spmm_narrow/{_short(dtype)}-{bh}x{bw}-{order}"
            f"{'-epilogue' if epilogue else ''}-{tiles}{early}"
        ),
        kernel=_bsr_spmm_narrow_kernel,
        args={
            "out_ptr": dtype,
            "values_ptr": dtype,
            "x_ptr": dtype,
            "records_ptr": torch.int32,
            "out_strides": strides.out,
            "value_strides": (
                Strides(bh * bw, 1, bh) if strides.blocks_transposed else Strides(bh * bw, bw, 1)
            ),
            "x_strides": strides.x,
            "m_size": _SIZE,
            "k_size": _SIZE if epilogue else None,
            "n_size": config.tile_n,
            "n_rows": 33,
            "width": 33,
            "addends": _addends(dtype, strides.out, epilogue),
            "ACTIVATION": "gelu" if epilogue else None,
            "OVERLAP": config.overlap,
            "PREFETCH": config.prefetch,
            "BLOCK_H": bh,
            "BLOCK_W": bw,
            "TILE_M": config.tile_m,
            "TILE_N": config.tile_n,
            "TILE_K": config.tile_k,
            "NUM_WARPS": config.num_warps,
        },
        num_warps=config.num_warps,
        num_stages=1,
        options={"maxnreg": MAX_REGISTERS, **early_options},
        **options,
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    bf16 = torch.bfloat16
    for early, archs in ((False, _OLD), (True, _NEW)):

        def config(*tiles: int, early: bool = early) -> NarrowConfig:
            return NarrowConfig(*tiles, early, early)

        tensor_cores: dict[str, Any] = {"archs": archs, "expect": {"mma.sync": 1}}
        yield narrow_case(config(8, 1, 1024, 4), bf16, (128, 128), archs=archs)
        yield narrow_case(config(8, 1, 1024, 4), bf16, (16, 16), "A@X", True, archs=archs)
        yield narrow_case(config(16, 16, 512, 4), bf16, (128, 128), **tensor_cores)
        yield narrow_case(config(16, 16, 512, 4), bf16, (16, 16), "A@X", True, **tensor_cores)
        yield narrow_case(config(16, 16, 256, 4), bf16, (48, 80), "A.T@X", **tensor_cores)
        yield narrow_case(config(32, 16, 256, 4), bf16, (32, 32), "X@A", True, **tensor_cores)
