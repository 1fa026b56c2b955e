"""The Hopper forward against the oracle.

`PYTHONPATH=src python -m pytest -m gpu tests/sparse_attention/sm90`
"""

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.attention import empty_lse, empty_out
from blackwell_sparsek.sparse_attention.sm90.forward import launch_sparse_attn_fwd_sm90
from blackwell_sparsek.sparse_attention.sm90.tuning import sparse_attn_sm90_config
from blackwell_sparsek.testing import layouts
from blackwell_sparsek.testing.poison import poisoned_empty

from .. import problems

pytestmark = pytest.mark.sm90

HALF, BRAIN = torch.float16, torch.bfloat16
BASE = {"granularity": 64, "most": 5, "dims": (64, 64), "dtype": BRAIN, "device": "cuda"}


def check(problem):
    with poisoned_empty():
        return problems.check_forward(problem, "sm90")


CASES = {
    "one query": {"lengths": (1, 400)},
    "one key": {"lengths": (3, 1)},
    "more queries than keys": {"lengths": (200, 70)},
    "several tiles": {"lengths": (300, 900), "most": 8},
    "groups of three": {"batch": 2, "heads": (6, 2), "lists": 2, "lengths": (130, 500)},
    "groups of sixteen": {"heads": (32, 2), "lists": 2, "lengths": (40, 700)},
    "more heads than rows": {"heads": (256, 1), "lengths": (3, 300)},
    "seven heads": {"heads": (7, 1), "lengths": (50, 300)},
    "a list per query head": {"heads": (4, 2), "lists": 4, "lengths": (150, 300)},
    "one list for all": {"heads": (4, 4), "lists": 1, "lengths": (150, 300)},
    "not causal": {"causal": False, "lengths": (170, 630)},
    "near keys": {"window": 70, "heads": (8, 1), "lengths": (333, 650)},
    "near keys alone": {"window": 70, "most": 0, "lengths": (333, 650)},
    "near keys on both sides": {"window": (None, 30), "causal": False, "lengths": (170, 400)},
    "a window past the tile": {"window": (300, 0), "heads": (16, 1), "lengths": (65, 700)},
    "gates": {"gate": True, "lengths": (330, 650)},
    "sinks": {"sinks": True, "heads": (8, 2), "lists": 2, "lengths": (100, 300)},
    "all of it": {
        **{"batch": 2, "heads": (4, 2), "lists": 2, "lengths": (310, 650), "window": (50, 0)},
        **{"sinks": True, "gate": True, "softcap": 2.0, "scale": -0.7},
    },
}


