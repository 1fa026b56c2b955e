"""The Hopper forward over latent keys against the oracle.

`PYTHONPATH=src python -m pytest -m gpu tests/sparse_attention/sm90/test_latent_gpu.py`
"""

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.attention import empty_lse, empty_out
from blackwell_sparsek.sparse_attention.sm90.latent import launch_sparse_attn_latent
from blackwell_sparsek.sparse_attention.sm90.latent_tuning import sparse_latent_config
from blackwell_sparsek.testing import layouts
from blackwell_sparsek.testing.poison import poisoned_empty

from .. import problems

pytestmark = pytest.mark.sm90

HALF, BRAIN = torch.float16, torch.bfloat16
DIM, VALUES = 576, 512
BASE = {"granularity": 1, "most": 200, "dims": (DIM, DIM), "dtype": BRAIN, "device": "cuda"}


def latent(problem):
    """A problem with values that are the first columns of its keys."""
    (q, k, _, chosen), options = problem
    return (q, k, k[..., :VALUES], chosen), options


def check(problem):
    with poisoned_empty():
        return problems.check_forward(problem, "sm90")


def check_dense(**given):
    return check(latent(problems.dense(**{**BASE, **given})))


CASES = {
    "one query": {"lengths": (1, 400)},
    "one key": {"lengths": (3, 1)},
    "more queries than keys": {"lengths": (90, 70)},
    "one entry": {"lengths": (20, 300), "most": 1},
    "whole tiles": {"lengths": (9, 500), "most": 64},
    "one more than a tile": {"lengths": (9, 500), "most": 65},
    "three tiles": {"lengths": (9, 500), "most": 192},
    "all keys": {"lengths": (30, 333), "most": 333},
    "no entries": {"lengths": (9, 100), "most": 0},
    "not causal": {"causal": False, "lengths": (30, 630)},
    "a list per query head": {"heads": (4, 2), "lists": 4, "lengths": (50, 300)},
    "two latent heads": {"batch": 2, "heads": (6, 2), "lists": 2, "lengths": (30, 500)},
    "near keys": {"window": 70, "heads": (8, 1), "lengths": (133, 450)},
    "near keys alone": {"window": 70, "most": 0, "lengths": (133, 450)},
    "near keys on both sides": {"window": (None, 30), "causal": False, "lengths": (70, 400)},
    "gates": {"gate": True, "lengths": (130, 450)},
    "sinks": {"sinks": True, "heads": (8, 1), "lengths": (100, 300)},
    "softcap": {"softcap": 2.0, "heads": (8, 1), "lengths": (100, 300)},
    "all of it": {
        **{"batch": 2, "heads": (12, 2), "lists": 2, "lengths": (110, 450), "window": (50, 0)},
        **{"sinks": True, "gate": True, "softcap": 2.0, "scale": -0.7},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_dense(case):
    check_dense(**CASES[case])


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize("heads", [1, 7, 8, 16, 48, 64, 96, 128, 192])
def test_heads(heads, dtype):
    check_dense(heads=(heads, 1), lengths=(40, 700), dtype=dtype, sinks=True)


@pytest.mark.parametrize("granularity", [1, 4, 16, 32, 64, 128])
def test_granularities(granularity):
    given = {"granularity": granularity, "most": 300 // granularity + 1, "lengths": (40, 777)}
    check_dense(**given, heads=(16, 1), window=20, gate=True)


def test_long_lists():
    check_dense(heads=(64, 1), lengths=(24, 6000), most=2048)


@pytest.mark.parametrize("gate", [False, True])
def test_packed(gate):
    given = {**BASE, "heads": (16, 1), "window": 40, "gate": gate, "sinks": True}
    lens = {"q_lens": (50, 0, 70, 1, 33), "k_lens": (90, 30, 400, 700, 33)}
    check(latent(problems.packed(**given, **lens)))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages(page_size):
    given = {**BASE, "heads": (16, 1), "lists": 1, "page_size": page_size}
    check(latent(problems.paged(**given, q_len=3, k_lens=(1, 37, 200, 333))))


@pytest.mark.parametrize("programs", [1, 2, 5, 132])
def test_any_number_of_programs(programs):
    problem = latent(problems.dense(**BASE, heads=(128, 1), lengths=(50, 500), window=9))
    call = problems.call_of(*problem)
    with poisoned_empty():
        out, lse = empty_out(call.q, VALUES), empty_lse(call.q)
        launch_sparse_attn_latent(call, out, lse, sparse_latent_config(call.problem), programs)
    expected = bsk.sparse_attention(*problem[0], **problem[1], return_lse=True, impl="sm90")
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("start", range(len(layouts.KINDS)))
def test_strides(start):
    (q, k, _, chosen), options = problems.dense(
        **BASE, batch=2, heads=(4, 2), lists=2, lengths=(40, 333), gate=True
    )
    q, gate, ids, counts = layouts.different_layouts(
        q, options["gate"], chosen.ids, chosen.counts, start=start
    )
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    chosen = bsk.KeySelection(ids, counts, granularity=1, kv_len=333)
    check(((q, k, k[..., :VALUES], chosen), {**options, "gate": gate}))


def test_keys_of_wider_rows():
    """Rows of 584 elements: steps of 16 bytes, and no more than that."""
    (q, k, _, chosen), options = problems.dense(**BASE, batch=2, heads=(8, 1), lengths=(40, 333))
    wide = k.new_full((*k.shape[:-1], DIM + 8), torch.nan)
    wide[..., :DIM] = k
    k = wide[..., :DIM]
    check(((q, k, k[..., :VALUES], chosen), options))


def test_keys_that_are_not_chosen_may_be_nan():
    problem = latent(problems.dense(**BASE, heads=(16, 1), lengths=(64, 1000)))
    (q, k, v, chosen), options = problem
    expected = bsk.sparse_attention(q, k, v, chosen, **options, impl="sm90")
    used = torch.zeros(1000, dtype=torch.bool, device="cuda")
    used[chosen.ids[chosen.listed()].long()] = True
    assert not used.all()
    k[:, :, ~used] = torch.nan
    assert torch.equal(bsk.sparse_attention(q, k, v, chosen, **options, impl="sm90"), expected)


def test_keys_behind_a_query_may_be_nan():
    """Chosen, but hidden by causal."""
    (q, k, _, _), _ = problems.dense(**BASE, heads=(16, 1), lengths=(200, 300))
    ids = torch.arange(300, device="cuda", dtype=torch.int32).expand(1, 1, 200, 300)
    chosen = bsk.KeySelection.from_indices(ids, granularity=1, kv_len=300)
    out = bsk.sparse_attention(q, k, k[..., :VALUES], chosen, impl="sm90")
    k[:, :, 250:] = torch.nan
    hidden = bsk.sparse_attention(q, k, k[..., :VALUES], chosen, impl="sm90")
    assert torch.equal(out[:, :, :150], hidden[:, :, :150])
    assert hidden[:, :, 150:].isnan().all()


@pytest.mark.parametrize("wrong", [-7, 2**31 - 1, 640])
def test_an_index_out_of_range_makes_its_query_nan(wrong):
    (q, k, v, chosen), _ = latent(problems.dense(**BASE, heads=(16, 1), lengths=(70, 640)))
    ids = chosen.ids.clone()
    counts = chosen.counts.clone()
    counts[0, 0, 5] = 100
    ids[0, 0, 5, :100] = torch.arange(100, device="cuda")
    ids[0, 0, 5, 99] = wrong
    bad = bsk.KeySelection._from_tensors(ids, counts, 1, 640)
    out, lse = bsk.sparse_attention(q, k, v, bad, return_lse=True, impl="sm90")
    right = bsk.sparse_attention(q, k, v, chosen, impl="sm90")
    rows = torch.arange(70, device="cuda") == 5
    assert out[:, :, rows].isnan().all() and lse[:, :, rows].isnan().all()
    assert torch.equal(out[:, :, ~rows], right[:, :, ~rows])


def test_wrong_counts_make_their_query_nan():
    (q, k, v, chosen), _ = latent(problems.dense(**BASE, lengths=(40, 640)))
    counts = chosen.counts.clone()
    counts[0, 0, 3], counts[0, 0, 4] = 201, -1
    bad = bsk.KeySelection._from_tensors(chosen.ids, counts, 1, 640)
    out = bsk.sparse_attention(q, k, v, bad, impl="sm90")
    assert out.isnan().all(-1)[0, 0].nonzero().flatten().tolist() == [3, 4]


def test_wrong_pages_make_their_query_nan():
    problem = latent(problems.paged(**BASE, heads=(8, 1), lists=1, k_lens=(64, 64), page_size=16))
    (q, k, v, _), options = problem
    ids = torch.arange(64, device="cuda", dtype=torch.int32).expand(2, 1, 1, 64)
    kv_len = options["page_table"].shape[1] * 16
    chosen = bsk.KeySelection.from_indices(ids, granularity=1, kv_len=kv_len)
    right = bsk.sparse_attention(q, k, v, chosen, **options, impl="sm90")
    options["page_table"][1, 2] = 10**6
    out = bsk.sparse_attention(q, k, v, chosen, **options, impl="sm90")
    assert torch.equal(out[0], right[0]) and out[1].isnan().all()


def test_the_same_bits_each_time():
    problem = latent(problems.dense(**BASE, heads=(128, 1), lengths=(500, 1000), window=100))
    problems.check_repeats(problem)


def test_the_next_call_under_a_graph():
    problems.check_graph(latent(problems.dense(**BASE, heads=(16, 1), lengths=(100, 400))))


def test_values_of_their_own_are_refused():
    (q, k, v, chosen), _ = latent(problems.dense(**BASE, lengths=(4, 40)))
    with pytest.raises(bsk.Unsupported, match="view of the first 512 columns"):
        bsk.sparse_attention(q, k, v.clone(), chosen, impl="sm90")


def test_narrow_heads_of_single_keys():
    """They have a kernel of their own, which keeps values apart from keys."""
    problem = problems.dense(**{**BASE, "dims": (64, 64)}, lengths=(40, 300))
    assert bsk.explain(bsk.sparse_attention, *problem[0], **problem[1]).chosen == "sm90"
    problems.check_forward(problem, "auto")
