"""Compile cases of sparse attention."""

from collections.abc import Iterator
from typing import Any

import torch

from ...calls.attention import empty_lse, empty_out
from ...calls.sparse_attention import (
    SparseAttentionCall,
    SparseAttnGradients,
    SparseAttnSpec,
    SparseBackwardCall,
)
from ...masks.band import Band
from ...masks.key_selection import KeySelection
from ...sparse_attention.sm90.backward import backward as backward_sm90
from ...sparse_attention.sm90.dkdv import _sparse_attn_dkdv_sm90_kernel
from ...sparse_attention.sm90.dq import _sparse_attn_dq_sm90_kernel
from ...sparse_attention.sm90.forward import launch_sparse_attn_fwd_sm90
from ...sparse_attention.sm90.gathered import (
    _sparse_attn_gathered_kernel,
    launch_sparse_attn_gathered,
)
from ...sparse_attention.sm90.gathered_tuning import sparse_gathered_config
from ...sparse_attention.sm90.latent import launch_sparse_attn_latent
from ...sparse_attention.sm90.latent_tuning import sparse_latent_config
from ...sparse_attention.sm90.tuning import sparse_attn_sm90_config
from ...sparse_attention.triton.backward import (
    _sparse_attn_dkdv_kernel,
    _sparse_attn_dq_kernel,
    backward,
)
from ...sparse_attention.triton.forward import forward
from ...sparse_attention.triton.unions import _sparse_attn_unions_kernel, merge_lists
from ..captured_launches import launched_case, meta
from ..compile_cases import CompileCase, compile_cases

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
# Query heads, KV heads, D, entries, their keys: MSA, QSA, NSA, and small ones.
GEOMETRIES = {
    "msa": (BRAIN, 64, 4, 128, 16, 128),
    "qsa": (BRAIN, 24, 2, 256, 512, 4),
    "nsa": (HALF, 64, 4, 128, 16, 64),
    "mla": (BRAIN, 128, 1, 576, 2048, 1),
    "mla-64": (HALF, 64, 1, 576, 2048, 1),
    "mla-16": (BRAIN, 16, 1, 576, 2048, 1),
    "mla-8": (BRAIN, 8, 1, 576, 2048, 1),
    "mla-blocks": (BRAIN, 16, 1, 576, 16, 64),
    "tokens": (BRAIN, 16, 1, 64, 2048, 1),
    "group": (HALF, 16, 1, 128, 256, 16),
    "narrow": (BRAIN, 16, 1, 64, 16, 64),
    "wide": (BRAIN, 64, 1, 256, 16, 64),
    "float32": (FLOAT, 6, 2, 80, 7, 32),
    "float32-wide": (FLOAT, 64, 2, 256, 7, 128),
    "float32-tokens": (FLOAT, 64, 2, 128, 200, 1),
}
# Those whose values are narrower than their keys: latent attention, which has no backward.
VALUE_DIMS = dict.fromkeys(("mla", "mla-64", "mla-16", "mla-8", "mla-blocks"), 512)
TOKENS = 4099
KERNELS = {"dq": _sparse_attn_dq_kernel, "dkdv": _sparse_attn_dkdv_kernel}


