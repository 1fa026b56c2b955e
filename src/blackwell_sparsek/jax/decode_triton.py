"""Decoding by the portable kernel, on a GPU: see `attention_triton`."""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp

import jax

from ..core.errors import Unsupported
from ..core.target import Arch
from ..launch.description import KernelLaunch
from .attention_triton import KernelOptions
from .batching import batch_of, fold_axis, fold_pool, vmapped
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
    k_cache, v_cache = arrays.add("k", cache.k), arrays.add("v", cache.v)
    if page_size is None:
        k_cache, v_cache = (x.with_batch(problem.batch) for x in (k_cache, v_cache))
    call = SimpleNamespace(
        q=arrays.add("q", q),
        k_cache=k_cache,
        v_cache=v_cache,
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


def _fold(size: int, is_mapped: Any, inputs: Any) -> tuple[Any, int] | None:
    """q, cache and sinks with an axis folded into the batch; sinks have no batch."""
    q_is_mapped, cache_is_mapped, sinks_are_mapped = is_mapped
    q, cache, sinks = inputs
    if sinks_are_mapped:
        return None
    batch = batch_of(q, q_is_mapped)
    fold = partial(fold_axis, size=size, batch=batch, broadcasts=False)
    mapped = cache_is_mapped._asdict()
    if cache.page_table is not None:
        keys, values = cache_is_mapped.k, cache_is_mapped.v
        if keys != values:
            # one page table serves both
            return None
        pages, table, mapped["page_table"] = fold_pool(
            cache.k, cache.page_table, keys, cache_is_mapped.page_table, size
        )
        folded_v = cache.v.reshape(-1, *cache.v.shape[2:]) if values else cache.v
        cache = cache._replace(k=pages, v=folded_v, page_table=table)
    else:
        k, v = (fold_axis(getattr(cache, n), mapped[n], size, batch) for n in "kv")
        cache = cache._replace(k=k, v=v)
    lists = ("lengths", "page_table", "kv_blocks")
    cache = cache._replace(**{n: fold(getattr(cache, n), mapped[n]) for n in lists})
    return (fold(q, q_is_mapped), cache, sinks), batch


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def decode_triton(
    options: KernelOptions, kv_block: int, q: jax.Array, cache: Any, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of a checked call; `kv_block` is the size of listed blocks without pages."""

    def kernels(q: jax.Array, cache: Any, sinks: jax.Array | None) -> Any:
        arrays = Arrays()
        launch = plan(options, kv_block, q, cache, sinks, arrays)
        found = run_launches([launch], arrays.given, options.arch)
        shape = (*q.shape[:3], cache.v.shape[3])
        if "out" in found:
            return found["out"], found["lse"]
        return jnp.zeros(shape, q.dtype), jnp.zeros(shape[:3], jnp.float32)

    return vmapped(kernels, _fold)(q, cache, sinks)


@decode_triton.defjvp
def _refuse_gradients(options: Any, kv_block: Any, primals: Any, tangents: Any) -> Any:
    raise Unsupported(NO_DERIVATIVE)
