"""`select_keys` against a formula that looks at one query at a time.

Inputs are small whole numbers: scores are exact in every precision and many of them equal, so that
choices must agree entry by entry, ties included.
"""

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.select_keys import eager
from blackwell_sparsek.testing import inputs

CASES = {
    "tokens": {"granularity": 1, "top_k": 5},
    "indexer": {"granularity": 1, "top_k": 7, "weights": True, "activation": "relu"},
    "max pool": {"granularity": 4, "top_k": 3, "pool": "max"},
    "mean pool": {"granularity": 16, "top_k": 2, "pool": "mean", "force_last": 1},
    # so that the last entry, of which only some keys are seen, competes with the others
    "mean pool, nothing forced": {"granularity": 4, "top_k": 3, "pool": "mean"},
    "forced": {"granularity": 4, "top_k": 4, "pool": "max", "force_first": 1, "force_last": 2},
    "all seen": {"granularity": 4, "top_k": 2, "pool": "max", "causal": False},
    "more than there are": {"granularity": 16, "top_k": 50, "pool": "mean"},
    "by share": {"granularity": 4, "top_p": 0.8, "pool": "max"},
    "by share, bounded": {"granularity": 4, "top_p": 0.9, "top_k": 3, "pool": "max"},
    "by share, forced": {"granularity": 1, "top_p": 0.5, "force_first": 2, "force_last": 1},
    "two lists": {"granularity": 1, "top_k": 3, "weights": True, "lists": 2},
}


def drawn(batch=2, heads=(4, 2), lengths=(9, 37), dim=8, seed=0, dtype=torch.float32):
    """Index queries and keys."""
    q = inputs.integers(batch, heads[0], lengths[0], dim, seed=seed, bound=1, dtype=dtype)
    k = inputs.integers(batch, heads[1], lengths[1], dim, seed=seed + 1, bound=1, dtype=dtype)
    return q, k


def check(q, k, options, impl="auto"):
    """Compare a choice with that of the formula; return it."""
    options = dict(options)
    if options.get("weights"):
        options["weights"] = inputs.integers(*q.shape[:3], seed=9, bound=2).to(q.device)
    ours = bsk.select_keys(q, k, **options, impl=impl)
    exact = bsk.select_keys(q, k, **options, impl="reference")
    assert torch.equal(ours.counts, exact.counts)
    listed = ours.listed()
    assert torch.equal(ours.ids[listed], exact.ids[listed])
    ours.validate()
    return ours


@pytest.mark.parametrize("lengths", [(9, 37), (1, 40), (20, 7)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_chooses_what_the_formula_chooses(case, lengths):
    check(*drawn(lengths=lengths), CASES[case])


@pytest.mark.parametrize("case", ["indexer", "max pool", "by share"])
def test_in_several_chunks(case, monkeypatch):
    monkeypatch.setattr(eager, "SCORES", 400)
    check(*drawn(), CASES[case])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype):
    q, k = drawn()
    check(q.to(dtype), k.to(dtype), CASES["max pool"])


def test_ties_go_to_the_lower_entry():
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 30, 8)
    chosen = bsk.select_keys(q, k, granularity=1, top_k=3)
    assert (chosen.ids == torch.arange(3)).all()


def test_forced_entries_are_always_there():
    q, k = drawn(lengths=(40, 40))
    chosen = bsk.select_keys(q, k, granularity=4, pool="max", top_k=3, force_first=1, force_last=1)
    own = torch.arange(40) // 4
    assert (chosen.ids[..., 0] == 0).all()
    last = chosen.ids.gather(-1, chosen.counts[..., None].long() - 1)[..., 0]
    assert (last == own).all()


