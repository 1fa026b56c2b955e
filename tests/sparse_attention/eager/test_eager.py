"""Sparse attention in plain PyTorch against the oracle: both ways through the keys."""

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.sparse_attention.eager import by_block, by_query

from .. import problems

CASES = {
    "one query": {"lengths": (1, 40)},
    "more queries than keys": {"lengths": (40, 17)},
    "no keys": {"lengths": (5, 0)},
    "groups and lists": {"batch": 2, "heads": (6, 2), "lists": 2, "lengths": (33, 65)},
    "a list per query head": {"heads": (4, 2), "lists": 4, "lengths": (17, 50)},
    "single keys": {"granularity": 1, "most": 9, "lengths": (15, 31)},
    "entries of four": {"granularity": 4, "most": 5, "lengths": (15, 31), "dims": (16, 24)},
    "not causal": {"causal": False, "lengths": (17, 63)},
    "a window": {"window": 7, "lengths": (33, 65)},
    "a wide window": {"window": (None, 3), "causal": False, "lengths": (17, 40)},
    "sinks": {"sinks": True, "heads": (4, 1)},
    "gates": {"gate": True, "lengths": (33, 65), "most": 4},
    "all of it": {
        **{"batch": 2, "heads": (4, 2), "lists": 2, "lengths": (31, 65), "window": (5, 0)},
        **{"sinks": True, "gate": True, "softcap": 2.0, "scale": -0.7},
    },
    "gated single keys": {"granularity": 1, "most": 7, "gate": True, "window": 3, "sinks": True},
}


@pytest.fixture(params=["by query", "by block"])
def way(request, monkeypatch):
    """Which way through the keys is taken, in several chunks, and in several tiles of a block."""
    blocks = request.param == "by block"
    monkeypatch.setattr(by_block, "FEWEST_QUERIES", 1 if blocks else 10**9)
    monkeypatch.setattr(by_block, "CHUNK", 2000)
    monkeypatch.setattr(by_block, "TILE_ROWS", 4)
    monkeypatch.setattr(by_query, "GATHERED", 10000)
    return request.param


@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients(case, way):
    problem = problems.dense(**CASES[case])
    problems.check_forward(problem, "eager")
    problems.check_gradients(problem, "eager")


@pytest.mark.parametrize("options", [{}, {"window": 4, "gate": True, "sinks": True}], ids=str)
@pytest.mark.parametrize("granularity", [4, 16])
def test_packed(options, granularity, way):
    problem = problems.packed(granularity=granularity, heads=(4, 2), lists=2, **options)
    problems.check_forward(problem, "eager")
    problems.check_gradients(problem, "eager")


@pytest.mark.parametrize("options", [{}, {"window": 4, "gate": True}], ids=str)
@pytest.mark.parametrize(("q_len", "page_size"), [(1, 16), (3, 7)])
def test_pages(options, q_len, page_size):
    problem = problems.paged(q_len=q_len, page_size=page_size, **options)
    problems.check_forward(problem, "eager")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, way):
    problem = problems.dense(dtype=dtype, window=3, gate=True, lengths=(33, 65), heads=(4, 2))
    problems.check_forward(problem, "eager")
    problems.check_gradients(problem, "eager")


def test_gradients_by_finite_differences(way):
    (q, k, v, chosen), options = problems.dense(
        dtype=torch.float64, lengths=(6, 20), dims=(3, 2), sinks=True, gate=True, window=3
    )
    gate = (options.pop("gate").double() + 0.5).requires_grad_()
    sinks = options.pop("sinks").double().requires_grad_()
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def run(q, k, v, sinks, gate):
        given = {"sinks": sinks, "gate": gate, "return_lse": True, **options}
        out, lse = bsk.sparse_attention(q, k, v, chosen, **given)
        return out, lse.clamp(min=-99)

    assert torch.autograd.gradcheck(run, (q, k, v, sinks, gate), fast_mode=True)


def test_two_runs_give_the_same_bits(way):
    problem = problems.dense(heads=(4, 2), lists=2, gate=True, window=5, lengths=(65, 129))
    first, second = (problems.our_gradients(problem, "eager") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_everything_chosen_is_attention(way):
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float64) for _ in range(3))
    indices = torch.arange(3).expand(1, 1, 40, 3)
    chosen = bsk.KeySelection.from_indices(indices, granularity=16, kv_len=40)
    out = bsk.sparse_attention(q, k, v, chosen)
    assert torch.allclose(out, bsk.attention(q, k, v, causal=True), atol=1e-12)


def test_a_gate_of_zero_hides_the_largest_score(way):
    q, k, v = torch.randn(1, 1, 1, 16), *torch.randn(2, 1, 1, 32, 16)
    k[:, :, 16:] = 1e4 * q
    indices = torch.tensor([0, 1]).view(1, 1, 1, 2)
    both, first = (
        bsk.KeySelection.from_indices(x, granularity=16, kv_len=32)
        for x in (indices, indices[..., :1])
    )
    gate = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    out = bsk.sparse_attention(q, k, v, both, gate=gate)
    assert torch.allclose(out, bsk.sparse_attention(q, k, v, first), atol=1e-6)


def test_a_gate_of_zero_is_not_chosen_but_has_a_gradient(way):
    (q, k, v, chosen), _ = problems.dense(lengths=(33, 64), most=2)
    gate = torch.ones(chosen.ids.shape)
    gate[..., 1] = 0
    gate.requires_grad_()
    out, lse = bsk.sparse_attention(q, k, v, chosen, gate=gate, return_lse=True)
    first = bsk.KeySelection(
        chosen.ids[..., :1], chosen.counts.clamp(max=1), granularity=16, kv_len=64
    )
    expected, expected_lse = bsk.sparse_attention(q, k, v, first, return_lse=True)
    assert torch.allclose(out, expected, atol=1e-6) and torch.allclose(lse, expected_lse, atol=1e-6)
    (dgate,) = torch.autograd.grad(torch.where(lse.isinf(), 0.0, lse).sum(), gate)
    assert (dgate[..., 1] != 0).any()
