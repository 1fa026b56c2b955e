"""The Hopper kernel for latent caches, with programs alone and in pairs, against the oracle."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.decode import sm90_latent, tuning
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.testing.decode_cases import DecodeCase, check_decode
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
