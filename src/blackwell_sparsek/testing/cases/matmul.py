"""Compile cases of the products with block-sparse matrices: portable kernels, then Hopper's.

The configurations are those that `tuning` chooses for the main problems; a test checks that they
agree.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...calls.matmul import PatternTensors
from ...core.compat import warps_may_part
from ...launch.launcher import cdiv
from ...matmul.plan import SpmmPlan
from ...matmul.rows import BlockRows, SampledViews, Views
from ...matmul.sm90.config import (
    NarrowSm90Config,
    SpmmSm90Config,
    StripsConfig,
    WarpRowsConfig,
    narrow_stages_that_fit,
    stages_that_fit,
)
from ...matmul.sm90.layouts import in_fragments, launch_transpose
from ...matmul.sm90.narrow import launch_spmm_narrow_sm90
from ...matmul.sm90.row_pairs import PAIR_FIELDS, PairPlan
from ...matmul.sm90.row_schedule import HEADER, TABLE_HEADER, RowSchedule, RowTable
from ...matmul.sm90.sddmm_config import SddmmSm90Config, sddmm_stages_that_fit
from ...matmul.sm90.sddmm_launch import SampledBlocks, launch_sddmm_sm90
from ...matmul.sm90.sddmm_plan import TILE_FIELDS
from ...matmul.sm90.spmm import _spmm_sm90_kernel
from ...matmul.sm90.spmm_launch import TallBlocks, launch_spmm_sm90
from ...matmul.sm90.strips import launch_spmm_strips
from ...matmul.sm90.warps import launch_spmm_warps
from ...matmul.triton.densify import launch_densify
from ...matmul.triton.epilogue_gradients import (
    _epilogue_gradients_kernel,
    launch_epilogue_gradients,
)
from ...matmul.triton.finish import _bsr_spmm_reduce_kernel
from ...matmul.triton.narrow import launch_spmm_narrow
from ...matmul.triton.pack import launch_pack
from ...matmul.triton.pair_products import launch_pair_products
from ...matmul.triton.sample import launch_sample
from ...matmul.triton.sddmm import _bsr_sddmm_kernel, launch_sddmm
from ...matmul.triton.shares import add_shares
from ...matmul.triton.spmm import _bsr_spmm_kernel, launch_spmm
from ...matmul.triton.tuning import NarrowConfig, PairConfig, SddmmConfig, SpmmConfig
from ...sparse.product import PairLists
from ..captured_launches import launched_case, meta
from ..compile_cases import CompileCase, compile_cases

# Only the divisibility of sizes matters; numbers of blocks and rows do not matter at all.
_SIZE = 4096
_BLOCKS = 333
_ROWS = 33
_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32

_DATACENTRE = (90, 100)  # wgmma and tcgen05
_MMA_SYNC = (80, 89, 120)
# Programmatic dependent launch is new with sm_90.
_WITHOUT_PDL, _WITH_PDL = (80, 89), (90, 100, 120)

_ORDERS = ("A@X", "A.T@X", "X@A.T", "X@A")


def _int32(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def _short(dtype: torch.dtype) -> str:
    return {_FP16: "fp16", _BF16: "bf16", _FP32: "fp32"}[dtype]


def _tiles(config: Any) -> str:
    tf32 = "-tf32" if config.input_precision == "tf32" else ""
    tiles = f"{config.tile_m}x{config.tile_n}x{config.tile_k}"
    return f"{tiles}-w{config.num_warps}s{config.num_stages}{tf32}"


class _Product(NamedTuple):
    """A block-sparse matrix and its dense operand, as the portable launchers take them."""

    views: Views
    rows: BlockRows
    bias: torch.Tensor | None


def _product(
    dtype: torch.dtype,
    block_shape: tuple[int, int],
    order: str,
    columns: int = _SIZE,
    *,
    extras: bool,
    ragged_k: bool,
) -> _Product:
    """The operands of a product; `extras` are a bias and a residual."""
    block_h, block_w = block_shape
    m = _SIZE // block_h * block_h
    k = _SIZE // block_w * block_w - (block_w // 2 if ragged_k else 0)

    def dense(rows: int) -> torch.Tensor:
        if order.startswith("X"):
            return meta(1, columns, rows, dtype=dtype).mT
        return meta(1, rows, columns, dtype=dtype)

    views = Views(dense(m), dense(k), dense(m) if extras else None)
    blocks, perm = meta(_BLOCKS, block_h, block_w, dtype=dtype), None
    if order in ("A.T@X", "X@A"):
        # read through the metadata of the transpose
        blocks, perm = meta(_BLOCKS, block_w, block_h, dtype=dtype).mT, _int32(_BLOCKS)
    indptr, cols_b = _int32(m // block_h + 1), cdiv(k, block_w)
    rows = BlockRows(blocks, indptr, _int32(_BLOCKS), perm, cols_b)
    return _Product(views, rows, meta(m, dtype=dtype) if extras else None)


def _plan(split: bool) -> SpmmPlan:
    """A plan in which some rows are split, or none."""
    return SpmmPlan(_int32(_ROWS, 4), _int32(3 if split else 0, 3), 9 if split else 0)


def _table() -> RowTable:
    return RowTable(_int32(_ROWS, TABLE_HEADER + 2 * _ROWS), _ROWS)


# Portable kernels, in the order of `matmul/triton`.


def spmm_case(
    config: SpmmConfig,
    dtype: torch.dtype,
    block_shape: tuple[int, int],
    order: str = "A@X",
    epilogue: bool = False,
    ragged_k: bool = False,
    **options: Any,
) -> CompileCase:
    """A launch of the product. `epilogue` adds bias, gelu, a residual and split rows."""
    block = f"{block_shape[0]}x{block_shape[1]}"
    return launched_case(
        f"bsr_spmm/{_short(dtype)}-{block}-{order}{'-epilogue' if epilogue else ''}"
        f"{'-ragged' if ragged_k else ''}-{_tiles(config)}",
        launch_spmm,
        *_product(dtype, block_shape, order, extras=epilogue, ragged_k=ragged_k),
        "gelu" if epilogue else None,
        _plan(split=epilogue),
        config,
        kernel=_bsr_spmm_kernel,
        **options,
    )


# Chunks do not affect compilation.
_TALL = SpmmConfig(128, 256, 64, 8, 4, "ieee", 1)
_MEDIUM = SpmmConfig(64, 256, 64, 4, 4, "ieee", 1)
_FLAT = SpmmConfig(16, 256, 64, 4, 4, "ieee", 1)
_TALL_SYNC = SpmmConfig(128, 128, 32, 8, 4, "ieee", 1)
_MEDIUM_SYNC = SpmmConfig(64, 128, 32, 4, 4, "ieee", 1)
_FLAT_SYNC = SpmmConfig(16, 128, 32, 4, 4, "ieee", 1)
_NARROW = SpmmConfig(16, 16, 128, 4, 4, "ieee", 1)
_IN_FP32 = SpmmConfig(64, 64, 16, 4, 3, "ieee", 1)
_IN_TF32 = SpmmConfig(128, 128, 32, 8, 3, "tf32", 1)


@compile_cases
def spmm_cases() -> Iterator[CompileCase]:
    """Products with many columns."""
    wgmma: dict[str, Any] = {"archs": (90,), "expect": {"wgmma": 1}}
    for order in _ORDERS:
        options = {"archs": _DATACENTRE} if order == "A@X" else wgmma
        yield spmm_case(_TALL, _BF16, (128, 128), order, **options)
    yield spmm_case(_TALL, _BF16, (128, 128), "X@A", True, True, **wgmma)
    yield spmm_case(_TALL, _BF16, (128, 16), "X@A.T", True, archs=(90,))
    yield spmm_case(_MEDIUM, _BF16, (64, 64), "X@A", True, True, archs=(90,))
    yield spmm_case(_FLAT, _BF16, (16, 16), "A@X", True, archs=_DATACENTRE)
    after_erf = SpmmConfig(128, 128, 64, 8, 4, "ieee", 1)
    yield spmm_case(after_erf, _BF16, (128, 128), "X@A", True, True, archs=(100,))
    for order in ("A@X", "X@A"):
        yield spmm_case(_TALL_SYNC, _BF16, (128, 128), order, True, True, archs=_MMA_SYNC)
    yield spmm_case(_MEDIUM_SYNC, _BF16, (64, 64), "X@A.T", True, archs=_MMA_SYNC)
    yield spmm_case(_FLAT_SYNC, _BF16, (16, 16), "X@A", True, archs=_MMA_SYNC)
    yield spmm_case(_NARROW, _BF16, (128, 128), "X@A.T", True)
    yield spmm_case(_NARROW, _BF16, (16, 16), "A.T@X", True, True)
    yield spmm_case(_IN_FP32, _FP32, (128, 128), "X@A", True, True)
    yield spmm_case(_IN_TF32, _FP32, (128, 128), "X@A.T", True)
    yield launched_case(
        "bsr_spmm_reduce/bf16-128",
        launch_spmm,
        *_product(_BF16, (128, 128), "A@X", extras=True, ragged_k=False),
        "gelu",
        _plan(split=True),
        _TALL,
        kernel=_bsr_spmm_reduce_kernel,
    )


def narrow_case(
    config: NarrowConfig,
    dtype: torch.dtype,
    block_shape: tuple[int, int],
    order: str = "X@A.T",
    epilogue: bool = False,
    **options: Any,
) -> CompileCase:
    """A launch of the product. `epilogue` adds bias, gelu, a residual and a ragged K."""
    block = f"{block_shape[0]}x{block_shape[1]}"
    tiles = f"{config.tile_m}x{config.tile_n}x{config.tile_k}-w{config.num_warps}"
    early = f"{'-overlap' if config.pdl else ''}{'-prefetch' if config.prefetch else ''}"
    views, rows, bias = _product(
        dtype, block_shape, order, config.tile_n, extras=epilogue, ragged_k=epilogue
    )
    return launched_case(
        f"bsr_spmm_narrow/{_short(dtype)}-{block}-{order}"
        f"{'-epilogue' if epilogue else ''}-{tiles}{early}",
        launch_spmm_narrow,
        *(views, rows.blocks, _table(), bias, "gelu" if epilogue else None, config),
        **options,
    )


@compile_cases
def narrow_cases() -> Iterator[CompileCase]:
    """Products with few columns."""
    for early, archs in ((False, _WITHOUT_PDL), (True, _WITH_PDL)):

        def config(
            tile_m: int, tile_n: int, tile_k: int, num_warps: int, early: bool = early
        ) -> NarrowConfig:
            return NarrowConfig(tile_m, tile_n, tile_k, num_warps, early, early)

        tensor_cores: dict[str, Any] = {"archs": archs, "expect": {"mma.sync": 1}}
        yield narrow_case(config(8, 1, 1024, 4), _BF16, (128, 128), archs=archs)
        yield narrow_case(config(8, 1, 1024, 4), _BF16, (16, 16), "A@X", True, archs=archs)
        yield narrow_case(config(16, 16, 512, 4), _BF16, (128, 128), **tensor_cores)
        yield narrow_case(config(16, 16, 512, 4), _BF16, (16, 16), "A@X", True, **tensor_cores)
        yield narrow_case(config(16, 16, 256, 4), _BF16, (48, 80), "A.T@X", **tensor_cores)
        yield narrow_case(config(32, 16, 256, 4), _BF16, (32, 32), "X@A", True, **tensor_cores)


def sddmm_case(
    config: SddmmConfig,
    dtype: torch.dtype,
    block_shape: tuple[int, int],
    of_weight: bool = False,
) -> CompileCase:
    """A launch of the sampled product; `of_weight` has the strides of a weight's gradient."""
    name = f"bsr_sddmm/{_short(dtype)}-{block_shape[0]}x{block_shape[1]}"
    dense = meta(3, _SIZE, _SIZE, dtype=dtype)
    return launched_case(
        f"{name}{'-of-weight' if of_weight else ''}-{_tiles(config)}",
        launch_sddmm,
        meta(_BLOCKS, *block_shape, dtype=dtype),
        dense.mT if of_weight else dense,
        dense,
        PatternTensors(*[_int32(_BLOCKS) for _ in PatternTensors._fields]),
        config,
        kernel=_bsr_sddmm_kernel,
    )


