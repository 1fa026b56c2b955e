"""BlockMask: round trips, transposition, ownership, and its place in torch."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blackwell_sparsek import masks
from blackwell_sparsek.attention.api import attention
from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.masks.block_mask import BlockMask

BLOCKS = [(16, 16), (32, 16), (16, 64), (64, 32)]


def random_elements(shape, share, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def raw_lists(mask: BlockMask) -> dict:
    f = mask.forward
    return {
        "indptr": f.indptr,
        "indices": f.indices,
        "partial_end": f.partial_end,
        "bits_id": f.bits_id,
        "bits": mask.bits,
        "seq_lengths": mask.seq_lengths,
        "block_size": mask.block_size,
        "batch": mask.batch,
        "heads": mask.heads,
    }


planes = st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (0, 1)])
shares = st.sampled_from([0.0, 0.002, 0.5, 0.998, 1.0])
lengths = st.sampled_from([0, 1, 15, 16, 17, 33, 63, 65, 80])


@settings(derandomize=True, max_examples=120, deadline=None)
@given(planes, lengths, lengths, st.sampled_from(BLOCKS), shares, st.integers(0, 99))
def test_element_masks_round_trip(bh, sq, sk, block, share, seed):
    visible = random_elements((*bh, sq, sk), share, seed)
    mask = BlockMask.from_element_mask(visible, block)
    mask.validate()
    assert torch.equal(mask.to_element_mask(), visible)
    assert mask.seq_lengths == (sq, sk) and (mask.batch, mask.heads) == bh
    rebuilt = BlockMask(**raw_lists(mask))
    assert rebuilt.equals(mask)


@settings(derandomize=True, max_examples=120, deadline=None)
@given(planes, lengths, lengths, st.sampled_from(BLOCKS), shares, st.integers(0, 99))
def test_forward_and_transposed_lists_agree(bh, sq, sk, block, share, seed):
    visible = random_elements((*bh, sq, sk), share, seed)
    mask = BlockMask.from_element_mask(visible, block)
    flipped = mask.T
    flipped.validate()
    mask.validate()
    assert flipped.seq_lengths == (sk, sq) and flipped.block_size == block[::-1]
    assert torch.equal(flipped.to_element_mask(), visible.transpose(-1, -2))
    assert flipped.T.equals(mask)
    # entry for entry, the transposed list points at the same bits as the forward list
    nb = mask.grid[1]
    there = {
        (int(r) // max(mask.grid[0], 1), int(r) % max(mask.grid[0], 1), int(c)): int(i)
        for r, c, i in zip(
            mask.forward.row_indices(), mask.forward.indices, mask.forward.bits_id, strict=True
        )
    }
    t = mask.transposed
    back = {
        (int(r) // max(nb, 1), int(c), int(r) % max(nb, 1)): int(i)
        for r, c, i in zip(t.row_indices(), t.indices, t.bits_id, strict=True)
    }
    assert back == there


@settings(derandomize=True, max_examples=80, deadline=None)
@given(planes, st.integers(0, 6), st.integers(0, 6), st.sampled_from(BLOCKS), st.integers(0, 99))
def test_dense_masks_round_trip(bh, mb, nb, block, seed):
    keep = random_elements((*bh, mb, nb), 0.5, seed)
    mask = BlockMask.from_dense(keep, block)
    mask.validate()
    assert torch.equal(mask.to_dense(), keep)
    assert mask.nnz_blocks == int(keep.sum())
    assert mask.bits.shape[0] == 0 and bool((mask.forward.bits_id == -1).all())
    elements = keep.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)
    assert torch.equal(mask.to_element_mask(), elements)


def test_lists_of_a_small_mask_by_hand():
    visible = torch.zeros(33, 40, dtype=torch.bool)
    visible[:16, 16:32] = True  # full
    visible[0, 0] = True  # partial
    visible[32, 32:] = True  # full, for a block of one row and eight columns
    mask = BlockMask.from_element_mask(visible, 16)
    f, t = mask.forward, mask.transposed
    assert f.indptr.tolist() == [0, 2, 2, 3]
    assert f.partial_end.tolist() == [1, 2, 2]
    assert f.indices.tolist() == [0, 1, 2]
    assert f.bits_id.tolist() == [0, -1, -1]
    assert mask.bits.tolist() == [[[1]] + [[0]] * 15]
    assert t.indptr.tolist() == [0, 1, 2, 3]
    assert t.partial_end.tolist() == [1, 1, 2]
    assert t.indices.tolist() == [0, 0, 2]
    assert t.bits_id.tolist() == [0, -1, -1]


def test_equal_partial_blocks_share_bits():
    tile = random_elements((16, 16), 0.5)
    mask = BlockMask.from_element_mask(tile.repeat(4, 5), 16)
    assert mask.nnz_blocks == 20 and mask.bits.shape[0] == 1


def test_ragged_dense_mask_shows_what_exists():
    mask = BlockMask.from_dense(torch.ones(2, 3, dtype=torch.bool), 16, seq_lengths=(17, 33))
    mask.validate()
    assert mask.to_element_mask().shape == (1, 1, 17, 33) and bool(mask.to_element_mask().all())


@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced"])
def test_strided_inputs(layout):
    keep = random_elements((3, 4, 6, 5), 0.5)
    strided = {
        "expanded": keep[:, :1].expand(-1, 4, -1, -1),
        "transposed": keep.transpose(2, 3),
        "sliced": keep[:, ::2, 1:, ::3],
    }[layout]
    assert torch.equal(BlockMask.from_dense(strided, 16).to_dense(), strided)
    elements = BlockMask.from_element_mask(strided, 16)
    assert torch.equal(elements.to_element_mask(), strided)


def test_ranks_broadcast_from_the_right():
    keep = random_elements((3, 4, 5), 0.5)
    assert BlockMask.from_dense(keep, 16).equals(BlockMask.from_dense(keep[None], 16))
    assert BlockMask.from_dense(keep[0], 16).equals(BlockMask.from_dense(keep[None, :1], 16))
    assert (BlockMask.from_dense(keep, 16).batch, BlockMask.from_dense(keep, 16).heads) == (1, 3)


def test_tensors_round_trip():
    mask = BlockMask.from_element_mask(random_elements((2, 3, 40, 50), 0.9), (16, 32))
    tensors = mask.tensors()
    assert len(tensors) == 9 and all(x.dtype == torch.int32 for x in tensors)
    assert all(x.is_contiguous() for x in tensors)
    again = BlockMask._from_tensors(tensors, 2, 3, [40, 50], [16, 32])
    again.validate()
    assert again.equals(mask)
    assert all(map(torch.equal, again.tensors(), tensors))


def test_mask_owns_its_metadata():
    given_lists = raw_lists(BlockMask.from_element_mask(random_elements((64, 64), 0.9), 16))
    mask = BlockMask(**given_lists)
    before = mask.to_element_mask()
    for name in ("indptr", "indices", "partial_end", "bits_id", "bits"):
        given_lists[name].fill_(7)
    assert torch.equal(mask.to_element_mask(), before)
    mask.validate()

    keep = torch.ones(2, 2, dtype=torch.bool)
    dense = BlockMask.from_dense(keep, 16)
    keep.zero_()
    assert dense.nnz_blocks == 4 and bool(dense.to_dense().all())


def test_attributes_cannot_be_set():
    mask = BlockMask.from_dense(torch.ones(2, 2, dtype=torch.bool), 16)
    for name in ("forward", "transposed", "bits", "seq_lengths", "block_size", "batch", "heads"):
        with pytest.raises(AttributeError):
            setattr(mask, name, None)


def test_validate_sees_later_damage():
    mask = BlockMask.from_dense(torch.ones(2, 3, dtype=torch.bool), 16)
    mask.validate()
    mask.forward.indices[1] = 9
    with pytest.raises(InvalidInput, match=r"indices \(entry 1, row 0\) is out of range"):
        mask.validate()
    mask = BlockMask.from_dense(torch.ones(2, 3, dtype=torch.bool), 16)
    mask.transposed.indices[0] = 1
    with pytest.raises(InvalidInput, match="transposed lists do not agree"):
        mask.validate()


def test_density_and_repr():
    keep = torch.tensor([[1, 0, 0], [1, 1, 0]], dtype=torch.bool)
    mask = BlockMask.from_dense(keep, (16, 32), seq_lengths=(30, 90))
    assert mask.density == 0.5 and mask.grid == (2, 3)
    assert repr(mask) == (
        "BlockMask(batch=1, heads=1, seq_lengths=(30, 90), block_size=(16, 32), nnz_blocks=3, "
        "density=0.5000, device='cpu')"
    )
    assert BlockMask.from_dense(keep[:0], 16).density == 0.0


def test_equals_compares_everything():
    visible = random_elements((48, 48), 0.9)
    mask = BlockMask.from_element_mask(visible, 16)
    assert mask.equals(BlockMask.from_element_mask(visible, 16))
    # one element of any block, wherever its bits are kept
    for row, column in itertools.product((1, 17, 47), (1, 20, 46)):
        other = visible.clone()
        other[row, column] ^= True
        assert not mask.equals(BlockMask.from_element_mask(other, 16))
    assert not mask.equals(BlockMask.from_element_mask(visible, (16, 32)))
    assert not mask.equals(BlockMask.from_element_mask(visible[:47], 16))
    assert not mask.equals(BlockMask.from_dense(mask.to_dense(), 16))


def test_to_another_device():
    mask = BlockMask.from_element_mask(random_elements((40, 40), 0.9), 16)
    assert mask.to("cpu") is mask
    lazy = mask.to("meta")
    assert lazy.device.type == "meta" and lazy.nnz_blocks == mask.nnz_blocks
    assert all(x.device.type == "meta" for x in lazy.tensors())
    _ = mask.transposed
    assert all(x.device.type == "meta" for x in mask.to("meta").transposed)


def through_torch(x, **options):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": lambda x: through_torch(x, weights_only=False),
    "weights only": lambda x: through_torch(x, weights_only=True),
}
MASKS = {
    "elements": lambda: BlockMask.from_element_mask(random_elements((2, 3, 40, 50), 0.9), 16),
    "blocks": lambda: BlockMask.from_dense(random_elements((2, 3, 4), 0.5), (16, 32), (33, 100)),
    "nothing": lambda: BlockMask.from_dense(torch.zeros(2, 2, dtype=torch.bool), 16),
    "no queries": lambda: BlockMask.from_dense(torch.zeros(0, 2, dtype=torch.bool), 16),
    "causal": lambda: masks.causal((40, 50), 16),
    "window": lambda: masks.sliding_window(50, 20, 16, causal=True),
    "strided": lambda: masks.strided(50, 2, 16),
    "global_local": lambda: masks.global_local(50, 16),
    "documents": lambda: masks.documents(torch.tensor([0, 7, 40]).int(), 16, causal=True),
    "topk": lambda: masks.topk(random_elements((1, 2, 4, 4), 0.5).float(), 2, 16),
    "random": lambda: masks.random(50, 0.4, 16, heads=2),
    "transposed": lambda: masks.causal((40, 50), 16).T,
}


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_copies_show_the_same(make, way):
    mask = make()
    transposed = mask.transposed
    mask._launches["recorded"] = "launches"
    other = way(mask)
    assert other.equals(mask) and other._launches == {}
    assert torch.equal(other.to_element_mask(), mask.to_element_mask())
    assert all(map(torch.equal, other.transposed, transposed))
    other.validate()


@pytest.mark.parametrize("way", COPIES.values(), ids=COPIES)
def test_copies_attend_the_same_with_gradients(way):
    mask = masks.sliding_window(50, 20, 16, causal=True)
    q = torch.randn(1, 2, 50, 16, requires_grad=True)
    grads = []
    for one in (mask, way(mask)):
        out = attention(q, q, q, block_mask=one)
        grads.append((out, *torch.autograd.grad(out.square().sum(), q)))
    assert all(map(torch.equal, *grads))


def test_only_shallow_copies_share_lists():
    mask = MASKS["elements"]()
    for name, way in COPIES.items():
        shared = [a is b for a, b in zip(way(mask).forward, mask.forward, strict=True)]
        assert shared == [name == "copy"] * 4


def test_copies_made_in_inference_mode_are_usable_in_training():
    mask = MASKS["window"]()
    q = torch.randn(1, 1, 50, 16, requires_grad=True)
    for way in COPIES.values():
        with torch.inference_mode():
            other = way(mask)
        attention(q, q, q, block_mask=other).sum().backward()


def test_meta_masks_are_copied():
    for way in COPIES.values():
        assert way(MASKS["elements"]().to("meta")).seq_lengths == (40, 50)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("indices", 4, "indices"),
        ("indices", -1, "indices"),
        ("indptr", 10**6, "indptr"),
        ("bits_id", 10**6, "bits_id"),
        ("partial_end", -1, "partial_end"),
    ],
)
def test_malformed_copies_are_refused(name, value, problem):
    state = MASKS["elements"]().__getstate__()
    state[name] = state[name].clone()
    state[name][-1] = value
    with pytest.raises(InvalidInput, match=f"BlockMask: .*{problem}"):
        BlockMask.__new__(BlockMask).__setstate__(state)
    with pytest.raises(InvalidInput, match="the state of a saved BlockMask does not fit"):
        BlockMask.__new__(BlockMask).__setstate__({"bits": state["bits"]})


@pytest.mark.parametrize("name", ["batch", "heads"])
def test_copies_of_too_many_masks_are_refused(name):
    """Without queries they have no lists that would have to be as many."""
    state = BlockMask.from_dense(torch.ones(0, 2, dtype=torch.bool), 16).__getstate__()
    most = 2**31 - 1
    copy = BlockMask.__new__(BlockMask)
    copy.__setstate__(state | {name: most})
    assert getattr(copy, name) == most
    with pytest.raises(InvalidInput, match=f"BlockMask: {name} .*{most}"):
        copy.__setstate__(state | {name: most + 1})


@pytest.mark.parametrize("name", ["indptr", "partial_end", "indices", "bits_id", "bits"])
@pytest.mark.parametrize("trains", [False, True])
def test_a_mask_that_was_written_to_is_refused(name, trains):
    mask = BlockMask.from_element_mask(random_elements((40, 40), 0.9), 16)
    q = torch.randn(1, 2, 40, 16, requires_grad=trains)
    attention(q, q, q, block_mask=mask)
    (mask.bits if name == "bits" else getattr(mask.forward, name)).add_(0)
    with pytest.raises(InvalidInput, match=r"lists were written in place.*make a new mask"):
        attention(q, q, q, block_mask=mask)
    mask.validate()


def test_a_mask_may_be_written_to_before_its_first_use():
    mask = BlockMask.from_dense(torch.eye(3, dtype=torch.bool), 16)
    mask.forward.indices.copy_(torch.tensor([2, 1, 0]))
    q = torch.randn(1, 1, 48, 16)
    other = BlockMask.from_dense(torch.eye(3, dtype=torch.bool).flip(0), 16)
    expected = attention(q, q, q, block_mask=other)
    assert torch.equal(attention(q, q, q, block_mask=mask), expected)


def test_masks_made_and_used_in_inference_mode():
    with torch.inference_mode():
        mask = BlockMask.from_element_mask(random_elements((40, 40), 0.9), 16)
        q = torch.randn(1, 2, 40, 16)
        for one in (mask, mask.T.T, copy.deepcopy(mask)):
            attention(q, q, q, block_mask=one)


def test_inside_torch_compile():
    mask = BlockMask.from_element_mask(random_elements((40, 40), 0.9), 16)

    def count(x):
        return x + sum(t.numel() for t in mask.tensors()) + mask.forward.indices.sum()

    compiled = torch.compile(count, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(2)), count(torch.zeros(2)))
    mask.validate()


@pytest.mark.parametrize("made_in_inference", [False, True])
def test_a_mask_first_used_in_inference_serves_training(made_in_inference):
    visible = random_elements((40, 40), 0.9)
    with torch.inference_mode(made_in_inference):
        mask = BlockMask.from_element_mask(visible.clone(), 16)
    with torch.inference_mode():
        tensors = [*mask.tensors(), *mask.T.tensors()]
    assert not any(x.is_inference() for x in tensors)
    assert torch.equal(mask.to_element_mask()[0, 0], visible)


def test_check_problem():
    mask = BlockMask.from_dense(torch.ones(2, 1, 2, 3, dtype=torch.bool), 16, (30, 40))
    mask.check_problem("attention", 2, 8, 30, 40)
    for batch, heads, sq, sk in [(3, 8, 30, 40), (2, 8, 32, 40), (2, 8, 30, 48), (1, 8, 30, 40)]:
        with pytest.raises(InvalidInput, match=r"was made for .*\[2, 1, 30, 40\]; expected \[1 or"):
            mask.check_problem("attention", batch, heads, sq, sk)
    way_out = r"of a mask per KV head: mask\[:, \[h // 2 for h in range\(4\)\]\]"
    expected = rf"expected \[1 or 2, 1 or 4, 32, 48\] \({way_out}\), got \[1, 2, 32"
    with pytest.raises(InvalidInput, match=expected):
        BlockMask.from_dense(torch.ones(2, 2, 3, dtype=torch.bool), 16).check_problem(
            "attention", 2, 4, 32, 48
        )


@pytest.mark.parametrize("made_for, wanted", [((1, 3), (1, 4)), ((2, 4), (1, 4))])
def test_the_way_out_of_a_mask_per_kv_head_is_no_other_ones(made_for, wanted):
    mask = BlockMask.from_dense(torch.ones(*made_for, 2, 3, dtype=torch.bool), 16)
    with pytest.raises(InvalidInput, match=r"32, 48\], got \["):
        mask.check_problem("attention", *wanted, 32, 48)


ONES = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize("side", [16, 32, 64, 128, 256])
def test_every_block_size_is_accepted(side):
    assert BlockMask.from_dense(ONES, side).block_size == (side, side)
    assert BlockMask.from_dense(ONES, [16, side]).block_size == (16, side)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((ONES, 8), InvalidInput, r"block_size is unsupported; .*16, 32, .*256, got \(8, 8\)$"),
        ((ONES, (16, 48)), InvalidInput, r"block_size is unsupported; .*got \(16, 48\)$"),
        ((ONES, 512), InvalidInput, r"block_size is unsupported"),
        ((ONES, 0), InvalidInput, r"block_size is unsupported"),
        ((ONES, True), InvalidType, r"block_size is malformed; .*got True$"),
        ((ONES, (16,)), InvalidType, r"block_size is malformed; .*got \(16,\)$"),
        ((ONES, 16.0), InvalidType, r"block_size is malformed"),
        ((ONES, 16, (33, 48)), InvalidInput, r"keep does not match .*expected 3 x 3 .*got 2 x 3$"),
        ((ONES, 16, (32, 32)), InvalidInput, r"keep does not match .*expected 2 x 2 .*got 2 x 3$"),
        ((ONES, 16, (-1, 48)), InvalidInput, r"seq_lengths is out of range; .*got \(-1, 48\)$"),
        ((ONES, 16, (2**30, 48)), InvalidInput, r"seq_lengths is out of range"),
        ((ONES, 16, "ab"), InvalidType, r"seq_lengths is malformed"),
        ((ONES.int(), 16), InvalidType, r"keep has an unsupported dtype; .*torch.bool, got"),
        ((ONES[0], 16), InvalidInput, r"keep has a wrong rank; expected \[B or 1, .*got \[3\]$"),
        ((ONES[None, None, None], 16), InvalidInput, r"keep has a wrong rank"),
        (([[True]], 16), InvalidType, r"keep is not a tensor; .*got list$"),
        ((ONES.to_sparse(), 16), InvalidType, r"keep has a sparse layout"),
    ],
)
def test_from_dense_refuses(arguments, error, text):
    with pytest.raises(error, match=r"^BlockMask.from_dense: " + text):
        BlockMask.from_dense(*arguments)


def test_from_element_mask_refuses():
    with pytest.raises(InvalidType, match=r"from_element_mask: visible has an unsupported dtype"):
        BlockMask.from_element_mask(torch.ones(4, 4), 16)
    with pytest.raises(InvalidInput, match=r"from_element_mask: block_size is unsupported"):
        BlockMask.from_element_mask(torch.ones(4, 4, dtype=torch.bool), 4)
    with pytest.raises(InvalidInput, match=r"visible has a wrong rank; .*Sq, Sk\], got \[4\]$"):
        BlockMask.from_element_mask(torch.ones(4, dtype=torch.bool), 16)
