"""Launching the product of single warps, and what is compiled of it without a GPU."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...core.arch import arch_of
from ...core.compat import warps_may_part
from ...core.compile_cases import CompileCase, compile_cases
from ...core.launch import cdiv, launch, on_device_of
from ..sm90 import descriptor_type, tensor_descriptor
from .config_warps import WarpRowsConfig
from .plan import SpmmPlan
from .spmm_warps import _spmm_warps_kernel

# Registers per thread the kernel is compiled for; the producer leaves most of its own to the rest.
MAX_REGISTERS = 96
# Blocks of the rows that run together: they are read again for every panel of X, out of L2 (50 MB).
SECTION_BYTES = 16 * 2**20


def launch_spmm_warps(
    out: torch.Tensor,
    fragments: torch.Tensor,
    columns: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    plan: SpmmPlan,
    per_block: int,
    config: WarpRowsConfig,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    out : [M, N]; rows contiguous, or columns where the configuration says transposed
    fragments : A as `in_fragments` gives it, with AHEAD spare ones; at least one other
    columns : int32, columns of the fragments in units of 16
    x : [K, N], rows contiguous
    bias : [M] contiguous, residual : [M, N], any strides; or None
    plan : of the pattern, no row cut
    per_block : fragments of a block
    """
    m, n = out.shape
    groups, panels = cdiv(plan.n_items, config.WARPS), cdiv(n, config.tile_n)
    with on_device_of(out):
        args = (
            out,
            out.stride(1 if config.OUT_TRANSPOSED else 0),
            bias,
            residual,
            None if residual is None else residual.stride(),
            fragments,
            tensor_descriptor(x, config.x_block()),
            plan.items,
            columns,
            plan.n_items,
            m,
            n,
            per_block,
            groups,
            panels,
            max(1, min(groups, SECTION_BYTES * groups // fragments.nbytes)),
            cdiv(x.shape[0], config.CHUNK),
            config,
        )
        programs = min(arch_of(out.device).num_sms, groups * panels)
        launch(
            *(_spmm_warps_kernel, programs, args),
            num_warps=config.WARPS,
            maxnreg=MAX_REGISTERS,
        )


def _case(
    name: str,
    config: WarpRowsConfig,
    dtype: torch.dtype = torch.float16,
    out_dtype: torch.dtype | None = None,
    extras: bool = False,
    max_spill_bytes: int = 0,
) -> CompileCase:
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
            "groups": 16,
            "panels": 32,
            "section": 8,
            "chunks": 32,
            "CFG": config,
        },
        archs=(90,),
        num_warps=config.WARPS,
        options={"maxnreg": MAX_REGISTERS},
        expect={"sass:HMMA": 16, "sass:LDSM": 8},
        max_spill_bytes=max_spill_bytes,
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    # with other releases of Triton nothing runs it, and not every one could build it
    if not warps_may_part():
        return
    plain = WarpRowsConfig()
    yield _case("16x16", plain)
    yield _case("16x16-bf16", plain, torch.bfloat16)
    yield _case("16x16-fp32-out", plain, out_dtype=torch.float32)
    linear = replace(plain, OUT_TRANSPOSED=True, ACTIVATION="silu")
    # addresses of the residual, once for each tile; the loop has no spills
    yield _case("16x16-linear-silu", linear, extras=True, max_spill_bytes=192)
    gelu = replace(plain, ACTIVATION="gelu")
    yield _case("16x16-gelu", gelu, extras=True, max_spill_bytes=208)
