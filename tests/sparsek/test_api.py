"""`sparsek` and `sparsek_causal`: numbers, gradients, refusals, compilers and transforms."""

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.reference import sparsek as reference
from blackwell_sparsek.sparsek import eager
from blackwell_sparsek.testing import inputs
from blackwell_sparsek.testing.tolerance import assert_within_budget

SIZES = [1, 17, 129, 700]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_weights_match_the_formula(size, dtype):
    z = inputs.normal(1, 2, size, seed=size, dtype=dtype)
    for k in (0, 0.3, 2.5, 8, size - 0.5, size + 1):
        p, tau = bsk.sparsek(z, k, return_threshold=True)
        limit = torch.tensor(float(k), dtype=torch.float64)
        exact, exact_tau = reference.sparsek(z, limit)
        low = torch.float64 if dtype == torch.float64 else torch.float32
        plain, plain_tau = reference.sparsek(z, limit, precision=low)
        assert_within_budget(p, exact, plain.to(dtype), what=f"p of k={k}")
        assert_within_budget(tau, exact_tau, plain_tau, what=f"tau of k={k}")


def test_weights_add_up_to_k_and_more_than_k_of_them_may_be_above_zero():
    z = inputs.normal(64, 300, seed=0, dtype=torch.float64, scale=0.5)
    p = bsk.sparsek(z, 8.25)
    assert torch.allclose(p.sum(-1), torch.full((64,), 8.25, dtype=torch.float64), atol=1e-12)
    assert p.min() == 0 and p.max() <= 1 and ((p > 0).sum(-1) > 8).all()


def test_scores_far_apart_are_an_ordinary_top_k():
    z = 10.0 * torch.randperm(50, generator=torch.Generator().manual_seed(1))
    p, tau = bsk.sparsek(z, 5, return_threshold=True)
    assert torch.equal(p, (z >= 450).float()) and tau == 440


@pytest.mark.parametrize("k", [4.0, 30.0, 250.0])
def test_normal_rows_take_few_steps(k, monkeypatch):
    monkeypatch.setattr(eager, "MAX_STEPS", 8)
    z = torch.cat([inputs.normal(8, 500, seed=1, scale=scale) for scale in (0.2, 1.0, 5.0)])
    p = bsk.sparsek(z, k)
    limit = torch.tensor(k, dtype=torch.float64)
    plain, _ = reference.sparsek(z, limit, precision=torch.float32)
    assert_within_budget(p, reference.sparsek(z, limit)[0], plain)


def test_rows_that_are_halved_take_newtons_steps_between(monkeypatch):
    """Halving alone takes more than 50 steps for the digits of fp64."""
    monkeypatch.setattr(eager, "FREE_STEPS", 0)
    monkeypatch.setattr(eager, "MAX_STEPS", 30)
    z, limit = inputs.normal(8, 500, seed=1, dtype=torch.float64), torch.tensor(30.0).double()
    p, tau = bsk.sparsek(z, 30.0, return_threshold=True)
    exact, exact_tau = reference.sparsek(z, limit)
    assert_within_budget(p, exact, exact)
    assert_within_budget(tau, exact_tau, exact_tau)


@pytest.mark.parametrize("k", [0.5, 1.0, 60.0, 299.5])
def test_rows_that_mislead_the_first_guess(k):
    z = inputs.normal(6, 300, seed=16)
    z[0, 7] = 1e4
    z[1] = z[1].mul(3).exp()
    z[2, ::50] += 1e30
    z[3] *= 1000
    z[4] = 0.25
    z[5] -= 1e5
    p = bsk.sparsek(z, k)
    limit = torch.tensor(k, dtype=torch.float64)
    plain, _ = reference.sparsek(z, limit, precision=torch.float32)
    assert_within_budget(p, reference.sparsek(z, limit)[0], plain)


def test_many_rows_are_more_than_one_chunk(monkeypatch):
    monkeypatch.setattr(eager, "CHUNK", 100)
    z, k = inputs.normal(23, 30, seed=2), torch.linspace(0, 31, 23)
    lengths = torch.arange(23, dtype=torch.int32)
    p = bsk.sparsek(z, k, lengths=lengths)
    exact, _ = reference.sparsek(z, k, lengths)
    plain, _ = reference.sparsek(z, k, lengths, precision=torch.float32)
    assert_within_budget(p, exact, plain)


def test_ragged_rows_read_nothing_past_their_lengths():
    z = inputs.normal(4, 9, seed=3)
    lengths = torch.tensor([0, 1, 5, 9], dtype=torch.int32)
    masked = z.masked_fill(torch.arange(9) >= lengths[:, None], torch.nan)
    p = bsk.sparsek(masked.requires_grad_(), 2.0, lengths=lengths)
    p.square().sum().backward()
    hidden = masked.isnan()
    assert (p[hidden] == 0).all() and (masked.grad[hidden] == 0).all()
    assert torch.allclose(p.sum(-1), torch.tensor([0.0, 1.0, 2.0, 2.0]))


