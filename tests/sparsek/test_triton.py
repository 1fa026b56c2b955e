"""The SparseK kernel against the sorted formula in fp64, interpreted and compiled."""

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.sparsek import PrefixSparsekCall, SparsekProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.reference import sparsek as reference
from blackwell_sparsek.sparsek import api
from blackwell_sparsek.sparsek import triton as kernels
from blackwell_sparsek.sparsek.op import causal_dispatch, sparsek_dispatch
from blackwell_sparsek.testing import guard, inputs, layouts, poison
from blackwell_sparsek.testing.tolerance import assert_within_budget


def check(z, k, lengths=None, p=None, tau=None):
    p = poison.nan_like(z).contiguous() if p is None else p
    shape = z.shape[:-1]
    tau = poison.nan_like(z.new_empty(shape, dtype=torch.float32)) if tau is None else tau
    kernels.launch_sparsek(p, tau, z, k, lengths)
    exact, exact_tau = reference.sparsek(z, k, lengths)
    plain, plain_tau = reference.sparsek(z, k, lengths, precision=torch.float32)
    assert_within_budget(p, exact, plain.to(p.dtype), what="p")
    assert_within_budget(tau, exact_tau, plain_tau, what="tau")
    return p, tau


def limits(shape, *values, device="cpu"):
    """k of each row, in turn from `values`."""
    count = torch.Size(shape).numel()
    return torch.tensor([values[i % len(values)] for i in range(count)], device=device).view(shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 17, 48, 129])
def test_matches_the_formula(size, dtype, device):
    z = inputs.normal(1, 2, 5, size, seed=size, dtype=dtype, device=device)
    check(z, limits((1, 2, 5), 0.0, 0.4, 1.0, 3.0, 7.7, 20.0, device=device))


