"""Compile cases of attention whose keys have a gate."""

from collections.abc import Iterator

import torch

from ...attention.gated.live_blocks import BLOCK
from ...attention.gated.sm90 import launch_gated_sm90
from ...attention.gated.triton import backward, forward
from ...attention.triton.backward import _attn_dkdv_kernel, _attn_dq_kernel
from ...calls.attention import empty_lse, empty_out
from ...calls.gated_attention import GatedBackwardCall, GatedCall, GatedGradients, KeyGate
from ..captured_launches import launched_case, meta
from ..compile_cases import CompileCase, compile_cases
from .attention import (
    BRAIN,
    CAUSAL,
    FLOAT,
    HALF,
    HEADS,
    KV_HEADS,
    TOKENS,
    WGMMA,
    attention_call,
    integers,
)

KERNELS = {"dq": _attn_dq_kernel, "dkdv": _attn_dkdv_kernel}
# Head dim, dtype, softcap and sinks, architectures.
CASES: dict[str, tuple[int, torch.dtype, bool, tuple[int, ...]]] = {
    "d128": (128, BRAIN, False, (80, 89, 90, 120)),
    "d64": (64, HALF, True, (90,)),
    "d256": (256, BRAIN, False, (80, 89, 90, 120)),
    "float32": (80, FLOAT, False, (80, 90)),
}


def _call(dim: int, dtype: torch.dtype, more: bool, block: tuple[int, int] = BLOCK) -> GatedCall:
    """A call with a gate for each KV head, within blocks as `live_blocks` leaves them."""
    given = attention_call((dim, dim), dtype, block, band=CAUSAL, sinks=more, softcap=more)
    u, tau = (meta(2, KV_HEADS, TOKENS, dtype=kind) for kind in (dtype, FLOAT))
    return GatedCall(given, KeyGate(u, tau))


def _backward(call: GatedCall) -> GatedBackwardCall:
    given = call.attention
    out, lse = empty_out(given.q, given.v.shape[-1]), empty_lse(given.q)
    dq, dk, dv = (torch.empty_like(x) for x in (given.q, given.k, given.v))
    du, dtau = (torch.empty_like(x) for x in call.gate)
    gradients = GatedGradients(dq, dk, dv, None, du, dtau)
    return GatedBackwardCall(call, torch.empty_like(out), None, out, lse, gradients)


def _accepted_spills(kernel: str, dtype: torch.dtype, sm: int) -> int:
    """In loops with mask code; tiles are those of attention without gates, not yet measured."""
    if dtype == FLOAT:
        # Triton 3.6; 3.9 spills only in dk and dv
        return 1600
    if kernel == "dkdv":
        # without gates 852 with this tile, which measured faster than those that do not spill
        return 3072 if sm == 90 else 96
    # Triton 3.9; 3.6 spills up to 172
    return 512


# The Hopper forward: head dim, dtype, softcap and sinks, query and key blocks, accepted spills in
# the code of partial blocks.
SM90_CASES: tuple[tuple[int, torch.dtype, bool, tuple[int, int], int], ...] = (
    (128, BRAIN, False, BLOCK, 1280),
    (64, BRAIN, True, BLOCK, 320),
    (128, BRAIN, False, (64, 64), 256),
    (64, BRAIN, False, (128, 16), 4096),
)


def gated_sm90_case(
    dim: int, dtype: torch.dtype, more: bool, block: tuple[int, int], spills: int
) -> CompileCase:
    """The Hopper forward with gates; parameters as in `SM90_CASES`."""
    call = _call(dim, dtype, more, block)
    order = integers(call.attention.q.shape[0] * HEADS * TOKENS // block[0])
    return launched_case(
        f"gated_attn_fwd_sm90/d{dim}-blocks{block[0]}x{block[1]}",
        launch_gated_sm90,
        *(call, call.attention, order, 1),
        archs=(90,),
        expect=WGMMA,
        max_spill_bytes=spills,
    )


@compile_cases
def gated_attention_sm90_cases() -> Iterator[CompileCase]:
    """The Hopper forward with gates."""
    for case in SM90_CASES:
        yield gated_sm90_case(*case)


@compile_cases
def gated_attention_cases() -> Iterator[CompileCase]:
    """Forward and backward, for each tile of `attention.triton.tuning` with a mask."""
    for name, (dim, dtype, more, archs) in CASES.items():
        for sm in archs:
            # calls remember the architecture that they were asked about first
            label = f"{name}-sm_{sm}"
            spills = _accepted_spills("fwd", dtype, sm)
            yield launched_case(
                f"gated_attn_fwd/{label}",
                forward,
                _call(dim, dtype, more),
                sm=sm,
                archs=(sm,),
                max_spill_bytes=spills,
            )
            for kind, kernel in KERNELS.items():
                yield launched_case(
                    f"gated_attn_{kind}/{label}",
                    backward,
                    _backward(_call(dim, dtype, more)),
                    kernel=kernel,
                    sm=sm,
                    archs=(sm,),
                    max_spill_bytes=_accepted_spills(kind, dtype, sm),
                )
