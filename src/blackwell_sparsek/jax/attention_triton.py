"""Attention and its gradients by kernels, on a GPU.

Kernels and planners are shared with `bsk.attention`; only the launch differs. The portable kernels
compute everything, except that the forward can run the Hopper kernel.
"""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jax

from ..core.target import Arch
from ..dispatch.tuned import planned_for
from ..launch.description import ArraySpec, KernelLaunch
from ..masks.band import Band
from .arrays import gradient_of
from .attention_problem import problem_of
from .attention_sm90 import plan_forward_sm90, with_own_memory
from .batching import batch_of, common_batch, fold_axis, vmapped
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
    hopper: bool = False
    """Whether the forward runs the Hopper kernel."""


class Lists(NamedTuple):
    """Block lists as kernels take them (see `device.records.MaskLists`)."""

    indptr: Any
    """Followed by what `partial_end` would be, if that is None."""
    partial_end: Any
    indices: Any
    bits_id: Any


def why_not_triton(q: Any, k: Any, v: Any, mask: BlockMask | None, arch: Arch) -> str | None:
    """Why the kernels cannot run a problem on a GPU that could run others, or None."""
    from ..attention.triton.tuning import why_not_key_tiles, why_not_sizes

    if mask is not None and not set(mask.block_size) <= set(BLOCK_SIZES):
        sides = ", ".join(map(str, BLOCK_SIZES))
        return f"needs a mask with block sides among {sides}, got {mask.block_size}"
    problem: Any = problem_of(q, k, v, _block_of(mask), arch)
    return why_not_sizes(problem) or why_not_key_tiles(problem)


def _block_of(mask: BlockMask | None) -> tuple[int, int] | None:
    return None if mask is None else mask.block_size


def forward_lists(mask: BlockMask) -> Lists:
    """The lists of a mask by blocks of queries, `mask.grid[0] + 1` rows for each of its masks."""
    entries, lists = mask.entries, mask.lists
    return _joined(lists.row_start, lists.row_full, entries.kv_block, entries.bits_id)


def transposed_lists(mask: BlockMask) -> Lists:
    """The lists of a mask by blocks of keys, `mask.grid[1] + 1` rows for each of its masks."""
    lists = mask.lists
    return _joined(lists.column_start, lists.column_full, lists.q_block, lists.bits_id)


def _joined(start: Any, full: Any, indices: Any, bits_id: Any) -> Lists:
    """The lists of all masks as one, without moving an entry.

    What fills up the list of a mask is in a last row of its own, which no kernel visits.
    """
    room = indices.shape[-1]
    masks = math.prod(indices.shape[:2])
    if room == 0:
        # kernels read no entry, but take a pointer
        indices = bits_id = start
    if masks > 1 and room > 0:
        first = room * np.arange(masks, dtype=np.int32).reshape(*start.shape[:2], 1)
        # one array, so that one small kernel adds to both before each call
        start, full = jnp.stack([start, full]) + first, None
    return Lists(*(None if x is None else x.reshape(-1) for x in (start, full, indices, bits_id)))


