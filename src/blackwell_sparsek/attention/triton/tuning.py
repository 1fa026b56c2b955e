"""(architecture, problem) -> tiles of the portable attention kernels.

Tiles may not depend on a length, a window or the content of a mask: a change of those must not
compile anything. Each choice is the largest tile that compiles without spills, unless a comment
says otherwise; `testing.compile_only` shows registers and shared memory. The dQ kernel keeps one
accumulator of TILE_M rows, the dK/dV kernel two of TILE_N rows, which alone fill half of the
registers.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ...dispatch.tuned import tuned_tile

if TYPE_CHECKING:
    from ...calls.attention import AttnProblem, MergeProblem
    from ...calls.fp8 import Fp8AttnProblem

PRECISIONS = ("ieee", "tf32")
# From here on GPUs have an instruction that converts e4m3.
MIN_SM_CONVERTS_FP8 = 89


@dataclass(frozen=True)
class AttnFwdConfig:
    """Tiles and launch options of the forward kernel: all that a launch needs besides its tensors.

    Parameters
    ----------
    tile_m, tile_n : queries and keys of one tile; powers of two, at least 16
    num_warps, num_stages : launch options of Triton
    precision : of fp32 products: "ieee" or "tf32"; ignored for 16-bit inputs
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n"):
            side = getattr(self, name)
            if side < 16 or side & (side - 1):
                raise ValueError(f"{name} is {side}; expected a power of two from 16 on")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; expected one of {PRECISIONS}")


class AttnBwdConfig(AttnFwdConfig):
    """The same for a kernel of the backward pass."""


# GPUs whose programs get at least 160 KiB of shared memory; all others have 99 KiB.
LARGE_SMEM = (80, 87, 90, 100, 101, 103, 110)
# Data-centre Hopper and Blackwell: warp groups of 128 threads issue products.
WARP_GROUP_MMA = (90, 100, 101, 103, 110)


class _Tile(NamedTuple):
    m: int
    n: int
    warps: int
    stages: int


def attn_fwd_fp8_config(problem: "Fp8AttnProblem") -> AttnFwdConfig:
    """Tiles of the forward kernel for fp8, whose products have fp16 operands."""
    import torch

    config = attn_fwd_config(replace(problem, dtype=torch.float16), "ieee")
    dim = max(problem.head_dim, problem.head_dim_v)
    # where integer arithmetic converts, 128 rows spill 200 to 650 bytes
    if problem.arch.sm < MIN_SM_CONVERTS_FP8 and dim > 64:
        config = replace(config, tile_m=min(config.tile_m, 64))
    # on Hopper 64 keys spill 324 bytes, 32 keys 44
    return replace(config, tile_n=min(config.tile_n, 32)) if dim > 128 else config


def attn_fwd_config(problem: "AttnProblem", precision: str) -> AttnFwdConfig:
    """Tiles of the forward kernel; `precision` applies to fp32 products."""
    dim = max(problem.head_dim, problem.head_dim_v)
    block_q = None if problem.mask_block is None else problem.mask_block[0]
    facts = (problem.arch.sm, problem.dtype.itemsize, dim, block_q, precision)
    tile = tuned_tile("attn_fwd", facts) or _tile(*facts)
    config = AttnFwdConfig(*tile, precision)
    # where a warp holds scores, 64 keys of a bias spill 60 to 120 bytes
    narrow = problem.bias and problem.arch.sm not in WARP_GROUP_MMA
    return replace(config, tile_n=min(config.tile_n, 32)) if narrow else config


@lru_cache(maxsize=1024)
def _tile(sm: int, itemsize: int, dim: int, block_q: int | None, precision: str) -> _Tile:
    if itemsize == 4:
        tile = _forward_tile_fp32(sm, dim, precision)
    elif sm in WARP_GROUP_MMA:
        tile = _tile_warp_group(dim, masked=block_q is not None)
    else:
        tile = _tile_warp(sm, dim, masked=block_q is not None)
    return tile if block_q is None or block_q >= tile.m else _cut(tile, block_q, dim)


def _tile_warp_group(dim: int, masked: bool) -> _Tile:
    if dim <= 64:
        # wide tiles amortise a softmax step, but with a mask its bits need those registers
        return _Tile(128, 64, 8, 3) if masked else _Tile(128, 128, 8, 3)
    if dim <= 128:
        # 128 x 128 leaves room for only two stages and spills with a mask
        return _Tile(128, 64, 8, 3)
    # fp32 accumulators of 128 rows x 256 columns alone fill the registers of 8 warps
    return _Tile(64, 64, 8, 2)


