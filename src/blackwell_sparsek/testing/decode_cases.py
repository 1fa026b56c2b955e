"""Random decode calls from a seed, and the check of results that all implementations share."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..calls.decode import DecodeCall
from ..masks.band import Band
from ..reference.decode import attention_decode as oracle
from .inputs import normal
from .poison import poison_, poison_unused_
from .tolerance import assert_within_budget, roundings_of_exponents

CAUSAL = Band(None, 0)
SPARE_PAGES = 3


@dataclass(frozen=True)
class DecodeCase:
    """One decode call; the same seed gives the same keys in any layout.

    Slots past the lengths and pages that belong to no sequence hold NaN.
    """

    seed: int
    dtype: torch.dtype = torch.float16
    heads: tuple[int, int] = (4, 1)
    lengths: tuple[int, ...] = (33,)
    q_len: int = 1
    head_dims: tuple[int, int] = (16, 16)
    capacity: int | None = None
    """Slots of a sequence; by default the length of the longest sequence."""
    band: Band = CAUSAL
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    page_size: int | None = None
    block_size: int | None = None
    """Size of the listed blocks, with `page_size` that of a page; None reads all keys."""
    keep: float = 0.5
    """Fraction of the blocks that are listed."""
    fp8: str = "none"
    """`none`, or scales per `tensor` or per `head`."""
    latent: bool = False
    """Whether the values are a view of the first columns of the keys."""
    slopes: str = "none"
    """`none`, or ALiBi slopes per `head` or per `sequence` too."""

    def build(self, device: torch.device | str) -> DecodeCall:
        """The call, with its tensors on `device`."""
        (hq, hkv), (d, dv), batch = self.heads, self.head_dims, len(self.lengths)
        slots = max(self.lengths) if self.capacity is None else self.capacity
        size = self.page_size or 1
        slots = -(-slots // size) * size
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        q = normal(batch, hq, self.q_len, d, seed=self.seed * 8, dtype=self.dtype)
        k, v = (
            normal(batch, hkv, max(self.lengths), dim, seed=self.seed * 8 + i)
            for i, dim in ((1, d), (2, dv))
        )
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, slots - x.shape[2])) for x in (k, v))
        cache_dtype = self.dtype if self.fp8 == "none" else torch.float8_e4m3fn
        k, v = (_poisoned(x.to(cache_dtype), lengths) for x in (k, v))
        table = None
        if self.page_size is not None:
            k, v, table = self._paged(k, v)
        call = DecodeCall(
            q.to(device),
            k.to(device),
            v.to(device),
            lengths.to(device),
            scale=d**-0.5 if self.scale is None else self.scale,
            page_table=None if table is None else table.to(device),
            band=self.band,
            softcap=self.softcap,
            sinks=normal(hq, seed=self.seed * 8 + 3, device=device) if self.sinks else None,
        )
        if self.slopes != "none":
            shape = (hq,) if self.slopes == "head" else (batch, hq)
            slopes = normal(*shape, seed=self.seed * 8 + 7, device=device).abs() * 0.1
            call = replace(call, alibi_slopes=slopes)
        if self.latent:
            call = replace(call, v_cache=call.k_cache[..., :dv])
        return self._with_scales(self._with_lists(call, slots))

    def _generator(self, salt: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 8 + salt)

    def _with_lists(self, call: DecodeCall, slots: int) -> DecodeCall:
        size = self.page_size or self.block_size
        if self.block_size is None or size is None:
            return call
        shape = (len(self.lengths), self.heads[1], -(-slots // size))
        order = torch.rand(shape, generator=self._generator(4)).argsort(-1)
        kept = torch.rand(shape, generator=self._generator(5)) < self.keep
        blocks = torch.where(kept, order, -1).to(device=call.q.device, dtype=torch.int32)
        return replace(call, kv_blocks=blocks, kv_block_size=size)

    def _with_scales(self, call: DecodeCall) -> DecodeCall:
        if self.fp8 == "none":
            return call
        shape = () if self.fp8 == "tensor" else (self.heads[1],)
        factors = torch.rand((2, *shape), generator=self._generator(6)) + 0.5
        k_scale, v_scale = factors.to(call.q.device)
        return replace(call, k_scale=k_scale, v_scale=v_scale)

    def _paged(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scatter over shuffled pages, [pages, page_size, Hkv, D], not contiguous."""
        batch, hkv, slots, _ = k.shape
        size = self.page_size or 1
        pages = slots // size
        places = torch.randperm(batch * pages + SPARE_PAGES, generator=self._generator(7))
        table = places[: batch * pages].view(batch, pages)
        cache = poison_(
            torch.empty(batch * pages + SPARE_PAGES, hkv, size, k.shape[3] + v.shape[3])
        ).to(k.dtype)
        rows = cache.transpose(1, 2)
        k_cache, v_cache = rows[..., : k.shape[3]], rows[..., k.shape[3] :]
        for pool, x in ((k_cache, k), (v_cache, v)):
            own = x.view(batch, hkv, pages, size, -1).permute(0, 2, 3, 1, 4)
            pool[table.flatten()] = own.flatten(0, 1)
        return k_cache, v_cache, table.to(torch.int32)


