"""The checker is checked: it rejects planted wrong outputs and accepts honest ones."""

import pytest
import torch

from blackwell_sparsek.testing.inputs import qkv
from blackwell_sparsek.testing.tolerance import assert_lse_within_budget, assert_within_budget


def _attention(q, k, v):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16, torch.float32], ids=str)
def case(request):
    """Honest results with their oracle: (out, exact, plain, lse, lse_exact, lse_plain)."""
    q, k, v = qkv(2, 3, 3, 33, 65, 16, seed=7, dtype=request.param)
    exact, lse_exact = _attention(q.double(), k.double(), v.double())
    plain, lse_plain = _attention(q, k, v)
    out, lse = _attention(q.float(), k.float(), v.float())
    out = out.to(request.param)
    return out, exact, plain, lse, lse_exact, lse_plain.float()


def test_accepts_the_honest_output(case):
    out, exact, plain, *_ = case
    assert_within_budget(out, exact, plain)


def test_accepts_the_honest_lse_with_empty_rows(case):
    *_, lse, lse_exact, lse_plain = case
    lse, lse_exact, lse_plain = lse.clone(), lse_exact.clone(), lse_plain.clone()
    lse[..., 3] = lse_exact[..., 3] = -torch.inf
    lse_plain[..., 3] = torch.nan  # plain PyTorch may fail there: no budget, no complaint
    assert_within_budget(lse, lse_exact, lse_plain)


def _zeros(out):
    return torch.zeros_like(out)


def _off_by_one_row(out):
    return out.roll(1, dims=-2)


def _one_nan(out):
    out = out.clone()
    out[1, 2, 17, 5] = torch.nan
    return out


def _swapped_heads(out):
    return out[:, [1, 0, 2]]


def _stale(out):
    out = out.clone()
    out[1] = out[0]
    return out


def _half_written(out):
    out = out.clone()
    out[:, :, out.shape[2] // 2 :] = 0
    return out


@pytest.mark.parametrize(
    "plant", [_zeros, _off_by_one_row, _one_nan, _swapped_heads, _stale, _half_written]
)
def test_rejects_a_planted_output(case, plant):
    out, exact, plain, *_ = case
    with pytest.raises(AssertionError, match="budget"):
        assert_within_budget(plant(out), exact, plain)


def test_rejects_three_times_the_noise(case):
    _, exact, plain, *_ = case
    noisy = (exact + 3 * (plain.double() - exact)).to(torch.float64)
    with pytest.raises(AssertionError, match="over the budget"):
        assert_within_budget(noisy, exact, plain)


@pytest.mark.parametrize("value", [-torch.inf, torch.inf])
def test_rejects_a_planted_infinite_lse(case, value):
    *_, lse, lse_exact, lse_plain = case
    lse = lse.clone()
    lse[0, 1, 4] = value
    with pytest.raises(AssertionError, match=r"got -?inf at \(0, 1, 4\)"):
        assert_within_budget(lse, lse_exact, lse_plain)


def test_rejects_a_finite_lse_where_the_row_is_empty(case):
    *_, lse, lse_exact, lse_plain = case
    lse_exact = lse_exact.clone()
    lse_exact[1, 0, 2] = -torch.inf
    with pytest.raises(AssertionError, match=r"at \(1, 0, 2\), exact -inf"):
        assert_within_budget(lse, lse_exact, lse_plain)


def test_rejects_the_other_infinity():
    minus, plus = torch.tensor([-torch.inf]), torch.tensor([torch.inf])
    with pytest.raises(AssertionError, match="got inf"):
        assert_within_budget(plus, minus.double(), minus)


@pytest.mark.parametrize("where", ["reference only", "everywhere"])
def test_nan_in_the_reference_matches_nothing(where):
    exact = torch.tensor([1.0, torch.nan], dtype=torch.float64)
    actual = exact.float() if where == "everywhere" else torch.ones(2)
    with pytest.raises(AssertionError, match=r"reference is NaN at \(1,\)"):
        assert_within_budget(actual, exact, actual)


def test_rejects_an_error_that_only_the_mean_shows():
    exact = torch.zeros(1000, dtype=torch.float64)
    plain = torch.zeros(1000)
    plain[0] = 1.0
    with pytest.raises(AssertionError, match="mean error"):
        assert_within_budget(torch.full((1000,), 0.5), exact, plain)


def test_names_the_worst_coordinate_both_values_and_the_budget():
    exact = torch.zeros(2, 3, dtype=torch.float64)
    exact[1, 2] = 4.0
    actual = exact.float()
    actual[1, 2] = 5.0
    message = r"scores: error 1 at \(1, 2\) is over the budget 4\.7\d*e-07: got 5, exact 4;"
    with pytest.raises(AssertionError, match=message):
        assert_within_budget(actual, exact, exact.float(), what="scores")


def test_budget_boundary_is_two_times_plain_plus_one_ulp():
    exact = torch.tensor([1.0], dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    plain = torch.tensor([1 + 8 * eps])
    # the mean of one element binds first: 1.5 * 8 + 1 = 13 ulp
    assert_within_budget(torch.tensor([1 + 13 * eps]), exact, plain)
    with pytest.raises(AssertionError, match="mean error"):
        assert_within_budget(torch.tensor([1 + 14 * eps]), exact, plain)
    with pytest.raises(AssertionError, match="over the budget"):
        assert_within_budget(torch.tensor([1 + 18 * eps]), exact, plain)


def test_rejects_other_shapes_and_integers():
    x = torch.zeros(2, 3)
    with pytest.raises(AssertionError, match=r"shapes differ: actual \[2, 3\], exact \[3\]"):
        assert_within_budget(x, x[0].double(), x)
    with pytest.raises(AssertionError, match=r"float results, got torch\.int64"):
        assert_within_budget(x.long(), x.double(), x)


def test_empty_results_are_fine():
    x = torch.zeros(0, 3)
    assert_within_budget(x, x.double(), x)


def test_more_roundings_grant_more_eps_and_no_more():
    exact = torch.ones(1, dtype=torch.float64)
    plain = torch.ones(1)
    eps = torch.finfo(torch.float32).eps
    assert_within_budget(plain + 3 * eps, exact, plain, roundings=3)
    with pytest.raises(AssertionError, match="over the budget"):
        assert_within_budget(plain + 4 * eps, exact, plain, roundings=3)
    with pytest.raises(AssertionError, match="over the budget"):
        assert_within_budget(plain + 2 * eps, exact, plain)


def test_an_lse_has_three_roundings_and_no_more():
    exact = torch.ones(1, dtype=torch.float64)
    plain = torch.ones(1)
    eps = torch.finfo(torch.float32).eps
    assert_lse_within_budget(plain + 3 * eps, exact, plain)
    with pytest.raises(AssertionError, match="over the budget"):
        assert_lse_within_budget(plain + 4 * eps, exact, plain)