def test_nan_is_chosen_last():
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, torch.nan, 2.0, -5.0]).view(1, 1, 4, 1)
    assert bsk.select_keys(q, k, granularity=1, top_k=3).ids.tolist() == [[[[0, 2, 3]]]]


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_a_score_of_minus_infinity_is_a_score(pool, impl):
    """It pulls the mean of its entry down; a key that is not seen has no score at all."""
    k_index = torch.tensor([1.0, -torch.inf, 1.0, 1.0, 0.5, 0.5, 0.1, 0.1]).view(1, 1, 8, 1)
    options = {"granularity": 4, "pool": pool, "top_k": 1, "causal": False, "impl": impl}
    chosen = bsk.select_keys(torch.ones(1, 1, 1, 1), k_index, **options)
    assert chosen.ids.flatten().tolist() == [1 if pool == "mean" else 0]


def test_feeds_sparse_attention():
    q, k = (inputs.normal(1, 2, 64, 16, seed=i, dtype=torch.float64) for i in (0, 1))
    chosen = bsk.select_keys(q, k, granularity=16, pool="max", top_k=4)
    # four entries of sixteen keys are all of them
    out = bsk.sparse_attention(q, k, k, chosen)
    assert torch.allclose(out, bsk.attention(q, k, k, causal=True), atol=1e-12)


@pytest.mark.parametrize("sizes", [(0, 1, 3, 5), (1, 1, 0, 5), (1, 1, 3, 0)], ids=str)
def test_nothing_to_choose(sizes):
    batch, heads, q_len, kv_len = sizes
    q, k = torch.zeros(batch, heads, q_len, 4), torch.zeros(batch, heads, kv_len, 4)
    chosen = bsk.select_keys(q, k, granularity=1, top_k=2)
    assert chosen.counts.shape == (batch, heads, q_len)
    assert kv_len or not chosen.counts.any()


def test_operator_and_explanation():
    q, k = drawn()
    sizes = [4, 4, 3, 0, 1]
    arguments = (q, k, None, sizes, 0.0, "none", "max", True, "eager")
    torch.library.opcheck(torch.ops.bsk.select_keys.default, arguments)
    decision = bsk.explain(bsk.select_keys, q, k, granularity=4, pool="max", top_k=3)
    assert decision.chosen == "eager" and "4 index heads of 8 for 4 lists" in str(decision.problem)
    assert decision.reasons["sm90"] == "select_keys has no sm90 implementation"


Q, K = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 9, 8)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"granularity": 3}, bsk.InvalidInput, "granularity is unknown"),
        ({"granularity": 4}, bsk.InvalidInput, "pool is unknown; expected one of 'max', 'mean'"),
        ({"pool": "max"}, bsk.InvalidInput, "pool is unknown; expected one of None"),
        ({"top_k": None}, bsk.InvalidInput, "top_k/top_p are both missing"),
        ({"top_k": 0}, bsk.InvalidInput, "top_k is too small"),
        ({"top_p": 1.5}, bsk.InvalidInput, "top_p is out of range; expected above 0, up to 1"),
        ({"top_p": "x"}, bsk.InvalidType, "top_p is not a number"),
        ({"force_first": 2, "force_last": 1}, bsk.InvalidInput, r"are too many.*got 2 \+ 1"),
        ({"activation": "gelu"}, bsk.InvalidInput, "activation is unknown"),
        ({"lists": 3}, bsk.InvalidInput, "lists does not fit; expected a divisor of the 4"),
        ({"weights": torch.zeros(1, 4, 2)}, bsk.InvalidInput, "weights has a wrong shape"),
        ({"weights": [1.0]}, bsk.InvalidType, "weights is not a tensor"),
        ({"k_index": K[..., :4].contiguous()}, bsk.InvalidInput, "do not match"),
        ({"k_index": K.double()}, bsk.InvalidType, r"expected one dtype \(cast them\)"),
        ({"q_index": Q[:, :3]}, bsk.InvalidInput, "3 heads over 2"),
        ({"impl": "sm90"}, bsk.Unsupported, "has no sm90 implementation"),
    ],
)
def test_refusals(changed, error, text):
    given = {"q_index": Q, "k_index": K, "granularity": 1, "top_k": 2, **changed}
    with pytest.raises(error, match=text):
        bsk.select_keys(**given)