@pytest.mark.parametrize("granularity", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_dense(case, granularity):
    check(problems.dense(**{**BASE, "granularity": granularity, **CASES[case]}))


@pytest.mark.parametrize("granularity", [64, 128])
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize(
    "dims", [(128, 128), (96, 96), (64, 128), (8, 80), (192, 128), (256, 256), (200, 136)]
)
def test_head_dims(dims, dtype, granularity):
    given = {**BASE, "dims": dims, "dtype": dtype, "granularity": granularity, "window": 30}
    check(problems.dense(**given, heads=(8, 2), lists=2, lengths=(90, 500), sinks=True))


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("granularity", [64, 128])
def test_packed(granularity, gate):
    given = {**BASE, "granularity": granularity, "heads": (8, 2), "lists": 2}
    lens = {"q_lens": (50, 0, 170, 1, 33), "k_lens": (90, 30, 400, 700, 33)}
    check(problems.packed(**given, **lens, window=40, gate=gate, sinks=True))


@pytest.mark.parametrize("programs", [1, 2, 5, 132])
def test_any_number_of_programs(programs):
    problem = problems.dense(**BASE, heads=(8, 2), lists=2, lengths=(200, 500), window=9)
    call = problems.call_of(*problem)
    with poisoned_empty():
        out, lse = empty_out(call.q, 64), empty_lse(call.q)
        config = sparse_attn_sm90_config(call.problem)
        launch_sparse_attn_fwd_sm90(call, out, lse, config, programs)
    expected = bsk.sparse_attention(*problem[0], **problem[1], return_lse=True, impl="sm90")
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_shared_entries_run_without_masks():
    """All queries of a tile choose the same entries, all of them in the past."""
    (q, k, v, _), _ = problems.dense(**BASE, heads=(16, 1), lengths=(64, 1024))
    ids = torch.tensor([0, 3, 4, 9, 14], device="cuda").expand(1, 1, 64, 5)
    chosen = bsk.KeySelection.from_indices(ids, granularity=64, kv_len=1024)
    check(((q, k, v, chosen), {}))


def test_entries_of_single_queries():
    """No two queries share an entry: one of the consumers skips nearly every tile."""
    (q, k, v, _), _ = problems.dense(**BASE, heads=(16, 1), lengths=(16, 2048))
    ids = (torch.arange(16, device="cuda")[:, None] + torch.tensor([0, 16], device="cuda"))[
        None, None
    ]
    chosen = bsk.KeySelection.from_indices(ids, granularity=64, kv_len=2048)
    check(((q, k, v, chosen), {"causal": False}))


@pytest.mark.parametrize("start", range(len(layouts.KINDS)))
def test_strides(start):
    (q, k, v, chosen), options = problems.dense(
        **BASE, batch=2, heads=(4, 2), lists=2, lengths=(90, 333), gate=True
    )
    q, gate, ids, counts = layouts.different_layouts(
        q, options["gate"], chosen.ids, chosen.counts, start=start
    )
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    chosen = bsk.KeySelection(ids, counts, granularity=64, kv_len=333)
    check(((q, k, v, chosen), {**options, "gate": gate}))


@pytest.mark.parametrize("wrong", [-7, 1000])
def test_an_index_out_of_range_makes_its_query_nan(wrong):
    (q, k, v, chosen), _ = problems.dense(**BASE, lengths=(170, 640))
    indices = torch.where(chosen.listed(), chosen.ids, -1)
    indices[0, 0, 5, 0] = wrong
    bad = bsk.KeySelection.from_indices(indices, granularity=64, kv_len=640, check=False)
    out, lse = bsk.sparse_attention(q, k, v, bad, return_lse=True, impl="sm90")
    right = bsk.sparse_attention(q, k, v, chosen, impl="sm90")
    rows = torch.arange(170, device="cuda") == 5
    assert out[:, :, rows].isnan().all() and lse[:, :, rows].isnan().all()
    assert torch.equal(out[:, :, ~rows], right[:, :, ~rows])


def test_wrong_counts_make_their_query_nan():
    (q, k, v, chosen), _ = problems.dense(**BASE, lengths=(40, 640))
    counts = chosen.counts.clone()
    counts[0, 0, 3], counts[0, 0, 4] = 99, -1
    bad = bsk.KeySelection._from_tensors(chosen.ids, counts, 64, 640)
    out = bsk.sparse_attention(q, k, v, bad, impl="sm90")
    assert out.isnan().all(-1)[0, 0].nonzero().flatten().tolist() == [3, 4]


@pytest.mark.parametrize("window", [None, 30])
def test_a_list_that_begins_with_the_largest_number_ends(window):
    """Which the kernel takes for the end of all lists, so that it must not wait for another."""
    (q, k, v, chosen), _ = problems.dense(**BASE, lengths=(40, 640))
    ids = torch.full_like(chosen.ids, 2**31 - 1)
    bad = bsk.KeySelection._from_tensors(ids, torch.full_like(chosen.counts, 2), 64, 640)
    out = bsk.sparse_attention(q, k, v, bad, window=window, impl="sm90")
    none = bsk.KeySelection._from_tensors(ids, torch.zeros_like(chosen.counts), 64, 640)
    assert torch.equal(out, bsk.sparse_attention(q, k, v, none, window=window, impl="sm90"))


def test_the_same_bits_each_time():
    problem = problems.dense(**BASE, heads=(16, 1), lengths=(1000, 2000), window=100)
    problems.check_repeats(problem)


def test_the_next_call_under_a_graph():
    problems.check_graph(problems.dense(**BASE, heads=(8, 1), lengths=(100, 400)))


def test_auto_takes_it_for_outputs_and_gradients():
    problem = problems.dense(**{**BASE, "lengths": (70, 300), "sinks": True, "gate": True})
    arguments, options = problem
    assert bsk.explain(bsk.sparse_attention, *arguments, **options).chosen == "sm90"
    out, lse = bsk.sparse_attention(*arguments, **options, return_lse=True)
    expected = bsk.sparse_attention(*arguments, **options, return_lse=True, impl="sm90")
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    problems.check_gradients(problem, "auto")