def test_gradients_by_finite_differences():
    z = inputs.normal(5, 23, seed=4, dtype=torch.float64).requires_grad_()
    k = torch.tensor([1.5, 3.0, 0.5, 7.2, 30.0], dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([23, 20, 1, 15, 23], dtype=torch.int32)

    def weights_and_threshold(z, k):
        p, tau = bsk.sparsek(z, k, lengths=lengths, return_threshold=True)
        return p, tau.clamp(min=-99)

    assert torch.autograd.gradcheck(weights_and_threshold, (z, k))


@pytest.mark.parametrize("needs", ["p", "tau", "both"])
def test_gradients_are_those_of_the_formula(needs):
    z = inputs.normal(4, 40, seed=5, dtype=torch.float64).requires_grad_()
    k = torch.tensor([2.0, 0.25, 6.5, 50.0], dtype=torch.float64, requires_grad=True)
    weights = inputs.normal(4, 40, seed=6, dtype=torch.float64)

    def loss(p, tau):
        total = (p * weights).sum() * (needs != "tau")
        return total + (tau.clamp(min=-99) * weights[:, 0]).sum() * (needs != "p")

    ours = torch.autograd.grad(loss(*bsk.sparsek(z, k, return_threshold=True)), (z, k))
    exact = torch.autograd.grad(loss(*reference.sparsek(z, k)), (z, k))
    for name, a, b in zip("zk", ours, exact, strict=True):
        assert_within_budget(a, b, b, what=f"d{name}")


def test_weights_of_exactly_0_and_1_do_not_move():
    z = torch.tensor([1.0, 0.5, 0.5, 0.0], requires_grad=True)
    k = torch.tensor(2.0, requires_grad=True)
    p, tau = bsk.sparsek(z, k, return_threshold=True)
    assert p.tolist() == [1.0, 0.5, 0.5, 0.0] and tau == 0
    dz, dk = torch.autograd.grad(p, (z, k), torch.tensor([8.0, 3.0, 1.0, 5.0]))
    assert dz.tolist() == [0.0, 1.0, -1.0, 0.0] and dk == 2


def test_half_precision_gradients_take_the_same_entries_as_the_forward():
    z = inputs.normal(6, 200, seed=7, dtype=torch.bfloat16).requires_grad_()
    p = bsk.sparsek(z, 12)
    dp = inputs.normal(6, 200, seed=8, dtype=torch.bfloat16)
    (dz,) = torch.autograd.grad(p, z, dp)
    precise = z.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(reference.sparsek(precise, torch.tensor(12.0))[0], precise, dp)
    single = z.detach().float().requires_grad_()
    made = reference.sparsek(single, torch.tensor(12.0), precision=torch.float32)[0]
    (plain,) = torch.autograd.grad(made, single, dp.float())
    assert_within_budget(dz, exact, plain.bfloat16())


@pytest.mark.parametrize(("size", "k"), [(1, 1), (17, 0), (17, 40), (129, 4.5), (300, 12)])
def test_causal_thresholds(size, k):
    u = inputs.normal(2, size, seed=size)
    u[0, size // 2 :: 3] = 0.5
    u[1, ::7] = -torch.inf
    limit = torch.tensor(float(k), dtype=torch.float64)
    tau = bsk.sparsek_causal(u, k)
    plain = reference.sparsek_causal(u, limit, precision=torch.float32)
    assert_within_budget(tau, reference.sparsek_causal(u, limit), plain)
    assert (tau[..., 1:] >= tau[..., :-1]).all()
    assert (tau[0, : int(k)] == -torch.inf).all()


def test_a_dropped_entry_bounds_later_thresholds():
    # after 0 is dropped, 5 and -3 alone would lower the threshold of k = 1 to -3
    u = torch.cat([torch.tensor([5.0, 0.0]), torch.full((200,), -3.0)])
    assert torch.equal(bsk.sparsek_causal(u, 1)[1:], torch.zeros(201))


def test_causal_gradients_by_finite_differences():
    u = inputs.normal(2, 31, seed=9, dtype=torch.float64).requires_grad_()
    k = torch.tensor([2.5, 4.25], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda u, k: bsk.sparsek_causal(u, k).clamp(min=-99), (u, k))


@pytest.mark.parametrize("size", [200, 300])
def test_causal_gradients_are_those_of_the_formula(size):
    u = inputs.normal(size, seed=10, dtype=torch.float64).requires_grad_()
    k = torch.tensor(5.5, dtype=torch.float64, requires_grad=True)
    weights = inputs.normal(size, seed=11, dtype=torch.float64)
    results = [
        torch.autograd.grad((f(u, k).clamp(min=-99) * weights).sum(), (u, k))
        for f in (bsk.sparsek_causal, reference.sparsek_causal)
    ]
    for name, ours, exact in zip("uk", *results, strict=True):
        assert_within_budget(ours, exact, exact, what=f"d{name}", roundings=4)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4)])