class AttentionArrays(Arrays):
    """The arrays of an attention call."""

    def add_lists(self, name: str, lists: Lists) -> tuple[ArraySpec, ...]:
        """Take the lists of a mask."""
        named = lists._asdict()
        indptr, partial_end, *others = (self.add_if(f"{name}_{n}", x) for n, x in named.items())
        assert indptr is not None
        bounds = indptr.halves() if partial_end is None else (indptr, partial_end)
        return (*bounds, *(x for x in others if x is not None))

    def add_call(self, options: KernelOptions, inputs: Any, transposed: bool) -> Any:
        """A call as planners take it; `inputs` are q, k, v, sinks and mask."""
        *qkv, sinks, mask = inputs
        batches = [x.shape[0] for x in qkv] + ([] if mask is None else [mask.batch])
        batch = common_batch(batches)
        q, k, v = (self.add(n, x).with_batch(batch) for n, x in zip("qkv", qkv, strict=True))
        described = None
        if mask is not None:
            listed = self.add_lists("lists", forward_lists(mask))
            described = SimpleNamespace(
                _listed=listed,
                # without partial blocks kernels read no bits, but take a pointer
                bits=self.add("bits", mask.bits) if mask.bits.size else listed[0],
                # a row and a column more, for what fills up the lists
                grid=(mask.grid[0] + 1, mask.grid[1] + 1),
                **{name: getattr(mask, name) for name in ("batch", "heads", "block_size")},
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

    if options.hopper:
        return [plan_forward_sm90(call, options.arch)]
    problem: Any = problem_of(call.q, call.k, call.v, _block_of(mask), options.arch)
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

    problem: Any = problem_of(call.q, call.k, call.v, _block_of(mask), options.arch)
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


def _fold_inputs(size: int, is_mapped: Any, inputs: Any) -> tuple[Any, int] | None:
    """q, k, v, sinks and mask with an axis folded into the batch; sinks have no batch."""
    *_, sinks_are_mapped, mask_is_mapped = is_mapped
    *_, sinks, mask = inputs
    if sinks_are_mapped:
        return None
    qkv = list(zip(inputs[:3], is_mapped[:3], strict=True))
    sizes = [batch_of(x, mapped) for x, mapped in qkv]
    if mask is not None:
        sizes.append(batch_of(mask.entries.q_block, mask_is_mapped.entries.q_block))
    batch = common_batch(sizes)
    folded = [fold_axis(x, mapped, size, batch) for x, mapped in qkv]
    if mask is not None:
        mask = mask.folded(mask_is_mapped, size, batch)
    return (*folded, sinks, mask), batch


def _fold_backward(size: int, is_mapped: Any, inputs: Any) -> tuple[Any, int] | None:
    """The inputs and results of a forward, and what came back for the results, likewise."""
    call_is_mapped, results_are_mapped = is_mapped
    call, results = inputs
    *_, sinks, _ = call
    # each entry has a gradient of its own for the sinks, which the kernels add up over the batch
    folded = _fold_inputs(size, call_is_mapped, call) if sinks is None else None
    if folded is None:
        return None
    arrays, batch = folded
    pairs = zip(results, results_are_mapped, strict=True)
    return (arrays, [fold_axis(x, m, size, batch, broadcasts=False) for x, m in pairs]), batch


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(options: KernelOptions, *inputs: Any) -> tuple[jax.Array, jax.Array]:
    """Output [B, Hq, Sq, Dv] and lse [B, Hq, Sq]; `inputs` are q, k, v, sinks and mask."""

    def forward(*inputs: Any) -> Any:
        *_, mask = inputs
        arrays = AttentionArrays()
        if options.hopper:
            inputs = with_own_memory(inputs)
        call = arrays.add_call(options, inputs, transposed=False)
        found = run_launches(plan_forward(options, call, mask), arrays.given, options.arch)
        if "out" in found:
            return found["out"], found["lse"]
        rows, dim_v = call.q.shape[:3], call.v.shape[3]
        return jnp.zeros((*rows, dim_v), call.q.dtype), jnp.zeros(rows)

    return vmapped(forward, _fold_inputs)(*inputs)


def _attend_fwd(options: KernelOptions, *inputs: Any) -> Any:
    out, lse = attend(options, *inputs)
    return (out, lse), (*inputs, out, lse)


def _attend_bwd(options: KernelOptions, saved: Any, cotangents: Any) -> Any:
    def backward(inputs: Any, results: Any) -> Any:
        arrays = AttentionArrays()
        call = arrays.add_call(options, inputs, transposed=True)
        names = ("out", "lse", "dout", "dlse")
        described = [arrays.add(f"given_{n}", x) for n, x in zip(names, results, strict=True)]
        *_, mask = inputs
        launches = plan_backward(options, call, described, mask)
        found = run_launches(launches, arrays.given, options.arch)
        like = {"dq": call.q, "dk": call.k, "dv": call.v, "dsinks": call.spec.sinks}
        # of an empty problem nothing is found
        return [
            found[name] if name in found else None if x is None else jnp.zeros(x.shape, x.dtype)
            for name, x in like.items()
        ]

    *wanted, mask, out, lse = saved
    gradients = vmapped(backward, _fold_backward)((*wanted, mask), [out, lse, *cotangents])
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
    scale: float,
    softcap: float,
    band: Band,
    arch: Arch,
    device_name: str,
    dtype: Any,
    hopper: bool = False,
) -> KernelOptions:
    """The options of a call, with the precision that JAX is set to now."""
    return KernelOptions(scale, softcap, band, arch, device_name, fp32_precision(dtype), hopper)
