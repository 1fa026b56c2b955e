import torch

from blackwell_sparsek.reference.merge import merge_states


def test_merge_of_two_numbers():
    o, lse = merge_states(
        torch.tensor([[2.0]]),
        torch.tensor([1.0]).log(),
        torch.tensor([[5.0]]),
        torch.tensor([2.0]).log(),
    )
    torch.testing.assert_close(o, torch.tensor([[4.0]]))
    torch.testing.assert_close(lse, torch.tensor([3.0]).log())


def test_empty_sides():
    nothing = torch.tensor([-torch.inf, -torch.inf])
    o_a, lse_a = torch.tensor([[1.0], [torch.nan]]), torch.tensor([0.5, -torch.inf])
    o, lse = merge_states(o_a, lse_a, torch.full((2, 1), torch.nan), nothing)
    assert o.tolist() == [[1.0], [0.0]]
    assert lse.tolist() == [0.5, -torch.inf]
