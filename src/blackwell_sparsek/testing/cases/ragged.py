"""Compile cases of the kernels for packed queries over caches, as their launcher launches them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from ...calls.attention import empty_lse, empty_out
from ...calls.ragged import RaggedCall
from ...decode.sm90 import _attn_decode_sm90_kernel
from ...masks.band import Band
from ...ragged.order import _order_kernel
from ...ragged.plan import _plan_kernel
from ...ragged.sm90 import _attn_ragged_sm90_kernel, launch_attn_ragged_sm90
from ...ragged.steps import _steps_kernel, attend_steps
from ...ragged.triton import _attn_ragged_kernel, launch_attn_ragged
from ...ragged.tuning import ragged_config, ragged_sm90_config
from ..captured_launches import launched_case, meta
from ..compile_cases import CompileCase, compile_cases

KV_HEADS, GROUP, TOKENS, PAGES, SEQUENCES, QUERIES = 8, 4, 4096, 1000, 34, 8224
BRAIN, HALF, FLOAT, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
INDEX = torch.int32


class Ragged(NamedTuple):
    """A call. `everything`: every option that has code of its own."""

    dtype: torch.dtype
    head_dim: int
    page_size: int | None = None
    cache: torch.dtype | None = None
    everything: bool = False
    max_q: int = TOKENS

    def name(self, sm: int) -> str:
        """Name of the case."""
        parts = [str(self.dtype).split(".")[-1], f"d{self.head_dim}"]
        parts += [f"pages{self.page_size}"] if self.page_size else []
        parts += ["fp8"] if self.cache else []
        parts += ["everything"] if self.everything else []
        parts += ["decode"] if self.max_q == 1 else []
        return f"attn_ragged/{'-'.join(parts)}-sm_{sm}"


# The main call for all architectures, the others for some.
RAGGED: dict[Ragged, tuple[int, ...]] = {
    Ragged(BRAIN, 128, 16): (80, 89, 90, 100, 120),
    Ragged(BRAIN, 128, 64): (90,),
    Ragged(BRAIN, 128, 16, max_q=1): (80, 90),
    Ragged(BRAIN, 128, 64, FP8): (89, 90),
    Ragged(HALF, 64): (80, 90),
    Ragged(HALF, 80, 48, everything=True): (80, 90),
    Ragged(FLOAT, 128, 16): (80, 90),
    Ragged(HALF, 256, 16): (90,),
}


def _call(asked: Ragged) -> RaggedCall:
    q = meta(QUERIES, GROUP * KV_HEADS, asked.head_dim, dtype=asked.dtype)
    stored = asked.cache or asked.dtype
    if asked.page_size is None:
        cache = meta(SEQUENCES, KV_HEADS, TOKENS, asked.head_dim, dtype=stored)
    else:
        cache = meta(PAGES, asked.page_size, KV_HEADS, asked.head_dim, dtype=stored)
    table = None
    if asked.page_size is not None:
        table = meta(SEQUENCES, TOKENS // asked.page_size, dtype=INDEX)
    everything = asked.everything
    return RaggedCall(
        empty_out(q, asked.head_dim),
        empty_lse(q),
        q,
        cache,
        cache,
        meta(SEQUENCES + 1, dtype=INDEX),
        asked.max_q,
        TOKENS,
        0.1,
        seqlens_k=meta(SEQUENCES, dtype=INDEX),
        page_table=table,
        seqused_q=meta(SEQUENCES, dtype=INDEX) if everything else None,
        first_key=meta(SEQUENCES, dtype=INDEX) if everything else None,
        kv_blocks=meta(SEQUENCES, KV_HEADS, 100, dtype=INDEX) if everything else None,
        kv_block_size=asked.page_size or 0 if everything else 0,
        band=Band(None, 0),
        chunk=512 if everything else 0,
        softcap=30.0 if everything else 0.0,
        sinks=meta(GROUP * KV_HEADS, dtype=FLOAT) if everything else None,
        alibi_slopes=meta(GROUP * KV_HEADS, dtype=FLOAT) if everything else None,
        k_scale=meta(KV_HEADS, dtype=FLOAT) if asked.cache else None,
        v_scale=meta(KV_HEADS, dtype=FLOAT) if asked.cache else None,
    )


def _launch(asked: Ragged) -> None:
    call = _call(asked)
    launch_attn_ragged(call, ragged_config(call.problem, "ieee"))


@compile_cases
def ragged_cases() -> Iterator[CompileCase]:
    """The portable kernel."""
    for asked, archs in RAGGED.items():
        for sm in archs:
            yield launched_case(
                asked.name(sm), _launch, asked, kernel=_attn_ragged_kernel, sm=sm, archs=(sm,),
                max_spill_bytes=32 if asked.everything else 0,
            )  # fmt: skip
    for asked in (Ragged(BRAIN, 128, 16), Ragged(HALF, 80, 48, everything=True)):
        name = asked.name(90).replace("attn_ragged", "ragged_plan")
        yield launched_case(name, _launch, asked, kernel=_plan_kernel, archs=(90,))


# The Hopper kernel, with the bytes that may spill: those of the producer, which keeps the
# coordinates of eight copies while it waits for a stage, and those of the consumers at D 128 with
# every option. "everything" leaves out what it has no code for.
RAGGED_SM90 = {
    Ragged(BRAIN, 128, 16): 128,
    Ragged(BRAIN, 128, 64): 48,
    Ragged(BRAIN, 128, 256): 0,
    Ragged(BRAIN, 128, 16, max_q=1): 128,
    Ragged(HALF, 128): 0,
    Ragged(HALF, 128, 48, everything=True): 768,
    Ragged(HALF, 64, 48, everything=True): 128,
}


def _launch_sm90(asked: Ragged) -> None:
    call = _call(asked)
    if asked.everything:
        call = replace(call, kv_blocks=None, kv_block_size=0, alibi_slopes=None)
    launch_attn_ragged_sm90(call, ragged_sm90_config(call.problem, call.top_left), 132)


@compile_cases
def ragged_sm90_cases() -> Iterator[CompileCase]:
    """The Hopper kernel."""
    for asked, spills in RAGGED_SM90.items():
        name = asked.name(90).removesuffix("-sm_90").replace("attn_ragged", "attn_ragged_sm90")
        yield launched_case(
            name, _launch_sm90, asked, kernel=_attn_ragged_sm90_kernel, archs=(90,),
            expect={"wgmma.mma_async": 1}, max_spill_bytes=spills,
        )  # fmt: skip
    for asked in (Ragged(BRAIN, 128, 16), Ragged(HALF, 64, 48, everything=True)):
        name = asked.name(90).removesuffix("-sm_90").replace("attn_ragged", "ragged_order")
        yield launched_case(name, _launch_sm90, asked, kernel=_order_kernel, archs=(90,))


# Decoding steps alone. "everything" leaves out what decoding has no code for.
STEPS = (
    Ragged(BRAIN, 128, 16, max_q=1),
    Ragged(HALF, 64, 64, everything=True, max_q=1),
    Ragged(BRAIN, 128, 64, FP8, max_q=1),
    Ragged(BRAIN, 128, max_q=1),
)


def _launch_steps(asked: Ragged) -> None:
    call = replace(_call(asked), seqused_q=None, first_key=None, chunk=0, alibi_slopes=None)
    attend_steps(call)


@compile_cases
def steps_cases() -> Iterator[CompileCase]:
    """The Hopper kernel of decoding, with rows that need not be sequences, and what names them."""
    for asked in STEPS:
        name = asked.name(90).removesuffix("-decode-sm_90").replace("attn_ragged/", "steps-")
        yield launched_case(
            f"attn_decode_sm90/{name}", _launch_steps, asked, kernel=_attn_decode_sm90_kernel,
            archs=(90,), expect={"wgmma.mma_async": 1}, max_spill_bytes=128,
        )  # fmt: skip
    yield launched_case("ragged_steps/bf16", _launch_steps, STEPS[0], kernel=_steps_kernel)
