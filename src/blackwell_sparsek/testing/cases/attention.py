"""Compile cases of attention kernels, as their launchers would launch them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from ...attention.sm90.backward import _attn_bwd_sm90_kernel
from ...attention.sm90.backward_preprocess import (
    _attn_bwd_postprocess_kernel,
    _attn_bwd_preprocess_kernel,
    _attn_bwd_round_keys_kernel,
)
from ...attention.sm90.backward_split import (
    _attn_bwd_dkdv_sm90_kernel,
    _attn_bwd_dq_sm90_kernel,
)
from ...attention.sm90.backward_wide import _attn_bwd_wide_sm90_kernel
from ...attention.sm90.backward_wide_queries import _attn_bwd_wide_dq_sm90_kernel
from ...attention.sm90.config import make_forward_config
from ...attention.sm90.dq_order import Columns, column_groups
from ...attention.sm90.dq_order_kernel import plan_visits
from ...attention.sm90.launch import (
    launch_attn_bwd_dkdv_sm90,
    launch_attn_bwd_dq_sm90,
    launch_attn_bwd_sm90,
    launch_attn_bwd_terms,
    launch_attn_bwd_wide_dkdv_sm90,
    launch_attn_bwd_wide_dq_sm90,
    launch_attn_fwd_sm90,
)
from ...attention.sm90.tuning import (
    attn_bwd_dkdv_config,
    attn_bwd_dq_config,
    attn_bwd_sm90_config,
    attn_bwd_sm90_raster_group,
    attn_bwd_wide_dkdv_config,
    attn_bwd_wide_dq_config,
    attn_fwd_sm90_raster_group,
    with_added_scores,
)
from ...attention.triton.backward import launch_attn_dkdv, launch_attn_dq
from ...attention.triton.delta import (
    _sink_parts_kernel,
    _sink_sum_kernel,
    launch_attn_delta,
    launch_sink_gradients,
)
from ...attention.triton.forward import launch_attn_fwd
from ...attention.triton.merge import launch_merge_states
from ...attention.triton.tuning import attn_dkdv_config, attn_dq_config, attn_fwd_config
from ...calls.attention import (
    AttentionCall,
    AttnGradients,
    AttnSpec,
    BackwardCall,
    empty_lse,
    empty_out,
)
from ...masks.band import EVERYTHING, Band
from ...masks.block_mask import BlockMask
from ..captured_launches import launched_case, meta
from ..compile_cases import CompileCase, compile_cases

HEADS, KV_HEADS, TOKENS = 32, 8, 4096
CAUSAL = Band(None, 0)
SCALE, SOFTCAP = 0.1, 30.0
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
Blocks = tuple[int, int] | None
WGMMA = {"wgmma.mma_async": 1}


# Tensors.


def by_token(heads: int, dim: int, dtype: torch.dtype, tokens: int = TOKENS) -> torch.Tensor:
    """[2, heads, tokens, dim] in the order of a projection: the heads of a token are contiguous."""
    return meta(2, tokens, heads, dim, dtype=dtype).transpose(1, 2)


def by_head(heads: int, dim: int, dtype: torch.dtype, tokens: int = TOKENS) -> torch.Tensor:
    """[2, heads, tokens, dim], contiguous."""
    return meta(2, heads, tokens, dim, dtype=dtype)


def packed(heads: int, dim: int, dtype: torch.dtype, tokens: int = TOKENS) -> torch.Tensor:
    """[tokens, heads, dim]: sequences one after the other."""
    return meta(tokens, heads, dim, dtype=dtype)


def integers(*shape: int) -> torch.Tensor:
    """A list that a kernel reads, without its contents."""
    return meta(*shape, dtype=torch.int32)


@cache
def block_mask(block_size: Blocks, tokens: int = TOKENS) -> BlockMask | None:
    """A mask of full blocks for all heads. Its lists have contents, which transposing needs."""
    if block_size is None:
        return None
    grid = tokens // block_size[0], tokens // block_size[1]
    mask = BlockMask.from_dense(torch.ones(grid, dtype=torch.bool), block_size)
    # transposed here, because kernels launched for it later would be captured
    assert mask.transposed is not None
    return mask


def attention_call(
    dims: tuple[int, int],
    dtype: torch.dtype,
    block_size: Blocks,
    *,
    lay_out: Callable[..., torch.Tensor] = by_token,
    tokens: int = TOKENS,
    band: Band = EVERYTHING,
    sinks: bool = False,
    softcap: bool = False,
    deterministic: bool = False,
    added: tuple[str, ...] = (),
) -> AttentionCall:
    """A call with head dimensions `dims` of keys and values; `lay_out` makes q, k and v."""
    q, k = (lay_out(heads, dims[0], dtype, tokens) for heads in (HEADS, KV_HEADS))
    spec = AttnSpec(
        scale=SCALE,
        band=band,
        block_mask=block_mask(block_size, tokens),
        softcap=SOFTCAP if softcap else 0.0,
        sinks=meta(HEADS, dtype=FLOAT) if sinks else None,
        cu_seqlens_q=integers(5) if lay_out is packed else None,
        cu_seqlens_k=integers(5) if lay_out is packed else None,
        max_q=tokens,
        max_k=tokens,
        alibi_slopes=meta(2, HEADS, dtype=FLOAT) if "alibi" in added else None,
        bias=meta(2, HEADS, tokens, tokens, dtype=dtype) if "bias" in added else None,
    )
    return AttentionCall(q, k, lay_out(KV_HEADS, dims[1], dtype, tokens), spec, deterministic)


def backward_call(call: AttentionCall) -> BackwardCall:
    """The backward pass of a call, for all gradients but that of sinks."""
    out, lse = empty_out(call.q, call.v.shape[-1]), empty_lse(call.q)
    dout, dlse, dq, dk, dv = (torch.empty_like(x) for x in (out, lse, call.q, call.k, call.v))
    return BackwardCall(call, dout, dlse, out, lse, AttnGradients(dq, dk, dv, None))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, as in the names of cases."""
    return str(dtype).split(".")[-1]


