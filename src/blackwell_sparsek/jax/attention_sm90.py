"""The forward kernel for Hopper under JAX: which calls it takes, and its launch."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

import jax

from ..core.env import triton_interpreted
from ..core.target import Arch
from ..launch.description import KernelLaunch
from ..masks.band import EVERYTHING, Band
from .attention_problem import Problem, problem_of
from .batching import common_batch
from .ffi import why_no_ffi
from .kernel_calls import made


@dataclass(frozen=True, kw_only=True)
class HopperProblem(Problem):
    """`Problem`, with the properties that only the Hopper kernel needs."""

    banded: bool
    softcap: bool
    positive: bool
    varlen: bool = False
    tokens: None = None
    tma: bool = True
    """Arrays of JAX are contiguous; rows of 8 elements or more are a condition of their own."""
    alibi: bool = False
    mask_per_kv_head: bool = False


def hopper_problem(
    q: Any,
    k: Any,
    v: Any,
    block: tuple[int, int] | None,
    band: Band,
    factors: tuple[float, float],
    arch: Arch,
) -> HopperProblem:
    """The problem of arrays [B, H, S, D], or of their descriptions.

    `block` is the block size of the mask; `factors` are scale and softcap, 0 for none.
    """
    scale, softcap = factors
    return HopperProblem(
        **vars(problem_of(q, k, v, block, arch)),
        banded=band != EVERYTHING,
        softcap=softcap != 0.0,
        # under a softcap, the factor before the softmax is the softcap
        positive=scale > 0 or softcap > 0,
    )


def why_not_sm90(problem: HopperProblem) -> str | None:
    """Why the kernel cannot run a call that the portable kernels can run, or None."""
    from ..attention.sm90.tuning import attn_fwd_sm90_unsupported
    from ..core.compat import why_no_gluon, why_no_launcher

    facts: Any = problem
    return (
        attn_fwd_sm90_unsupported(facts)
        or ("does not run interpreted: TRITON_INTERPRET is set" if triton_interpreted() else None)
        or why_no_gluon()
        or why_no_launcher()
        or why_no_ffi()
    )


def passed_over(problem: HopperProblem) -> str | None:
    """Why "auto" does not take the kernel where it could run, or None."""
    from ..attention.sm90.tuning import attn_fwd_sm90_passed_over

    facts: Any = problem
    return attn_fwd_sm90_passed_over(facts)


def with_own_memory(inputs: Any) -> tuple[Any, ...]:
    """q, k, v, sinks and mask with a batch for each of q, k and v: TMA takes no stride of 0."""
    *qkv, sinks, mask = inputs
    batch = common_batch([x.shape[0] for x in qkv] + ([] if mask is None else [mask.batch]))
    own = [x if x.shape[0] == batch else _repeated(x, batch) for x in qkv]
    return (*own, sinks, mask)


def _repeated(x: jax.Array, batch: int) -> jax.Array:
    return jnp.broadcast_to(x, (batch, *x.shape[1:])) if x.shape[0] == 1 else x


def plan_forward_sm90(call: Any, arch: Arch) -> KernelLaunch | None:
    """The launch that writes "out" and "lse", or None if there is nothing to compute."""
    from ..attention.sm90.forward_plan import plan_attn_fwd_sm90, schedule_of_call
    from ..attention.sm90.forward_producer import Workspace
    from ..attention.sm90.tuning import attn_fwd_sm90_config, attn_fwd_sm90_raster_group

    q, k, v, spec = call.q, call.k, call.v, call.spec
    block = None if spec.block_mask is None else spec.block_mask.block_size
    factors = spec.scale, spec.softcap
    problem: Any = hopper_problem(q, k, v, block, spec.band, factors, arch)
    config = attn_fwd_sm90_config(problem)
    schedule = schedule_of_call(call, None, config, arch.num_sms)
    if schedule is None:
        return None
    out = made("out", "output", (*q.shape[:3], v.shape[3]), q.dtype)
    lse = made("lse", "output", q.shape[:3], jnp.float32)
    parts = None
    if config.SPLIT_TAIL:
        # any array will do if the tail is not split: it is not read
        parts = lse
        if schedule.tail_share > 0:
            parts = made("parts", "scratch", schedule.parts_shape(config), jnp.float32)
    counters = made("counters", "counters", (schedule.counters,), jnp.int32)
    raster_group = attn_fwd_sm90_raster_group(problem, spec.band)
    workspace = Workspace(counters, None, parts)
    return plan_attn_fwd_sm90(call, out, lse, workspace, raster_group, schedule, config)
