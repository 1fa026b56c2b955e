"""The Hopper forward over small entries against the oracle.

`PYTHONPATH=src python -m pytest -m gpu tests/sparse_attention/sm90/test_gathered_gpu.py`
"""

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.attention import empty_lse, empty_out
from blackwell_sparsek.sparse_attention.sm90.gathered import launch_sparse_attn_gathered
from blackwell_sparsek.sparse_attention.sm90.gathered_tuning import sparse_gathered_config
from blackwell_sparsek.sparse_attention.triton.unions import merge_lists
from blackwell_sparsek.testing import layouts
from blackwell_sparsek.testing.poison import poisoned_empty
from blackwell_sparsek.testing.tolerance import assert_lse_within_budget, assert_within_budget

from .. import problems

pytestmark = pytest.mark.sm90

HALF, BRAIN = torch.float16, torch.bfloat16
BASE = {"granularity": 4, "most": 50, "dims": (64, 64), "dtype": BRAIN, "device": "cuda"}


def check(problem):
    with poisoned_empty():
        return problems.check_forward(problem, "sm90")


def check_dense(**given):
    return check(problems.dense(**{**BASE, **given}))


CASES = {
    "one query": {"lengths": (1, 400)},
    "one key": {"lengths": (3, 1)},
    "more queries than keys": {"lengths": (90, 70)},
    "one entry": {"lengths": (20, 300), "most": 1},
    "whole tiles": {"lengths": (9, 500), "most": 16},
    "one more than a tile": {"lengths": (9, 500), "most": 17},
    "all keys": {"lengths": (30, 333), "most": 84},
    "no entries": {"lengths": (9, 100), "most": 0},
    "not causal": {"causal": False, "lengths": (70, 630)},
    "a list per query head": {"heads": (4, 2), "lists": 4, "lengths": (50, 300)},
    "one list for all": {"heads": (8, 4), "lists": 1, "lengths": (50, 300)},
    "groups of three": {"batch": 2, "heads": (6, 2), "lists": 2, "lengths": (75, 500)},
    "near keys": {"window": 70, "heads": (8, 1), "lengths": (133, 450)},
    "near keys alone": {"window": 70, "most": 0, "lengths": (133, 450)},
    "near keys on both sides": {"window": (None, 30), "causal": False, "lengths": (70, 400)},
    "sinks": {"sinks": True, "heads": (8, 1), "lengths": (100, 300)},
    "softcap": {"softcap": 2.0, "heads": (8, 1), "lengths": (100, 300)},
    "all of it": {
        **{"batch": 2, "heads": (12, 2), "lists": 2, "lengths": (110, 450), "window": (50, 0)},
        **{"sinks": True, "softcap": 2.0, "scale": -0.7},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_dense(case):
    check_dense(**CASES[case])


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [1, 7, 12, 16, 64, 96])
def test_heads(heads, dim, dtype):
    given = {"heads": (heads, 1), "dims": (dim, dim), "dtype": dtype, "sinks": True}
    check_dense(**given, lengths=(43, 700))


@pytest.mark.parametrize("granularity", [1, 4, 16, 32])
@pytest.mark.parametrize("dim", [64, 256])
def test_granularities(granularity, dim):
    given = {"granularity": granularity, "most": 300 // granularity + 1, "dims": (dim, dim)}
    check_dense(**given, lengths=(61, 777), heads=(16, 1), window=20)


def test_long_lists():
    check_dense(heads=(24, 2), lists=2, lengths=(48, 6000), most=512, dims=(256, 256))


@pytest.mark.parametrize("dim", [64, 256])
def test_packed(dim):
    given = {**BASE, "heads": (16, 1), "window": 40, "sinks": True, "dims": (dim, dim)}
    lens = {"q_lens": (50, 0, 70, 1, 33), "k_lens": (90, 30, 400, 700, 33)}
    check(problems.packed(**given, **lens))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dim", [64, 256])
def test_pages(page_size, dim):
    given = {**BASE, "heads": (16, 2), "lists": 2, "page_size": page_size, "dims": (dim, dim)}
    check(problems.paged(**given, q_len=13, k_lens=(1, 37, 200, 333)))


@pytest.mark.parametrize("programs", [1, 2, 5, 132])
def test_any_number_of_programs(programs):
    given = {**BASE, "dims": (256, 256)}
    problem = problems.dense(**given, heads=(12, 1), lengths=(150, 500), window=9)
    call = problems.call_of(*problem)
    config = sparse_gathered_config(call.problem)
    with poisoned_empty():
        out, lse = empty_out(call.q, 256), empty_lse(call.q)
        unions = merge_lists(call, config.tile_t)
        launch_sparse_attn_gathered(call, out, lse, unions, config, programs)
    expected = bsk.sparse_attention(*problem[0], **problem[1], return_lse=True, impl="sm90")
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("start", range(len(layouts.KINDS)))
def test_strides(start):
    (q, k, v, chosen), options = problems.dense(
        **BASE, batch=2, heads=(4, 2), lists=2, lengths=(40, 333)
    )
    q, ids, counts = layouts.different_layouts(q, chosen.ids, chosen.counts, start=start)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    chosen = bsk.KeySelection(ids, counts, granularity=4, kv_len=333)
    check(((q, k, v, chosen), options))


def test_keys_of_wider_rows():
    """Rows of 72 elements: steps of 16 bytes, and no more than that."""
    (q, k, v, chosen), options = problems.dense(**BASE, batch=2, heads=(8, 1), lengths=(40, 333))
    wide = k.new_full((*k.shape[:-1], 72), torch.nan)
    wide[..., :64] = k
    check(((q, wide[..., :64], v, chosen), options))


@pytest.mark.parametrize("window", [None, 9])
def test_keys_that_nobody_sees_may_be_nan(window):
    (q, k, v, chosen), _ = problems.dense(**BASE, heads=(12, 1), lengths=(64, 1000), window=window)
    run = {"window": window, "impl": "sm90"}
    expected = bsk.sparse_attention(q, k, v, chosen, **run)
    used = chosen.to_dense()[0, 0]
    past = torch.arange(1000, device="cuda") - torch.arange(936, 1000, device="cuda")[:, None]
    used &= past <= 0
    if window is not None:
        used |= (past <= 0) & (past > -9)
    used = used.any(0)
    assert not used.all()
    k[:, :, ~used] = torch.nan
    v[:, :, ~used] = torch.nan
    assert torch.equal(bsk.sparse_attention(q, k, v, chosen, **run), expected)


def test_keys_behind_the_queries_may_be_nan():
    """Chosen, but hidden by causal."""
    (q, k, v, _), _ = problems.dense(**BASE, heads=(16, 1), lengths=(200, 300))
    ids = torch.arange(75, device="cuda", dtype=torch.int32).expand(1, 1, 200, 75)
    chosen = bsk.KeySelection.from_indices(ids, granularity=4, kv_len=300)
    out = bsk.sparse_attention(q, k, v, chosen, impl="sm90")
    k[:, :, 250:] = torch.nan
    hidden = bsk.sparse_attention(q, k, v, chosen, impl="sm90")
    # a tile has eight queries, and those at positions below 244 begin no later than 248
    assert torch.equal(out[:, :, :144], hidden[:, :, :144])
    assert hidden[:, :, 150:].isnan().all()


def test_entries_past_the_counts_are_not_read():
    (q, k, v, chosen), options = problems.dense(**BASE, heads=(12, 1), lengths=(70, 640))
    expected = bsk.sparse_attention(q, k, v, chosen, **options, impl="sm90")
    ids = torch.where(chosen.listed(), chosen.ids, 10**9)
    other = bsk.KeySelection._from_tensors(ids, chosen.counts, 4, 640)
    assert torch.equal(bsk.sparse_attention(q, k, v, other, **options, impl="sm90"), expected)


@pytest.mark.parametrize("wrong", [-7, 2**31 - 1, 160])
def test_an_index_out_of_range_makes_its_query_nan(wrong):
    (q, k, v, chosen), _ = problems.dense(**BASE, heads=(16, 1), lengths=(70, 640))
    ids, counts = chosen.ids.clone(), chosen.counts.clone()
    counts[0, 0, 5] = 50
    ids[0, 0, 5] = torch.arange(50, device="cuda")
    ids[0, 0, 5, 49] = wrong
    bad = bsk.KeySelection._from_tensors(ids, counts, 4, 640)
    out, lse = bsk.sparse_attention(q, k, v, bad, return_lse=True, impl="sm90")
    rows = torch.arange(70, device="cuda") == 5
    assert out[:, :, rows].isnan().all() and lse[:, :, rows].isnan().all()
    results = ((out, lse), *problems.expected_of(((q, k, v, chosen), {})))
    outs, lses = ([x[:, :, ~rows] for x in each] for each in zip(*results, strict=True))
    assert_within_budget(*outs)
    assert_lse_within_budget(*lses)


def test_wrong_counts_make_their_query_nan():
    (q, k, v, chosen), _ = problems.dense(**BASE, lengths=(40, 640))
    counts = chosen.counts.clone()
    counts[0, 0, 3], counts[0, 0, 24] = 51, -1
    bad = bsk.KeySelection._from_tensors(chosen.ids, counts, 4, 640)
    out = bsk.sparse_attention(q, k, v, bad, impl="sm90")
    assert out.isnan().all(-1)[0, 0].nonzero().flatten().tolist() == [3, 24]


def test_wrong_pages_make_their_queries_nan():
    given = {**BASE, "heads": (8, 1), "lists": 1, "page_size": 16}
    (q, k, v, _), options = problems.paged(**given, q_len=4, k_lens=(64, 64))
    ids = torch.arange(16, device="cuda", dtype=torch.int32).repeat(2, 1, 4, 1)
    kv_len = options["page_table"].shape[1] * 16
    # of the second sequence, only the last two queries have keys of the third page
    counts = torch.tensor([[[16] * 4], [[8, 8, 9, 16]]], device="cuda", dtype=torch.int32)
    chosen = bsk.KeySelection._from_tensors(ids, counts, 4, kv_len)
    right = bsk.sparse_attention(q, k, v, chosen, **options, impl="sm90")
    options["page_table"][1, 2] = 10**6
    out = bsk.sparse_attention(q, k, v, chosen, **options, impl="sm90")
    assert torch.equal(out[0], right[0]) and torch.equal(out[1, :, :2], right[1, :, :2])
    assert out[1, :, 2:].isnan().all()


def test_wrong_lengths_make_their_sequence_nan():
    given = {**BASE, "heads": (8, 1), "lists": 1, "page_size": 16}
    (q, k, v, chosen), options = problems.paged(**given, q_len=4, k_lens=(64, 64))
    right = bsk.sparse_attention(q, k, v, chosen, **options, impl="sm90")
    options["cache_seqlens"][1] = 10**6
    out = bsk.sparse_attention(q, k, v, chosen, **options, impl="sm90")
    assert torch.equal(out[0], right[0]) and out[1].isnan().all()


def test_the_same_bits_each_time():
    given = {**BASE, "dims": (256, 256), "most": 200}
    problem = problems.dense(**given, heads=(24, 2), lists=2, lengths=(500, 1000), window=100)
    problems.check_repeats(problem)


def test_the_next_call_under_a_graph():
    problems.check_graph(problems.dense(**BASE, heads=(16, 1), lengths=(100, 400)))


def test_gates_stay_with_the_portable_kernel():
    problem = problems.dense(**BASE, gate=True, lengths=(40, 300))
    with pytest.raises(bsk.Unsupported, match="no code for gates"):
        bsk.sparse_attention(*problem[0], **problem[1], impl="sm90")
    problems.check_forward(problem, "auto")
