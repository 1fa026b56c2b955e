"""Attention called from JAX, against the same calls in torch and JAX's own attention.

In a loop, every call takes the result of the one before as its queries, so that no compiler can
leave one out; the figure is the time of the loop over the number of its calls. Of one call, it is
the time until its result is there, with what the host does before and after. `bsk_jax` and `bsk`
launch the same kernels, and so do `bsk_jax_triton` and `bsk_triton`.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.utils.dlpack

from ... import attention
from ..case import REPORTED, Case, Contender, Peer, Suite
from .attention import dtype_of
from .attention_peers import OURS, options_of
from .attention_problem import Attention, AttentionInputs

# Calls of one loop.
CALLS = 50
# Calls in the body of a loop of XLA: with one alone, its result is copied to where the next reads.
UNROLLED = 2
OURS_JAX, OURS_JAX_TRITON, OURS_TRITON = "bsk_jax", "bsk_jax_triton", "bsk_triton"
DPA, DPA_CUDNN = "jax_dpa", "jax_dpa_cudnn"


class Calls(NamedTuple):
    """A problem, and how many calls are timed together."""

    inputs: AttentionInputs
    repeats: int


def _why_no_jax() -> str | None:
    if find_spec("jax") is None:
        return "jax is not installed"
    import jax

    return None if jax.default_backend() == "gpu" else "JAX sees no GPU"


def _why_no_kernels() -> str | None:
    missing = None if find_spec("jax_triton") else "jax-triton is not installed"
    return missing or _why_no_jax()


def _contender(calls: Calls, loop: Callable[[int], Any]) -> Contender:
    """A loop that makes this many calls, waits for the last, and returns its result for torch."""

    def measured() -> float:
        begin = time.perf_counter()
        loop(calls.repeats)
        return (time.perf_counter() - begin) / calls.repeats

    # compiles; the result of one call is what fp64 is compared with
    loop(calls.repeats)
    check = calls.inputs.check()
    return Contender(measured, lambda seconds: check(loop(1)), calls.inputs.flops)


def _in_torch(calls: Calls, impl: str) -> Contender:
    inputs, options = calls.inputs, options_of(calls.inputs)

    def loop(count: int) -> Any:
        out: Any = inputs.q
        for _ in range(count):
            out = attention(out, inputs.k, inputs.v, impl=impl, **options)
        torch.cuda.synchronize(inputs.q.device)
        return out

    return _contender(calls, loop)


def _in_jax(call: Callable[..., Any], arrays: tuple[Any, ...]) -> Callable[[int], Any]:
    """A loop of `call(out, *arrays)`, which keeps the layout of the queries `arrays[0]`."""
    import jax

    def looped(count: int, q: Any, *others: Any) -> Any:
        def step(_: Any, out: Any) -> Any:
            return call(out, *others)

        # a count known while tracing: otherwise the host reads the condition from the GPU each time
        return jax.lax.fori_loop(0, count, step, q, unroll=UNROLLED) if count > 1 else step(0, q)

    compiled = jax.jit(looped, static_argnums=0)
    return lambda count: compiled(count, *arrays).block_until_ready()


def _as_torch(x: Any) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(x)


def _as_jax(x: torch.Tensor) -> Any:
    import jax.numpy as jnp

    return jnp.from_dlpack(x.contiguous())


def _ours(calls: Calls, impl: str) -> Contender:
    from ... import jax as bsk_jax

    inputs, p = calls.inputs, calls.inputs.problem
    mask = None if inputs.mask is None else bsk_jax.BlockMask.from_torch(inputs.mask)

    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return bsk_jax.attention(
            q, k, v, causal=p.causal, window=p.window, block_mask=mask, impl=impl
        )

    arrays = (*map(_as_jax, (inputs.q, inputs.k, inputs.v)), mask)
    loop = _in_jax(call, arrays)
    return _contender(calls, lambda count: _as_torch(loop(count)))


def _dot_product_attention(calls: Calls, implementation: str) -> Contender:
    import jax

    inputs, p = calls.inputs, calls.inputs.problem
    shown = None
    if inputs.keep is not None and p.block is not None:
        blocks = inputs.keep.repeat_interleave(p.block[0], 1).repeat_interleave(p.block[1], 2)
        shown = _as_jax(blocks[None, :, : p.length, : p.length])

    def call(q: Any, k: Any, v: Any, shown: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, mask=shown, is_causal=p.causal, implementation=implementation
        )

    loop = _in_jax(call, (*map(_as_jax, inputs.token_major()), shown))
    return _contender(calls, lambda count: _as_torch(loop(count)).transpose(1, 2))


PEERS = {
    OURS_JAX: Peer(
        OURS_JAX,
        "blackwell_sparsek.jax, impl auto",
        lambda x: _ours(x, "auto"),
        _why_no_kernels,
    ),
    OURS_JAX_TRITON: Peer(
        OURS_JAX_TRITON,
        "blackwell_sparsek.jax, impl triton",
        lambda x: _ours(x, "triton"),
        _why_no_kernels,
    ),
    OURS: Peer(OURS, "torch, impl auto", lambda x: _in_torch(x, "auto")),
    OURS_TRITON: Peer(OURS_TRITON, "torch, impl triton", lambda x: _in_torch(x, "triton")),
    DPA: Peer(
        DPA,
        "jax.nn.dot_product_attention, XLA",
        lambda x: _dot_product_attention(x, "xla"),
        _why_no_jax,
        rival=True,
    ),
    DPA_CUDNN: Peer(
        DPA_CUDNN,
        "jax.nn.dot_product_attention, cuDNN",
        lambda x: _dot_product_attention(x, "cudnn"),
        _why_no_jax,
        rival=True,
    ),
}


def jax_attention(tiny: bool = False) -> Iterator[Case]:
    """Attention from JAX, in a jitted loop and as single calls, against torch and JAX's own."""
    dtype, sizes = dtype_of(tiny), (1, 2, 64, 16) if tiny else (1, 16, 4096, 128)
    block, density = (16, 16) if tiny else (128, 128), 0.22
    problems = {
        "4k, 22 % of the blocks": Attention(*sizes, dtype=dtype, block=block, density=density),
        "4k, causal": Attention(*sizes, dtype=dtype, causal=True),
        "4k": Attention(*sizes, dtype=dtype),
    }
    if not tiny:
        batch, heads, length, dim = sizes
        doubled = (batch, heads, 2 * length, dim)
        problems["8k, causal"] = Attention(*doubled, dtype=dtype, causal=True)
        problems["8k"] = Attention(*doubled, dtype=dtype)
    for how, count in (("in a loop", CALLS), ("one call", 1)):
        for name, problem in problems.items():
            facts = {**problem.describe(), "calls": count}
            build = partial(_build, problem, count)
            yield Case(f"{name}, {how}", facts, build, (*PEERS,), modes=(REPORTED,))


def _build(problem: Attention, count: int, device: torch.device) -> Calls:
    return Calls(problem.build(device), count)


SUITES = [
    Suite(
        "jax", jax_attention.__doc__ or "", jax_attention, PEERS, OURS_JAX, unit="us", gpu_only=True
    )
]
