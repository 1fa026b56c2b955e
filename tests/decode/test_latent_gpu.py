"""The Hopper kernel for latent caches, with programs alone and in pairs, against the oracle."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.decode import DecodeCall
from blackwell_sparsek.decode import sm90_latent, tuning
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.testing.decode_cases import CAUSAL, DecodeCase, check_decode
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.poison import poisoned_empty

pytestmark = pytest.mark.sm90

BRAIN, HALF = torch.bfloat16, torch.float16
MLA = DecodeCase(2, BRAIN, heads=(128, 1), head_dims=(576, 512), latent=True)


@pytest.fixture(params=["alone", "paired"])
def paired(request, monkeypatch):
    """Programs in pairs where the number of head tiles is even, however few the keys; or alone."""
    paired = request.param == "paired"
    monkeypatch.setattr(tuning, "PAIRED_SLOTS", 0 if paired else 2**31)
    return paired


def run(call):
    with poisoned_empty():
        return sm90_latent.decode(call)


def check(case):
    """Against the oracle on the host; the budget is that of `test_decode_gpu.py`."""
    out, lse = run(case.build("cuda"))
    exact = case.build("cpu")
    check_decode(out.cpu(), lse.cpu(), exact, what=str(case), score_roundings=576 // 16)
    return out, lse


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": (1,)},
        {"lengths": (63, 64, 65, 0)},
        {"lengths": (1000, 3), "page_size": 64},
        # more softmaxes than programs: nothing is combined by a launch of its own
        {"lengths": (129,) * 70},
    ],
    ids=["one", "around-a-tile", "paged", "many"],
)
def test_lengths(paired, options):
    check(dataclasses.replace(MLA, **options))


@pytest.mark.parametrize("page_size", [None, 64])
def test_caches_of_one_memory(page_size):
    """What `bsk.KVCache` and `bsk.PagedKVCache` hold after two appends, by `impl="auto"`."""
    sizes = {"head_dim_v": 512, "latent": True, "dtype": BRAIN, "device": "cuda"}
    latents, more = (normal(2, 1, n, 576, seed=n, dtype=BRAIN, device="cuda") for n in (65, 2))
    if page_size is None:
        cache = bsk.KVCache(2, 1, 70, 576, **sizes)
        cache.append(latents, counts=[65, 9])
        cache.append(more)
        where = {"cache_seqlens": cache.lengths}
    else:
        cache = bsk.PagedKVCache(5, page_size, 1, 576, **sizes)
        ids = cache.add_sequences(2)[::-1]
        cache.append(ids, latents, counts=[65, 9])
        cache.append(ids, more)
        where = {"cache_seqlens": cache.lengths(ids), "page_table": cache.page_table(ids)}
    q = normal(2, 16, 2, 576, seed=3, dtype=BRAIN, device="cuda")
    chosen = bsk.explain(bsk.attention_decode, q, cache.k, cache.v, **where)
    assert chosen.chosen == "sm90"
    out, lse = bsk.attention_decode(q, cache.k, cache.v, return_lse=True, **where)
    where = {name: x.cpu() for name, x in where.items()}
    k = cache.k.cpu()
    exact = DecodeCall(q.cpu(), k, k[..., :512], scale=576**-0.5, band=CAUSAL, **where)
    check_decode(out.cpu(), lse.cpu(), exact, score_roundings=576 // 16)


@pytest.mark.parametrize("heads", [16, 32, 64, 96])
def test_fewer_heads(paired, heads):
    """Up to 64 heads are one head tile, which is never paired; of 96 the second is half full."""
    case = dataclasses.replace(MLA, heads=(heads, 1), lengths=(700, 64))
    in_pairs = tuning.latent_launch(case.build("cuda").problem).config.PAIRED
    assert in_pairs is (paired and heads > 64)
    check(case)


@pytest.mark.parametrize(
    "options",
    [
        {"q_len": 3, "heads": (32, 1)},
        {"dtype": HALF, "softcap": 20.0, "sinks": True},
        {"page_size": 64, "block_size": 64, "keep": 0.4},
        {"page_size": 16},
        {"band": Band(100, 0)},
        {"scale": -0.05},
    ],
    ids=str,
)
def test_options(paired, options):
    check(dataclasses.replace(MLA, lengths=(700, 129, 0), **options))


def test_missing_pages_are_nan(paired):
    case = dataclasses.replace(MLA, lengths=(300, 200, 100), page_size=64)
    call = case.build("cuda")
    fine = run(call)
    call.page_table[1, 3] = 2**30
    out, lse = run(call)
    assert out[1].isnan().all() and lse[1].isnan().all()
    for b in (0, 2):
        assert out[b].equal(fine[0][b]) and lse[b].equal(fine[1][b])


@pytest.mark.parametrize("page_size", [None, 64])
def test_long_sequences_give_the_same_bits_every_time(paired, page_size):
    case = dataclasses.replace(MLA, lengths=(9000, 1, 5000), page_size=page_size)
    first = check(case)
    call = case.build("cuda")
    for _ in range(20):
        again = run(call)
        assert first[0].equal(again[0]) and first[1].equal(again[1])
