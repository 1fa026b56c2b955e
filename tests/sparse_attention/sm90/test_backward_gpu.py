"""The Hopper backward against the oracle.

`PYTHONPATH=src python -m pytest -m gpu tests/sparse_attention/sm90/test_backward_gpu.py`
"""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.sparse_attention import SparseAttnGradients, SparseBackwardCall
from blackwell_sparsek.sparse_attention.sm90.dkdv import launch_sparse_attn_dkdv_sm90
from blackwell_sparsek.sparse_attention.sm90.dq import launch_sparse_attn_dq_sm90
from blackwell_sparsek.sparse_attention.sm90.tuning import (
    sparse_dkdv_sm90_config,
    sparse_dq_sm90_config,
)
from blackwell_sparsek.sparse_attention.triton.backward import fill_gradients
from blackwell_sparsek.testing import inputs, layouts
from blackwell_sparsek.testing.poison import poisoned_empty

from .. import problems

pytestmark = pytest.mark.sm90

HALF, BRAIN = torch.float16, torch.bfloat16
BASE = {"granularity": 64, "most": 5, "dims": (64, 64), "dtype": BRAIN, "device": "cuda"}
# Eight query heads on each of two KV heads: a copy of dk and dv's kernel takes all of them.
EIGHT = {"heads": (16, 2), "lists": 2}


def check(problem):
    with poisoned_empty():
        return problems.check_gradients(problem, "sm90")


CASES = {
    "one query": {"lengths": (1, 400)},
    "one key": {"lengths": (3, 1)},
    "more queries than keys": {"lengths": (200, 70)},
    "several tiles": {"lengths": (300, 900), "most": 8},
    "two sequences": {"batch": 2, "lengths": (130, 500)},
    "sixteen heads": {"heads": (32, 2), "lengths": (40, 700)},
    "thirty-two heads": {"heads": (32, 1), "lists": 1, "lengths": (40, 700)},
    "sixty-four heads": {"heads": (64, 1), "lists": 1, "lengths": (21, 300)},
    "more heads than rows": {"heads": (256, 1), "lists": 1, "lengths": (3, 300)},
    "three copies of eight heads": {"heads": (24, 1), "lists": 1, "lengths": (50, 300)},
    "one list for all": {"heads": (16, 2), "lists": 1, "lengths": (150, 300)},
    "no entries": {"most": 0, "window": 40, "lengths": (100, 300)},
    "not causal": {"causal": False, "lengths": (170, 630)},
    "near keys": {"window": 70, "lengths": (333, 650)},
    "near keys on both sides": {"window": (None, 30), "causal": False, "lengths": (170, 400)},
    "a window past the tile": {"window": (300, 0), "lengths": (65, 700)},
    "gates": {"gate": True, "lengths": (330, 650)},
    "gates of many heads": {"gate": True, "heads": (48, 1), "lists": 1, "lengths": (60, 650)},
    "sinks": {"sinks": True, "lengths": (100, 300)},
    "capped": {"softcap": 2.0, "lengths": (100, 300)},
    "all of it": {
        **{"batch": 2, "lengths": (310, 650), "window": (50, 0)},
        **{"sinks": True, "gate": True, "softcap": 2.0, "scale": -0.7},
    },
}


@pytest.mark.parametrize("granularity", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_dense(case, granularity):
    check(problems.dense(**{**BASE, **EIGHT, "granularity": granularity, **CASES[case]}))


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 2), (6, 2), (7, 1)])
def test_few_heads_share_a_list(heads):
    """dk and dv come from the portable kernel, dq from this one."""
    given = {**BASE, "heads": heads, "lists": heads[1], "lengths": (150, 300)}
    check(problems.dense(**given, window=30, gate=True))


@pytest.mark.parametrize("granularity", [64, 128])
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (96, 96), (64, 128), (128, 64), (8, 80)])
def test_head_dims(dims, dtype, granularity):
    given = {**BASE, **EIGHT, "dims": dims, "dtype": dtype, "granularity": granularity}
    check(problems.dense(**given, lengths=(90, 500), window=30, sinks=True))


@pytest.mark.parametrize("dims", [(128, 128), (64, 64)])
def test_gates_of_all_widths(dims):
    given = {**BASE, "heads": (16, 1), "lists": 1, "dims": dims, "gate": True}
    check(problems.dense(**given, lengths=(90, 500), softcap=5.0))


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("granularity", [64, 128])
def test_packed(granularity, gate):
    given = {**BASE, **EIGHT, "granularity": granularity}
    lens = {"q_lens": (50, 0, 170, 1, 33), "k_lens": (90, 30, 400, 700, 33)}
    check(problems.packed(**given, **lens, window=40, gate=gate, sinks=True))


def test_lists_that_are_empty():
    (q, k, v, chosen), _ = problems.dense(**BASE, **EIGHT, lengths=(40, 640))
    none = bsk.KeySelection._from_tensors(chosen.ids, torch.zeros_like(chosen.counts), 64, 640)
    made = problems.our_gradients(((q, k, v, none), {}), "sm90")
    assert all((x == 0).all() for x in made.values())