def pair_case(config: PairConfig, dtype: torch.dtype, side: int) -> CompileCase:
    """A launch of the products of pairs of square blocks."""
    blocks = meta(_BLOCKS, side, side, dtype=dtype)
    return launched_case(
        f"bsr_pair_products/{_short(dtype)}-{side}x{side}x{side}-{_tiles(config)}",
        launch_pair_products,
        *(blocks, blocks, blocks),
        PairLists(*[_int32(_BLOCKS) for _ in PairLists._fields]),
        config,
    )


@compile_cases
def sddmm_and_pair_cases() -> Iterator[CompileCase]:
    """Sampled products, and products of two block-sparse matrices."""
    for of_weight in (False, True):
        yield sddmm_case(SddmmConfig(128, 128, 64, 8, 3, "ieee", 1), _BF16, (128, 128), of_weight)
    yield sddmm_case(SddmmConfig(64, 64, 64, 4, 3, "ieee", 2), _BF16, (64, 64), True)
    yield sddmm_case(SddmmConfig(16, 16, 64, 2, 3, "ieee", 1), _BF16, (16, 16))
    yield sddmm_case(SddmmConfig(64, 64, 16, 4, 3, "ieee", 1), _FP32, (128, 128))
    yield pair_case(PairConfig(128, 128, 64, 8, 3, "ieee"), _BF16, 128)
    yield pair_case(PairConfig(64, 64, 16, 4, 3, "ieee"), _FP32, 64)


