"""The portable decode kernel as implementation `triton` of `bsk::attn_decode`.

Triton and the kernel are imported at the first call.
"""

import torch

from ..attention.triton.tuning import LARGEST_HEAD_DIM as _LARGEST_HEAD_DIM
from ..attention.triton.tuning import LONGEST as _LONGEST
from ..calls.attention import empty_lse, empty_out
from ..calls.decode import DecodeProblem, DecodeSpec
from ..dispatch.machine import fp32_precision, why_no_kernels, why_not_portable
from .tuning import attn_decode_config, attn_decode_sm90_launch, attn_decode_sm90_unsupported

_FP8 = torch.float8_e4m3fn
_MIN_SM_FP8 = 89
# Tiles of all sequences and heads lie in one row that int32 counts.
_MOST_TILES = 2**31 - 1
_SMALLEST_TILE = 16


def why_not_triton(problem: DecodeProblem) -> str | None:
    """Why the kernel cannot run this problem, or None when it can."""
    if (reason := why_not_portable(problem.arch, problem.dtype)) is not None:
        return reason
    if problem.cache_dtype == _FP8:
        if problem.dtype == torch.float32:
            return "needs float16 or bfloat16 queries for a float8 cache, got torch.float32"
        if problem.arch.sm < _MIN_SM_FP8 and not problem.arch.interpreted:
            return f"needs sm_{_MIN_SM_FP8} or newer for a float8 cache, got {problem.arch}"
    dims = (problem.head_dim, problem.head_dim_v)
    if not 1 <= min(dims) <= max(dims) <= _LARGEST_HEAD_DIM:
        return f"needs head dimensions of 1 to {_LARGEST_HEAD_DIM}, got {dims[0]} and {dims[1]}"
    if problem.capacity > _LONGEST:
        return f"needs caches of at most {_LONGEST} tokens a sequence"
    planes = problem.batch * problem.heads_kv * -(-problem.rows // _SMALLEST_TILE)
    if planes * (problem.capacity // _SMALLEST_TILE + 1) > _MOST_TILES:
        return f"needs at most {_MOST_TILES} tiles over all sequences and heads"
    return None


def run_triton(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, spec: DecodeSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, laid out as `empty_out` and `empty_lse` do."""
    from .triton import launch_attn_decode

    config = attn_decode_config(
        DecodeProblem.of(q, k_cache, v_cache, spec), fp32_precision(q.dtype)
    )
    out, lse = empty_out(q, v_cache.shape[-1]), empty_lse(q)
    launch_attn_decode(out, lse, q, k_cache, v_cache, spec, config)
    return out, lse


# The Hopper decode kernel as implementation `sm90` of `bsk::attn_decode`.
#
# Triton and the kernel are imported at the first call.


def why_not_sm90(problem: DecodeProblem) -> str | None:
    """Why the kernel cannot run this problem, or None when it can."""
    return why_no_kernels(problem.arch) or attn_decode_sm90_unsupported(problem)


def run_sm90(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, spec: DecodeSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, laid out as `empty_out` and `empty_lse` do."""
    from .sm90_launch import launch_attn_decode_sm90

    chosen = attn_decode_sm90_launch(DecodeProblem.of(q, k_cache, v_cache, spec))
    out, lse = empty_out(q, v_cache.shape[-1]), empty_lse(q)
    launch_attn_decode_sm90(out, lse, q, k_cache, v_cache, spec, *chosen)
    return out, lse