def _tile_warp(sm: int, dim: int, masked: bool) -> _Tile:
    if dim <= 64:
        return _Tile(128, 32 if masked else 64, 8, 3)
    if dim <= 128:
        # 96 KiB with three stages; 64 KiB with two, which fit 99 KiB with room to spare
        return _Tile(128, 64, 8, 3 if sm in LARGE_SMEM and not masked else 2)
    return _Tile(64, 64 if sm in LARGE_SMEM and not masked else 32, 8, 2)


def _forward_tile_fp32(sm: int, dim: int, precision: str) -> _Tile:
    if precision == "tf32":
        if dim <= 64:
            return _Tile(64, 32, 4, 2)
        if dim <= 128:
            return _Tile(64, 32, 8, 2)
        return _Tile(32, 32 if sm in LARGE_SMEM else 16, 8, 2)
    # products on the CUDA cores: operands live in registers, so tiles are small
    if dim <= 64:
        return _Tile(32, 32, 4, 2)
    if dim <= 128:
        return _Tile(32, 32, 8, 1)
    return _Tile(16, 16, 8, 1)


def _cut(tile: _Tile, block_q: int, dim: int) -> _Tile:
    """A tile within one query block: four warps for its columns, or two if it has only 16 rows."""
    warps = (4 if dim > 128 else 2) if block_q < 32 else 8 if dim > 128 and block_q > 32 else 4
    return _Tile(block_q, min(tile.n, 64), warps, 2 if block_q < 64 else tile.stages)


def attn_dq_config(problem: "AttnProblem", precision: str) -> AttnBwdConfig:
    """Tiles of the dQ kernel; `precision` applies to fp32 products."""
    sm, itemsize, dim = _facts(problem)
    tile = _dq_tile(sm, itemsize, dim, problem.mask_block is not None, precision)
    if problem.mask_block is not None and problem.mask_block[0] < tile.m:
        rows = problem.mask_block[0]
        tile = tile._replace(m=rows, warps=2 if rows < 32 and dim <= 128 else 4)
    if problem.bias and sm not in WARP_GROUP_MMA and tile.m > 64:
        # 128 rows of a bias spill 260 to 530 bytes
        tile = tile._replace(m=64)
    return AttnBwdConfig(*tile, precision)


def attn_dkdv_config(problem: "AttnProblem", precision: str) -> AttnBwdConfig:
    """Tiles of the dK/dV kernel."""
    sm, itemsize, dim = _facts(problem)
    tile = _dkdv_tile(sm, itemsize, dim, precision)
    if problem.mask_block is not None and problem.mask_block[1] < tile.n:
        # two accumulators of 16 rows x 128 columns spill with two warps; with few keys, registers
        # are left for more queries
        keys = problem.mask_block[1]
        queries = 64 if keys <= 32 and dim <= 128 and itemsize == 2 else tile.m
        tile = tile._replace(m=queries, n=keys, warps=4)
    return AttnBwdConfig(*tile, precision)


def _facts(problem: "AttnProblem") -> tuple[int, int, int]:
    return problem.arch.sm, problem.dtype.itemsize, max(problem.head_dim, problem.head_dim_v)


@lru_cache(maxsize=1024)
def _dq_tile(sm: int, itemsize: int, dim: int, masked: bool, precision: str) -> _Tile:
    if itemsize == 4:
        return _backward_tile_fp32(sm, dim, precision)
    if dim <= 64:
        if sm == 90:
            # measured: four warps 628 TFLOP/s, eight 440; with a mask its bits need the registers
            return _Tile(128, 64, 8 if masked else 4, 3)
        return _Tile(128, 64, 8, 2)
    if dim <= 128:
        # measured: three stages 604 TFLOP/s, two 461
        if sm == 90:
            return _Tile(128, 64, 8, 3)
        # Q and dO stay in shared memory beside two stages of K and V: 128 KiB, or 80 KiB
        return _Tile(128, 64 if sm in LARGE_SMEM else 32, 8, 2)
    return _Tile(64 if sm in LARGE_SMEM else 32, 32, 8, 2)