@compile_cases
def shares_and_sample_cases() -> Iterator[CompileCase]:
    """Sums of shares, and blocks cut out of a dense product."""
    for dtype in (_BF16, _FP32):
        out, parts = meta(_BLOCKS, 64, 64, dtype=dtype), meta(3, _BLOCKS, 64, 64, dtype=_FP32)
        yield launched_case(f"bsr_add_shares/{_short(dtype)}", add_shares, out, parts)
        product = meta(_SIZE, _SIZE, dtype=_FP32)
        lists = (_int32(_BLOCKS), _int32(_BLOCKS))
        yield launched_case(f"bsr_sample/{_short(dtype)}", launch_sample, out, product, *lists)


@compile_cases
def epilogue_gradients_cases() -> Iterator[CompileCase]:
    """Gradients of bias and activation."""
    lines, sums = meta(_SIZE, _SIZE).mT, meta(_SIZE)
    for activation in ("gelu", "silu"):
        yield launched_case(
            f"bsr_epilogue_gradients/{activation}",
            launch_epilogue_gradients,
            *(lines, sums, lines, lines, activation),
            kernel=_epilogue_gradients_kernel,
        )
    yield launched_case(
        "bsr_epilogue_gradients/bias",
        launch_epilogue_gradients,
        *(None, sums, lines, None, None),
        kernel=_epilogue_gradients_kernel,
    )


