"""Calls with packed queries over caches from a seed, and the check of their results."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..calls.attention import empty_lse, empty_out
from ..calls.ragged import RaggedCall
from ..masks.band import Band
from ..reference.ragged import attention_ragged as oracle
from .inputs import normal
from .poison import poison_, poison_unused_
from .tolerance import assert_within_budget

CAUSAL = Band(None, 0)
SPARE = 3
"""Pages, or rows of a cache, that belong to no sequence."""


@dataclass(frozen=True)
class RaggedCase:
    """One call; the same seed gives the same keys in any layout.

    Slots that belong to no key, and keys before the first of a sequence, hold NaN. So do `out` and
    `lse`, and the rows of q after the last sequence.
    """

    seed: int
    dtype: torch.dtype = torch.float16
    heads: tuple[int, int] = (4, 2)
    q_lens: tuple[int, ...] = (1, 17, 5)
    kv_lens: tuple[int, ...] = (33, 17, 40)
    head_dims: tuple[int, int] = (16, 16)
    layout: str = "contiguous"
    """`contiguous`, `paged` or `packed`."""
    page_size: int = 16
    table_dtype: torch.dtype = torch.int32
    padding: int = 0
    """Rows of q after the last sequence."""
    band: Band = CAUSAL
    chunk: int = 0
    top_left: bool = False
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    slopes: str = "none"
    """`none`, per `head`, or per `sequence` and head."""
    block_size: int | None = None
    """Size of the listed blocks, with pages that of a page; None reads all keys."""
    fp8: str = "none"
    """`none`, or scales per `tensor` or per `head`."""
    used: bool = False
    """Whether some sequences use only part of their queries, or packed keys."""
    first_keys: bool = False
    moved: bool = False
    """Whether sequences lie in other rows of a contiguous cache."""
    batch_invariant: bool = False

    def build(self, device: torch.device | str) -> RaggedCall:
        """The call, with its tensors on `device`."""
        (hq, hkv), (d, dv), batch = self.heads, self.head_dims, len(self.q_lens)
        rng = random.Random(self.seed)
        size = self.page_size if self.layout == "paged" else 1
        longest = max(*self.kv_lens, 1)
        slots = -(-longest // size) * size
        lengths = torch.tensor(self.kv_lens, dtype=torch.int32)
        used_k = [n - min(n, 5 * self.used) for n in self.kv_lens]
        k, v = (
            normal(batch, hkv, longest, dim, seed=self.seed * 8 + i) for i, dim in ((1, d), (2, dv))
        )
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, slots - longest)) for x in (k, v))
        stored = self.dtype if self.fp8 == "none" else torch.float8_e4m3fn
        in_use = torch.tensor(used_k) if self.layout == "packed" else lengths
        k, v = (poison_unused_(x.to(stored).float(), in_use) for x in (k, v))
        first_key = None
        if self.first_keys:
            first_key = torch.tensor([rng.randint(0, n) for n in self.kv_lens], dtype=torch.int32)
            for b, first in enumerate(first_key.tolist()):
                k[b, :, :first], v[b, :, :first] = torch.nan, torch.nan
        k, v = k.to(stored), v.to(stored)
        offsets = _offsets(self.q_lens)
        tokens = int(offsets[-1])
        q = normal(tokens + self.padding, hq, d, seed=self.seed * 8, dtype=self.dtype)
        poison_(q[tokens:])
        seqused_q = None
        if self.used:
            used_q = [rng.randint(0, n) for n in self.q_lens]
            seqused_q = torch.tensor(used_q, dtype=torch.int32)
            for first, n, end in zip(offsets.tolist(), used_q, offsets[1:].tolist(), strict=False):
                poison_(q[first + n : end])
        q = q.to(device)
        slopes = {"none": None, "head": (hq,), "sequence": (batch, hq)}[self.slopes]
        call = RaggedCall(
            poison_(empty_out(q, dv)),
            poison_(empty_lse(q)),
            q,
            *self._keys(k, v),
            offsets,
            max(*self.q_lens, 0),
            max(*self.kv_lens, 0),
            d**-0.5 if self.scale is None else self.scale,
            seqlens_k=lengths,
            first_key=first_key,
            seqused_q=seqused_q,
            band=self.band,
            chunk=self.chunk,
            top_left=self.top_left,
            softcap=self.softcap,
            sinks=normal(hq, seed=self.seed * 8 + 3) if self.sinks else None,
            alibi_slopes=None if slopes is None else _uniform(slopes, self.seed * 8 + 4),
            batch_invariant=self.batch_invariant,
        )
        call = self._with_tables(call, used_k)
        call = self._with_scales(self._with_lists(call, slots))
        moved: dict[str, Any] = {
            n: x.to(device) for n, x in vars(call).items() if isinstance(x, torch.Tensor)
        }
        return replace(call, **moved)

    def _keys(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in their layout, not contiguous where that is allowed."""
        batch, _, slots, _ = k.shape
        if self.layout == "packed":
            rows = [x.transpose(1, 2) for x in (k, v)]
            packed = [torch.cat([x[b, :n] for b, n in enumerate(self.kv_lens)]) for x in rows]
            return packed[0], packed[1]
        outer = batch * (slots // self.page_size if self.layout == "paged" else 1) + SPARE
        size = self.page_size if self.layout == "paged" else slots
        pools = []
        for x in (k, v):
            pool = poison_(torch.empty(outer, x.shape[1], size, x.shape[3])).to(x.dtype)
            own = x.reshape(batch, x.shape[1], -1, size, x.shape[3]).transpose(1, 2).flatten(0, 1)
            pool[self._places(outer)[: own.shape[0]]] = own
            pools.append(pool.transpose(1, 2) if self.layout == "paged" else pool)
        if self.layout == "contiguous" and not self.moved:
            return pools[0][:batch], pools[1][:batch]
        return pools[0], pools[1]

    def _places(self, outer: int) -> torch.Tensor:
        """Where pages or rows lie among `outer` of them."""
        if self.layout == "contiguous" and not self.moved:
            return torch.arange(outer)
        return torch.randperm(outer, generator=torch.Generator().manual_seed(self.seed * 8 + 7))

    def _with_tables(self, call: RaggedCall, used_k: list[int]) -> RaggedCall:
        batch, places = len(self.q_lens), self._places(call.k.shape[0])
        if self.layout == "paged":
            pages = (call.k.shape[0] - SPARE) // batch
            table = places[: batch * pages].view(batch, pages).to(self.table_dtype)
            return replace(call, page_table=table)
        if self.layout == "packed":
            lengths = torch.tensor(used_k, dtype=torch.int32) if self.used else None
            return replace(call, cu_seqlens_k=_offsets(self.kv_lens), seqlens_k=lengths)
        if self.moved:
            return replace(call, slabs=places[:batch].to(torch.int32))
        return call

    def _with_lists(self, call: RaggedCall, slots: int) -> RaggedCall:
        if self.block_size is None:
            return call
        size = self.page_size if self.layout == "paged" else self.block_size
        shape = (len(self.q_lens), self.heads[1], -(-slots // size))
        generator = torch.Generator().manual_seed(self.seed * 8 + 5)
        order = torch.rand(shape, generator=generator).argsort(-1)
        kept = torch.rand(shape, generator=generator) < 0.5
        blocks = torch.where(kept, order, -1).to(torch.int32)
        return replace(call, kv_blocks=blocks, kv_block_size=size)

    def _with_scales(self, call: RaggedCall) -> RaggedCall:
        if self.fp8 == "none":
            return call
        shape = () if self.fp8 == "tensor" else (self.heads[1],)
        k_scale, v_scale = _uniform((2, *shape), self.seed * 8 + 6) + 0.5
        return replace(call, k_scale=k_scale, v_scale=v_scale)


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _uniform(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed))


def draw_ragged_case(
    seed: int, *, dtypes: Sequence[torch.dtype] = (torch.float16, torch.float32), longest: int = 70
) -> RaggedCase:
    """A call in which every option is as likely as not, and sizes are awkward."""
    rng = random.Random(seed)
    hkv, batch = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 5])
    dim = rng.choice([16, 24, 40, 64])
    awkward = [n for n in (0, 1, 15, 16, 17, 31, 33, 63, 65) if n <= longest]
    kv_lens = tuple(rng.choice([*awkward, rng.randint(0, longest), longest]) for _ in range(batch))
    q_lens = tuple(rng.choice([1, 1, 0, 2, 7, min(n, 33), n + 3]) for n in kv_lens)
    layout = rng.choice(["contiguous", "paged", "packed"])
    cached = layout != "packed"
    dtype = rng.choice(list(dtypes))
    fp8 = rng.choice(["none", "tensor", "head"]) if cached and dtype.itemsize == 2 else "none"
    return RaggedCase(
        seed,
        dtype,
        (hkv * rng.choice([1, 2, 4, 7]), hkv),
        q_lens,
        kv_lens,
        (dim, dim if rng.random() < 0.6 else rng.choice([16, 40, 64])),
        layout,
        rng.choice([16, 17, 32, 64]),
        rng.choice([torch.int32, torch.int64]),
        rng.choice([0, 1, 20]),
        Band(rng.choice([None, None, 0, 1, 15, 40]), rng.choice([None, 0, 0, 2])),
        rng.choice([0, 0, 16, 23]),
        rng.random() < 0.3,
        rng.choice([None, None, -0.3]),
        rng.choice([0.0, 2.0]),
        rng.random() < 0.5,
        rng.choice(["none", "none", "head", "sequence"]),
        rng.choice([None, None, 16, 24]) if cached else None,
        fp8,
        rng.random() < 0.3,
        rng.random() < 0.3,
        layout == "contiguous" and rng.random() < 0.5,
        rng.random() < 0.3,
    )


def check_ragged(call: RaggedCall, what: str = "", *, on_gpu: bool | None = None) -> None:
    """Compare `out` and `lse` of a call that was run with the oracle under the error budget.

    `on_gpu` says where it was run if its tensors have been copied since.
    """
    q = call.q
    exact, exact_lse = oracle(replace(call, q=q.double()))
    plain, _ = oracle(call, precision=q.dtype)
    _, plain_lse = oracle(replace(call, q=q.float()), precision=torch.float32)
    assert_within_budget(call.out, exact, plain, what=f"{what} out")
    # tensor cores truncate their sums, where float32 on the CPU and in cuBLAS rounds
    factor = 4.0 if call.lse.is_cuda or on_gpu else 2.0
    assert_within_budget(call.lse, exact_lse, plain_lse, factor=factor, what=f"{what} lse")