@lru_cache(maxsize=1024)
def _dkdv_tile(sm: int, itemsize: int, dim: int, precision: str) -> _Tile:
    if itemsize == 4:
        tile = _backward_tile_fp32(sm, dim, precision)
        return _Tile(tile.n, tile.m, tile.warps, tile.stages)
    if sm == 90:
        return _dkdv_tile_hopper(dim)
    if sm in WARP_GROUP_MMA:
        # accumulators in tensor memory; with two stages the compiler moves them through registers
        return _Tile(64, 128 if dim <= 128 else 64, 8, 1)
    if dim <= 64:
        return _Tile(32, 128, 8, 2)
    if dim <= 128:
        return _Tile(64, 64, 8, 2)
    # 64 keys spill, and need more than 99 KiB
    return _Tile(32, 32, 8, 2)


def _dkdv_tile_hopper(dim: int) -> _Tile:
    # measured: one warp group of 64 keys per program, with two programs on an SM, is faster than
    # tiles that do not spill (525 TFLOP/s at 128 columns; 32 x 128 gives 331 to 482, 64 x 128 496);
    # most spills are outside the loop without mask code
    if dim <= 64:
        return _Tile(64, 64, 4, 3)
    if dim <= 128:
        return _Tile(64, 64, 4, 2)
    return _Tile(32, 64, 8, 2)


def _backward_tile_fp32(sm: int, dim: int, precision: str) -> _Tile:
    if precision == "tf32":
        if dim <= 128:
            return _Tile(32, 32, 4 if dim <= 64 else 8, 2)
        return _Tile(32 if sm in LARGE_SMEM else 16, 16, 8, 1)
    # products on the CUDA cores: operands live in registers, so tiles are small
    if dim <= 64:
        return _Tile(32, 32, 4, 1)
    if dim <= 128:
        return _Tile(32 if sm in LARGE_SMEM else 16, 32, 8, 1)
    return _Tile(16, 16, 8, 1)


# Reasons why the portable kernels cannot run a problem.


def _why_not_portable(arch: Any, dtype: Any) -> str | None:
    # asks torch, which programs that only plan launches need not have
    from ...dispatch.machine import why_not_portable

    return why_not_portable(arch, dtype)


LARGEST_HEAD_DIM = 256
# Positions and band limits are int32 in kernels, and so is the number of programs.
LONGEST = 2**30 - 1
MOST_PROGRAMS = 2**31 - 1
SMALLEST_TILE = 16


def why_not_forward(problem: "AttnProblem") -> str | None:
    """Why the forward kernel cannot run this problem, or None when it can."""
    if (reason := _why_not_portable(problem.arch, problem.dtype)) is not None:
        return reason
    return why_not_sizes(problem)


def why_not_fp8(problem: "Fp8AttnProblem") -> str | None:
    """Why the forward kernel for fp8 cannot run this problem, or None when it can."""
    if (reason := _why_not_portable(problem.arch, problem.out_dtype)) is not None:
        return reason
    return why_not_sizes(problem)


def why_not_sizes(problem: "AttnProblem") -> str | None:
    """Why the forward kernel cannot run these sizes, whatever the machine, or None."""
    dims = (problem.head_dim, problem.head_dim_v)
    if not 1 <= min(dims) <= max(dims) <= LARGEST_HEAD_DIM:
        return f"needs head dimensions of 1 to {LARGEST_HEAD_DIM}, got {dims[0]} and {dims[1]}"
    if max(problem.max_q, problem.max_k) > LONGEST:
        return f"needs sequences of at most {LONGEST} tokens"
    tiles = -(-problem.max_q // SMALLEST_TILE)
    if problem.batch * problem.heads_q * tiles > MOST_PROGRAMS:
        return f"needs at most {MOST_PROGRAMS} query tiles over batch and heads"
    return None


def why_not_backward(problem: "AttnProblem") -> str | None:
    """Why the backward kernels cannot run this problem, or None when they can."""
    return why_not_forward(problem) or why_not_key_tiles(problem)


def why_not_key_tiles(problem: "AttnProblem") -> str | None:
    """Why the kernel of dk and dv cannot run these sizes, whatever the machine, or None."""
    tiles = -(-problem.max_k // SMALLEST_TILE)
    if problem.batch * problem.heads_kv * tiles > MOST_PROGRAMS:
        return f"needs at most {MOST_PROGRAMS} key tiles over batch and heads"
    return None


def why_not_merge(problem: "MergeProblem") -> str | None:
    """Why the merge kernel cannot run this problem, or None when it can."""
    return _why_not_portable(problem.arch, problem.dtype)