@compile_cases
def densify_and_pack_cases() -> Iterator[CompileCase]:
    """Copies of the blocks into another order."""
    for block_h, block_w in ((16, 16), (128, 128), (64, 48)):
        yield launched_case(
            f"bsr_write_out/{block_h}x{block_w}",
            launch_densify,
            meta(64 * block_h, 64 * block_w, dtype=_FP16),
            meta(_BLOCKS, block_h, block_w, dtype=_FP16),
            _int32(64, 64),
            expect={"ld.global.v4": 8, "st.global.v4": 8},
        )
    for block_h, block_w in ((16, 16), (32, 32), (32, 48)):
        group = 128 // block_h
        for transposed in (False, True):
            stored = (block_w, block_h) if transposed else (block_h, block_w)
            yield launched_case(
                f"bsr_pack/{block_h}x{block_w}{'-transposed' if transposed else ''}",
                launch_pack,
                meta(_BLOCKS, 128, block_w, dtype=_FP16),
                meta(_BLOCKS, *stored, dtype=_FP16),
                _int32(_BLOCKS, group),
                _int32(_BLOCKS) if transposed else None,
                archs=(90,),
            )


# Hopper's kernels.


@compile_cases
def layout_cases() -> Iterator[CompileCase]:
    """Operands copied into the layout that a product reads."""
    for block_w in (16, 32):
        for transposed in (False, True):
            stored = (block_w, 16) if transposed else (16, block_w)
            yield launched_case(
                f"bsr_fragments/16x{block_w}{'-transposed' if transposed else ''}",
                in_fragments,
                meta(_BLOCKS, *stored, dtype=_FP16),
                block_w,
                _int32(_BLOCKS) if transposed else None,
                4,
                archs=(90,),
            )
    x = meta(_SIZE, _SIZE, dtype=_FP16)
    yield launched_case("bsr_transpose/fp16", launch_transpose, x, x, archs=(90,))


