# mypy: ignore-errors
"""Rounding to fp8, the portable kernels: sm_80 and newer, and the interpreter.

    y = (x - mean) H / sqrt(D)                        mean and H as asked for
    descale[g] = max |y| of group g / 448             1 if all are zero, at least 2^-120
    data = y / descale[g], rounded to nearest even

x [B, H, S, D] with any strides and a contiguous last dimension. Where a tile holds whole groups one
launch does all of it; otherwise a launch before it finds the maxima, which do not depend on the
order in which programs come. Means are summed in parts, which are added in a fixed order. Called as
impl "triton" of `bsk::fp8_quantize`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..calls.fp8 import Group, QuantizeCall
from ..core.fp8 import E5M2, SMALLEST_SCALE
from ..device.fp8 import E4M3_MAX, E5M2_MAX, e4m3_bits, e5m2_bits
from ..device.records import Strides
from ..launch.launcher import cdiv, launch, on_device_of
from ..launch.workspace import scratch

# From here on GPUs have an instruction that converts to e4m3, and programmatic dependent launch.
MIN_SM_CONVERTS_FP8, MIN_SM_PDL = 89, 90
# Tokens of a part of a mean, parts that are added at a time, tokens of a tile, and the widest tile.
CHUNK = 512
CHUNKS_AT_A_TIME = 16
TILE_TOKENS = 64
WIDEST_TILE = 256
# (up to this many tokens, tokens of a tile): few tokens get smaller tiles, so that more SMs work.
FEW_TOKENS = 64
FEW_TILES = ((4, 4), (FEW_TOKENS, 16))
# Of a tile.
MOST_ELEMENTS = 128 * 128
WIDEST_GROUP = 128
# What tensor cores multiply with in a rotation, and the fewest columns that `tl.dot` takes.
WIDEST_MATRIX = tl.constexpr(128)
FEWEST_COLUMNS = 16
_SMALLEST = tl.constexpr(SMALLEST_SCALE)


class Sizes(NamedTuple):
    """Heads, tokens and channels."""

    heads: Any
    tokens: Any
    channels: Any


@triton.jit
def _is_finite(x):
    """Neither infinite nor NaN."""
    return tl.abs(x) < float("inf")


@triton.jit
def _signs(WIDTH: tl.constexpr, STEPS: tl.constexpr, dtype: tl.constexpr):
    """The Hadamard matrix [WIDTH, WIDTH]: -1 where two indices share an odd number of bits.

    Columns from 2**STEPS on are zero.
    """
    columns = tl.arange(0, WIDTH)[None, :]
    shared = tl.arange(0, WIDTH)[:, None] & columns
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    signs = tl.where((shared & 1) == 0, 1.0, -1.0)
    if WIDTH > 2**STEPS:
        signs = tl.where(columns < 2**STEPS, signs, 0.0)
    return signs.to(dtype)


@triton.jit
def _fast_transform(x, STEPS: tl.constexpr):
    """Rows [rows, D] times the Hadamard matrix of 2**STEPS, for each 2**STEPS of their columns."""
    ROWS: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    SIZE: tl.constexpr = 2**STEPS
    PARTS: tl.constexpr = ROWS * D // SIZE
    x = tl.reshape(x, (PARTS, SIZE))
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(x, (PARTS, SIZE // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (PARTS, SIZE))
    return tl.reshape(x, (ROWS, D))


@triton.jit
def _by_tensor_cores(x, STEPS: tl.constexpr):
    """The first 2**STEPS columns in 16 bits times that matrix: products with 1 and -1 are exact."""
    ROWS: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    WIDTH: tl.constexpr = min(D, WIDEST_MATRIX)
    parts = tl.reshape(x, (ROWS * D // WIDTH, WIDTH))
    y = tl.dot(parts, _signs(WIDTH, STEPS, x.dtype), input_precision="ieee")
    if D > WIDTH:
        # the last step of the fast transform, so that the matrix takes little shared memory
        left, right = tl.split(tl.permute(tl.reshape(y, (ROWS, 2, WIDTH)), (0, 2, 1)))
        y = tl.permute(tl.join(left + right, left - right), (0, 2, 1))
    return tl.reshape(y, (ROWS, D))


@triton.jit
def rotate(x, STEPS: tl.constexpr):
    """Rows [rows, 2**STEPS] times the Hadamard matrix over its root, as `calls.fp8.rotated`.

    Rows may end in zeros that make them wider; so does the result, in fp32.
    """
    y = _fast_transform(x, STEPS) if x.dtype == tl.float32 else _by_tensor_cores(x, STEPS)
    return y * (2.0 ** (STEPS * -0.5))


@triton.jit
def _place(sizes, TILE_S: tl.constexpr, TILE_D: tl.constexpr):
    """(batch, head), its first token and first channel of this program."""
    column_tiles = tl.cdiv(sizes.channels, TILE_D)
    row_tiles = tl.cdiv(sizes.tokens, TILE_S)
    pid = tl.program_id(0)
    tile = pid // column_tiles
    return tile // row_tiles, tile % row_tiles * TILE_S, pid % column_tiles * TILE_D


@triton.jit
def _head_offset(n, sizes, strides):
    """Offset of a (batch, head)."""
    batch = (n // sizes.heads).to(tl.int64)
    return batch * strides.batch + (n % sizes.heads).to(tl.int64) * strides.head


@triton.jit
def _load(x_ptr, mean_ptr, n, rows, columns, sizes, strides, STEPS: tl.constexpr):
    """A tile in fp32, smoothed and rotated; 0 where there is nothing."""
    live = (rows < sizes.tokens)[:, None] & (columns < sizes.channels)[None, :]
    offsets = rows.to(tl.int64)[:, None] * strides.token + columns[None, :]
    at = x_ptr + _head_offset(n, sizes, strides) + offsets
    x = tl.load(at, mask=live, other=0.0)
    if STEPS > 0:
        x = rotate(x, STEPS)
    x = x.to(tl.float32)
    if mean_ptr is not None:
        mean_at = mean_ptr + n.to(tl.int64) * sizes.channels + columns
        mean = tl.load(mean_at, mask=columns < sizes.channels, other=0.0)[None, :]
        if STEPS > 0:
            # x - mean takes more than the 16 bits that tensor cores multiply
            mean = rotate(mean, STEPS)
        x = tl.where(live, x - mean, 0.0)
    return x


@triton.jit
def _amax(x, GROUP_SIZE_S: tl.constexpr, GROUP_SIZE_D: tl.constexpr):
    """The largest finite magnitude of each group: [1, 1], one per row or one per column."""
    magnitude = tl.where(_is_finite(x), tl.abs(x), 0.0)
    if GROUP_SIZE_D == 1:
        top = tl.max(magnitude, 0, keep_dims=True)
    else:
        top = tl.max(magnitude, 1, keep_dims=True)
        if GROUP_SIZE_S != 1:
            top = tl.max(top, 0, keep_dims=True)
    return top


@triton.jit
def _group_places(
    n, s_start, d_start, sizes, GROUP_SIZE_S: tl.constexpr, GROUP_SIZE_D: tl.constexpr,
    TILE_S: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Indices of the groups of a tile, shaped as `_amax` does, and which of them exist."""
    HEIGHT: tl.constexpr = TILE_S if GROUP_SIZE_S == 1 else 1
    WIDTH: tl.constexpr = TILE_D if GROUP_SIZE_D == 1 else 1
    rows = s_start + tl.arange(0, HEIGHT)
    columns = d_start + tl.arange(0, WIDTH)
    live = (rows < sizes.tokens)[:, None] & (columns < sizes.channels)[None, :]
    at = tl.zeros([HEIGHT, WIDTH], tl.int64)
    if GROUP_SIZE_S >= 0:
        at += n
        if GROUP_SIZE_S > 0:
            at = at * tl.cdiv(sizes.tokens, GROUP_SIZE_S) + (rows // GROUP_SIZE_S)[:, None]
        if GROUP_SIZE_D > 0:
            at = at * tl.cdiv(sizes.channels, GROUP_SIZE_D) + (columns // GROUP_SIZE_D)[None, :]
    return at, live


@triton.jit
def _is_first(n, s_start, d_start, GROUP_SIZE_S: tl.constexpr, GROUP_SIZE_D: tl.constexpr):
    """Whether a tile is the first of its groups."""
    first = s_start == 0
    if GROUP_SIZE_S > 0:
        first = s_start % GROUP_SIZE_S == 0
    if GROUP_SIZE_D == 0:
        first = first & (d_start == 0)
    if GROUP_SIZE_S < 0:
        first = first & (n == 0)
    return first


@triton.jit(do_not_specialize=["heads", "tokens", "chunks"])
def _sums_kernel(
    sums_ptr, x_ptr, strides, heads, tokens, channels, chunks,
    CHUNK: tl.constexpr, TILE_S: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Sums of the finite values of CHUNK tokens, fp32 [B * H, chunks, D]."""
    sizes = Sizes(heads, tokens, channels)
    n, start, d_start = _place(sizes, CHUNK, TILE_D)
    columns = d_start + tl.arange(0, TILE_D)
    total = tl.zeros([TILE_D], tl.float32)
    for first in tl.range(0, CHUNK, TILE_S):
        rows = start + first + tl.arange(0, TILE_S)
        x = _load(x_ptr, None, n, rows, columns, sizes, strides, 0)
        total += tl.sum(tl.where(_is_finite(x), x, 0.0), 0)
    part = n.to(tl.int64) * chunks + start // CHUNK
    tl.store(sums_ptr + part * channels + columns, total, mask=columns < channels)


@triton.jit(do_not_specialize=["tokens", "channels", "chunks"])
def _means_kernel(
    mean_ptr, sums_ptr, tokens, channels, chunks, TILE_S: tl.constexpr, TILE_D: tl.constexpr
):
    """Means fp32 [B * H, D] from what `_sums_kernel` leaves."""
    tiles = tl.cdiv(channels, TILE_D)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.program_id(0) % tiles * TILE_D + tl.arange(0, TILE_D)
    total = tl.zeros([TILE_D], tl.float32)
    for first in tl.range(0, chunks, TILE_S):
        parts = first + tl.arange(0, TILE_S)
        at = sums_ptr + (n * chunks + parts)[:, None] * channels + columns[None, :]
        live = (parts < chunks)[:, None] & (columns < channels)[None, :]
        total += tl.sum(tl.load(at, mask=live, other=0.0), 0)
    mean = tl.math.div_rn(total, tl.full([TILE_D], 1.0, tl.float32) * tokens)
    tl.store(mean_ptr + n * channels + columns, mean, mask=columns < channels)


@triton.jit(do_not_specialize=["heads", "tokens"])
def _amax_kernel(
    amax_ptr, x_ptr, mean_ptr, strides, heads, tokens, channels,
    GROUP_SIZE_S: tl.constexpr, GROUP_SIZE_D: tl.constexpr, LOG2_HADAMARD_SIZE: tl.constexpr,
    TILE_S: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Maxima of all groups, as bits of fp32: for what is not negative they have the same order."""
    sizes = Sizes(heads, tokens, channels)
    n, s_start, d_start = _place(sizes, TILE_S, TILE_D)
    rows, columns = s_start + tl.arange(0, TILE_S), d_start + tl.arange(0, TILE_D)
    x = _load(x_ptr, mean_ptr, n, rows, columns, sizes, strides, LOG2_HADAMARD_SIZE)
    top = _amax(x, GROUP_SIZE_S, GROUP_SIZE_D)
    at, live = _group_places(n, s_start, d_start, sizes, GROUP_SIZE_S, GROUP_SIZE_D, TILE_S, TILE_D)
    tl.atomic_max(amax_ptr + at, top.to(tl.int32, bitcast=True), mask=live, sem="relaxed")


@triton.jit(do_not_specialize=["heads", "tokens"])
def _quantize_kernel(
    data_ptr, descale_ptr, x_ptr, mean_ptr, amax_ptr, strides, data_strides,
    heads, tokens, channels,
    GROUP_SIZE_S: tl.constexpr, GROUP_SIZE_D: tl.constexpr,
    LOG2_HADAMARD_SIZE: tl.constexpr, TRANSPOSED: tl.constexpr, FORMAT: tl.constexpr,
    TILE_S: tl.constexpr, TILE_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Round one tile; without `amax_ptr` it holds whole groups."""
    if PDL:
        # a product of few tokens reads its schedule while this runs, and then waits
        gdc_launch_dependents()
        gdc_wait()
    sizes = Sizes(heads, tokens, channels)
    n, s_start, d_start = _place(sizes, TILE_S, TILE_D)
    rows, columns = s_start + tl.arange(0, TILE_S), d_start + tl.arange(0, TILE_D)
    x = _load(x_ptr, mean_ptr, n, rows, columns, sizes, strides, LOG2_HADAMARD_SIZE)
    at, live = _group_places(n, s_start, d_start, sizes, GROUP_SIZE_S, GROUP_SIZE_D, TILE_S, TILE_D)
    if amax_ptr is None:
        top = _amax(x, GROUP_SIZE_S, GROUP_SIZE_D)
    else:
        top = tl.load(amax_ptr + at, mask=live, other=0).to(tl.float32, bitcast=True)
        # all tiles of a group find the same scale; the first of them stores it
        live = live & _is_first(n, s_start, d_start, GROUP_SIZE_S, GROUP_SIZE_D)
    LIMIT: tl.constexpr = E5M2_MAX if FORMAT == "e5m2" else E4M3_MAX
    scale = tl.math.div_rn(top, tl.full(top.shape, LIMIT, tl.float32))
    scale = tl.where(top == 0.0, 1.0, tl.maximum(scale, _SMALLEST))
    tl.store(descale_ptr + at, scale, mask=live)

    x = x * tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    if FORMAT == "e5m2":
        bits = e5m2_bits(x)
    elif FORMAT == "e4m3 converted":
        bits = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = e4m3_bits(x)
    data_ptr += _head_offset(n, sizes, data_strides)
    if TRANSPOSED:
        # `data_strides.token` is that from channel to channel, and tokens are contiguous
        offsets = columns.to(tl.int64)[:, None] * data_strides.token + rows[None, :]
        kept = (columns < channels)[:, None] & (rows < tokens)[None, :]
        tl.store(data_ptr + offsets, tl.trans(bits), mask=kept)
    else:
        offsets = rows.to(tl.int64)[:, None] * data_strides.token + columns[None, :]
        kept = (rows < tokens)[:, None] & (columns < channels)[None, :]
        tl.store(data_ptr + offsets, bits, mask=kept)


class Tile(NamedTuple):
    """Tokens and channels of a tile, and whether it holds whole groups."""

    tokens: int
    channels: int
    local: bool


def tile_of(group: Group, tokens: int, channels: int) -> Tile:
    """The tile that a program rounds."""
    if group.channels > 1:
        height = next((tile for most, tile in FEW_TILES if tokens <= most), TILE_TOKENS)
        return Tile(max(group.tokens, height), group.channels, True)
    width = min(max(triton.next_power_of_2(channels), FEWEST_COLUMNS), WIDEST_TILE)
    if group.tokens > 1:
        whole = channels <= width and group.tokens * width <= MOST_ELEMENTS
        return Tile(group.tokens if whole else min(group.tokens, TILE_TOKENS), width, whole)
    return Tile(TILE_TOKENS, width, False)


def quantize(call: QuantizeCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data, scales and means of a call."""
    data, descale, mean = call.empty_data(), call.empty_descale(), call.empty_mean()
    if call.x.numel() == 0:
        return data, descale.fill_(1.0), mean.zero_()
    with on_device_of(call.x):
        if call.smooth:
            *outer, tokens, channels = call.x.shape
            shape = (torch.Size(outer).numel(), cdiv(tokens, CHUNK), channels)
            sums = scratch(shape, torch.float32, call.x.device)
            launch_sums(call, sums)
            launch_means(call, mean, sums)
        converts = call.problem.arch.sm >= MIN_SM_CONVERTS_FP8
        pdl = call.problem.arch.sm >= MIN_SM_PDL and _as_4d(call.x).shape[2] <= FEW_TOKENS
        options = {"converts_fp8": converts, "pdl": pdl and not call.smooth}
        launch_quantize(call, data, descale, mean if call.smooth else None, **options)
    return data, descale, mean


def launch_sums(call: QuantizeCall, sums: torch.Tensor) -> None:
    """Fill `sums`, fp32 [B * H, chunks, D], with those of CHUNK tokens each."""
    x = _as_4d(call.x)
    batch, heads, tokens, channels = x.shape
    tile_d = min(triton.next_power_of_2(channels), WIDEST_GROUP)
    programs = batch * heads * sums.shape[1] * cdiv(channels, tile_d)
    sizes = (heads, tokens, channels, sums.shape[1])
    args = (sums, x, _strides(x), *sizes, CHUNK, TILE_TOKENS, tile_d)
    launch(_sums_kernel, programs, args, num_warps=4)


def launch_means(call: QuantizeCall, mean: torch.Tensor, sums: torch.Tensor) -> None:
    """Fill `mean`, fp32 [..., D] contiguous, from the `sums` of `launch_sums`."""
    batch_heads, chunks, channels = sums.shape
    tile_d = min(triton.next_power_of_2(channels), WIDEST_GROUP)
    args = (mean, sums, call.x.shape[-2], channels, chunks, CHUNKS_AT_A_TIME, tile_d)
    launch(_means_kernel, batch_heads * cdiv(channels, tile_d), args, num_warps=4)


def launch_quantize(
    call: QuantizeCall,
    data: torch.Tensor,
    descale: torch.Tensor,
    mean: torch.Tensor | None,
    *,
    converts_fp8: bool = False,
    pdl: bool = False,
) -> None:
    """Fill `data` and `descale`.

    Parameters
    ----------
    call : at least one element
    data, descale : as `call.empty_data` and `call.empty_descale` make them; all of it is written
    mean : fp32 [..., D] contiguous, what to subtract from every token, or None
    converts_fp8 : whether the GPU has an instruction for e4m3 (sm_89 on); the bits are the same
    pdl : start before the previous kernel has ended, and wait on the device (sm_90 on)
    """
    x, group = _as_4d(call.x), call.group
    batch, heads, tokens, channels = x.shape
    tile = tile_of(group, tokens, channels)
    programs = batch * heads * cdiv(tokens, tile.tokens) * cdiv(channels, tile.channels)
    # 64 values in each thread at the most
    warps = 8 if tile.tokens * tile.channels > 8192 else 4
    sizes = (heads, tokens, channels)
    steps = channels.bit_length() - 1 if call.hadamard else 0
    # -1: all tokens of all heads
    groups = (-1, 0) if call.scale == "tensor" else group
    amax = None
    if not tile.local:
        amax = scratch(descale.shape, torch.int32, x.device, zero=True)
        tiles = (tile.tokens, tile.channels)
        args = (amax, x, mean, _strides(x), *sizes, *groups, steps, *tiles)
        launch(_amax_kernel, programs, args, num_warps=warps)
    stored = _as_4d((data.mT if call.transposed else data).view(torch.uint8))
    precision = "e4m3 converted" if converts_fp8 else "e4m3"
    if call.dtype == E5M2:
        precision = "e5m2"
    args = (
        stored,
        descale,
        x,
        mean,
        amax,
        _strides(x),
        _strides(stored),
        *sizes,
        *groups,
        steps,
        call.transposed,
        precision,
        tile.tokens,
        tile.channels,
        pdl,
    )
    # the interpreter does not know the option
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    launch(_quantize_kernel, programs, args, num_warps=warps, **options)


def _as_4d(x: torch.Tensor) -> torch.Tensor:
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x


def _strides(x: torch.Tensor) -> Strides:
    # a dimension of size 1 may have any stride; 0 keeps it from compiling another variant
    return Strides(*(x.stride(d) if x.shape[d] > 1 else 0 for d in range(3)))
