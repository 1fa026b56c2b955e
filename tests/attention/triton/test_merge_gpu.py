"""What only a GPU can say about the merge kernel: real sizes, real memory, repeated launches."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention.triton import merge as merge_states
from blackwell_sparsek.attention.triton.merge import launch_merge_states
from blackwell_sparsek.testing import inputs, poison
from blackwell_sparsek.testing.tolerance import assert_within_budget

pytestmark = pytest.mark.gpu


def _states(*shape, dtype):
    o_a, o_b = (inputs.normal(*shape, seed=i, dtype=dtype, device="cuda") for i in (0, 1))
    lse_a, lse_b = (inputs.normal(*shape[:-1], seed=i, device="cuda", scale=3.0) for i in (2, 3))
    lse_a[..., ::7] = -torch.inf
    lse_b[..., ::14] = -torch.inf
    return o_a, lse_a, o_b, lse_b


def _merged(o_a, lse_a, o_b, lse_b, dtype):
    lse = torch.logaddexp(lse_a.to(dtype), lse_b.to(dtype))
    at = torch.where(lse.isinf(), 0, lse)
    weights = [(x.to(dtype) - at).exp()[..., None] for x in (lse_a, lse_b)]
    return weights[0] * o_a.to(dtype) + weights[1] * o_b.to(dtype), lse


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("v_dim", [64, 72, 128, 256, 320])
def test_matches_the_formula(dtype, v_dim):
    args = _states(2, 16, 1023, v_dim, dtype=dtype)
    out, lse = poison.nan_like(args[0]), poison.nan_like(args[1])
    launch_merge_states(out, lse, *args)
    exact, exact_lse = _merged(*args, torch.float64)
    plain, plain_lse = _merged(*args, torch.float32)
    assert_within_budget(out, exact, plain.to(dtype), what="out")
    assert_within_budget(lse, exact_lse, plain_lse, what="lse")


def test_same_bits_every_time():
    args = _states(1, 8, 4097, 128, dtype=torch.bfloat16)
    first = [torch.empty_like(x) for x in args[:2]]
    launch_merge_states(*first, *args)
    for _ in range(50):
        again = [poison.nan_like(x) for x in args[:2]]
        launch_merge_states(*again, *args)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_more_than_two_to_the_31_elements():
    rows = 2**31 // 64 + 33
    o_a = torch.zeros(1, 1, rows, 64, dtype=torch.float16, device="cuda")
    lse_a = torch.zeros(1, 1, rows, device="cuda")
    o_a[0, 0, -33:] = inputs.normal(33, 64, seed=0, dtype=torch.float16, device="cuda")
    out, lse = poison.nan_like(o_a), poison.nan_like(lse_a)
    launch_merge_states(out, lse, o_a, lse_a, o_a, lse_a)
    assert torch.equal(out[0, 0, -33:], o_a[0, 0, -33:])
    assert not out[0, 0, : rows // 2].any() and not lse.isnan().any()


def test_replays_in_a_cuda_graph_with_new_inputs():
    args = _states(1, 4, 200, 64, dtype=torch.float16)
    out, lse = torch.empty_like(args[0]), torch.empty_like(args[1])
    launch_merge_states(out, lse, *args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_merge_states(out, lse, *args)
    args[0].mul_(2.0)
    graph.replay()
    expected, expected_lse = poison.nan_like(out), poison.nan_like(lse)
    launch_merge_states(expected, expected_lse, *args)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_more_programs_than_65535(monkeypatch):
    """With one row to a program the grid passes what its second dimension could hold."""
    monkeypatch.setattr(merge_states, "TILE_ELEMENTS", 1)
    args = _states(70_000, 1, 1, 1, dtype=torch.float32)
    out, lse = poison.nan_like(args[0]), poison.nan_like(args[1])
    launch_merge_states(out, lse, *args)
    exact, _ = _merged(*args, torch.float64)
    plain, _ = _merged(*args, torch.float32)
    assert_within_budget(out, exact, plain)
