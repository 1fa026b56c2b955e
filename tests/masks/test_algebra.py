"""Masks from functions and from other masks, against dense bool tensors."""

import operator
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.core.errors import BskError, InvalidInput, InvalidType
from blackwell_sparsek.masks.block_mask import BlockMask

SIZES = [((40, 40), (16, 16)), ((33, 70), (16, 32)), ((1, 17), (16, 16)), ((64, 64), (64, 32))]


def elements(batch, heads, seq, seed, keep=0.5):
    """A mask with absent, partial and full blocks of 16."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(batch, heads, -(-seq[0] // 16), -(-seq[1] // 16), generator=generator)
    blocks = coarse.repeat_interleave(16, 2).repeat_interleave(16, 3)[..., : seq[0], : seq[1]]
    fine = torch.rand(batch, heads, *seq, generator=generator) < keep
    return (blocks < 0.3) | ((blocks < 0.7) & fine)


@pytest.mark.parametrize("seq, block", SIZES)
def test_from_function(seq, block):
    def mask_mod(b, h, q, kv):
        return (q + h >= kv) & ((q // 20 == kv // 20) | (b == 1))

    mask = BlockMask.from_function(mask_mod, seq, block, batch=2, heads=3)
    index = [torch.arange(n) for n in (2, 3, *seq)]
    b, h, q, kv = torch.meshgrid(*index, indexing="ij")
    mask.validate()
    assert mask.to_element_mask().equal(mask_mod(b, h, q, kv))
    assert mask.equals(BlockMask.from_element_mask(mask_mod(b, h, q, kv), block))


def test_functions_may_read_tensors():
    """As document masks do; positions past the end are never asked for."""
    document = torch.tensor([0] * 11 + [1] * 22)
    mask = BlockMask.from_function(lambda b, h, q, kv: document[q] == document[kv], 33, 16)
    assert mask.to_element_mask()[0, 0].equal(document[:, None] == document)


@pytest.mark.parametrize("seq, block", SIZES)
@pytest.mark.parametrize("shapes", [((1, 1), (1, 1)), ((2, 1), (1, 3)), ((2, 3), (2, 3))])
@pytest.mark.parametrize("combine", [operator.and_, operator.or_])
def test_intersection_and_union(seq, block, shapes, combine):
    shown = [elements(*shape, seq, seed) for seed, shape in enumerate(shapes)]
    masks = [BlockMask.from_element_mask(x, block) for x in shown]
    got = combine(*masks)
    got.validate()
    want = combine(*shown)
    assert got.to_element_mask().equal(want)
    # the same blocks are absent, partial and full as if made from the elements
    assert got.equals(BlockMask.from_element_mask(want, block))


def test_combined_masks_attend():
    q = torch.randn(1, 2, 40, 16, dtype=torch.float64)
    window = bsk.masks.sliding_window(40, 9, 16)
    causal = bsk.masks.causal(40, 16)
    got = bsk.attention(q, q, q, block_mask=window & causal)
    torch.testing.assert_close(got, bsk.attention(q, q, q, causal=True, window=9))


@pytest.mark.parametrize(
    "index", [0, -1, (1, 2), (), (slice(None), slice(1, 3)), (slice(1, None), -1)]
)
def test_selection(index):
    shown = elements(2, 3, (40, 33), 0)
    mask = BlockMask.from_element_mask(shown, 16)
    parts = index if isinstance(index, tuple) else (index,)
    kept = tuple(slice(i, i + 1 or None) if isinstance(i, int) else i for i in parts)
    got = mask[index]
    got.validate()
    assert got.equals(BlockMask.from_element_mask(shown[kept], 16))


def test_picture():
    mask = BlockMask.from_element_mask(elements(2, 2, (40, 70), 3), 16)
    root = ElementTree.fromstring(mask.to_svg(1, 0, pixels=100))
    squares = [x for x in root if x.tag.endswith("rect")][1:]
    one = mask[1, 0]
    assert len(squares) == one.nnz_blocks and root.get("width") == "100"
    places = {(int(x.get("y")) // 20, int(x.get("x")) // 20) for x in squares}
    assert places == {tuple(x) for x in one.to_dense()[0, 0].nonzero().tolist()}
    light = sum(x.get("fill") == "#7fa8d9" for x in squares)
    assert light == int((one.forward.bits_id >= 0).sum())


@pytest.mark.parametrize("change, match", [
    (lambda m: m & bsk.masks.causal(41, 16), "seq_lengths differ"),
    (lambda m: m | bsk.masks.causal(40, 32), "block_size differ"),
    (lambda m: m & BlockMask.from_element_mask(elements(3, 1, (40, 40), 0), 16), "batch differ"),
    (lambda m: m[0, 0, 0], "too many dimensions"), (lambda m: m[2:], "selects nothing"),
    (lambda m: m.to_svg(pixels=0), "pixels"),
])  # fmt: skip
def test_refusals(change, match):
    mask = BlockMask.from_element_mask(elements(2, 1, (40, 40), 0), 16)
    with pytest.raises(InvalidInput, match=match):
        change(mask)


def test_wrong_types():
    mask = bsk.masks.causal(40, 16)
    with pytest.raises(TypeError):
        mask & torch.ones(40, 40)
    with pytest.raises(TypeError):
        iter(mask)
    with pytest.raises(InvalidType, match="an int, a slice or a list of ints"):
        mask["a"]
    with pytest.raises(IndexError, match="out of range"):
        mask[1]
    with pytest.raises(InvalidType, match="mask_mod is not callable"):
        BlockMask.from_function(torch.ones(40, 40), 40, 16)
    with pytest.raises(InvalidType, match="batch is not an int"):
        mask.to_svg(slice(None))


@pytest.mark.parametrize("mask_mod, match", [
    (lambda b, h, q, kv: q - kv, "returns a wrong dtype; .* got torch.int64"),
    (lambda b, h, q, kv: (q >= kv).float(), "returns a wrong dtype"),
    (lambda b, h, q, kv: True, "does not return a tensor; .* got bool"),
    (lambda b, h, q, kv: torch.stack([q >= kv, q < kv]), "returns a wrong shape"),
])  # fmt: skip
def test_functions_must_return_one_bool(mask_mod, match):
    with pytest.raises(BskError, match=f"from_function: mask_mod {match}"):
        BlockMask.from_function(mask_mod, 40, 16)


def test_a_mask_per_kv_head_is_repeated_for_query_heads():
    """Attention does so by itself, with the result of a mask that was repeated by hand."""
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(2, 2, 50, 40, generator=generator) < 0.4
    mask = BlockMask.from_element_mask(seen, 16)
    q, k = torch.randn(2, 6, 50, 16), torch.randn(2, 2, 40, 16)
    repeated = mask[:, [h // 3 for h in range(6)]]
    assert repeated.to_element_mask().equal(seen.repeat_interleave(3, 1))
    out = bsk.attention(q, k, k, block_mask=repeated)
    torch.testing.assert_close(bsk.attention(q, k, k, block_mask=mask), out)
    for h in range(6):
        alone = bsk.attention(
            q[:, h : h + 1], k[:, h // 3 :][:, :1], k[:, h // 3 :][:, :1],
            block_mask=mask[:, h // 3],
        )  # fmt: skip
        torch.testing.assert_close(out[:, h : h + 1], alone)


def test_lists_of_numbers():
    mask = BlockMask.from_dense(torch.eye(3, dtype=torch.bool).view(3, 1, 1, 3), (16, 16))
    assert mask[[2, 0, -1]].to_dense()[:, 0, 0].equal(torch.eye(3, dtype=torch.bool)[[2, 0, 2]])
    assert mask[::-1].equals(mask[[2, 1, 0]])
    with pytest.raises(IndexError, match="out of range"):
        mask[[0, 3]]
    with pytest.raises(InvalidInput, match="selects nothing"):
        mask[[]]
    with pytest.raises(TypeError, match="list of ints"):
        mask[["a"]]
