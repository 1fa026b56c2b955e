"""Compile cases of the kernels in fp8: rounding, attention, products."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...attention.sm90.launch_fp8 import attn_fwd_fp8_sm90_config, launch_attn_fwd_fp8_sm90
from ...attention.triton.forward_fp8 import launch_attn_fwd_fp8
from ...attention.triton.tuning import attn_fwd_fp8_config
from ...calls.attention import AttentionCall, AttnSpec
from ...calls.fp8 import TOKEN_PADDING, Fp8AttentionCall, QuantizeCall
from ...calls.matmul import BsrProblem
from ...core.arch import Arch
from ...core.compat import warps_may_part
from ...core.fp8 import E4M3, E5M2
from ...fp8.triton import (
    MIN_SM_CONVERTS_FP8,
    MIN_SM_PDL,
    _amax_kernel,
    _quantize_kernel,
    launch_means,
    launch_quantize,
    launch_sums,
)
from ...masks.band import Band
from ...masks.block_mask import BlockMask
from ...matmul.plan import SpmmPlan
from ...matmul.rows import BlockRows, Views
from ...matmul.sm90.config import narrow_stages_that_fit
from ...matmul.sm90.fp8_launch import launch_spmm_fp8_sm90
from ...matmul.sm90.narrow import launch_spmm_narrow_sm90
from ...matmul.sm90.narrow_records import NarrowScales
from ...matmul.sm90.row_schedule import HEADER, RowSchedule
from ...matmul.sm90.spmm_fp8 import _spmm_fp8_sm90_kernel
from ...matmul.sm90.tuning import narrow_fp8_config, spmm_fp8_sm90_config
from ...matmul.triton.spmm import Scales, _bsr_spmm_kernel, launch_spmm
from ...matmul.triton.tuning import spmm_fp8_config
from ..captured_launches import captured_launches, launched_case, meta
from ..compile_cases import ALL_ARCHS, CompileCase, compile_cases

_CONVERTING = tuple(sm for sm in ALL_ARCHS if sm >= MIN_SM_CONVERTS_FP8)
_WITH_PDL = tuple(sm for sm in ALL_ARCHS if sm >= MIN_SM_PDL)


def _call(
    scale: str, channels: int, dtype: torch.dtype = E4M3, *, tokens: int = 1000, **options: bool
) -> QuantizeCall:
    given = {"smooth": False, "hadamard": False, "transposed": False, **options}
    return QuantizeCall(meta(2, 8, tokens, channels), scale, dtype, 128, **given)


def quantize_case(
    name: str,
    call: QuantizeCall,
    *,
    amax: bool = False,
    converts: bool = False,
    pdl: bool = False,
) -> CompileCase:
    """The launch that rounds, or the one that finds the maxima."""
    results = (call.empty_data(), call.empty_descale(), call.empty_mean() if call.smooth else None)
    return launched_case(
        f"{'fp8_amax' if amax else 'fp8_quantize'}/{name}",
        launch_quantize,
        call,
        *results,
        converts_fp8=converts,
        pdl=pdl,
        kernel=_amax_kernel if amax else _quantize_kernel,
        archs=_WITH_PDL if pdl else _CONVERTING if converts else ALL_ARCHS,
    )


@compile_cases
def quantize_cases() -> Iterator[CompileCase]:
    """Queries, keys and values of attention, activations and weights of products."""
    keys = _call("block", 128, smooth=True, hadamard=True)
    values = _call("channel", 128, transposed=True)
    queries = _call("block", 128, hadamard=True)
    yield quantize_case("queries-converted-d128", queries, converts=True)
    yield quantize_case("keys-d128", keys)
    yield quantize_case("keys-converted-d128", keys, converts=True)
    wide = _call("block", 256, smooth=True, hadamard=True)
    yield quantize_case("keys-converted-d256", wide, converts=True)
    yield quantize_case("values-d128", values)
    few = _call("1x128", 4096, tokens=16)
    yield quantize_case("few-tokens-1x128", few, converts=True, pdl=True)
    yield quantize_case("values-converted-d128", values, converts=True)
    yield quantize_case("values-d128", values, amax=True)
    yield quantize_case("tensor-d64", _call("tensor", 64, hadamard=True), amax=True)
    yield quantize_case("tensor-e5m2-d64", _call("tensor", 64, E5M2, hadamard=True))
    yield quantize_case("1x128-converted", _call("1x128", 4096), converts=True)
    yield quantize_case("128x128-converted", _call("128x128", 4096), converts=True)
    sums = meta(16, 2, 128, dtype=torch.float32)
    yield launched_case("fp8_sums/d128", launch_sums, keys, sums)
    mean = meta(2, 8, 128, dtype=torch.float32)
    yield launched_case("fp8_means/d128", launch_means, keys, mean, sums)


def attention_call(
    dim: int,
    *,
    length: int = 1000,
    mask: tuple[int, int] | None = None,
    turned: bool = True,
    everything: bool = False,
) -> Fp8AttentionCall:
    """A call with scales by block and channel; `everything` adds all options."""
    heads = 8
    q, k, v = (meta(2, n, length, dim, dtype=E4M3) for n in (2 * heads, heads, heads))
    if turned:
        padded = -(-length // TOKEN_PADDING) * TOKEN_PADDING
        v = meta(2, heads, dim, padded, dtype=E4M3)[..., :length].mT
    block_mask = None
    if mask is not None:
        keep = torch.ones(1, 1, -(-length // mask[0]), -(-length // mask[1]), dtype=torch.bool)
        block_mask = BlockMask.from_dense(keep, mask, seq_lengths=length).to("meta")
    spec = AttnSpec(0.1, max_q=length, max_k=length, block_mask=block_mask)
    if everything:
        sinks = meta(2 * heads, dtype=torch.float32)
        spec = spec._replace(band=Band(None, 0), softcap=30.0, sinks=sinks)
    scales = (
        meta(2, 2 * heads, -(-length // 128), dtype=torch.float32),
        meta(2, heads, -(-length // 128), dtype=torch.float32),
        meta(2, heads, dim, dtype=torch.float32),
    )
    return Fp8AttentionCall(AttentionCall(q, k, v, spec), *scales, torch.bfloat16)


def hopper_case(
    name: str,
    dim: int,
    *,
    k_blocks: bool = True,
    spills: int = 0,
    **options: Any,
) -> CompileCase:
    """A launch of the Hopper forward; `spills` is what is accepted, with Triton 3.6."""
    call = attention_call(dim, **options)
    with captured_launches():
        config = attn_fwd_fp8_sm90_config(call.problem, k_blocks)
    order = None if config.SCHEDULER_WARP is False else meta(256, dtype=torch.int32)
    return launched_case(
        f"attn_fwd_fp8_sm90/{name}-d{dim}",
        launch_attn_fwd_fp8_sm90,
        *(call, *call.empty_results(), order, 2, config),
        expect={"wgmma": 8},
        max_spill_bytes=spills,
        archs=(90,),
    )


@compile_cases
def hopper_cases() -> Iterator[CompileCase]:
    """The Hopper forward: products of e4m3, masks, all options, wide heads."""
    yield hopper_case("dense", 128, spills=704)
    yield hopper_case("head-scales", 128, k_blocks=False, spills=592)
    yield hopper_case("mask", 128, mask=(128, 128), spills=1224)
    yield hopper_case("mask-rows-of-64", 128, mask=(64, 64), spills=908)
    yield hopper_case("mask-rows-of-64-wide-blocks", 128, mask=(64, 128), spills=1308)
    yield hopper_case("all-options", 128, everything=True, spills=684)
    yield hopper_case("dense", 64)
    # three consumers
    yield hopper_case("long", 64, length=4000, spills=1580)
    yield hopper_case("dense", 256, spills=1144)
    yield hopper_case("mask", 256, mask=(128, 128), spills=1608)


def portable_case(name: str, sm: int, dim: int, *, spills: int = 0, **options: Any) -> CompileCase:
    """A launch of the portable forward as on `sm`; `spills` is what is accepted."""
    call = attention_call(dim, **options)
    with captured_launches(sm):
        config = attn_fwd_fp8_config(call.problem)
    out, lse = call.empty_results()
    return launched_case(
        f"attn_fwd_fp8/{name}-d{dim}-sm{sm}",
        launch_attn_fwd_fp8,
        *(call, out, lse, config),
        sm=sm,
        converts_fp8=sm >= MIN_SM_CONVERTS_FP8,
        max_spill_bytes=spills,
        archs=(sm,),
    )


@compile_cases
def portable_cases() -> Iterator[CompileCase]:
    """The portable forward, with the tiles of each architecture."""
    for sm in ALL_ARCHS:
        yield portable_case("dense", sm, 128)
        yield portable_case("values-in-rows", sm, 64, turned=False)
        yield portable_case("all-options", sm, 128, everything=True)
        yield portable_case("mask", sm, 128, mask=(128, 128))
        yield portable_case("dense", sm, 256, spills=44 if sm == 90 else 0)


class ProductParts(NamedTuple):
    """What launchers of products in fp8 take: views as bytes, blocks by rows, scales, a bias."""

    views: Views
    rows: BlockRows
    descale: torch.Tensor
    x_scales: torch.Tensor
    bias: torch.Tensor | None


def product_parts(
    block_shape: tuple[int, int], tokens: int, *, extras: bool = False, transposed: bool = False
) -> ProductParts:
    """x @ A.T with 4096 channels and features, or x @ A where blocks are stored `transposed`."""
    (block_h, block_w), size, count = block_shape, 4096, 333

    def dense(features: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return meta(1, tokens, features, dtype=dtype).mT

    blocks, perm = meta(count, block_h, block_w, dtype=E4M3), None
    if transposed:
        blocks = meta(count, block_w, block_h, dtype=E4M3).mT
        perm = meta(count, dtype=torch.int32)
    indptr = meta(size // block_h + 1, dtype=torch.int32)
    rows = BlockRows(blocks, indptr, meta(count, dtype=torch.int32), perm, size // block_w)
    views = Views(dense(size), dense(size, E4M3), dense(size) if extras else None)
    descale = meta(count, dtype=torch.float32)
    x_scales = dense(size // 128, torch.float32)
    return ProductParts(views, rows, descale, x_scales, meta(size) if extras else None)


def product_problem(block_shape: tuple[int, int], tokens: int, sm: int) -> BsrProblem:
    """The problem of `product_parts` on `sm`."""
    return BsrProblem(
        kind="matmul",
        arch=Arch("cuda", sm, 132, 0 if sm in (89, 120) else 160 * 1024, False),
        dtype=E4M3,
        out_dtype=torch.bfloat16,
        shape=(4096, 4096),
        block_shape=block_shape[::-1],
        nnz_blocks=333,
        n=tokens,
        dense_left=True,
        transposed=True,
        tma=True,
    )


def portable_product(
    name: str,
    sm: int,
    block_shape: tuple[int, int],
    tokens: int,
    *,
    split: bool = False,
    activation: str | None = None,
    spills: int = 0,
    **options: Any,
) -> CompileCase:
    """A launch of the portable product as on `sm`."""
    parts = product_parts(block_shape, tokens, **options)
    config = spmm_fp8_config(product_problem(block_shape, tokens, sm))
    rows = parts.rows._replace(blocks=parts.rows.blocks.view(torch.uint8))
    views = parts.views._replace(x=parts.views.x.view(torch.uint8))
    items, cut = meta(33, 4, dtype=torch.int32), meta(3 if split else 0, 3, dtype=torch.int32)
    plan = SpmmPlan(items, cut, 9 if split else 0)
    scales = Scales(parts.descale, parts.x_scales, *parts.x_scales.stride())
    height, width = block_shape
    return launched_case(
        f"bsr_spmm_fp8/{name}-{height}x{width}-n{tokens}-sm{sm}",
        launch_spmm,
        *(views, rows, parts.bias, activation, plan, config, scales),
        converts_fp8=sm >= MIN_SM_CONVERTS_FP8,
        kernel=_bsr_spmm_kernel,
        sm=sm,
        max_spill_bytes=spills,
        archs=(sm,),
    )


@compile_cases
def portable_products() -> Iterator[CompileCase]:
    """Products with few and many tokens, blocks of 128, 64 and 32, every part of the epilogue."""
    for sm in ALL_ARCHS:
        for side in (128, 64, 32):
            yield portable_product("x@A.T", sm, (side, side), 4096)
        yield portable_product("x@A.T", sm, (128, 128), 16)
        yield portable_product("x@A.T", sm, (128, 128), 64)
        yield portable_product("x@A-gelu", sm, (128, 128), 4096, transposed=True, activation="gelu")
        yield portable_product("split", sm, (128, 128), 4096, split=True, extras=True)


def hopper_product(
    name: str,
    block_shape: tuple[int, int],
    tokens: int,
    *,
    split: bool = False,
    programs: int = 1,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    spills: int = 0,
    **options: Any,
) -> CompileCase:
    """A launch of the Hopper product, of few or many tokens; `spills` is what is accepted.

    `programs` split the blocks of a tile of few tokens.
    """
    parts = product_parts(block_shape, tokens, **options)
    problem = replace(product_problem(block_shape, tokens, 90), activation=activation)
    problem = replace(problem, out_dtype=out_dtype)
    views = parts.views._replace(out=parts.views.out.to(out_dtype))
    views, x_scales = next(views.entries()), parts.x_scales[0]
    height, width = block_shape
    title = f"{name}-{height}x{width}-n{tokens}"
    if (few := narrow_fp8_config(problem)) is not None:
        if programs > 1:
            sizes = (few.TILE_M, few.TILE_N, few.TILE_K * few.STAGE_BLOCKS)
            wide = out_dtype == torch.float32
            stages = narrow_stages_that_fit(*sizes, wide, programs, item_bytes=1)
            few = replace(few, STAGES=stages, SPLIT_K=programs)
        records = meta(33, 1, HEADER + 2 * 33, dtype=torch.int32)
        group_stride, col_stride = x_scales.stride()
        strides = (col_stride, group_stride)
        scales = NarrowScales(parts.descale, x_scales, *strides, x_scales.shape[0])
        operands = (views.out, parts.rows.blocks, RowSchedule(records, 33, 4), views.x)
        return launched_case(
            f"bsr_spmm_narrow_fp8_sm90/{title}",
            launch_spmm_narrow_sm90,
            *(*operands, parts.bias, views.residual, few, scales),
            expect={"wgmma": 1},
            max_spill_bytes=spills,
            archs=(90,),
        )
    items, cut = meta(33, 4, dtype=torch.int32), meta(3 if split else 0, 3, dtype=torch.int32)
    plan = SpmmPlan(items, cut, 9 if split else 0)
    return launched_case(
        f"bsr_spmm_fp8_sm90/{title}",
        launch_spmm_fp8_sm90,
        *(views, parts.rows, parts.descale, x_scales, parts.bias),
        *(plan, spmm_fp8_sm90_config(problem)),
        kernel=_spmm_fp8_sm90_kernel,
        expect={"wgmma": 4},
        max_spill_bytes=spills,
        archs=(90,),
    )


@compile_cases
def hopper_products() -> Iterator[CompileCase]:
    """Many tokens in tiles of 256 and 128, few tokens, blocks of 128, 64 and 32, the epilogue."""
    for side in (128, 64, 32):
        yield hopper_product("x@A.T", (side, side), 8192, spills=40 if side == 128 else 0)
        yield hopper_product("x@A.T", (side, side), 64)
    yield hopper_product("x@A.T", (128, 128), 16)
    yield hopper_product("x@A.T", (128, 128), 512)
    yield hopper_product("x@A.T", (256, 256), 8192, spills=32)
    # in the epilogue: sums of the second 64 tokens wait while the first are finished
    everything: dict[str, Any] = {
        "split": True,
        "extras": True,
        "activation": "gelu",
        "spills": 880,
    }
    yield hopper_product("all", (128, 128), 8192, **everything)
    yield hopper_product("all", (128, 128), 64, extras=True, activation="silu")
    yield hopper_product("fp32", (128, 128), 8192, out_dtype=torch.float32, spills=256)
    yield hopper_product("fp32", (128, 128), 64, out_dtype=torch.float32)
    if warps_may_part():
        yield hopper_product("parts2", (128, 128), 64, programs=2)
