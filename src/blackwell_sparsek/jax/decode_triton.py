"""Decoding by the portable kernel, on a GPU: see `attention_triton`."""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

import jax

from ..core.errors import Unsupported
from ..core.target import Arch
from ..launch.description import KernelLaunch
from .attention_triton import KernelOptions
from .kernel_calls import Arrays, made, run_launches

NO_DERIVATIVE = (
    "attention_decode: has no derivative; use attention for training, or jax.lax.stop_gradient"
)


class Problem(NamedTuple):
    """The facts of a call that tiles depend on, named as in `calls.decode.DecodeProblem`."""

    arch: Arch
    dtype: Any
    cache_dtype: Any
    batch: int
    heads_kv: int
    rows: int
    capacity: int
    head_dim: int
    head_dim_v: int
    alibi: bool = False


def problem_of(q: Any, cache: Any, arch: Arch) -> Problem:
    """The facts of a call; `cache` has k, v and page_table."""
    batch, heads, sq, dim = q.shape
    paged = cache.page_table is not None
    heads_kv = cache.k.shape[2 if paged else 1]
    capacity = cache.page_table.shape[1] * cache.k.shape[1] if paged else cache.k.shape[2]
    rows, dim_v = sq * heads // heads_kv, cache.v.shape[3]
    return Problem(arch, q.dtype, cache.k.dtype, batch, heads_kv, rows, capacity, dim, dim_v)


def why_not_triton(q: Any, cache: Any, arch: Arch) -> str | None:
    """Why the kernel cannot run a problem on a GPU that could run others, or None."""
    from ..decode.portable_tuning import LARGEST_HEAD_DIM, why_not_head_dims, why_not_sizes

    problem: Any = problem_of(q, cache, arch)
    return why_not_head_dims(problem, LARGEST_HEAD_DIM) or why_not_sizes(problem)


def plan(
    options: KernelOptions, kv_block: int, q: Any, cache: Any, sinks: Any, arrays: Arrays
) -> KernelLaunch | None:
    """The launch that writes "out" and "lse"; `cache` is that of `decode`."""
    from ..decode.portable_tuning import attn_decode_config
    from ..decode.triton import DecodeWorkspace, partials_shape, plan_attn_decode

    problem = problem_of(q, cache, options.arch)
    wanted: Any = problem
    config = attn_decode_config(wanted, options.precision)
    page_size = None if cache.page_table is None else cache.k.shape[1]
    call = SimpleNamespace(
        q=arrays.add("q", q),
        k_cache=arrays.add("k", cache.k),
        v_cache=arrays.add("v", cache.v),
        cache_seqlens=arrays.add("lengths", cache.lengths),
        page_table=arrays.add_if("page_table", cache.page_table),
        kv_blocks=arrays.add_if("kv_blocks", cache.kv_blocks),
        sinks=arrays.add_if("sinks", sinks),
        kv_block_size=kv_block if page_size is None else page_size,
        page_size=page_size,
        kv_heads=problem.heads_kv,
        capacity=problem.capacity,
        band=options.band,
        scale=options.scale,
        softcap=options.softcap,
        k_scale=None,
        v_scale=None,
        alibi_slopes=None,
    )
    shape = partials_shape(config, problem.head_dim_v)
    workspace = DecodeWorkspace(
        made("partials", "scratch", shape, jnp.float32),
        made("counters", "zeroed", (config.programs,), jnp.int32),
        None,
    )
    out = made("out", "output", (*q.shape[:3], problem.head_dim_v), q.dtype)
    lse = made("lse", "output", q.shape[:3], jnp.float32)
    caches = (call.k_cache, call.v_cache)
    return plan_attn_decode(out, lse, call, caches, workspace, config)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def decode_triton(
    options: KernelOptions, kv_block: int, q: jax.Array, cache: Any, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of a checked call; `kv_block` is the size of listed blocks without pages."""

    @sequential_vmap
    def kernels(q: jax.Array, cache: Any, sinks: jax.Array | None) -> Any:
        arrays = Arrays()
        launch = plan(options, kv_block, q, cache, sinks, arrays)
        found = run_launches([launch], arrays.given, options.arch)
        shape = (*q.shape[:3], cache.v.shape[3])
        empty = jnp.zeros(shape, q.dtype), jnp.zeros(shape[:3], jnp.float32)
        return found.get("out", empty[0]), found.get("lse", empty[1])

    return kernels(q, cache, sinks)


@decode_triton.defjvp
def _refuse_gradients(options: Any, kv_block: Any, primals: Any, tangents: Any) -> Any:
    raise Unsupported(NO_DERIVATIVE)
