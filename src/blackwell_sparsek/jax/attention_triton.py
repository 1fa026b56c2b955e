"""Attention and its gradients by the portable kernels, on a GPU.

The kernels and their planners are those of `bsk.attention`; what differs is who launches them.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

import jax
from jax import lax

from ..core.target import Arch
from ..dispatch.tuned import planned_for
from ..launch.description import ArraySpec, KernelLaunch
from ..masks.band import Band
from .arrays import gradient_of
from .block_mask import BlockMask
from .kernel_calls import Arrays, fp32_precision, made, run_launches

# The blocks that kernels have code for.
BLOCK_SIZES = (16, 32, 64, 128, 256)


class KernelOptions(NamedTuple):
    """What is known while tracing."""

    scale: float
    softcap: float
    """0 for none."""
    band: Band
    arch: Arch
    device_name: str
    precision: str
    """Of fp32 products."""


class Lists(NamedTuple):
    """Block lists as kernels take them (see `device.records.MaskLists`)."""

    indptr: Any
    partial_end: Any
    indices: Any
    bits_id: Any


class Problem(NamedTuple):
    """The facts of a call that tiles depend on, named as in `calls.attention.AttnProblem`."""

    arch: Arch
    dtype: Any
    batch: int
    heads_q: int
    heads_kv: int
    max_q: int
    max_k: int
    head_dim: int
    head_dim_v: int
    mask_block: tuple[int, int] | None
    bias: bool = False


def problem_of(q: Any, k: Any, v: Any, mask: BlockMask | None, arch: Arch) -> Problem:
    """The facts of arrays [B, H, S, D], or of their descriptions."""
    (batch, heads, sq, dim), sk = q.shape, k.shape[2]
    block = None if mask is None else mask.block_size
    return Problem(arch, q.dtype, batch, heads, k.shape[1], sq, sk, dim, v.shape[3], block)


def why_not_triton(q: Any, k: Any, v: Any, mask: BlockMask | None, arch: Arch) -> str | None:
    """Why the kernels cannot run a problem on a GPU that could run others, or None."""
    from ..attention.triton.tuning import why_not_key_tiles, why_not_sizes

    if mask is not None and not set(mask.block_size) <= set(BLOCK_SIZES):
        sides = ", ".join(map(str, BLOCK_SIZES))
        return f"needs a mask with block sides among {sides}, got {mask.block_size}"
    problem: Any = problem_of(q, k, v, mask, arch)
    return why_not_sizes(problem) or why_not_key_tiles(problem)


def forward_lists(mask: BlockMask) -> Lists:
    """The lists of a mask, row by row of its query blocks."""
    rows, cols, ids = (x.reshape(mask.batch * mask.heads, -1) for x in mask.entries)
    masks, entries = rows.shape
    height = mask.grid[0]
    first = jnp.arange(masks, dtype=jnp.int32)[:, None] * height
    row = jnp.where(rows < 0, masks * height, first + rows)
    # entries are sorted within each mask and fill up at its end, so they only move together
    counts = (rows >= 0).sum(1, dtype=jnp.int32)
    place = (jnp.cumsum(counts) - counts)[:, None] + jnp.arange(entries, dtype=jnp.int32)
    place = jnp.where(rows < 0, masks * entries, place).reshape(-1)
    empty = jnp.zeros(max(masks * entries, 1), jnp.int32)
    indices, bits_id = (empty.at[place].set(x.reshape(-1), mode="drop") for x in (cols, ids))
    return _lists(row.reshape(-1), ids.reshape(-1), masks * height, indices, bits_id)


def transposed_lists(mask: BlockMask) -> Lists:
    """The lists of a mask, row by row of its key blocks."""
    rows, cols, ids = (x.reshape(mask.batch * mask.heads, -1) for x in mask.entries)
    masks, width = rows.shape[0], mask.grid[1]
    first = jnp.arange(masks, dtype=jnp.int32)[:, None] * width
    col = jnp.where(rows < 0, masks * width, first + cols).reshape(-1)
    row, ids = rows.reshape(-1), ids.reshape(-1)
    order = jnp.lexsort((row, ids < 0, col))
    spare = jnp.zeros(1 if row.size == 0 else 0, jnp.int32)
    indices, bits_id = (jnp.concatenate([x[order], spare]) for x in (row, ids))
    return _lists(col, ids, masks * width, indices, bits_id)


def _lists(row: Any, ids: Any, rows: int, indices: Any, bits_id: Any) -> Lists:
    zeros = jnp.zeros(rows, jnp.int32)
    counts = zeros.at[row].add(1, mode="drop")
    partial_counts = zeros.at[row].add((ids >= 0).astype(jnp.int32), mode="drop")
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    indptr = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return Lists(indptr, indptr[:-1] + partial_counts, indices, bits_id)


class AttentionArrays(Arrays):
    """The arrays of an attention call."""

    def add_lists(self, name: str, lists: Lists) -> tuple[ArraySpec, ...]:
        """Take the lists of a mask."""
        return tuple(
            self.add(f"{name}_{field}", x) for field, x in zip(Lists._fields, lists, strict=True)
        )

    def add_call(self, options: KernelOptions, inputs: Any, transposed: bool) -> Any:
        """A call as planners take it; `inputs` are q, k, v, sinks and mask."""
        *qkv, sinks, mask = inputs
        q, k, v = (self.add(n, x) for n, x in zip("qkv", qkv, strict=True))
        described = None
        if mask is not None:
            bits = lax.bitcast_convert_type(mask.bits, jnp.int32)
            if bits.shape[0] == 0:
                bits = jnp.zeros((1, *bits.shape[1:]), jnp.int32)
            described = SimpleNamespace(
                _listed=self.add_lists("lists", forward_lists(mask)),
                bits=self.add("bits", bits),
                **{name: getattr(mask, name) for name in ("batch", "heads", "grid", "block_size")},
            )
            if transposed:
                lists = transposed_lists(mask)
                described._listed_transposed = self.add_lists("transposed", lists)
        options_of_call = SimpleNamespace(
            scale=options.scale,
            softcap=options.softcap,
            band=options.band,
            block_mask=described,
            sinks=self.add_if("sinks", sinks),
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            alibi_slopes=None,
            bias=None,
        )
        return SimpleNamespace(q=q, k=k, v=v, spec=options_of_call)


def plan_forward(options: KernelOptions, call: Any, mask: BlockMask | None) -> list[Any]:
    """The launch of the forward kernel, which writes "out" and "lse"."""
    from ..attention.triton.forward import plan_attn_fwd
    from ..attention.triton.tuning import attn_fwd_config

    problem: Any = problem_of(call.q, call.k, call.v, mask, options.arch)
    out = made("out", "output", (*call.q.shape[:3], call.v.shape[3]), call.q.dtype)
    lse = made("lse", "output", call.q.shape[:3], jnp.float32)
    with planned_for(options.device_name):
        config = attn_fwd_config(problem, options.precision)
    return [plan_attn_fwd(call, out, lse, config)]


def plan_backward(
    options: KernelOptions, call: Any, results: Any, mask: BlockMask | None
) -> list[KernelLaunch | None]:
    """The launches that write "dq", "dk", "dv" and, where there are sinks, "dsinks".

    `results` describes out, lse and what comes back for them.
    """
    from ..attention.triton.backward import plan_attn_dkdv, plan_attn_dq
    from ..attention.triton.delta import plan_attn_delta, plan_sink_gradients, sink_parts
    from ..attention.triton.tuning import attn_dkdv_config, attn_dq_config

    problem: Any = problem_of(call.q, call.k, call.v, mask, options.arch)
    out, lse, dout, dlse = results
    delta = made("delta", "scratch", lse.shape, lse.dtype)
    gradients = SimpleNamespace(
        **{f"d{n}": made(f"d{n}", "output", x.shape, x.dtype) for n, x in _qkv(call)}
    )
    backward = SimpleNamespace(forward=call, dout=dout, lse=lse, gradients=gradients)
    launches = [
        plan_attn_delta(delta, dout, out, dlse, lse),
        plan_attn_dq(backward, delta, attn_dq_config(problem, options.precision)),
        plan_attn_dkdv(backward, delta, attn_dkdv_config(problem, options.precision)),
    ]
    if call.spec.sinks is not None:
        sinks = call.spec.sinks
        parts = made("parts", "scratch", (sink_parts(lse.shape),), jnp.float32)
        dsinks = made("dsinks", "output", sinks.shape, sinks.dtype)
        launches += plan_sink_gradients(dsinks, parts, sinks, lse, delta, None)
    return launches


def _qkv(call: Any) -> list[tuple[str, ArraySpec]]:
    return [("q", call.q), ("k", call.k), ("v", call.v)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(options: KernelOptions, *inputs: Any) -> tuple[jax.Array, jax.Array]:
    """Output [B, Hq, Sq, Dv] and lse [B, Hq, Sq]; `inputs` are q, k, v, sinks and mask."""

    @sequential_vmap
    def forward(*inputs: Any) -> Any:
        q, _, v, _, mask = inputs
        arrays = AttentionArrays()
        call = arrays.add_call(options, inputs, transposed=False)
        found = run_launches(plan_forward(options, call, mask), arrays.given, options.arch)
        empty = (jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), jnp.zeros(q.shape[:3]))
        return found.get("out", empty[0]), found.get("lse", empty[1])

    return forward(*inputs)


def _attend_fwd(options: KernelOptions, *inputs: Any) -> Any:
    out, lse = attend(options, *inputs)
    return (out, lse), (*inputs, out, lse)


def _attend_bwd(options: KernelOptions, saved: Any, cotangents: Any) -> Any:
    @sequential_vmap
    def backward(inputs: Any, results: Any) -> Any:
        arrays = AttentionArrays()
        call = arrays.add_call(options, inputs, transposed=True)
        names = ("out", "lse", "dout", "dlse")
        described = [arrays.add(f"given_{n}", x) for n, x in zip(names, results, strict=True)]
        *wanted, mask = inputs
        launches = plan_backward(options, call, described, mask)
        found = run_launches(launches, arrays.given, options.arch)
        like = dict(zip(("dq", "dk", "dv", "dsinks"), wanted, strict=True))
        return [
            None if x is None else found.get(name, jnp.zeros(x.shape, x.dtype))
            for name, x in like.items()
        ]

    *wanted, mask, out, lse = saved
    gradients = backward((*wanted, mask), (out, lse, *cotangents))
    pairs = zip(wanted, gradients, strict=True)
    return *(None if x is None else gradient_of(x, g) for x, g in pairs), None


attend.defvjp(_attend_fwd, _attend_bwd)


def attention_triton(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: BlockMask | None,
    sinks: jax.Array | None,
    options: KernelOptions,
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of a checked call."""
    return attend(options, q, k, v, sinks, mask)


def kernel_options(
    scale: float, softcap: float, band: Band, arch: Arch, device_name: str, dtype: Any
) -> KernelOptions:
    """The options of a call, with the precision that JAX is set to now."""
    return KernelOptions(scale, softcap, band, arch, device_name, fp32_precision(dtype))
