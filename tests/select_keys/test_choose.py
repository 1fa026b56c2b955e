"""Choosing from stored scores against a stable sort, whichever way the kernel takes."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.calls.select_keys import SelectCall, SelectOptions
from blackwell_sparsek.select_keys.choose import SPREAD, Rows, launch_choose
from blackwell_sparsek.select_keys.tuning import ChooseConfig, scores_stride
from blackwell_sparsek.testing import inputs

CAUSAL = SelectOptions(1, 1, 40)
ALL_SEEN = CAUSAL._replace(causal=False)
SAMPLE = 64
# A sample of 64 admits about 280 entries of 2000.
WIDE = ChooseConfig(64, 512, SAMPLE, 64, 4, 128)
NARROW = ChooseConfig(64, 110, SAMPLE, 64, 4, 128)


def choose(scores, options, config=WIDE, first=0):
    """ids and counts of all rows of `scores` from `first` on; they are rows of one list."""
    rows, kv_len = scores.shape
    device = scores.device
    stored = torch.full((rows - first, scores_stride(kv_len)), torch.nan, device=device)
    stored[:, :kv_len] = scores[first:]
    call = SelectCall(*(torch.empty(1, 1, n, 1) for n in (rows, kv_len)), None, options)
    ids = torch.full((rows, options.most), -7, dtype=torch.int32, device=device)
    counts = torch.full((rows,), -7, dtype=torch.int32, device=device)
    config = ChooseConfig(**{**vars(config), "words": -(-kv_len // 32)})
    launch_choose(ids, counts, call, stored, Rows(first, rows - first), config)
    assert (ids[:first] == -7).all() and (counts[:first] == -7).all()
    return ids[first:], counts[first:]


def check(scores, options, config=WIDE, first=0):
    """Compare with a stable sort of each row."""
    ids, counts = choose(scores, options, config, first)
    rows, kv_len = scores.shape
    for i, (own, count) in enumerate(zip(ids.cpu(), counts.tolist(), strict=True)):
        seen = min(kv_len, first + i + kv_len - rows + 1) if options.causal else kv_len
        row = scores[first + i, : max(seen, 0)].cpu().clone()
        row[: options.force_first] = torch.inf
        row[max(len(row) - options.force_last, 0) :] = torch.inf
        best = row.sort(descending=True, stable=True).indices[: options.most].sort().values
        assert count == len(best)
        assert own[:count].tolist() == best.tolist(), f"row {first + i}"
        assert not own[count:].any()


def normal(*shape, device):
    return inputs.normal(*shape, seed=3).to(device)


@pytest.mark.parametrize("config", [WIDE, NARROW], ids=["collected", "step by step"])
@pytest.mark.parametrize("kv_len", [2000, 257, 41, 1], ids=str)
def test_random_scores(kv_len, config, device):
    check(normal(3, kv_len, device=device), CAUSAL, config, first=1)


@pytest.mark.parametrize("config", [WIDE, NARROW], ids=["collected", "step by step"])
def test_forced_entries(config, device):
    options = CAUSAL._replace(force_first=3, force_last=5)
    check(normal(2, 1500, device=device), options, config)


@pytest.mark.parametrize("config", [WIDE, NARROW], ids=["collected", "step by step"])
@pytest.mark.parametrize("kind", ["constant", "few values", "rising", "falling", "one sign"])
def test_scores_that_are_not_random(kind, config, device):
    n = 1000
    rising = torch.arange(float(n)) - 500
    row = {
        "constant": torch.full((n,), 2.5),
        "few values": inputs.integers(n, seed=1, bound=2).float(),
        "rising": rising,
        "falling": -rising,
        "one sign": -normal(n, device="cpu").abs(),
    }[kind]
    check(row.expand(1, n).contiguous().to(device), ALL_SEEN, config)


def test_infinite_scores(device):
    scores = normal(2, 600, device=device)
    scores[:, 100:130], scores[:, 300:590] = torch.inf, -torch.inf
    check(scores, ALL_SEEN)
    check(scores, ALL_SEEN._replace(most=320), ChooseConfig(64, 400, SAMPLE, 64, 4, 128))


def sampled(kv_len):
    """Places of the sample."""
    stride = kv_len // SAMPLE
    i = torch.arange(SAMPLE)
    return i * stride + (i * SPREAD.value % 2**16 // 16) % stride


def test_a_sample_that_misleads(device):
    scores = normal(2, 2000, device=device)
    # too high a threshold for all others
    scores[0, sampled(2000).to(device)] = torch.arange(100.0, 100.0 + SAMPLE, device=device)
    # and one that nothing is below
    scores[1, sampled(2000).to(device)] = -100.0
    for config in (WIDE, NARROW):
        check(scores, ALL_SEEN, config)


def test_queries_before_the_first_key(device):
    check(normal(30, 9, device=device), CAUSAL)


@pytest.mark.gpu
@pytest.mark.parametrize("most", [1, 300, 2048, 4096])
def test_long_rows(most, device):
    """As the indexer launches it."""
    scores = normal(4, 131072 - 5, device=device)
    scores[1] = scores[1].sort().values
    scores[2] = (scores[2] * 4).round()
    scores[3] = 1.0
    capacity = max(most + 1024, min(3 * most, 8192))
    check(scores, CAUSAL._replace(most=most), ChooseConfig(1024, capacity, 4096, 0, 16, 64))