def _matrix(rows: int, columns: int, dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    """A matrix with contiguous rows or, if `transposed`, contiguous columns."""
    return meta(columns, rows, dtype=dtype).mT if transposed else meta(rows, columns, dtype=dtype)


def spmm_sm90_case(
    name: str,
    config: SpmmSm90Config,
    dtype: torch.dtype = _FP16,
    out_dtype: torch.dtype | None = None,
    extras: bool = False,
    max_spill_bytes: int = 0,
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias, residual and split rows."""
    out = _matrix(_SIZE, _SIZE, out_dtype or dtype, config.OUT_TRANSPOSED)
    x = _matrix(_SIZE, _SIZE, dtype, config.X_TRANSPOSED)
    residual = _matrix(_SIZE, _SIZE, dtype, config.OUT_TRANSPOSED) if extras else None
    stored = (config.BLOCK_H, config.BLOCK_W)
    values = meta(_BLOCKS, *(stored[::-1] if config.A_TRANSPOSED else stored), dtype=dtype)
    perm = _int32(_BLOCKS) if config.A_TRANSPOSED or config.PAIRED else None
    plan: SpmmPlan | PairPlan = _plan(split=extras)
    if config.PAIRED:
        plan = PairPlan(_int32(2 * _ROWS, PAIR_FIELDS), _int32(_BLOCKS), _int32(_BLOCKS))
    return launched_case(
        f"bsr_spmm_sm90/{name}",
        launch_spmm_sm90,
        Views(out, x, residual),
        TallBlocks(values, _int32(_ROWS + 1), _int32(_BLOCKS), perm),
        meta(_SIZE, dtype=dtype) if extras else None,
        plan,
        config,
        kernel=_spmm_sm90_kernel,
        archs=(90,),
        expect={"wgmma": 1} | ({"multicast::cluster": 2} if config.PAIRED else {}),
        max_spill_bytes=max_spill_bytes,
    )


def _tall(block_h: int, block_w: int, tile_k: int, out_bytes: int = 2) -> SpmmSm90Config:
    split_n = block_h == 64
    chunks = out_bytes
    stages = stages_that_fit(256, tile_k, split_n, out_bytes, chunks)
    return SpmmSm90Config(block_h, block_w, 256, tile_k, stages, split_n, chunks)


@compile_cases
def spmm_sm90_cases() -> Iterator[CompileCase]:
    """Many columns and tall blocks."""
    tall, flat = _tall(128, 128, 64), _tall(64, 64, 32)
    yield spmm_sm90_case("128x128", tall)
    yield spmm_sm90_case("128x128-wide", replace(tall, WIDE=True))
    yield spmm_sm90_case("128x16-wide", replace(_tall(128, 16, 16), WIDE=True))
    yield spmm_sm90_case("64x64-wide", replace(flat, WIDE=True))
    yield spmm_sm90_case("128x128-bf16", tall, _BF16)
    yield spmm_sm90_case("128x128-fp32-out", _tall(128, 128, 64, 4), out_dtype=_FP32)
    yield spmm_sm90_case("128x16", _tall(128, 16, 16))
    yield spmm_sm90_case("256x32", _tall(256, 32, 32))
    yield spmm_sm90_case("64x64", flat)
    yield spmm_sm90_case("64x16", _tall(64, 16, 16))
    linear = replace(tall, X_TRANSPOSED=True, OUT_TRANSPOSED=True, ACTIVATION="silu")
    yield spmm_sm90_case("128x128-linear-silu", linear, extras=True)
    gelu = replace(tall, ACTIVATION="gelu", OUT_CHUNKS=4)
    # the erf spills a few registers once per tile; the loop has no spills
    yield spmm_sm90_case("128x128-gelu", gelu, extras=True, max_spill_bytes=64)
    yield spmm_sm90_case("128x128-transposed", replace(tall, A_TRANSPOSED=True))
    yield spmm_sm90_case("64x64-transposed", replace(flat, A_TRANSPOSED=True, X_TRANSPOSED=True))
    for group_n in (64, 128):
        narrow = replace(tall, GROUP_N=group_n, STAGES=4)
        yield spmm_sm90_case(f"128x128-narrow-{group_n}", narrow)


@compile_cases
def paired_cases() -> Iterator[CompileCase]:
    """Pairs of rows that share copies of X."""
    # with other releases of Triton no rows are paired, and some cannot build this kernel
    if not warps_may_part():
        return
    paired = replace(_tall(64, 64, 32), PAIRED=True)
    yield spmm_sm90_case("64x64-paired", paired)
    yield spmm_sm90_case("64x64-paired-wide", replace(paired, WIDE=True))
    layer = replace(paired, X_TRANSPOSED=True, OUT_TRANSPOSED=True, ACTIVATION="silu")
    yield spmm_sm90_case("64x64-paired-linear-silu", layer)
    flat = replace(layer, BLOCK_W=32, A_TRANSPOSED=True)
    yield spmm_sm90_case("64x32-paired-transposed", flat, _BF16)


class _FewColumns(NamedTuple):
    """Operands of a layer's product with few columns: columns are contiguous."""

    out: torch.Tensor
    x: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None


def _few_columns(dtype: torch.dtype, columns: int, extras: bool) -> _FewColumns:
    x = meta(columns, _SIZE, dtype=dtype).mT
    return _FewColumns(x, x, meta(_SIZE, dtype=dtype) if extras else None, x if extras else None)


def narrow_sm90_case(
    config: NarrowSm90Config,
    dtype: torch.dtype = _BF16,
    extras: bool = False,
    out_dtype: torch.dtype | None = None,
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias and residual."""
    tiles = f"{config.TILE_M}x{config.TILE_N}x{config.TILE_K}-stages{config.STAGES}"
    parts = [f"{config.BLOCK_H}x{config.BLOCK_W}", tiles]
    parts += [f"parts{config.SPLIT_K}"] if config.SPLIT_K > 1 else []
    parts += ["extras"] if extras else []
    out, x, bias, residual = _few_columns(dtype, config.TILE_N, extras)
    return launched_case(
        f"bsr_spmm_narrow_sm90/{'-'.join(parts)}",
        launch_spmm_narrow_sm90,
        out.to(out_dtype or dtype),
        meta(_BLOCKS, config.BLOCK_H, config.BLOCK_W, dtype=dtype),
        RowSchedule(_int32(132, 3, HEADER + 2 * _ROWS), _ROWS, 4),
        *(x, bias, residual, config),
        archs=(90,),
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
def narrow_sm90_cases() -> Iterator[CompileCase]:
    """Few columns."""
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
            yield narrow_sm90_case(replace(config, ACTIVATION="gelu"), _FP16, extras=True)


@compile_cases
def split_cases() -> Iterator[CompileCase]:
    """Few columns, and tiles that two programs split."""
    # with other releases of Triton no tile is split, and some cannot build this kernel
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
        yield narrow_sm90_case(replace(config, ACTIVATION="gelu"), _FP16, extras=True)


def strips_case(
    config: StripsConfig, dtype: torch.dtype = _BF16, extras: bool = False
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias and residual."""
    parts = [
        f"{config.BLOCK_H}x16x{config.TILE_N}",
        f"warps{config.WARPS}",
        f"units{config.K_TILES}",
    ]
    parts += ["extras"] if extras else []
    out, x, bias, residual = _few_columns(dtype, config.TILE_N - 3, extras)
    return launched_case(
        f"bsr_spmm_strips/{'-'.join(parts)}",
        launch_spmm_strips,
        out,
        meta(_BLOCKS, config.BLOCK_H, 16, dtype=dtype),
        _table(),
        *(x, bias, residual, config),
        archs=(90,),
        # operands are loaded 16 bytes at a time, in and before the loop; results are stored so too
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
def strips_cases() -> Iterator[CompileCase]:
    """Few columns and blocks 16 columns wide."""
    # this kernel is not used with other releases of Triton
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
        yield strips_case(replace(config, ACTIVATION="gelu"), _FP16, extras=True)


def warp_rows_case(
    name: str,
    config: WarpRowsConfig,
    dtype: torch.dtype = _FP16,
    out_dtype: torch.dtype | None = None,
    extras: bool = False,
    max_spill_bytes: int = 0,
) -> CompileCase:
    """A launch of the kernel; `extras` adds bias and residual."""
    return launched_case(
        f"bsr_spmm_warps/{name}",
        launch_spmm_warps,
        _matrix(_SIZE, _SIZE, out_dtype or dtype, config.OUT_TRANSPOSED),
        _int32(_BLOCKS + config.AHEAD, 128),
        _int32(_BLOCKS),
        meta(_SIZE, _SIZE, dtype=dtype),
        meta(_SIZE, dtype=dtype) if extras else None,
        _matrix(_SIZE, _SIZE, dtype, config.OUT_TRANSPOSED) if extras else None,
        _plan(split=False),
        1,
        config,
        archs=(90,),
        expect={"sass:HMMA": 16, "sass:LDSM": 8},
        max_spill_bytes=max_spill_bytes,
    )


@compile_cases
def warp_rows_cases() -> Iterator[CompileCase]:
    """Many columns and blocks 16 rows high, one block row per warp."""
    # this kernel is not used with other releases of Triton, and some cannot build it
    if not warps_may_part():
        return
    plain = WarpRowsConfig()
    yield warp_rows_case("16x16", plain)
    yield warp_rows_case("16x16-bf16", plain, _BF16)
    yield warp_rows_case("16x16-fp32-out", plain, out_dtype=_FP32)
    linear = replace(plain, OUT_TRANSPOSED=True, ACTIVATION="silu")
    # addresses of the residual spill once per tile; the loop has no spills
    yield warp_rows_case("16x16-linear-silu", linear, extras=True, max_spill_bytes=208)
    gelu = replace(plain, ACTIVATION="gelu")
    yield warp_rows_case("16x16-gelu", gelu, extras=True, max_spill_bytes=208)


def sddmm_sm90_case(
    config: SddmmSm90Config, dtype: torch.dtype = _BF16, shares: int = 1
) -> CompileCase:
    """A launch of the kernel."""
    layout = f"{'t' if config.A_TRANSPOSED else 'n'}{'t' if config.B_TRANSPOSED else 'n'}"
    name = f"{config.BLOCK_H}x{config.BLOCK_W}-{layout}-{_short(dtype)}"
    a = _matrix(_SIZE, _SIZE, dtype, config.A_TRANSPOSED).unsqueeze(0)
    b = _matrix(_SIZE, _SIZE, dtype, config.B_TRANSPOSED).unsqueeze(0)
    out_dtype = dtype if config.OUT_BYTES == 2 else _FP32
    source = _int32(_BLOCKS, config.grouped_rows) if config.grouped_rows > 1 else None
    return launched_case(
        f"bsr_sddmm_sm90/{name}{'-fp32-out' if config.OUT_BYTES == 4 else ''}",
        launch_sddmm_sm90,
        meta(shares * _BLOCKS, config.BLOCK_H, config.BLOCK_W, dtype=out_dtype),
        SampledViews(a, b),
        SampledBlocks(_int32(_ROWS, TILE_FIELDS), _int32(_BLOCKS), source),
        shares,
        config,
        archs=(90,),
        expect={"wgmma": 1, "cp.async.bulk.tensor": 1 + config.tile_pieces},
    )


def _sampled(block_h: int, block_w: int, out_bytes: int = 2) -> SddmmSm90Config:
    """The configuration for these blocks, and for the gradient of a layer's weight."""
    tile_m = 128 if block_h % 128 == 0 else 64
    group_n = 128 if tile_m == 128 or block_w % 32 else 256
    tile_k = 32 if group_n == 256 else 64
    chunk_bytes = group_n // out_bytes * out_bytes
    stages = sddmm_stages_that_fit(tile_m, group_n, tile_k, chunk_bytes)
    piece = min(block_w & -block_w, group_n)
    tiles = (tile_m, group_n, piece, tile_k, stages)
    return SddmmSm90Config(block_h, block_w, *tiles, out_bytes, out_bytes, A_TRANSPOSED=True)


@compile_cases
def sddmm_sm90_cases() -> Iterator[CompileCase]:
    """Sampled products: every orientation, and blocks of all sides."""
    for side in (128, 64):
        layer = _sampled(side, side)
        for transposed in (False, True):
            yield sddmm_sm90_case(replace(layer, B_TRANSPOSED=transposed))
            swapped = replace(layer, A_TRANSPOSED=False, B_TRANSPOSED=transposed)
            yield sddmm_sm90_case(swapped, _FP16)
        yield sddmm_sm90_case(_sampled(side, side, 4), shares=3)
    for block_h, block_w in ((256, 256), (128, 16), (192, 64), (32, 32), (16, 16)):
        yield sddmm_sm90_case(_sampled(block_h, block_w))
    for side in (32, 16):
        yield sddmm_sm90_case(replace(_sampled(side, side, 4), B_TRANSPOSED=True), shares=3)