def _int32(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def _selection(lists: int, entries: int, size: int) -> KeySelection:
    ids = _int32(1, lists, TOKENS, entries)
    return KeySelection._from_tensors(ids, _int32(1, lists, TOKENS), size, TOKENS)


def _call(name: str, options: str = "") -> SparseAttentionCall:
    """A call of a geometry; `options` is "", "gated" (and capped), "capped" or "packed"."""
    dtype, heads, kv_heads, dim, entries, size = GEOMETRIES[name]
    chosen = _selection(kv_heads, entries, size)
    more: dict[str, Any] = {}
    by_head = (heads, kv_heads, kv_heads)
    shapes = [[1, n, TOKENS, dim] for n in by_head]
    if options == "gated":
        more["gate"] = meta(*chosen.ids.shape, dtype=torch.float32)
    if options in ("gated", "capped"):
        more["sinks"] = meta(heads, dtype=torch.float32)
        more["softcap"] = 30.0
    if options == "packed":
        shapes = [[TOKENS, n, dim] for n in by_head]
        more |= {"cu_seqlens_q": _int32(4), "cu_seqlens_k": _int32(4)}
    *_, of_v = shapes
    of_v[-1] = VALUE_DIMS.get(name, dim)
    q, k, v = (meta(*shape, dtype=dtype) for shape in shapes)
    spec = SparseAttnSpec(
        0.1, chosen, Band(None, 0), Band(127, 0), max_q=TOKENS, max_k=TOKENS, **more
    )
    return SparseAttentionCall(q, k, v, spec)


def _paged() -> SparseAttentionCall:
    """One query of each of two sequences over pages."""
    ids = _int32(2, 4, 1, 16)
    chosen = KeySelection._from_tensors(ids, _int32(2, 4, 1), 64, 64 * 16)
    spec = SparseAttnSpec(
        0.1, chosen, max_q=1, max_k=1024, page_table=_int32(2, 64), cache_seqlens=_int32(2)
    )
    k, v = (meta(99, 16, 4, 128) for _ in range(2))
    return SparseAttentionCall(meta(2, 32, 1, 128), k, v, spec)


def _backward(call: SparseAttentionCall) -> SparseBackwardCall:
    out, lse = torch.empty_like(call.q), empty_lse(call.q)
    spec = call.spec
    wanted = (torch.empty_like(x) for x in (call.q, call.k, call.v))
    others = (None if x is None else torch.empty_like(x) for x in (spec.sinks, spec.gate))
    return SparseBackwardCall(call, out, None, out, lse, SparseAttnGradients(*wanted, *others))


ALL = (80, 89, 90, 100, 120)
# each tile on its architectures; all of them where shared memory is tight
CASES: dict[tuple[str, str], tuple[int, ...]] = {
    ("msa", ""): (80, 90),
    ("nsa", ""): ALL,
    ("nsa", "gated"): (80, 90),
    ("nsa", "packed"): (90,),
    ("narrow", "gated"): (90,),
    ("wide", ""): (89, 90, 120),
    ("qsa", ""): (80, 90),
    ("qsa", "gated"): (90,),
    ("mla", ""): ALL,
    ("mla", "gated"): (90,),
    ("mla-8", ""): (90,),
    ("mla-blocks", ""): (89, 90),
    ("tokens", ""): (90,),
    ("float32", ""): (90,),
    ("float32-wide", ""): (89, 120),
    ("float32-tokens", ""): (90,),
}


def _accepted_spills(name: str, sm: int) -> int:
    # the smallest tile of full fp32 products; 16 warps spill twice as much
    if name == "float32-wide":
        return 1088
    # eight registers of the loop over blocks
    if name == "mla-blocks":
        return 32
    # four registers of dq
    return 32 if name == "wide" and sm != 90 else 0


@compile_cases
def sparse_attention_cases() -> Iterator[CompileCase]:
    """Geometries of models, gates, packed keys and pages."""
    for (name, options), archs in CASES.items():
        for sm in archs:
            label = "-".join(filter(None, (name, options, f"sm_{sm}")))
            made: dict[str, Any] = {"sm": sm, "archs": (sm,)}
            made["max_spill_bytes"] = _accepted_spills(name, sm)
            yield launched_case(f"sparse_attn_fwd/{label}", forward, _call(name, options), **made)
            if options == "packed" or name in VALUE_DIMS:
                # lists of packed sequences are made by torch, whose meta device has no values
                continue
            call = _backward(_call(name, options))
            for kind, kernel in KERNELS.items():
                label_of = f"sparse_attn_{kind}/{label}"
                yield launched_case(label_of, backward, call, kernel=kernel, **made)
    yield launched_case("sparse_attn_fwd/paged", forward, _paged())


# The Hopper kernel. Heads of 256 columns spill 44 bytes with 224 registers and with 232.
SM90_CASES = (
    ("msa", ""),
    ("nsa", ""),
    ("nsa", "gated"),
    ("nsa", "packed"),
    ("narrow", "gated"),
    ("wide", ""),
)


def _launch_sm90(call: SparseAttentionCall) -> None:
    out, lse = empty_out(call.q, call.v.shape[-1]), empty_lse(call.q)
    launch_sparse_attn_fwd_sm90(call, out, lse, sparse_attn_sm90_config(call.problem), 132)


@compile_cases
def sparse_attention_sm90_cases() -> Iterator[CompileCase]:
    """Entries of 64 and 128 keys, gates, packed keys, wide heads."""
    for name, options in SM90_CASES:
        label = "-".join(filter(None, (name, options)))
        yield launched_case(
            f"sparse_attn_fwd_sm90/{label}", _launch_sm90, _call(name, options), archs=(90,),
            expect={"wgmma.mma_async": 1}, max_spill_bytes=48 if name == "wide" else 0,
        )  # fmt: skip


# The Hopper kernel for latent keys.
LATENT_SPILLS = {"mla": 328, "mla-8": 232, "mla-gated": 272, "paged": 364}
LATENT_CASES = (
    ("mla", ""),
    ("mla", "gated"),
    ("mla-8", ""),
)


def _launch_latent(call: SparseAttentionCall) -> None:
    out, lse = empty_out(call.q, call.v.shape[-1]), empty_lse(call.q)
    launch_sparse_attn_latent(call, out, lse, sparse_latent_config(call.problem), 132)


def _paged_latent() -> SparseAttentionCall:
    """A few queries of each of two sequences over pages of 64 latent keys."""
    chosen = KeySelection._from_tensors(_int32(2, 1, 3, 2048), _int32(2, 1, 3), 1, 64 * 64)
    spec = SparseAttnSpec(
        0.1, chosen, max_q=3, max_k=4096, page_table=_int32(2, 64), cache_seqlens=_int32(2)
    )
    keys = meta(99, 64, 1, 576)
    return SparseAttentionCall(meta(2, 128, 3, 576), keys, keys[..., :512], spec)


@compile_cases
def sparse_attention_latent_cases() -> Iterator[CompileCase]:
    """Numbers of heads, gates, packed keys, pages."""
    calls = {
        "-".join(filter(None, (name, options))): _call(name, options)
        for name, options in LATENT_CASES
    }
    for label, call in {**calls, "paged": _paged_latent()}.items():
        yield launched_case(
            f"sparse_attn_latent/{label}", _launch_latent, call, archs=(90,),
            expect={"wgmma.mma_async": 1, "cp.async.cg.shared.global": 36},
            # arguments at the start of roles, and two registers in the producer's loop
            max_spill_bytes=LATENT_SPILLS[label],
        )  # fmt: skip


# The Hopper kernel for small entries. What spills are arguments at the start of roles and numbers
# of rows, outside of the loops over keys; with pages one register of the producer's loop, and with
# a cap and 256 columns some of a consumer's.
GATHERED_SPILLS = {"qsa": 192, "qsa-capped": 896, "qsa-packed": 192, "tokens": 64, "paged": 160}
GATHERED_CASES = (
    ("qsa", ""),
    ("qsa", "capped"),
    ("qsa", "packed"),
    ("tokens", ""),
    ("group", ""),
)


def _launch_gathered(call: SparseAttentionCall) -> None:
    out, lse = empty_out(call.q, call.v.shape[-1]), empty_lse(call.q)
    config = sparse_gathered_config(call.problem)
    launch_sparse_attn_gathered(call, out, lse, merge_lists(call, config.tile_t), config, 132)


def _paged_gathered() -> SparseAttentionCall:
    """A few queries of each of two sequences over pages of 64 keys."""
    chosen = KeySelection._from_tensors(_int32(2, 2, 3, 512), _int32(2, 2, 3), 4, 64 * 64)
    spec = SparseAttnSpec(
        0.1, chosen, max_q=3, max_k=4096, page_table=_int32(2, 64), cache_seqlens=_int32(2)
    )
    k, v = (meta(99, 64, 2, 256) for _ in range(2))
    return SparseAttentionCall(meta(2, 24, 3, 256), k, v, spec)


@compile_cases
def sparse_attention_gathered_cases() -> Iterator[CompileCase]:
    """Head dimensions, caps and sinks, packed keys, pages; and the unions of lists."""
    calls = {
        "-".join(filter(None, (name, options))): _call(name, options)
        for name, options in GATHERED_CASES
    }
    for label, call in {**calls, "paged": _paged_gathered()}.items():
        yield launched_case(
            f"sparse_attn_gathered/{label}", _launch_gathered, call, archs=(90,),
            kernel=_sparse_attn_gathered_kernel, max_spill_bytes=GATHERED_SPILLS.get(label, 0),
            expect={
                "wgmma.mma_async": 1, "cp.async.cg.shared.global": call.q.shape[-1] // 64 * 8
            },
        )  # fmt: skip
    yield launched_case(
        "sparse_attn_unions/qsa", _launch_gathered, calls["qsa"], archs=(90,),
        kernel=_sparse_attn_unions_kernel,
    )  # fmt: skip


SM90_BACKWARD_CASES = (
    ("msa", ""),
    ("nsa", ""),
    ("nsa", "gated"),
    ("narrow", "gated"),
)
# What producers and a consumer keep besides their loops; with a cap also what the loop of dk and dv
# needs of capped scores, and with gates a little of dq's.
SM90_BACKWARD_SPILLS = {
    ("dkdv", ""): 288,
    ("dkdv", "gated"): 1024,
    ("dq", "gated"): 160,
}
SM90_KERNELS: dict[str, Any] = {
    "dq": _sparse_attn_dq_sm90_kernel,
    "dkdv": _sparse_attn_dkdv_sm90_kernel,
}


@compile_cases
def sparse_attention_backward_sm90_cases() -> Iterator[CompileCase]:
    """The same of the gradients, up to 128 columns."""
    for name, options in SM90_BACKWARD_CASES:
        call = _backward(_call(name, options))
        for kind, kernel in SM90_KERNELS.items():
            label = "-".join(filter(None, (name, options)))
            yield launched_case(
                f"sparse_attn_{kind}_sm90/{label}", backward_sm90, call, kernel=kernel, archs=(90,),
                expect={"wgmma.mma_async": 1},
                max_spill_bytes=SM90_BACKWARD_SPILLS.get((kind, options), 0),
            )  # fmt: skip