# The portable kernels, with the tiles that the tuning picks on each GPU.


class Portable(NamedTuple):
    """A call of the portable kernels.

    `everything`: packed sequences and a softcap, in the forward pass also sinks. `head_dim_v`: that
    of narrower values, with the rows of one head contiguous, so that addresses of rows are not
    multiples of 16. `added`: what is added to scores.
    """

    dtype: torch.dtype
    head_dim: int
    block_size: Blocks = None
    everything: bool = False
    precision: str = "ieee"
    head_dim_v: int | None = None
    added: tuple[str, ...] = ()

    def name(self, sm: int) -> str:
        """End of the name of a case."""
        parts = [dtype_name(self.dtype), f"d{self.head_dim}"]
        parts += [f"dv{self.head_dim_v}"] if self.head_dim_v else []
        parts += [f"blocks{self.block_size[0]}x{self.block_size[1]}"] if self.block_size else []
        parts += ["everything"] if self.everything else []
        parts += self.added
        parts += [self.precision] if self.dtype == FLOAT else []
        return f"{'-'.join(parts)}-sm_{sm}"

    def call(self) -> AttentionCall:
        """The call."""
        lay_out = packed if self.everything else by_head if self.head_dim_v else by_token
        return attention_call(
            (self.head_dim, self.head_dim_v or self.head_dim), self.dtype, self.block_size,
            lay_out=lay_out, band=CAUSAL, sinks=self.everything, softcap=self.everything,
            added=self.added,
        )  # fmt: skip


ALL = (80, 89, 90, 100, 120)
# the main calls for all architectures, the others for one architecture per kind of tensor core
FORWARD: dict[Portable, tuple[int, ...]] = {
    Portable(BRAIN, 64): ALL,
    Portable(BRAIN, 128): ALL,
    Portable(BRAIN, 128, (128, 128)): ALL,
    Portable(HALF, 256): ALL,
    Portable(BRAIN, 64, (128, 16)): (80, 90),
    Portable(BRAIN, 128, (128, 16)): (80, 90),
    Portable(BRAIN, 128, (64, 64)): (80, 90),
    Portable(BRAIN, 128, (16, 16)): (80, 90),
    Portable(HALF, 80, everything=True): (80, 90),
    Portable(BRAIN, 40, head_dim_v=8): (90,),
    Portable(BRAIN, 24, (128, 64), head_dim_v=8): (90,),
    Portable(BRAIN, 72, (64, 256), head_dim_v=8): (90,),
    Portable(FLOAT, 128, precision="tf32"): (80, 90),
    Portable(FLOAT, 128): (80, 90),
    Portable(BRAIN, 128, added=("alibi",)): (80, 90),
    Portable(BRAIN, 128, added=("bias",)): (89, 90, 120),
    Portable(BRAIN, 64, (128, 128), added=("alibi", "bias")): (90,),
    Portable(HALF, 256, added=("alibi", "bias")): (89, 90),
}


