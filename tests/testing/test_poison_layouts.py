import pytest
import torch

from blackwell_sparsek.testing import inputs, layouts, poison

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_way_to_an_empty_tensor_is_poisoned(dtype):
    x = torch.zeros(3, 4, dtype=dtype)
    with poison.poisoned_empty():
        made = [
            torch.empty(3, dtype=dtype),
            torch.empty_like(x),
            torch.empty_strided((2, 2), (4, 1), dtype=dtype),
            torch.empty_permuted((2, 3), (1, 0), dtype=dtype),
            x.new_empty(5),
            x.new_empty_strided((2, 2), (2, 1)),
        ]
        assert torch.empty_like(x.int()).eq(2**31 - 1).all()
    for tensor in made:
        assert tensor.dtype == dtype and tensor.isnan().all()


def test_the_originals_come_back_even_after_an_exception():
    before = (torch.empty, torch.empty_like, torch.Tensor.new_empty)
    with pytest.raises(KeyError), poison.poisoned_empty():
        raise KeyError
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == before
    assert "new_empty" not in vars(torch.Tensor)


def test_poisoned_empty_nests():
    with poison.poisoned_empty():
        with poison.poisoned_empty():
            assert torch.ones(2).new_empty(2).isnan().all()
        assert torch.ones(2).new_empty(2).isnan().all() and torch.empty(2).isnan().all()
    assert "new_empty" not in vars(torch.Tensor)


def test_poison_unused_leaves_the_used_slots():
    cache = torch.ones(3, 2, 5, 4)
    poison.poison_unused_(cache, torch.tensor([0, 3, 5]))
    assert cache.isnan().sum(dim=(1, 2, 3)).tolist() == [40, 16, 0]
    assert cache[1, :, :3].eq(1).all()


def test_nan_like_keeps_strides():
    x = torch.zeros(4, 6).T
    assert poison.nan_like(x).stride() == x.stride()
    assert poison.nan_like(x).isnan().all()


@pytest.mark.parametrize("kind", [*layouts.KINDS, "last_gap"])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 4, 5), (1, 1, 1, 1), (2, 0, 3)])
def test_same_values_and_poisoned_gaps(kind, shape):
    x = inputs.normal(*shape, seed=1)
    y = layouts.strided_like(x, kind)
    assert torch.equal(x, y)
    assert kind == "last_gap" or y.stride(-1) == 1
    layouts.assert_gaps_untouched(y)
    storage = torch.tensor(y.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32)
    assert int(storage.isnan().sum()) == storage.numel() - x.numel()


def test_layouts_differ_from_each_other():
    x = torch.zeros(2, 3, 4, 5)
    made = layouts.different_layouts(*[x] * 5)
    assert len({(y.stride(), y.storage_offset()) for y in made}) == 5


def test_a_write_into_a_gap_is_seen():
    y = layouts.strided_like(torch.zeros(4, 5), "row_gap")
    layouts.assert_gaps_untouched(y)
    y.as_strided((1,), (1,), 6).fill_(1.0)
    with pytest.raises(AssertionError, match=r"1 elements .* storage offset 6: 1\.0"):
        layouts.assert_gaps_untouched(y)


def test_unknown_layout_kind():
    with pytest.raises(ValueError, match="layout kind is 'rowgap'"):
        layouts.strided_like(torch.zeros(1), "rowgap")


def test_inputs_are_seeded():
    assert torch.equal(inputs.normal(4, seed=3), inputs.normal(4, seed=3))
    assert not torch.equal(inputs.normal(4, seed=3), inputs.normal(4, seed=4))
    q, k, v = inputs.qkv(1, 4, 2, 5, 7, 8, v_dim=3, seed=0, dtype=torch.float16)
    assert q.shape == (1, 4, 5, 8) and k.shape == (1, 2, 7, 8) and v.shape == (1, 2, 7, 3)
    whole = inputs.integers(50, seed=0)
    assert torch.equal(whole, whole.round()) and whole.abs().max() == 3
    keep = inputs.block_pattern(1, 2, 5, 6, density=0.5, seed=0)
    assert not keep[:, :, 0].any() and keep.any() and keep.dtype == torch.bool
