"""What every rank checks of `bsk.distributed.attention_decode`; run by test_ranks.py."""

import itertools

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

CHECKS = {}
decode = bsk.attention_decode


def check(function):
    CHECKS[function.__name__] = function
    return function


def caches(world, heads=2, each=40, dim=16, dim_v=24, dtype=torch.float32):
    """Keys and values of three sequences, and how many of them each rank holds."""
    shape = 3, heads, each * world
    k, v = (normal(*shape, d, seed=i).to(dtype) for i, d in enumerate((dim, dim_v)))
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, each + 1, (world, 3), generator=generator, dtype=torch.int32)
    # nothing before the last rank, nothing on the last rank, no key at all
    lengths[:-1, 0], lengths[-1, 1], lengths[:, 2] = 0, 0, 0
    lengths[-1, 0], lengths[0, 1] = 7, 5
    return k, v, lengths


def local_cache(x, lengths, rank, each=40):
    """The part of a rank: its keys, and poison behind them."""
    starts = lengths[:rank].sum(0)
    part = torch.full_like(x[:, :, :each], torch.nan)
    for b, (start, length) in enumerate(zip(starts.tolist(), lengths[rank].tolist(), strict=True)):
        part[b, :, :length] = x[b, :, start : start + length]
    return part


def compare(q, k, v, lengths, found, **options):
    out, lse = found
    total = lengths.sum(0, dtype=torch.int32)
    results = []
    for dtype, impl in ((torch.float64, "reference"), (q.dtype, "eager")):
        given = (x.to(dtype) for x in (q, k, v))
        sinks = options.get("sinks")
        own = {**options, "sinks": None if sinks is None else sinks.to(dtype)}
        results.append(decode(*given, cache_seqlens=total, return_lse=True, impl=impl, **own))
    (exact, exact_lse), (plain, plain_lse) = results
    ranks = lengths.shape[0]
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert_within_budget(out, exact, plain, roundings=ranks, what=f"out {options}")
    assert_within_budget(lse, exact_lse, plain_lse, roundings=ranks, what=f"lse {options}")


@check
def decode_over_parts_of_a_sequence(rank, world, folder):
    k, v, lengths = caches(world)
    sinks = normal(4, seed=5)
    choices = ((1, 3), (False, True), (None, sinks), (None, 2.0))
    for queries, causal, own_sinks, softcap in itertools.product(*choices):
        q = normal(3, 4, queries, 16, seed=9)
        options = {"causal": causal, "sinks": own_sinks, "softcap": softcap, "scale": 0.3}
        parts = (local_cache(x, lengths, rank) for x in (k, v))
        found = bsk.distributed.attention_decode(
            q, *parts, cache_seqlens=lengths[rank], return_lse=True, **options
        )
        compare(q, k, v, lengths, found, **options)


@check
def decode_over_parts_in_half_precision(rank, world, folder):
    k, v, lengths = caches(world, dtype=torch.bfloat16)
    q = normal(3, 4, 2, 16, seed=9).bfloat16()
    parts = (local_cache(x, lengths, rank) for x in (k, v))
    found = bsk.distributed.attention_decode(
        q, *parts, cache_seqlens=lengths[rank], return_lse=True
    )
    compare(q, k, v, lengths, found)


@check
def decode_over_pages_on_each_rank(rank, world, folder):
    k, v, lengths = caches(world)
    q = normal(3, 4, 1, 16, seed=9)
    table = torch.arange(15, dtype=torch.int32).view(3, 5).flip(0)
    pages = []
    for x in (k, v):
        part = local_cache(x, lengths, rank)
        part = part.view(3, 2, 5, 8, -1).permute(0, 2, 3, 1, 4).flip(0).reshape(15, 8, 2, -1)
        pages.append(part.contiguous())
    found = bsk.distributed.attention_decode(
        q, *pages, cache_seqlens=lengths[rank], page_table=table, return_lse=True
    )
    compare(q, k, v, lengths, found)


@check
def decode_over_parts_of_the_heads(rank, world, folder):
    k, v, lengths = caches(world, heads=2 * world)
    total = lengths.sum(0, dtype=torch.int32)
    sinks = normal(4 * world, seed=5)
    own = slice(2 * rank, 2 * rank + 2)
    for queries, window in ((1, None), (3, 20)):
        q = normal(3, 4 * world, queries, 16, seed=9)
        options = {"window": window, "sinks": sinks, "softcap": 2.0}
        found = bsk.distributed.attention_decode(
            *(q, k[:, own], v[:, own]), cache_seqlens=total, split="heads", return_lse=True,
            **options,
        )  # fmt: skip
        compare(q, k, v, lengths, found, **options)


@check
def decode_refuses_what_it_cannot_do(rank, world, folder):
    k, v, lengths = caches(world)
    q = normal(3, 4, 1, 16, seed=9)
    call = bsk.distributed.attention_decode
    options = {"cache_seqlens": lengths[rank]}
    with pytest.raises(bsk.Unsupported, match="window does not apply to a cache split by seq"):
        call(q, k, v, window=4, **options)
    with pytest.raises(bsk.InvalidInput, match="split is unknown; expected one of 'sequence'"):
        call(q, k, v, split="tokens", **options)
    with pytest.raises(bsk.InvalidInput, match="sinks has a wrong shape"):
        call(q, k, v, sinks=torch.zeros(3), **options)
    with pytest.raises(bsk.InvalidInput, match="q has a wrong number of heads; expected a mult"):
        call(q[:, :3], k, v, split="heads", **options)
    other = q[:, :, :0] if rank == 1 else q
    with pytest.raises(bsk.InvalidInput, match="rank 1 has other arguments"):
        call(other, k, v, **options)
    with pytest.raises(bsk.InvalidInput, match="is not a tensor"):
        call(None if rank == 1 else q, k, v, **options)


@check
def a_wrong_part_on_one_rank_is_an_error_on_all(rank, world, folder):
    k, v, lengths = caches(world)
    q = normal(3, 4, 1, 16, seed=9)
    given = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths[rank]}
    wrong = {
        "v_cache is not a tensor": {"v_cache": None},
        "k_cache/v_cache do not match": {"v_cache": v[:, :, 1:]},
        "cache_seqlens has an unsupported dtype": {"cache_seqlens": lengths[rank].long()},
        "cache_seqlens has a wrong shape": {"cache_seqlens": lengths[rank, :2]},
        "k_scale": {"k_scale": torch.ones(())},
        "q requires a gradient": {"q": q.clone().requires_grad_()},
        "impl is unknown": {"impl": "fast"},
    }
    most = k.shape[2]
    wrong[rf"cache_seqlens\[1\] is out of range; expected 0 to {most}"] = {
        "cache_seqlens": torch.tensor([1, most + 1, 0], dtype=torch.int32)
    }
    for problem, changes in wrong.items():
        own = {**given, **changes} if rank == 1 else given
        with pytest.raises(bsk.BskError, match=problem if rank == 1 else "rank 1 has failed"):
            bsk.distributed.attention_decode(**own)
    heads, wide = {"split": "heads", "window": 3 + rank}, normal(3, 4 * world, 1, 16, seed=9)
    with pytest.raises(bsk.InvalidInput, match="rank 1 has other arguments"):
        bsk.distributed.attention_decode(**{**given, "q": wide}, **heads)