def test_shared_entries_run_without_masks():
    """All queries choose the same entries, all of them in the past."""
    (q, k, v, _), _ = problems.dense(**BASE, heads=(16, 1), lengths=(64, 1024))
    ids = torch.tensor([0, 3, 4, 9, 14], device="cuda").expand(1, 1, 64, 5)
    chosen = bsk.KeySelection.from_indices(ids, granularity=64, kv_len=1024)
    check(((q, k, v, chosen), {}))


def test_entries_of_single_queries():
    """No two queries share an entry: one of dq's consumers skips nearly every tile."""
    (q, k, v, _), _ = problems.dense(**BASE, heads=(16, 1), lengths=(16, 2048))
    apart = torch.tensor([0, 16], device="cuda")
    ids = (torch.arange(16, device="cuda")[:, None] + apart)[None, None]
    chosen = bsk.KeySelection.from_indices(ids, granularity=64, kv_len=2048)
    check(((q, k, v, chosen), {"causal": False}))


@pytest.mark.parametrize("start", range(len(layouts.KINDS)))
def test_strides(start):
    (q, k, v, chosen), options = problems.dense(
        **BASE, batch=2, heads=(16, 2), lists=2, lengths=(90, 333), gate=True
    )
    q, gate, ids, counts = layouts.different_layouts(
        q, options["gate"], chosen.ids, chosen.counts, start=start
    )
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    chosen = bsk.KeySelection(ids, counts, granularity=64, kv_len=333)
    check(((q, k, v, chosen), {**options, "gate": gate}))


def backward_call(problem):
    """The backward call of a problem, with outputs of the forward and random gradients of them."""
    call = problems.call_of(*problem)
    out, lse = bsk.sparse_attention(*problem[0], **problem[1], return_lse=True, impl="sm90")
    dout = inputs.normal(*out.shape, seed=3, device="cuda").to(out.dtype)
    wanted = [torch.full_like(x, torch.nan) for x in (call.q, call.k, call.v)]
    gate = call.spec.gate
    dgate = None if gate is None else torch.full_like(gate, torch.nan)
    gradients = SparseAttnGradients(*wanted, None, dgate)
    return SparseBackwardCall(call, dout, None, out, lse, gradients)


def launched(call, programs=132, stages=None):
    """Gradients by the two kernels, with so many programs for dq and stages for dk and dv."""
    made = [None if x is None else torch.full_like(x, torch.nan) for x in call.gradients]
    call = dataclasses.replace(call, gradients=SparseAttnGradients(*made))
    dkdv = sparse_dkdv_sm90_config(call.problem)
    assert dkdv is not None
    if stages is not None:
        dkdv = dataclasses.replace(dkdv, STAGES=stages)
    dq = sparse_dq_sm90_config(call.problem)
    fill_gradients(
        call,
        lambda delta, shares: launch_sparse_attn_dq_sm90(call, delta, shares, dq, programs),
        lambda delta: launch_sparse_attn_dkdv_sm90(call, delta, dkdv),
    )
    return [x for x in made if x is not None]


@pytest.mark.parametrize("programs", [1, 2, 5, 132])
def test_any_number_of_programs(programs):
    problem = problems.dense(**BASE, **EIGHT, lengths=(200, 500), window=9, gate=True)
    call = backward_call(problem)
    for made, expected in zip(launched(call, programs), launched(call), strict=True):
        assert torch.equal(made, expected)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_any_number_of_stages(stages):
    problem = problems.dense(**BASE, **EIGHT, lengths=(200, 500), window=9)
    call = backward_call(problem)
    for made, expected in zip(launched(call, stages=stages), launched(call), strict=True):
        assert torch.equal(made, expected)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_the_same_bits_each_time(dims):
    given = {**BASE, "dims": dims, "heads": (16, 1)}
    call = backward_call(problems.dense(**given, lengths=(1000, 2000), window=100))
    first, *others = (launched(call) for _ in range(20))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_only_some_gradients_are_wanted():
    call = backward_call(problems.dense(**BASE, **EIGHT, lengths=(100, 300), gate=True))
    every = launched(call)
    for i in range(4):
        wanted = [None] * 5
        # the gradient of sinks, which there are not, comes before that of the gate
        place = (0, 1, 2, 4)[i]
        wanted[place] = call.gradients[place]
        one = dataclasses.replace(call, gradients=SparseAttnGradients(*wanted))
        assert torch.equal(launched(one)[0], every[i])


def test_expanded_gradients_of_the_output():
    """The gradient of a sum has strides of 0, which TMA does not take."""
    problem = problems.dense(**BASE, **EIGHT, lengths=(100, 300))
    problems.check_gradients(problem, "sm90", loss=lambda out, lse: out.sum())


def test_the_next_call_under_a_graph():
    call = backward_call(problems.dense(**BASE, **EIGHT, lengths=(100, 400)))
    expected = launched(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = launched(call)
    for x in made:
        x.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