def _launch_forward(asked: Portable) -> None:
    call = asked.call()
    out, lse = empty_out(call.q, call.v.shape[-1]), empty_lse(call.q)
    launch_attn_fwd(call, out, lse, attn_fwd_config(call.problem, asked.precision))


def _forward_spills(asked: Portable, sm: int) -> int:
    # padding, softcap and packed sequences at once are rare; so are narrow values, see the kernel
    if asked.everything or asked.head_dim_v is not None:
        return 128 if asked.everything else 2400
    # two registers around the loop with mask code, if a tile packs several blocks
    return 8 if sm < 90 and asked.block_size == (128, 16) else 0


def _expecting_wgmma(case: CompileCase, asked: Portable, rows: int) -> CompileCase:
    """Expect WGMMA on Hopper if the `rows` of a tile fill a warp group."""
    wide = case.archs == (90,) and rows >= 64 and asked.dtype != FLOAT
    return replace(case, expect=WGMMA) if wide else case


@compile_cases
def forward_cases() -> Iterator[CompileCase]:
    """The portable forward kernel."""
    for asked, archs in FORWARD.items():
        for sm in archs:
            case = launched_case(
                f"attn_fwd/{asked.name(sm)}", _launch_forward, asked, sm=sm, archs=(sm,),
                max_spill_bytes=_forward_spills(asked, sm),
            )  # fmt: skip
            yield _expecting_wgmma(case, asked, case.args["TILE_M"])


BACKWARD: dict[Portable, tuple[int, ...]] = {
    Portable(BRAIN, 64): ALL,
    Portable(BRAIN, 128): ALL,
    Portable(BRAIN, 128, (128, 128)): ALL,
    Portable(HALF, 256): ALL,
    Portable(BRAIN, 128, (64, 64)): (80, 90),
    Portable(BRAIN, 64, (128, 16)): (80, 90),
    Portable(BRAIN, 128, (16, 16)): (80, 90),
    Portable(HALF, 80, everything=True): (80, 90),
    Portable(FLOAT, 128, precision="tf32"): (80, 90),
    Portable(FLOAT, 128): (80, 90),
    Portable(BRAIN, 128, added=("alibi",)): (80, 90),
    Portable(BRAIN, 128, added=("bias",)): (89, 90, 120),
}


def _launch_dq(asked: Portable) -> None:
    call = backward_call(asked.call())
    config = attn_dq_config(call.problem, asked.precision)
    launch_attn_dq(call, torch.empty_like(call.lse), config)


def _launch_dkdv(asked: Portable) -> None:
    call = backward_call(asked.call())
    config = attn_dkdv_config(call.problem, asked.precision)
    launch_attn_dkdv(call, torch.empty_like(call.lse), config)


def _backward_spills(asked: Portable, kernel: str, sm: int) -> int:
    if kernel == "dkdv" and sm == 90 and asked.dtype != FLOAT:
        # the loop with mask code; tiles that do not spill measured slower (see the tuning)
        return 2048
    # padding, softcap and packed sequences at once are rare; fp32 runs on the CUDA cores
    if asked.everything or (asked.precision == "ieee" and asked.dtype == FLOAT):
        return 192
    # a few registers around the loop with mask code
    return 96 if kernel == "dkdv" else 0


@compile_cases
def backward_cases() -> Iterator[CompileCase]:
    """The portable kernels of dq and of dk and dv."""
    for asked, archs in BACKWARD.items():
        for sm in archs:
            for kernel, launcher in (("dq", _launch_dq), ("dkdv", _launch_dkdv)):
                case = launched_case(
                    f"attn_{kernel}/{asked.name(sm)}", launcher, asked, sm=sm, archs=(sm,),
                    max_spill_bytes=_backward_spills(asked, kernel, sm),
                )  # fmt: skip
                own_rows = case.args["TILE_M" if kernel == "dq" else "TILE_N"]
                yield _expecting_wgmma(case, asked, own_rows)