def test_nothing(shape):
    z = torch.zeros(shape, requires_grad=True)
    p, tau = bsk.sparsek(z, 2, return_threshold=True)
    assert p.shape == shape and tau.shape == shape[:-1] and (tau == -torch.inf).all()
    assert bsk.sparsek_causal(z, 2).shape == shape
    p.sum().backward()
    assert z.grad.shape == shape


def test_compiled_and_checked_as_operators():
    z = inputs.normal(3, 20, seed=12).requires_grad_()
    k = torch.full((3,), 2.5)
    torch.library.opcheck(torch.ops.bsk.sparsek.default, (z, k, 0.0, None, "eager"))
    torch.library.opcheck(torch.ops.bsk.sparsek.default, (z, None, 2.5, None, "eager"))
    torch.library.opcheck(torch.ops.bsk.sparsek_causal.default, (z, k, "eager"))
    compiled = torch.compile(lambda z: bsk.sparsek(z, 2.5) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(z), bsk.sparsek(z, 2.5) * 2)


def test_batched_by_vmap():
    z = inputs.normal(4, 3, 10, seed=13)
    assert torch.equal(torch.vmap(lambda x: bsk.sparsek(x, 2.0))(z), bsk.sparsek(z, 2.0))


def test_autocast_changes_nothing():
    z = inputs.normal(3, 50, seed=14)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = bsk.sparsek(z, 3.0)
    assert cast.dtype == torch.float32 and torch.equal(cast, bsk.sparsek(z, 3.0))


def test_double_backward_is_refused():
    z = inputs.normal(3, 10, seed=15).requires_grad_()
    (dz,) = torch.autograd.grad(bsk.sparsek(z, 2.0).square().sum(), z, create_graph=True)
    with pytest.raises(bsk.Unsupported, match="no backward of the backward"):
        dz.sum().backward()


def test_explained():
    decision = bsk.explain(bsk.sparsek, torch.zeros(3, 5), 2)
    assert decision.chosen == "eager"
    assert str(decision.problem) == "weights on cpu, torch.float32, 3 rows of 5"
    with pytest.raises(bsk.Unsupported, match="has no sm90 implementation"):
        bsk.sparsek(torch.zeros(3, 5), 2, impl="sm90")
    with pytest.raises(bsk.Unsupported, match="needs float16, bfloat16 or float32"):
        bsk.sparsek(torch.zeros(3, 5, dtype=torch.float64), 2, impl="triton")


@pytest.mark.parametrize(
    ("z", "k", "lengths", "error", "text"),
    [
        ([1.0], 1, None, bsk.InvalidType, "z is not a tensor"),
        (torch.zeros(3, dtype=torch.int32), 1, None, bsk.InvalidType, "z has an unsupported dtype"),
        (torch.zeros(()), 1, None, bsk.InvalidInput, r"z has a wrong rank; expected \[..., n\]"),
        (torch.zeros(4, 3).T, 1, None, bsk.InvalidInput, "not contiguous in its last dimension"),
        (torch.zeros(3, 4), -1, None, bsk.InvalidInput, "k is negative or NaN.*got -1"),
        (torch.zeros(3, 4), float("nan"), None, bsk.InvalidInput, "k is negative or NaN"),
        (torch.zeros(3, 4), "2", None, bsk.InvalidType, "k is not a number.*got str"),
        (torch.zeros(3, 4), torch.zeros(2), None, bsk.InvalidInput, r"k has a wrong shape.*\[3\]"),
        (
            torch.zeros(3, 4),
            torch.tensor([1.0, -2.0, 1.0]),
            None,
            bsk.InvalidInput,
            r"k\[1\] is out of range; expected at least 0, got -2.0$",
        ),
        (torch.zeros(3, 4), 1, torch.tensor([1, 5, 2]), bsk.InvalidType, "lengths has an unsupp"),
        (
            torch.zeros(3, 4),
            1,
            torch.tensor([1, 5, 2], dtype=torch.int32),
            bsk.InvalidInput,
            r"lengths\[1\] is out of range; expected 0 to 4, got 5",
        ),
    ],
)
def test_refusals(z, k, lengths, error, text):
    with pytest.raises(error, match=text):
        bsk.sparsek(z, k, lengths=lengths)