def _poisoned(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    # float8 has NaN but supports hardly any operations
    return poison_unused_(x.float(), lengths).to(x.dtype)


def draw_decode_case(
    seed: int,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float16, torch.float32),
    longest: int = 130,
) -> DecodeCase:
    """A call in which every option is as likely as not, and sizes are awkward."""
    rng = random.Random(seed)
    hkv = rng.choice([1, 2, 3])
    dim = rng.choice([16, 24, 40, 64])
    page_size = rng.choice([None, None, 16, 17, 32, 64])
    listed = rng.random() < 0.4
    awkward = [n for n in (0, 1, 15, 16, 17, 31, 33, 63, 65) if n <= longest]
    lengths = tuple(
        rng.choice([*awkward, rng.randint(0, longest), longest])
        for _ in range(rng.choice([1, 2, 3, 5]))
    )
    sides = (rng.choice([None, 0, 1, 15, 16, 40]), rng.choice([None, 0, 0, 2]))
    return DecodeCase(
        seed=seed,
        dtype=rng.choice(list(dtypes)),
        heads=(hkv * rng.choice([1, 2, 4, 7]), hkv),
        lengths=lengths,
        q_len=rng.choice((1, 1, 1, 2, 3, 5, 16)),
        head_dims=(dim, dim if rng.random() < 0.6 else rng.choice([16, 40, 64])),
        capacity=longest + rng.choice([0, 1, 37]),
        band=rng.choice([CAUSAL, CAUSAL, Band(*sides)]),
        scale=rng.choice([None, None, 0.3, -0.2, 0.0]),
        softcap=rng.choice([0.0, 0.0, 5.0, 30.0]),
        sinks=rng.random() < 0.4,
        page_size=page_size,
        block_size=(page_size or rng.choice([8, 16, 20, 32, 64])) if listed else None,
        keep=rng.choice([0.3, 0.7, 1.0]),
    )


def check_decode(
    out: torch.Tensor,
    lse: torch.Tensor,
    call: DecodeCall,
    what: str = "",
    *,
    score_roundings: float = 1.0,
) -> None:
    """Compare a result with the oracle under the error budget.

    `score_roundings` is for scores of very many dimensions: tensor cores truncate the running sum
    after every 16 products, where plain PyTorch rounds it.
    """
    q = call.q
    exact, exact_lse = oracle(replace(call, q=q.double()))
    plain, _ = oracle(call, precision=q.dtype)
    _, plain_lse = oracle(replace(call, q=q.float()), precision=torch.float32)
    roundings = roundings_of_exponents(out, exact_lse, call.softcap != 0.0)
    assert_within_budget(out, exact, plain, what=f"{what} out", roundings=roundings)
    # tensor cores truncate their sums, where float32 on the CPU and in cuBLAS rounds
    factor = 4.0 if lse.is_cuda else 2.0
    assert_within_budget(
        lse, exact_lse, plain_lse, factor=factor, roundings=score_roundings, what=f"{what} lse"
    )