def test_rows_longer_than_a_tile(device, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_TILE", 64)
    monkeypatch.setattr(kernels, "LOOP_TILE", 64)
    z = inputs.normal(1, 2, 4, 150, seed=3, device=device)
    z[0, 0, 0, 5] = -torch.inf
    lengths = limits((1, 2, 4), 150, 64, 65, 1, 0, device=device).int()
    check(z, limits((1, 2, 4), 2.5, 40.0, 1.0, device=device), lengths)


def test_ragged_rows_and_entries_that_do_not_exist(device):
    z = inputs.normal(2, 3, 4, 33, seed=5, device=device)
    z[0, 0] = -torch.inf
    z[1, :, :, ::2] = -torch.inf
    lengths = limits((2, 3, 4), 33, 0, 1, 17, 32, device=device).int()
    check(z, limits((2, 3, 4), 2.0, 0.5, 6.0, 0.0, device=device), lengths)


def test_equal_scores_share(device):
    z = torch.zeros(1, 1, 1, 40, device=device)
    p, tau = check(z, limits((1, 1, 1), 10.0, device=device))
    assert torch.equal(p, torch.full_like(p, 0.25)) and tau.item() == -0.25


def test_a_first_guess_that_is_right_ends_the_search(interpreted, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_STEPS", kernels.tl.constexpr(1))
    z = torch.zeros(1, 1, 1, 40)
    check(z, limits((1, 1, 1), 10.0))


@pytest.mark.parametrize(
    ("row", "k"),
    [
        # the guess, 0 in both, is right; or one step away, where an entry at 0 has no weight
        ([0.5, 0.0], 0.5),
        ([0.0, 0.5, 0.75, -0.25], 1.0),
    ],
)
def test_one_step_from_a_guess_at_an_entry(row, k, interpreted, monkeypatch):
    # the guess is the mean of the row less that of the weights
    monkeypatch.setattr(kernels, "WIDTH_OF_DEVIATION", kernels.tl.constexpr(0.0))
    monkeypatch.setattr(kernels, "MAX_STEPS", kernels.tl.constexpr(1))
    check(torch.tensor([[[row]]]), limits((1, 1, 1), k))


def test_a_row_without_a_threshold_is_nan(device):
    z = inputs.normal(1, 1, 5, 20, seed=7, device=device)
    z[0, 0, 0, 3], z[0, 0, 1, 4] = torch.nan, torch.inf
    k = limits((1, 1, 5), 2.0, 2.0, -1.0, torch.nan, 2.0, device=device)
    lengths = limits((1, 1, 5), 20, device=device).int()
    p, tau = torch.empty_like(z), torch.empty(1, 1, 5, device=device)
    kernels.launch_sparsek(p, tau, z, k, lengths)
    assert tau.isnan().tolist() == [[[True, True, True, True, False]]]
    assert p.isnan().all(-1).tolist() == [[[True, True, True, True, False]]]
    assert p[0, 0, 4].sum().item() == pytest.approx(2.0)


@pytest.mark.parametrize("length", [-1, 21])
def test_a_length_out_of_range_gives_nan(length, device):
    z = inputs.normal(1, 1, 1, 20, seed=8, device=device)
    p, tau = torch.zeros_like(z), torch.zeros(1, 1, 1, device=device)
    k, lengths = limits((1, 1, 1), 2.0, device=device), limits((1, 1, 1), length, device=device)
    kernels.launch_sparsek(p, tau, z, k, lengths.int())
    assert p.isnan().all() and tau.isnan().all()


@pytest.mark.parametrize("kind", layouts.KINDS)
def test_strides(kind, device):
    z = layouts.strided_like(inputs.normal(2, 3, 5, 24, seed=9, device=device), kind)
    k = limits((5, 3, 2), 1.0, 2.5, 4.0, device=device).permute(2, 1, 0)
    check(z, k, limits((1, 1, 1), 20, device=device).int().expand(2, 3, 5))


def test_few_steps_for_normal_rows(interpreted, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_STEPS", kernels.tl.constexpr(8))
    z = inputs.normal(1, 1, 3, 500, seed=12)
    check(z, limits((1, 1, 3), 4.0, 30.0, 250.0))


@pytest.mark.parametrize(
    ("arch", "dtype", "chosen", "reason"),
    [
        (Arch("cuda", 90, 132, 232448, False), torch.float32, "triton", None),
        (Arch("cuda", 90, 132, 232448, False), torch.float64, "eager", "got torch.float64"),
        (Arch("cpu", 0, 1, 0, False), torch.float32, "eager", "needs a CUDA GPU"),
        (Arch("cpu", 0, 1, 0, True), torch.float32, "eager", "would be interpreted"),
    ],
)
@pytest.mark.parametrize("prefixes", [False, True])
def test_what_auto_takes(arch, dtype, chosen, reason, prefixes):
    dispatch = causal_dispatch if prefixes else sparsek_dispatch
    decision = dispatch.decide("auto", SparsekProblem(arch, dtype, 3, 100, prefixes))
    assert decision.chosen == chosen
    assert reason is None or reason in decision.reasons["triton"]


@pytest.mark.gpu
def test_auto_takes_the_kernel_on_a_gpu():
    z = torch.zeros(2, 30, device="cuda")
    assert bsk.explain(bsk.sparsek, z, 2).chosen == "triton"
    assert bsk.explain(bsk.sparsek_causal, z, 2).chosen == "triton"


def test_one_number_for_all_rows(device):
    z = inputs.normal(1, 2, 3, 40, seed=6, device=device)
    p, tau = torch.empty_like(z), torch.empty(1, 2, 3, device=device)
    kernels.launch_sparsek(p, tau, z, 2.7, None)
    expected = check(z, limits((1, 2, 3), 2.7, device=device))
    assert torch.equal(p, expected[0]) and torch.equal(tau, expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_later_calls_are_replayed(per_row, ragged, monkeypatch):
    recorded = {}
    monkeypatch.setattr(api, "_RECORDED", recorded)
    for seed in range(5):
        z = inputs.normal(2, 3, 300, seed=seed, device="cuda")
        k = torch.rand(2, 3, device="cuda") * 50 if per_row else 7.5
        lengths = torch.randint(301, (3,), dtype=torch.int32, device="cuda") if ragged else None
        made = bsk.sparsek(z, k, lengths=lengths, return_threshold=True, impl="triton")
        given = (k, 0.0) if per_row else (None, k)
        expected = torch.ops.bsk.sparsek(z, *given, lengths, "triton")
        assert torch.equal(made[0], expected[0]) and torch.equal(made[1], expected[1])
    assert [x is not None for x in recorded.values()] == [True]


@pytest.mark.gpu
def test_copies_of_strided_scores_are_not_replayed(monkeypatch):
    recorded = {}
    monkeypatch.setattr(api, "_RECORDED", recorded)
    for seed in range(4):
        z = inputs.normal(3, 2, 5, 4, 32, seed=seed, device="cuda").transpose(0, 2)
        p = bsk.sparsek(z, 3.0, impl="triton")
        assert torch.equal(p, bsk.sparsek(z.contiguous(), 3.0, impl="triton"))
    assert None in recorded.values()


@pytest.mark.parametrize("side", ["left", "right"])
def test_touches_nothing_outside(side, interpreted):
    z, k = inputs.normal(2, 1, 3, 17, seed=10), limits((2, 1, 3), 1.0, 3.5)
    lengths = limits((2, 1, 3), 17, 9).int()
    p, tau = poison.nan_like(z), poison.nan_like(k)
    z, k, lengths, p, tau = guard.guard_pages(z, k, lengths, p, tau, side=side)
    check(z, k, lengths, p, tau)


@pytest.mark.parametrize("k", [0.0, 4.5])
def test_thresholds_of_prefixes(k, device):
    u = inputs.normal(1, 2, 19, seed=11, device=device)
    u[0, 0, 7:13] = 1.0
    u[0, 1, 5] = -torch.inf
    tau = kernels.prefixes(PrefixSparsekCall(u, torch.tensor(k, device=device).expand(1, 2)))
    limit = torch.tensor(k, dtype=torch.float64)
    plain = reference.sparsek_causal(u, limit, precision=torch.float32)
    assert_within_budget(tau, reference.sparsek_causal(u, limit), plain, what="tau")
    assert (tau[..., 1:] >= tau[..., :-1]).all()