def _launch_delta(dtype: torch.dtype, dim: int) -> None:
    out, dout = (by_token(HEADS, dim, dtype) for _ in range(2))
    delta, lse, dlse = (empty_lse(out) for _ in range(3))
    launch_attn_delta(delta, dout, out, dlse, lse)


def _launch_sinks(cu_seqlens: torch.Tensor | None) -> None:
    sinks, dsinks = (meta(HEADS, dtype=FLOAT) for _ in range(2))
    lse, delta = (meta(HEADS, 2 * TOKENS, dtype=FLOAT) for _ in range(2))
    launch_sink_gradients(dsinks, sinks, lse, delta, cu_seqlens)


@compile_cases
def row_cases() -> Iterator[CompileCase]:
    """Portable kernels over rows: delta, gradients of sinks, merging."""
    for dtype, dim in ((HALF, 80), (BRAIN, 64), (BRAIN, 128), (FLOAT, 256)):
        yield launched_case(f"attn_delta/{dtype_name(dtype)}-d{dim}", _launch_delta, dtype, dim)
    for name, offsets in (("dense", None), ("packed", integers(5))):
        kernel = _sink_parts_kernel
        yield launched_case(f"attn_sink_parts/{name}", _launch_sinks, offsets, kernel=kernel)
    yield launched_case("attn_sink_sum/float32", _launch_sinks, None, kernel=_sink_sum_kernel)
    for dtype, dim in ((HALF, 40), (HALF, 64), (BRAIN, 128), (FLOAT, 512)):
        out, o_a, o_b = (by_token(HEADS, dim, dtype) for _ in range(3))
        lse, lse_a, lse_b = (empty_lse(out) for _ in range(3))
        name = f"merge_states/{dtype_name(dtype)}-d{dim}"
        yield launched_case(name, launch_merge_states, out, lse, o_a, lse_a, o_b, lse_b)


# The Hopper forward.


class ForwardSm90(NamedTuple):
    """A launch of the Hopper forward with a fixed configuration."""

    consumers: int
    tile_d: int
    tile_dv: int
    block_size: Blocks = None
    sinks: bool = False
    softcap: bool = False
    packed: bool = False
    dtype: torch.dtype = BRAIN
    max_spill_bytes: int = 0
    banded: bool = False
    long: bool = False
    alibi: bool = False
    bias: bool = False

    @property
    def name(self) -> str:
        """Name of the case."""
        parts = [dtype_name(self.dtype), f"d{self.tile_d}-{self.tile_dv}"]
        parts += [f"consumers{self.consumers}"]
        parts += [f"blocks{self.block_size[0]}x{self.block_size[1]}"] if self.block_size else []
        flags = ("sinks", "softcap", "packed", "banded", "long", "alibi", "bias")
        parts += [flag for flag in flags if getattr(self, flag)]
        return f"attn_fwd_sm90/{'-'.join(parts)}"


