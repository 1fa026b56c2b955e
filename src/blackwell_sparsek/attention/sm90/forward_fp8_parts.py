# mypy: ignore-errors
"""Shared by both tile loops of the fp8 forward: scales of scores, and weights as operands."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.scores import cap
from ...launch.descriptors import accumulator_layout
from .forward_producer import tile_starts

# The layout of 16-bit operands; the layout of the configuration is for fp8 operands.
_wide_layout = gluon.constexpr_function(accumulator_layout)
# Tokens that share a scale.
SCALE_TOKENS = gl.constexpr(128)


class HeadScales(NamedTuple):
    """Scales of a tensor, None if they are 1: strides of batch, head, and block or channel."""

    ptr: Any
    batch: Any
    head: Any
    last: Any


@gluon.jit
def head_scales_at(scales, batch, head):
    """Pointer to the scales of a (batch, head)."""
    return scales.ptr + (batch.to(gl.int64) * scales.batch + head.to(gl.int64) * scales.head)


@gluon.jit
def cap_scaled(s, score, scale):
    """`cap` for scores that are to be multiplied by `scale` first."""
    if score.inverse_cap is not None:
        s = cap(s, score.inverse_cap * scale)
    return s


@gluon.jit
def exponent_factor(score, scale):
    """The factor from what `cap_scaled` returns to exponents; a softcap has taken the scale in."""
    factor = score.factor
    if score.inverse_cap is None:
        factor = factor * scale
    return factor


@gluon.jit
def tile_scale(scale, k_scales, k_scale_ptr, visit, kv_tile, CFG: gl.constexpr):
    """`scale` of the queries times that of the keys of a tile."""
    if CFG.K_BLOCKS:
        block = tile_starts(visit, kv_tile, CFG)[0] // SCALE_TOKENS
        scale = scale * gl.load(k_scale_ptr + block.to(gl.int64) * k_scales.last)
    return scale


@gluon.jit
def packed_weights(weights, CFG: gl.constexpr):
    """Weights [64, keys] rounded to e4m3, four neighbouring keys to a word.

    A loop that carries single bytes from tile to tile has a register for each of them. Threads
    exchange pairs of keys, which one thread holds before and after: half as many exchanges as for
    single values.
    """
    rows: gl.constexpr = weights.shape[0]
    keys: gl.constexpr = weights.shape[1]
    # two bytes are to 16-bit operands what four are to those in fp8
    of_pairs: gl.constexpr = gl.DotOperandLayout(0, _wide_layout(CFG.SLICE_DV), 2)
    bits = weights.to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    low, high = bits.reshape([rows, keys // 2, 2]).split()
    pairs = low.to(gl.uint16) | (high.to(gl.uint16) << 8)
    pairs = gl.convert_layout(pairs, of_pairs)
    low, high = pairs.reshape([rows, keys // 4, 2]).split()
    return low.to(gl.uint32) | (high.to(gl.uint32) << 16)


@gluon.jit
def weight_operand(words, CFG: gl.constexpr):
    """`packed_weights` as the first operand of WGMMA."""
    rows: gl.constexpr = words.shape[0]
    keys: gl.constexpr = 4 * words.shape[1]
    sums: gl.constexpr = CFG.accumulator_layout(CFG.SLICE_DV)
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 4)
    even = gl.join(words.to(gl.uint8), (words >> 16).to(gl.uint8))
    odd = gl.join((words >> 8).to(gl.uint8), (words >> 24).to(gl.uint8))
    bits = gl.join(even, odd).reshape([rows, keys])
    return gl.convert_layout(bits.to(gl.float8e4nv, bitcast=True), operand, assert_trivial=True)
