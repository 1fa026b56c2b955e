"""Random attention calls from a seed, and the check of results that all implementations share."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..calls.attention import AttnSpec
from ..masks.band import EVERYTHING, Band
from ..masks.block_mask import BlockMask
from ..reference.attention import attention as oracle
from .inputs import normal
from .tolerance import assert_lse_within_budget, assert_within_budget, roundings_of_exponents

_DIMS_OF_TILES = {
    64: (8, 16, 40, 64, 64),
    128: (72, 80, 96, 128, 128),
    192: (136, 160, 192, 192),
    256: (200, 224, 256, 256),
}


@dataclass(frozen=True)
class AttnCase:
    """One attention call. `lengths` holds one (Sq, Sk), or those of each packed sequence."""

    seed: int
    dtype: torch.dtype = torch.float16
    batch: int = 1
    heads: tuple[int, int] = (1, 1)
    lengths: tuple[tuple[int, int], ...] = ((33, 33),)
    head_dims: tuple[int, int] = (16, 16)
    band: Band = EVERYTHING
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    mask: str = "none"
    """`none`, `blocks` (whole blocks) or `elements` (partial blocks among them)."""
    block_size: tuple[int, int] = (32, 32)
    mask_broadcast: tuple[bool, bool] = (True, True)
    mask_per_kv_head: bool = False
    """Whether a mask that does not broadcast over heads has one for each KV head."""
    varlen: bool = False
    alibi: str = "none"
    """`none`, `heads` (slopes [Hq]) or `batch` ([B, Hq])."""
    bias: tuple[bool, bool] | None = None
    """Whether a bias broadcasts over batch and heads; a tenth of it is -inf."""
    spread: float = 1.0
    """Deviation of q; a large one gives logits of 1e6."""

    def build(
        self, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttnSpec]:
        """Tensors and options of the call."""
        (hq, hkv), (d, dv) = self.heads, self.head_dims
        max_q, max_k = (max(x) for x in zip(*self.lengths, strict=True))
        batch = len(self.lengths) if self.varlen else self.batch
        shapes: tuple[tuple[int, ...], ...]
        if self.varlen:
            tq, tk = (sum(x) for x in zip(*self.lengths, strict=True))
            shapes = (tq, hq, d), (tk, hkv, d), (tk, hkv, dv)
        else:
            shapes = (batch, hq, max_q, d), (batch, hkv, max_k, d), (batch, hkv, max_k, dv)
        q, k, v = (
            normal(*shape, seed=self.seed * 8 + i, dtype=self.dtype, device=device)
            for i, shape in enumerate(shapes)
        )
        spec = AttnSpec(
            scale=d**-0.5 if self.scale is None else self.scale,
            band=self.band,
            block_mask=self._mask(batch, max_q, max_k, device),
            softcap=self.softcap,
            sinks=normal(hq, seed=self.seed * 8 + 3, device=device) if self.sinks else None,
            max_q=max_q,
            max_k=max_k,
            alibi_slopes=self._slopes(batch, device),
            bias=self._bias(batch, max_q, max_k, device),
        )
        if self.varlen:
            cu_q, cu_k = (
                torch.tensor([0, *x], dtype=torch.int32, device=device).cumsum(0).to(torch.int32)
                for x in zip(*self.lengths, strict=True)
            )
            spec = spec._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        return q * self.spread, k, v, spec

    def _slopes(self, batch: int, device: torch.device | str) -> torch.Tensor | None:
        if self.alibi == "none":
            return None
        shape = (self.heads[0],) if self.alibi == "heads" else (batch, self.heads[0])
        return normal(*shape, seed=self.seed * 8 + 7, device=device).abs() * 0.2

    def _bias(
        self, batch: int, max_q: int, max_k: int, device: torch.device | str
    ) -> torch.Tensor | None:
        if self.bias is None:
            return None
        any_batch, any_head = self.bias
        shape = (1 if any_batch else batch, 1 if any_head else self.heads[0], max_q, max_k)
        generator = torch.Generator().manual_seed(self.seed * 8 + 5)
        hidden = torch.rand(shape, generator=generator).to(device) < 0.1
        values = normal(*shape, seed=self.seed * 8 + 6, dtype=self.dtype, device=device)
        return values.masked_fill(hidden, -torch.inf)

    def _mask(
        self, batch: int, max_q: int, max_k: int, device: torch.device | str
    ) -> BlockMask | None:
        if self.mask == "none":
            return None
        (bq, bk), (any_batch, any_head) = self.block_size, self.mask_broadcast
        heads = self.heads[1 if self.mask_per_kv_head else 0]
        planes = (1 if any_batch else batch, 1 if any_head else heads)
        generator = torch.Generator().manual_seed(self.seed * 8 + 4)
        grid = (-(-max_q // bq), -(-max_k // bk))
        keep = torch.rand((*planes, *grid), generator=generator) < 0.6
        if self.mask == "blocks":
            return BlockMask.from_dense(keep.to(device), self.block_size, (max_q, max_k))
        whole = torch.rand(keep.shape, generator=generator) < 0.5
        elements = torch.rand((*planes, max_q, max_k), generator=generator) < 0.5
        keep, whole = (
            x.repeat_interleave(bq, -2).repeat_interleave(bk, -1)[..., :max_q, :max_k]
            for x in (keep, whole)
        )
        visible = keep & (whole | elements)
        return BlockMask.from_element_mask(visible.to(device), self.block_size)


def in_structure(
    case: AttnCase,
    rng: random.Random,
    tiles: Sequence[int],
    blocks: tuple[int, int] | None,
    softcap: bool,
    **given: Any,
) -> AttnCase:
    """`case` as one Hopper kernel takes it: D and Dv that fit `tiles`, and `blocks` or no mask."""
    d, dv = (rng.choice(_DIMS_OF_TILES[tile]) for tile in tiles)
    return replace(
        case,
        head_dims=(d, dv),
        scale=None if case.scale is None else abs(case.scale) or 0.7,
        softcap=rng.choice([5.0, 30.0]) if softcap else 0.0,
        mask=rng.choice(["none"] if blocks is None else ["blocks", "elements"]),
        block_size=blocks or (64, 64),
        **given,
    )


def draw_case(
    seed: int,
    structure: int | None = None,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float16, torch.float32),
    longest: int = 70,
    head_dims: Sequence[int] = (16, 24, 40, 64, 72),
    block_sizes: Sequence[int] = (16, 32, 64),
    most_heads: int = 4,
) -> AttnCase:
    """A call in which every option is as likely as not, and sizes are awkward.

    Whatever makes a kernel compile again (dtype, heads, head dimensions, blocks, which options are
    on) comes from the seed `structure`, by default `seed`; lengths, bands and values from `seed`.
    """
    form = random.Random(seed if structure is None else structure)
    hkv = form.choice([h for h in (1, 2, 3) if h <= most_heads])
    hq = hkv * form.choice([g for g in (1, 2, 3, 7) if g * hkv <= most_heads])
    d = form.choice(list(head_dims))
    dv = d if form.random() < 0.6 else form.choice(list(head_dims))
    dtype = form.choice(list(dtypes))
    block_size = (form.choice(list(block_sizes)), form.choice(list(block_sizes)))
    varlen, softcap, sinks, masked = (form.random() < chance for chance in (0.3, 0.4, 0.3, 0.6))

    rng = random.Random(seed)
    lengths = [n for n in (1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 257) if n <= longest]
    pairs = [_lengths(rng, lengths) for _ in range(rng.randint(1, 4) if varlen else 1)]
    if varlen:
        pairs = [(q if rng.random() < 0.8 else 0, k if rng.random() < 0.8 else 0) for q, k in pairs]
    sides = [rng.choice([None, 0, 1, 2, 15, 16, 17, 31, 40]) for _ in range(2)]
    return AttnCase(
        seed=seed,
        dtype=dtype,
        batch=rng.choice([1, 1, 2]),
        heads=(hq, hkv),
        lengths=tuple(pairs),
        head_dims=(d, dv),
        band=rng.choice([EVERYTHING, Band(None, 0), Band(sides[0], 0), Band(*sides)]),
        scale=rng.choice([None, None, 0.3, -0.2, 0.0]),
        softcap=rng.choice([5.0, 30.0]) if softcap else 0.0,
        sinks=sinks,
        mask=rng.choice(["blocks", "elements"]) if masked else "none",
        block_size=block_size,
        mask_broadcast=(rng.random() < 0.5, rng.random() < 0.5),
        varlen=varlen,
    )


def _lengths(rng: random.Random, lengths: Sequence[int]) -> tuple[int, int]:
    sq = rng.choice(list(lengths))
    sk = rng.choice([sq, rng.choice(list(lengths)), rng.randint(1, lengths[-1])])
    return sq, sk


def check_attention(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttnSpec,
    what: str = "",
) -> None:
    """Compare a result with the oracle under the error budget."""
    exact, exact_lse = oracle(q.double(), k.double(), v.double(), spec)
    plain, _ = oracle(q, k, v, spec, precision=q.dtype)
    _, plain_lse = oracle(q.float(), k.float(), v.float(), spec, precision=torch.float32)
    roundings = roundings_of_exponents(out, exact_lse, spec.softcap != 0.0)
    assert_within_budget(out, exact, plain, what=f"{what} out", roundings=roundings)
    assert_lse_within_budget(lse, exact_lse, plain_lse, what=f"{what} lse")
