"""What is compiled without a GPU: the main configurations of the BSR kernels, as launched."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ...core.compile_cases import CompileCase, compile_cases
from ..rows import Strides
from .finish import (
    REDUCE_TILE_M,
    REDUCE_TILE_N,
    REDUCE_WARPS,
    Addends,
    _bsr_spmm_reduce_kernel,
)
from .narrow import MAX_REGISTERS, _bsr_spmm_narrow_kernel
from .pair_products import _bsr_pair_products_kernel
from .sddmm import _bsr_sddmm_kernel
from .spmm import _bsr_spmm_kernel
from .tuning import NarrowConfig, PairConfig, SddmmConfig, SpmmConfig, triton_stages

# Sizes matter only in what they are multiples of.
_SIZE = 4096
_BIG = Strides(_SIZE * _SIZE, _SIZE, 1)


class _Order(NamedTuple):
    """Strides of a product, and whether it goes through the metadata of the transpose."""

    x: Strides
    out: Strides
    blocks_transposed: bool


_ORDERS = {
    "A@X": _Order(_BIG, _BIG, False),
    "A.T@X": _Order(_BIG, _BIG, True),
    "X@A.T": _Order(Strides(0, 1, _SIZE), Strides(0, 1, _SIZE), False),
    "X@A": _Order(Strides(0, 1, _SIZE), Strides(0, 1, _SIZE), True),
}


def spmm_case(
    config: SpmmConfig,
    dtype: torch.dtype,
    block_shape: tuple[int, int],
    order: str = "A@X",
    epilogue: bool = False,
    ragged_k: bool = False,
    **options: Any,
) -> CompileCase:
    """A launch of the product. `epilogue` adds bias, gelu, a residual and cut rows."""
    strides = _ORDERS[order]
    bh, bw = block_shape
    return CompileCase(
        name=(
            f"bsr_spmm/{_short(dtype)}-{bh}x{bw}-{order}{'-epilogue' if epilogue else ''}"
            f"{'-ragged' if ragged_k else ''}-{_tiles(config)}"
        ),
        kernel=_bsr_spmm_kernel,
        args={
            "out_ptr": dtype,
            "partial_ptr": torch.float32 if epilogue else None,
            "values_ptr": dtype,
            "x_ptr": dtype,
            "items_ptr": torch.int32,
            "indices_ptr": torch.int32,
            "perm_ptr": torch.int32 if strides.blocks_transposed else None,
            "out_strides": strides.out,
            "value_strides": (
                Strides(bh * bw, 1, bh) if strides.blocks_transposed else Strides(bh * bw, bw, 1)
            ),
            "x_strides": strides.x,
            "m_size": _SIZE,
            "k_size": _SIZE if ragged_k else None,
            "n_size": _SIZE,
            "n_items": 33,
            "n_slots": 33,
            "addends": _addends(dtype, strides.out, epilogue),
            "ACTIVATION": "gelu" if epilogue else None,
            "INPUT_PRECISION": config.input_precision,
            "BLOCK_H": bh,
            "BLOCK_W": bw,
            "TILE_M": config.tile_m,
            "TILE_N": config.tile_n,
            "TILE_K": config.tile_k,
        },
        num_warps=config.num_warps,
        num_stages=triton_stages(config.num_stages, 1),
        **options,
    )


def reduce_case(dtype: torch.dtype, block_h: int, **options: Any) -> CompileCase:
    """A launch of the second pass over cut rows."""
    return CompileCase(
        name=f"bsr_spmm_reduce/{_short(dtype)}-{block_h}",
        kernel=_bsr_spmm_reduce_kernel,
        args={
            "out_ptr": dtype,
            "partial_ptr": torch.float32,
            "split_rows_ptr": torch.int32,
            "out_strides": _BIG,
            "m_size": _SIZE,
            "n_size": _SIZE,
            "n_split_rows": 33,
            "n_slots": 33,
            "addends": _addends(dtype, _BIG, True),
            "ACTIVATION": "gelu",
            "BLOCK_H": block_h,
            "TILE_M": REDUCE_TILE_M,
            "TILE_N": REDUCE_TILE_N,
        },
        num_warps=REDUCE_WARPS,
        **options,
    )


def sddmm_case(
    config: SddmmConfig,
    dtype: torch.dtype,
    block_shape: tuple[int, int],
    of_weight: bool = False,
    **options: Any,
) -> CompileCase:
    """A launch of the sampled product; `of_weight` has the strides of a weight's gradient."""
    name = f"bsr_sddmm/{_short(dtype)}-{block_shape[0]}x{block_shape[1]}"
    return CompileCase(
        name=f"{name}{'-of-weight' if of_weight else ''}-{_tiles(config)}",
        kernel=_bsr_sddmm_kernel,
        args={
            "out_ptr": torch.float32 if config.split_k > 1 else dtype,
            "a_ptr": dtype,
            "b_ptr": dtype,
            "indices_ptr": torch.int32,
            "t_indices_ptr": torch.int32,
            "t_perm_ptr": torch.int32,
            "a_strides": Strides(0, 1, _SIZE) if of_weight else _BIG,
            "b_strides": _BIG,
            "m_size": _SIZE,
            "n_size": _SIZE,
            "k_size": _SIZE,
            "batches": 3,
            "nnz_blocks": 333,
            "steps_per_share": 33,
            "INPUT_PRECISION": config.input_precision,
            "BLOCK_H": block_shape[0],
            "BLOCK_W": block_shape[1],
            "TILE_M": config.tile_m,
            "TILE_N": config.tile_n,
            "TILE_K": config.tile_k,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )


def pair_case(
    config: PairConfig,
    dtype: torch.dtype,
    block_shape: tuple[int, int],
    inner: int,
    **options: Any,
) -> CompileCase:
    """A launch of the products of pairs."""
    bh, bw = block_shape
    return CompileCase(
        name=f"bsr_pair_products/{_short(dtype)}-{bh}x{inner}x{bw}-{_tiles(config)}",
        kernel=_bsr_pair_products_kernel,
        args={
            "out_ptr": dtype,
            "first_ptr": dtype,
            "second_ptr": dtype,
            "first_of_ptr": torch.int32,
            "second_of_ptr": torch.int32,
            "order_ptr": torch.int32,
            "pair_indptr_ptr": torch.int32,
            "first_strides": Strides(bh * inner, inner, 1),
            "second_strides": Strides(inner * bw, bw, 1),
            "INPUT_PRECISION": config.input_precision,
            "BLOCK_H": bh,
            "INNER": inner,
            "BLOCK_W": bw,
            "TILE_M": config.tile_m,
            "TILE_N": config.tile_n,
            "TILE_K": config.tile_k,
        },
        num_warps=config.num_warps,
        num_stages=triton_stages(config.num_stages, 2),
        **options,
    )


def _addends(dtype: torch.dtype, strides: Strides, given: bool) -> Addends:
    return Addends(dtype, 1, dtype, *strides) if given else Addends(None, 0, None, 0, 0, 0)


def _short(dtype: torch.dtype) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def _tiles(config: Any) -> str:
    tf32 = "-tf32" if config.input_precision == "tf32" else ""
    tiles = f"{config.tile_m}x{config.tile_n}x{config.tile_k}"
    return f"{tiles}-w{config.num_warps}s{config.num_stages}{tf32}"


_DATACENTRE = (90, 100)  # wgmma and tcgen05
_MMA_SYNC = (80, 89, 120)
# What `tuning` chooses for the main problems; a test holds the two together. Chunks do not
# enter compilation.
_TALL = SpmmConfig(128, 256, 64, 8, 4, "ieee", 1)
_MEDIUM = SpmmConfig(64, 256, 64, 4, 4, "ieee", 1)
_FLAT = SpmmConfig(16, 256, 64, 4, 4, "ieee", 1)
_TALL_SYNC = SpmmConfig(128, 128, 32, 8, 4, "ieee", 1)
_MEDIUM_SYNC = SpmmConfig(64, 128, 32, 4, 4, "ieee", 1)
_FLAT_SYNC = SpmmConfig(16, 128, 32, 4, 4, "ieee", 1)
_NARROW = SpmmConfig(16, 16, 128, 4, 4, "ieee", 1)
_FP32 = SpmmConfig(64, 64, 16, 4, 3, "ieee", 1)
_TF32 = SpmmConfig(128, 128, 32, 8, 3, "tf32", 1)


@compile_cases
def _spmm_cases() -> Iterator[CompileCase]:
    bf16, fp32 = torch.bfloat16, torch.float32
    wgmma: dict[str, Any] = {"archs": (90,), "expect": {"wgmma": 1}}
    for order in _ORDERS:
        options = {"archs": _DATACENTRE} if order == "A@X" else wgmma
        yield spmm_case(_TALL, bf16, (128, 128), order, **options)
    yield spmm_case(_TALL, bf16, (128, 128), "X@A", True, True, **wgmma)
    yield spmm_case(_TALL, bf16, (128, 16), "X@A.T", True, archs=(90,))
    yield spmm_case(_MEDIUM, bf16, (64, 64), "X@A", True, True, archs=(90,))
    yield spmm_case(_FLAT, bf16, (16, 16), "A@X", True, archs=_DATACENTRE)
    after_erf = SpmmConfig(128, 128, 64, 8, 4, "ieee", 1)
    yield spmm_case(after_erf, bf16, (128, 128), "X@A", True, True, archs=(100,))
    for order in ("A@X", "X@A"):
        yield spmm_case(_TALL_SYNC, bf16, (128, 128), order, True, True, archs=_MMA_SYNC)
    yield spmm_case(_MEDIUM_SYNC, bf16, (64, 64), "X@A.T", True, archs=_MMA_SYNC)
    yield spmm_case(_FLAT_SYNC, bf16, (16, 16), "X@A", True, archs=_MMA_SYNC)
    yield spmm_case(_NARROW, bf16, (128, 128), "X@A.T", True)
    yield spmm_case(_NARROW, bf16, (16, 16), "A.T@X", True, True)
    yield spmm_case(_FP32, fp32, (128, 128), "X@A", True, True)
    yield spmm_case(_TF32, fp32, (128, 128), "X@A.T", True)
    yield reduce_case(bf16, 128)


@compile_cases
def _sddmm_and_pair_cases() -> Iterator[CompileCase]:
    bf16, fp32 = torch.bfloat16, torch.float32
    for of_weight in (False, True):
        yield sddmm_case(SddmmConfig(128, 128, 64, 8, 3, "ieee", 1), bf16, (128, 128), of_weight)
    yield sddmm_case(SddmmConfig(64, 64, 64, 4, 3, "ieee", 2), bf16, (64, 64), True)
    yield sddmm_case(SddmmConfig(16, 16, 64, 2, 3, "ieee", 1), bf16, (16, 16))
    yield sddmm_case(SddmmConfig(64, 64, 16, 4, 3, "ieee", 1), fp32, (128, 128))
    yield pair_case(PairConfig(128, 128, 64, 8, 3, "ieee"), bf16, (128, 128), 128)
    yield pair_case(PairConfig(64, 64, 16, 4, 3, "ieee"), fp32, (64, 64), 64)


# Products with few columns.

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
    early = f"{'-overlap' if config.pdl else ''}{'-prefetch' if config.prefetch else ''}"
    early_options = {"launch_pdl": True} if config.pdl else {}
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
            "PDL": config.pdl,
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
            return NarrowConfig(*tiles, pdl=early, prefetch=early)

        tensor_cores: dict[str, Any] = {"archs": archs, "expect": {"mma.sync": 1}}
        yield narrow_case(config(8, 1, 1024, 4), bf16, (128, 128), archs=archs)
        yield narrow_case(config(8, 1, 1024, 4), bf16, (16, 16), "A@X", True, archs=archs)
        yield narrow_case(config(16, 16, 512, 4), bf16, (128, 128), **tensor_cores)
        yield narrow_case(config(16, 16, 512, 4), bf16, (16, 16), "A@X", True, **tensor_cores)
        yield narrow_case(config(16, 16, 256, 4), bf16, (48, 80), "A.T@X", **tensor_cores)
        yield narrow_case(config(32, 16, 256, 4), bf16, (32, 32), "X@A", True, **tensor_cores)