# Spills are before and after the loop over work tiles, in mask code, or where a scheduler warp
# looks up rows.
FORWARD_SM90 = (
    ForwardSm90(2, 128, 128),
    ForwardSm90(2, 128, 128, dtype=HALF),
    ForwardSm90(1, 128, 128),
    ForwardSm90(3, 64, 64),
    ForwardSm90(3, 64, 64, long=True),
    ForwardSm90(2, 64, 64),
    ForwardSm90(1, 64, 64),
    ForwardSm90(2, 128, 64),
    ForwardSm90(2, 128, 128, long=True),
    ForwardSm90(2, 128, 128, banded=True),
    ForwardSm90(2, 128, 128, banded=True, dtype=HALF),
    ForwardSm90(2, 64, 128, banded=True),
    ForwardSm90(3, 64, 64, banded=True),
    ForwardSm90(2, 64, 64, banded=True),
    ForwardSm90(1, 64, 64, banded=True),
    ForwardSm90(1, 64, 64, sinks=True, softcap=True, banded=True),
    ForwardSm90(2, 128, 128, sinks=True, softcap=True, long=True),
    ForwardSm90(2, 128, 128, sinks=True, softcap=True, banded=True, max_spill_bytes=32),
    ForwardSm90(3, 64, 64, sinks=True),
    ForwardSm90(2, 128, 128, (128, 128), max_spill_bytes=256),
    ForwardSm90(2, 128, 128, (128, 16), max_spill_bytes=384),
    ForwardSm90(1, 128, 128, (64, 64), max_spill_bytes=192),
    ForwardSm90(1, 128, 128, (64, 128), max_spill_bytes=192),
    ForwardSm90(1, 128, 128, (64, 16), max_spill_bytes=192),
    ForwardSm90(2, 64, 64, (256, 256), max_spill_bytes=192),
    ForwardSm90(1, 64, 64, (64, 64), max_spill_bytes=192),
    ForwardSm90(2, 128, 128, (128, 128), sinks=True, softcap=True, max_spill_bytes=256),
    ForwardSm90(2, 128, 128, packed=True),
    ForwardSm90(1, 128, 128, packed=True),
    ForwardSm90(3, 64, 64, packed=True),
    ForwardSm90(2, 64, 64, packed=True),
    ForwardSm90(1, 64, 64, packed=True),
    ForwardSm90(2, 128, 128, sinks=True, softcap=True, packed=True),
    ForwardSm90(2, 128, 128, (128, 128), packed=True, max_spill_bytes=192),
    ForwardSm90(1, 64, 64, (64, 16), packed=True, max_spill_bytes=192),
    ForwardSm90(2, 256, 256, max_spill_bytes=32),
    ForwardSm90(2, 256, 256, long=True, max_spill_bytes=192),
    ForwardSm90(2, 256, 256, sinks=True, softcap=True, banded=True, max_spill_bytes=32),
    ForwardSm90(2, 256, 256, (128, 128), max_spill_bytes=256),
    ForwardSm90(2, 256, 256, packed=True, max_spill_bytes=32),
    ForwardSm90(1, 256, 256, (64, 64), max_spill_bytes=960),
    ForwardSm90(2, 192, 128, max_spill_bytes=32),
    # 24 bytes with Triton 3.6 and 3.7
    ForwardSm90(2, 192, 128, banded=True, max_spill_bytes=320),
    ForwardSm90(2, 192, 128, long=True),
    ForwardSm90(2, 192, 128, packed=True),
    ForwardSm90(2, 192, 192, dtype=HALF),
    ForwardSm90(1, 192, 128, (64, 64), max_spill_bytes=256),
    ForwardSm90(2, 128, 128, banded=True, alibi=True),
    ForwardSm90(2, 128, 128, long=True, alibi=True),
    ForwardSm90(1, 64, 64, packed=True, alibi=True),
    ForwardSm90(2, 64, 64, banded=True, alibi=True),
    ForwardSm90(2, 128, 128, (128, 64), alibi=True, max_spill_bytes=256),
    ForwardSm90(1, 64, 64, (64, 16), sinks=True, alibi=True, max_spill_bytes=192),
    ForwardSm90(2, 256, 256, alibi=True, max_spill_bytes=128),
    ForwardSm90(2, 128, 128, banded=True, bias=True, max_spill_bytes=16),
    ForwardSm90(2, 128, 128, long=True, bias=True, max_spill_bytes=16),
    ForwardSm90(2, 64, 64, bias=True),
    ForwardSm90(2, 128, 128, (128, 64), bias=True, max_spill_bytes=320),
    ForwardSm90(1, 64, 64, (64, 16), bias=True, alibi=True, max_spill_bytes=192),
    ForwardSm90(1, 128, 128, (64, 64), bias=True, max_spill_bytes=192),
    ForwardSm90(2, 192, 128, bias=True, max_spill_bytes=128),
    ForwardSm90(2, 256, 256, bias=True, max_spill_bytes=128),
)


