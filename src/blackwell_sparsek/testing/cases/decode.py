"""Compile cases of decode kernels, as their launchers would launch them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from ...calls.attention import empty_lse, empty_out
from ...calls.decode import DecodeCall
from ...decode.combine import _attn_decode_combine_kernel
from ...decode.sm90 import _attn_decode_sm90_kernel, launch_attn_decode_sm90
from ...decode.sm90_latent import _attn_decode_latent_kernel, launch_attn_decode_latent
from ...decode.triton import launch_attn_decode
from ...decode.tuning import (
    LATENT_VALUES,
    DecodeSm90Config,
    LatentConfig,
    attn_decode_config,
    make_config,
)
from ...masks.band import Band
from ..captured_launches import launched_case, meta
from ..compile_cases import CompileCase, compile_cases

KV_HEADS, GROUP, TOKENS, PAGES, PROGRAMS = 8, 4, 4096, 1000, 132
SCALE, SOFTCAP = 0.1, 30.0
HALF, BRAIN, FLOAT, FP8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn


def decode_call(
    batch: int,
    rows: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    cache: torch.dtype,
    page_size: int | None = None,
    block_kv: int | None = None,
    *,
    everything: bool = False,
    entries: torch.dtype = torch.int32,
) -> DecodeCall:
    """A call with `rows` rows per KV head: the queries of all heads that share it.

    `block_kv` is the size of listed blocks, `everything` means sinks and a softcap, `entries` is
    the dtype of the page table.
    """
    q_len = max(rows // GROUP, 1)
    q = meta(batch, q_len, GROUP * KV_HEADS, dims[0], dtype=dtype).transpose(1, 2)
    table = None
    if page_size is None:
        caches = [meta(batch, TOKENS, KV_HEADS, d, dtype=cache).transpose(1, 2) for d in dims]
    else:
        table = meta(batch, TOKENS // page_size, dtype=entries)
        caches = [meta(PAGES, page_size, KV_HEADS, d, dtype=cache) for d in dims]
    k_cache, v_cache = caches
    k_scale, v_scale = (meta(KV_HEADS, dtype=FLOAT) if cache == FP8 else None for _ in dims)
    return DecodeCall(
        q,
        k_cache,
        v_cache,
        cache_seqlens=meta(batch, dtype=torch.int32),
        scale=SCALE,
        page_table=table,
        kv_blocks=None if block_kv is None else meta(batch, KV_HEADS, 100, dtype=torch.int32),
        kv_block_size=block_kv or 0,
        band=Band(None, 0),
        softcap=SOFTCAP if everything else 0.0,
        sinks=meta(GROUP * KV_HEADS, dtype=FLOAT) if everything else None,
        k_scale=k_scale,
        v_scale=v_scale,
    )


# The portable kernel.


class Decode(NamedTuple):
    """A call of the portable kernel. `everything`: sinks, a softcap, lists of blocks.

    `block_kv`: lists of blocks of this size in a contiguous cache.
    `odd`: caches whose rows do not start at multiples of 16 bytes, "k" or "kv". They cannot be
    copied 16 bytes at a time.
    """

    dtype: torch.dtype
    head_dim: int
    page_size: int | None = None
    cache: torch.dtype | None = None
    everything: bool = False
    rows: int = GROUP
    batch: int = 1
    alibi: bool = False
    odd: str = ""
    block_kv: int | None = None
    entries: torch.dtype = torch.int32

    def name(self, sm: int) -> str:
        """Name of the case."""
        parts = [str(self.dtype).split(".")[-1], f"d{self.head_dim}"]
        parts += [f"pages{self.page_size}"] if self.page_size else []
        parts += ["fp8"] if self.cache else []
        parts += [f"rows{self.rows}"] if self.rows != GROUP else []
        parts += ["everything"] if self.everything else []
        parts += [f"batch{self.batch}"] if self.batch != 1 else []
        parts += ["alibi"] if self.alibi else []
        parts += [f"odd-{self.odd}"] if self.odd else []
        parts += [f"blocks{self.block_kv}"] if self.block_kv else []
        parts += ["int64"] if self.entries == torch.int64 else []
        return f"attn_decode/{'-'.join(parts)}-sm_{sm}"


# The main call for all architectures, the others for some.
DECODE: dict[Decode, tuple[int, ...]] = {
    Decode(BRAIN, 128): (80, 89, 90, 100, 120),
    Decode(BRAIN, 128, 16): (80, 90),
    Decode(BRAIN, 128, 64): (90,),
    Decode(BRAIN, 128, 256): (90,),
    Decode(BRAIN, 128, 16, entries=torch.int64): (89, 90),
    Decode(BRAIN, 128, 64, FP8): (89, 90, 100, 120),
    Decode(BRAIN, 128, None, FP8, batch=16): (90,),
    Decode(BRAIN, 128, 16, FP8, batch=16): (90,),
    Decode(HALF, 80, 48, everything=True): (80, 90),
    Decode(FLOAT, 128): (80, 90),
    Decode(BRAIN, 128, rows=32): (90,),
    Decode(BRAIN, 128, rows=64): (80, 89, 90),
    Decode(HALF, 256, rows=64): (89, 90),
    Decode(BRAIN, 128, 64, alibi=True): (89, 90),
    Decode(BRAIN, 128, odd="k"): (90,),
    Decode(BRAIN, 128, 64, odd="k"): (90,),
    Decode(HALF, 80, 48, everything=True, odd="k"): (90,),
    Decode(FLOAT, 64, odd="kv", block_kv=16): (80, 90),
    Decode(FLOAT, 64, odd="kv", block_kv=20): (90,),
}


def _launch_decode(asked: Decode) -> None:
    call = decode_call(
        asked.batch, asked.rows, (asked.head_dim, asked.head_dim), asked.dtype,
        asked.cache or asked.dtype, asked.page_size,
        asked.page_size if asked.everything else asked.block_kv,
        everything=asked.everything,
        entries=asked.entries,
    )  # fmt: skip
    if asked.alibi:
        call = replace(call, alibi_slopes=meta(asked.batch, GROUP * KV_HEADS, dtype=FLOAT))
    *sizes, dim = call.k_cache.shape
    odd_rows = meta(*sizes, dim + 3, dtype=asked.dtype)[..., :dim]
    if "k" in asked.odd:
        call = replace(call, k_cache=odd_rows)
    if "v" in asked.odd:
        call = replace(call, v_cache=odd_rows)
    out, lse = empty_out(call.q, asked.head_dim), empty_lse(call.q)
    launch_attn_decode(out, lse, call, attn_decode_config(call.problem, "ieee"))


@compile_cases
def decode_cases() -> Iterator[CompileCase]:
    """The portable kernel."""
    for asked, archs in DECODE.items():
        # three programs on an SM and a page lookup for each key: the spills are outside the loop
        lookups = 64 if asked.cache and asked.batch > 1 and asked.page_size == 16 else 0
        for sm in archs:
            # ptxas of CUDA 12.9 puts two values aside to stay at 128 registers
            spills = 8 if asked.dtype == FLOAT and sm == 90 else lookups
            # rows that start anywhere have an address for every four bytes
            spills = 48 if asked.odd == "kv" else spills
            yield launched_case(
                asked.name(sm), _launch_decode, asked, sm=sm, archs=(sm,), max_spill_bytes=spills,
                forbid=("cp.async.cg",) if asked.odd == "kv" else (),
            )  # fmt: skip


# The Hopper kernel.


class DecodeSm90(NamedTuple):
    """A launch of the Hopper kernel. `everything`: sinks and a softcap."""

    config: DecodeSm90Config
    name: str
    everything: bool = False
    dtype: torch.dtype = BRAIN
    max_spill_bytes: int = 0
    entries: torch.dtype = torch.int32


# With eight copies, coordinates spill while they wait for a stage.
DECODE_SM90 = (
    DecodeSm90(make_config(8, 128, 128), "d128"),
    DecodeSm90(make_config(8, 128, 128, single=True), "d128-single"),
    DecodeSm90(make_config(8, 64, 64, tile_n=128), "d64"),
    DecodeSm90(
        make_config(16, 64, 64, 16, 16, tile_n=128),
        "d64-pages16-lists",
        everything=True,
        max_spill_bytes=128,
    ),
    DecodeSm90(make_config(8, 128, 128, 16), "d128-pages16"),
    DecodeSm90(make_config(8, 128, 128, 64), "d128-pages64"),
    DecodeSm90(make_config(8, 128, 128, 64), "d128-pages64-int64", entries=torch.int64),
    DecodeSm90(make_config(8, 128, 128, 64, 64, single=True), "d128-pages64-lists"),
    DecodeSm90(make_config(8, 128, 128, 16, 16), "d128-pages16-lists"),
    DecodeSm90(make_config(8, 128, 128, None, 32), "d128-lists32"),
    DecodeSm90(make_config(16, 128, 64, 48), "d128-64-pages48", everything=True),
    DecodeSm90(make_config(8, 128, 128, words=True, single=True), "d128-fp8-single"),
    DecodeSm90(make_config(8, 128, 128, tile_n=128, words=True), "d128-fp8"),
    DecodeSm90(
        make_config(8, 128, 128, 16, tile_n=128, words=True), "d128-fp8-pages16", max_spill_bytes=64
    ),
    DecodeSm90(make_config(8, 128, 128, 64, tile_n=128, words=True), "d128-fp8-pages64"),
    DecodeSm90(make_config(16, 128, 128, 64, 64, words=True), "d128-fp8-lists", everything=True),
    DecodeSm90(make_config(32, 128, 128), "d128-rows32"),
    DecodeSm90(make_config(32, 128, 128, single=True, combined=True), "d128-rows32-combined"),
    DecodeSm90(make_config(64, 128, 128, 256), "d128-rows64", dtype=HALF),
    DecodeSm90(make_config(64, 128, 128, single=True, combined=True), "d128-rows64-combined"),
    DecodeSm90(make_config(64, 64, 128, 64, 64), "d64-128-rows64-lists", everything=True),
    # parts of 256 columns spill where they are combined, 32 rows also 11 words in the main loop
    DecodeSm90(make_config(8, 256, 256), "d256", max_spill_bytes=80),
    DecodeSm90(make_config(8, 256, 256, single=True), "d256-single", max_spill_bytes=80),
    DecodeSm90(
        make_config(16, 256, 256, 64, 64), "d256-pages64-lists", everything=True, max_spill_bytes=16
    ),
    DecodeSm90(
        make_config(32, 256, 256, 16), "d256-rows32-pages16", dtype=HALF, max_spill_bytes=240
    ),
    DecodeSm90(
        make_config(32, 256, 256, single=True, combined=True),
        "d256-rows32-combined",
        max_spill_bytes=240,
    ),
    DecodeSm90(make_config(64, 256, 128, 16), "d256-128-rows64-pages16", everything=True),
)


def _launch_decode_sm90(asked: DecodeSm90) -> None:
    config = asked.config
    call = decode_call(
        1 if config.SINGLE else 16,
        # one query for each head fills less than the smallest tile
        GROUP if config.ROWS == 8 else config.ROWS,
        (config.TILE_D, config.TILE_DV),
        asked.dtype,
        FP8 if config.WORDS else asked.dtype,
        config.PAGE_SIZE,
        config.BLOCK_KV,
        everything=asked.everything,
        entries=asked.entries,
    )
    out, lse = empty_out(call.q, config.TILE_DV), empty_lse(call.q)
    launch_attn_decode_sm90(out, lse, call, config, PROGRAMS)


@compile_cases
def decode_sm90_cases() -> Iterator[CompileCase]:
    """The Hopper kernel."""
    for asked in DECODE_SM90:
        yield launched_case(
            f"attn_decode_sm90/{asked.name}", _launch_decode_sm90, asked, archs=(90,),
            kernel=_attn_decode_sm90_kernel, expect={"wgmma.mma_async": 1},
            max_spill_bytes=asked.max_spill_bytes,
        )  # fmt: skip


def _latent_call(
    dtype: torch.dtype, page_size: int | None, block_kv: int | None, everything: bool
) -> DecodeCall:
    q = meta(3, 128, 1, 576, dtype=dtype)
    table = None
    if page_size is None:
        cache = meta(3, 1, TOKENS, 576, dtype=dtype)
    else:
        table = meta(3, TOKENS // page_size, dtype=torch.int32)
        cache = meta(PAGES, page_size, 1, 576, dtype=dtype)
    return DecodeCall(
        q,
        cache,
        cache[..., :LATENT_VALUES],
        cache_seqlens=meta(3, dtype=torch.int32),
        scale=SCALE,
        page_table=table,
        kv_blocks=None if block_kv is None else meta(3, 1, 100, dtype=torch.int32),
        kv_block_size=block_kv or 0,
        band=Band(None, 0),
        softcap=SOFTCAP if everything else 0.0,
        sinks=meta(128, dtype=FLOAT) if everything else None,
    )


def _launch_latent(config: LatentConfig, dtype: torch.dtype, everything: bool) -> None:
    call = _latent_call(dtype, config.PAGE_SIZE, config.BLOCK_KV, everything)
    out, lse = empty_out(call.q, LATENT_VALUES), empty_lse(call.q)
    launch_attn_decode_latent(out, lse, call, config, PROGRAMS)


def _launch_portable_latent(page_size: int | None) -> None:
    call = _latent_call(BRAIN, page_size, None, False)
    out, lse = empty_out(call.q, LATENT_VALUES), empty_lse(call.q)
    launch_attn_decode(out, lse, call, attn_decode_config(call.problem, "ieee"))


@compile_cases
def latent_cases() -> Iterator[CompileCase]:
    """Latent caches of MLA, by the Hopper kernel and by the portable one."""
    for sm in (80, 89, 90):
        name = f"attn_decode/latent-pages64-sm_{sm}"
        yield launched_case(name, _launch_portable_latent, 64, sm=sm, archs=(sm,))
    for name, config, dtype, everything in (
        ("bf16", LatentConfig(None, None, 40), BRAIN, False),
        ("bf16-pages64", LatentConfig(64, None, 64), BRAIN, False),
        ("fp16-pages64-lists-everything", LatentConfig(64, 64, 64), HALF, True),
        ("bf16-pages64-combined", LatentConfig(64, None, 64, COMBINED=True), BRAIN, False),
        ("bf16-pages16", LatentConfig(16, None, 64), BRAIN, False),
        ("bf16-paired", LatentConfig(None, None, 40, PAIRED=True), BRAIN, False),
        ("fp16-pages64-lists-everything-paired", LatentConfig(64, 64, 64, PAIRED=True), HALF, True),
    ):
        yield launched_case(
            f"attn_decode_latent/{name}",
            _launch_latent,
            *(config, dtype, everything),
            kernel=_attn_decode_latent_kernel,
            archs=(90,),
            expect={"wgmma": 1},
            # addresses and descriptors that do not change from tile to tile; a few are read again
            max_spill_bytes=1600,
        )


@compile_cases
def combine_cases() -> Iterator[CompileCase]:
    """Parts of many rows, combined by a launch of their own."""
    combined = LatentConfig(None, None, 40, COMBINED=True)
    fp8 = DecodeSm90(make_config(16, 128, 128, words=True, combined=True), "", everything=True)
    few = DecodeSm90(make_config(32, 64, 64, single=True, combined=True), "")
    for name, launcher, args in (
        ("latent-everything", _launch_latent, (combined, HALF, True)),
        ("d128-fp8-everything", _launch_decode_sm90, (fp8,)),
        ("d64-single", _launch_decode_sm90, (few,)),
    ):
        yield launched_case(
            f"attn_decode_combine/{name}", launcher, *args,
            kernel=_attn_decode_combine_kernel, archs=(90,),
        )  # fmt: skip