def _launch_forward_sm90(asked: ForwardSm90) -> None:
    dims = asked.tile_d, asked.tile_dv
    call = attention_call(
        dims, asked.dtype, asked.block_size, lay_out=packed if asked.packed else by_token,
        band=CAUSAL if asked.banded else EVERYTHING, sinks=asked.sinks, softcap=asked.softcap,
        added=tuple(name for name in ("alibi", "bias") if getattr(asked, name)),
    )  # fmt: skip
    block_q, block_kv = asked.block_size or (None, None)
    options = {"packed": asked.packed, "banded": asked.banded, "long": asked.long}
    config = make_forward_config(asked.consumers, *dims, block_kv, **options)
    config = with_added_scores(config, call.problem)
    order = None
    if block_q is not None and not asked.packed:
        order = integers(call.q.shape[0] * HEADS * TOKENS // block_q)
    raster_group = attn_fwd_sm90_raster_group(call.problem, call.spec.band)
    out, lse = empty_out(call.q, asked.tile_dv), empty_lse(call.q)
    launch_attn_fwd_sm90(call, out, lse, order, raster_group, config)


def forward_sm90_case(asked: ForwardSm90) -> CompileCase:
    """The case of one launch."""
    return launched_case(
        asked.name, _launch_forward_sm90, asked, archs=(90,), expect=WGMMA,
        max_spill_bytes=asked.max_spill_bytes,
    )  # fmt: skip


@compile_cases
def forward_sm90_cases() -> Iterator[CompileCase]:
    """The Hopper forward."""
    for asked in FORWARD_SM90:
        yield forward_sm90_case(asked)


# The Hopper backward: one kernel for all gradients, or two.


class BackwardSm90(NamedTuple):
    """A call of the Hopper backward; `ordered` accumulates dq in the same order in every run."""

    head_dim: int
    head_dim_v: int
    block_size: Blocks = None
    softcap: bool = False
    ordered: bool = False
    dtype: torch.dtype = BRAIN
    max_spill_bytes: int = 0
    """Accepted for the only kernel, or for that of dk and dv."""
    dq_spill_bytes: int = 0
    """Accepted for the dq kernel of the split backward."""
    head_splits: int = 1
    """Work tiles that share the query heads of a KV tile."""
    packed: bool = False

    @property
    def wide(self) -> bool:
        """Whether the kernel for wide heads takes it."""
        return max(self.head_dim, self.head_dim_v) > 128

    @property
    def name(self) -> str:
        """End of the names of its cases."""
        parts = [dtype_name(self.dtype), f"d{self.head_dim}-{self.head_dim_v}"]
        parts += [f"blocks{self.block_size[0]}x{self.block_size[1]}"] if self.block_size else []
        parts += ["softcap"] if self.softcap else []
        parts += ["ordered"] if self.ordered else []
        parts += [f"splits{self.head_splits}"] if self.head_splits > 1 else []
        parts += ["packed"] if self.packed else []
        return "-".join(parts)

    def call(self, tokens: int = TOKENS) -> BackwardCall:
        """The call."""
        forward = attention_call(
            (self.head_dim, self.head_dim_v), self.dtype, self.block_size, tokens=tokens,
            softcap=self.softcap, deterministic=self.ordered,
            lay_out=packed if self.packed else by_token,
        )  # fmt: skip
        return backward_call(forward)


# The code for masked tiles spills, because their bits take 64 registers of a consumer.
BACKWARD_SM90 = (
    BackwardSm90(128, 128, max_spill_bytes=192),
    BackwardSm90(128, 128, dtype=HALF, max_spill_bytes=192),
    BackwardSm90(64, 64, max_spill_bytes=192),
    BackwardSm90(128, 64),
    BackwardSm90(128, 128, softcap=True, max_spill_bytes=512),
    BackwardSm90(128, 128, (128, 128), max_spill_bytes=1536),
    BackwardSm90(64, 64, (64, 128), max_spill_bytes=2560),
    BackwardSm90(128, 128, ordered=True, max_spill_bytes=192),
    BackwardSm90(64, 64, ordered=True, max_spill_bytes=192),
    BackwardSm90(128, 128, (128, 128), ordered=True, max_spill_bytes=1536),
    BackwardSm90(96, 96, head_splits=2, max_spill_bytes=192),
    BackwardSm90(64, 64, ordered=True, head_splits=4, max_spill_bytes=192),
    BackwardSm90(256, 256, max_spill_bytes=384),
    BackwardSm90(256, 256, softcap=True, max_spill_bytes=544),
    BackwardSm90(256, 256, (128, 128), max_spill_bytes=1536),
    BackwardSm90(256, 256, ordered=True, max_spill_bytes=448),
    BackwardSm90(192, 128, max_spill_bytes=112),
    BackwardSm90(192, 128, packed=True, max_spill_bytes=160),
    BackwardSm90(128, 128, packed=True, max_spill_bytes=448),
    BackwardSm90(64, 64, packed=True, max_spill_bytes=192),
    BackwardSm90(128, 128, softcap=True, packed=True, max_spill_bytes=832),
    BackwardSm90(64, 64, ordered=True, packed=True, max_spill_bytes=192),
    BackwardSm90(192, 128, (64, 64), ordered=True, max_spill_bytes=672),
    BackwardSm90(192, 192, dtype=HALF, max_spill_bytes=112),
)
# The code for masked tiles spills, and so do warps that must find work with 24 registers.
SPLIT_SM90 = (
    BackwardSm90(128, 128, (64, 64), max_spill_bytes=896, dq_spill_bytes=512),
    BackwardSm90(
        128, 128, (128, 64), softcap=True, dtype=HALF, max_spill_bytes=1408, dq_spill_bytes=544
    ),
    BackwardSm90(64, 64, (64, 64), max_spill_bytes=400, dq_spill_bytes=512),
    BackwardSm90(128, 64, (64, 64), max_spill_bytes=384, dq_spill_bytes=512),
    BackwardSm90(64, 128, (256, 64), max_spill_bytes=400, dq_spill_bytes=512),
)


def _launch_backward_sm90(asked: BackwardSm90, tokens: int = TOKENS) -> None:
    call = asked.call(tokens)
    config = attn_bwd_sm90_config(call.problem, asked.head_splits)
    order = ranks = visits = None
    if (mask := call.forward.spec.block_mask) is not None:
        order = integers(call.problem.batch * KV_HEADS * tokens // config.tile_n)
        if asked.ordered:
            nnz = mask.transposed.indices.numel()
            ranks, visits = (integers(nnz, HEADS // KV_HEADS) for _ in range(2))
    raster_group = attn_bwd_sm90_raster_group(call.problem, asked.head_splits)
    launch_attn_bwd_sm90(call, order, ranks, visits, raster_group, config, asked.head_splits)


def _launch_dkdv_sm90(asked: BackwardSm90) -> None:
    call, order = asked.call(), integers(2 * KV_HEADS * TOKENS // 64)
    terms = launch_attn_bwd_terms(call)
    launch_attn_bwd_dkdv_sm90(call, terms, order, attn_bwd_dkdv_config(call.problem))


def _launch_dq_sm90(asked: BackwardSm90) -> None:
    assert asked.block_size is not None
    call, order = asked.call(), integers(2 * HEADS * TOKENS // asked.block_size[0])
    terms = launch_attn_bwd_terms(call)
    launch_attn_bwd_dq_sm90(call, terms, order, attn_bwd_dq_config(call.problem))


@compile_cases
def backward_sm90_cases() -> Iterator[CompileCase]:
    """The Hopper backward with one kernel, and the kernels before and after it."""
    for asked in BACKWARD_SM90:
        kernel = _attn_bwd_wide_sm90_kernel if asked.wide else _attn_bwd_sm90_kernel
        yield launched_case(
            f"attn_bwd_sm90/{asked.name}", _launch_backward_sm90, asked, kernel=kernel,
            archs=(90,), expect=WGMMA, max_spill_bytes=asked.max_spill_bytes,
        )  # fmt: skip
    kernels = {"rows": _attn_bwd_preprocess_kernel, "round": _attn_bwd_postprocess_kernel}
    for dim, ordered in ((128, False), (80, True), (160, False)):
        asked = BackwardSm90(dim, dim, ordered=ordered)
        for kind, kernel in kernels.items():
            name = f"attn_bwd_{kind}/d{dim}{'-ordered' if ordered else ''}"
            launcher = _launch_backward_sm90
            yield launched_case(name, launcher, asked, 4000, kernel=kernel, archs=(90,))
    kernels = {"rows": _attn_bwd_preprocess_kernel, "round_keys": _attn_bwd_round_keys_kernel}
    for kind, kernel in kernels.items():
        asked = BackwardSm90(80, 80, head_splits=4)
        name, launcher = f"attn_bwd_{kind}/d80-splits4", _launch_backward_sm90
        yield launched_case(name, launcher, asked, 4000, kernel=kernel, archs=(90,))
    kernels = {"rows": _attn_bwd_preprocess_kernel, "round": _attn_bwd_postprocess_kernel}
    for kind, kernel in kernels.items():
        asked = BackwardSm90(160, 160, packed=True)
        name, launcher = f"attn_bwd_{kind}/d160-packed", _launch_backward_sm90
        yield launched_case(name, launcher, asked, 4000, kernel=kernel, archs=(90,))


@compile_cases
def split_sm90_cases() -> Iterator[CompileCase]:
    """The two kernels of the split backward."""
    for asked in SPLIT_SM90:
        yield launched_case(
            f"attn_bwd_keys_sm90/{asked.name}", _launch_dkdv_sm90, asked,
            kernel=_attn_bwd_dkdv_sm90_kernel, archs=(90,), expect=WGMMA,
            max_spill_bytes=asked.max_spill_bytes,
        )  # fmt: skip
        yield launched_case(
            f"attn_bwd_queries_sm90/{asked.name}", _launch_dq_sm90, asked,
            kernel=_attn_bwd_dq_sm90_kernel, archs=(90,), expect=WGMMA,
            max_spill_bytes=asked.dq_spill_bytes,
        )  # fmt: skip


# Spills are those of a work tile; the loops have none.
WIDE_SPLIT_SM90 = (
    BackwardSm90(256, 256, dq_spill_bytes=288),
    BackwardSm90(192, 128, max_spill_bytes=96),
    BackwardSm90(192, 192, dtype=HALF),
)


def _launch_wide_dkdv_sm90(asked: BackwardSm90) -> None:
    call = asked.call()
    config, raster_group = attn_bwd_wide_dkdv_config(call.problem), 2
    launch_attn_bwd_wide_dkdv_sm90(call, launch_attn_bwd_terms(call), raster_group, config)


def _launch_wide_dq_sm90(asked: BackwardSm90) -> None:
    call = asked.call()
    config, raster_group = attn_bwd_wide_dq_config(call.problem), 2
    launch_attn_bwd_wide_dq_sm90(call, launch_attn_bwd_terms(call), raster_group, config)


@compile_cases
def wide_split_sm90_cases() -> Iterator[CompileCase]:
    """The two kernels of the split backward for wide heads."""
    for asked in WIDE_SPLIT_SM90:
        yield launched_case(
            f"attn_bwd_wide_keys_sm90/{asked.name}", _launch_wide_dkdv_sm90, asked,
            kernel=_attn_bwd_wide_sm90_kernel, archs=(90,), expect=WGMMA,
            max_spill_bytes=asked.max_spill_bytes,
        )  # fmt: skip
        yield launched_case(
            f"attn_bwd_wide_queries_sm90/{asked.name}", _launch_wide_dq_sm90, asked,
            kernel=_attn_bwd_wide_dq_sm90_kernel, archs=(90,), expect=WGMMA,
            max_spill_bytes=asked.dq_spill_bytes,
        )  # fmt: skip


def _launch_visits(blocks: int, pack: int) -> None:
    mask = block_mask((64, 128), 64 * blocks)
    assert mask is not None
    columns = Columns(1, KV_HEADS, HEADS // KV_HEADS, EVERYTHING, raster_group=2, tile=128)
    order = torch.arange(KV_HEADS * mask.grid[1], dtype=torch.int32)
    groups = column_groups(mask, order, columns, programs=132)
    plan_visits(mask, groups, columns.group_size, pack, parts=4)


@compile_cases
def visits_cases() -> Iterator[CompileCase]:
    """The plan of ordered accumulation, by the number of visits that it holds at a time."""
    for width, blocks, pack in ((64, 32, 1), (256, 128, 2)):
        name = f"attn_bwd_visits/{width}"
        yield launched_case(name, _launch_visits, blocks, pack, archs=(90,))
