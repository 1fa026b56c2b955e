"""FlexAttention's masks, converted, against FlexAttention's own element masks."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.masks import flex as block_mask_flex
from blackwell_sparsek.masks.block_mask import BlockMask

DOCUMENT = torch.tensor([0] * 70 + [1] * 5 + [2] * 75)


def causal(b, h, q, kv):
    return q >= kv


def document(b, h, q, kv):
    return DOCUMENT[q] == DOCUMENT[kv]


def per_head(b, h, q, kv):
    return (q + b - kv) % (h + 2) == 0


def nothing(b, h, q, kv):
    return q < 0


@pytest.mark.parametrize("block", [16, 64, (32, 128)], ids=str)
@pytest.mark.parametrize(
    ("mask_mod", "batch", "heads"),
    [
        (causal, None, None),
        (document, None, None),
        (per_head, 2, 3),
        (nothing, None, 2),
        (flex.noop_mask, None, None),
    ],
)
def test_same_elements(mask_mod, batch, heads, block):
    sizes = (batch, heads, 150, 150)
    source = flex.create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=block)
    mask = BlockMask.from_flex(source)
    mask.validate()
    elements = flex.create_mask(mask_mod, *sizes, device="cpu")
    assert torch.equal(mask.to_element_mask(), elements)
    assert mask.equals(BlockMask.from_element_mask(elements, block))


def test_rectangular_lengths():
    source = flex.create_block_mask(causal, None, None, 40, 100, device="cpu", BLOCK_SIZE=32)
    expected = flex.create_mask(causal, None, None, 40, 100, device="cpu")
    assert torch.equal(BlockMask.from_flex(source).to_element_mask(), expected)


def two_rows(values):
    return torch.tensor(values, dtype=torch.int32)[None, None]


def made(num, indices, mask_mod=None, full=(None, None), seq=(32, 48)):
    full_num, full_indices = (None if x is None else two_rows(x) for x in full)
    return flex.BlockMask(
        seq_lengths=seq,
        kv_num_blocks=two_rows(num),
        kv_indices=two_rows(indices),
        full_kv_num_blocks=full_num,
        full_kv_indices=full_indices,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(16, 16),
        mask_mod=mask_mod,
    )


@pytest.mark.parametrize("mask_mod", [None, flex.noop_mask])
def test_without_a_mask_mod_listed_blocks_are_full(mask_mod):
    mask = BlockMask.from_flex(made([2, 0], [[2, 0, 99], [99, 99, -5]], mask_mod))
    assert mask.to_dense()[0, 0].tolist() == [[True, False, True], [False] * 3]
    assert mask.bits.shape[0] == 0


def test_entries_past_the_count_are_ignored_and_full_blocks_are_not_evaluated():
    seen = []

    def spy(b, h, q, kv):
        seen.append(1)
        return q >= kv

    source = made([1, 1], [[0, 99, 99], [1, 7, 7]], spy, ([1, 2], [[2, 99, 99], [0, 2, 99]]))
    mask = BlockMask.from_flex(source)
    expected = torch.zeros(32, 48, dtype=torch.bool)
    expected[:16, :16] = torch.ones(16, 16).tril().bool()
    expected[16:, 16:32] = torch.ones(16, 16).tril().bool()
    expected[:16, 32:] = expected[16:, :16] = expected[16:, 32:] = True
    assert torch.equal(mask.to_element_mask()[0, 0], expected)
    assert len(seen) == 1


def test_work_is_bounded_by_the_chunk(monkeypatch):
    sizes = (None, None, 150, 150)
    source = flex.create_block_mask(document, *sizes, device="cpu", BLOCK_SIZE=16)
    whole = BlockMask.from_flex(source)
    monkeypatch.setattr(block_mask_flex, "CHUNK_ELEMENTS", 3 * 256)
    calls = []
    real = flex.create_mask

    def create_mask(mod, batch, count, *rest, **kw):
        calls.append(count)
        return real(mod, batch, count, *rest, **kw)

    monkeypatch.setattr(flex, "create_mask", create_mask)
    assert BlockMask.from_flex(source).equals(whole)
    assert sum(calls) == int(source.kv_num_blocks.sum()) and max(calls) == 3


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("mask", InvalidType, r"flex_mask is of a wrong type; .*BlockMask, got str$"),
        (
            made([1, 1], [[3, 0, 0], [0, 0, 0]]),
            InvalidInput,
            r"kv_indices \(row 0, entry 0\) is out of range; expected 0 \.\. 2, got 3$",
        ),
        (
            made([1, 2], [[2, 0, 0], [0, -1, 0]]),
            InvalidInput,
            r"kv_indices \(row 1, entry 1\) is out of range; .*got -1$",
        ),
        (
            made([1, 4], [[0, 0, 0], [0, 1, 2]]),
            InvalidInput,
            r"kv_num_blocks \(row 1\) is out of range; expected 0 \.\. 3, got 4$",
        ),
        (
            made([1, 1], [[0, 0, 0], [1, 0, 0]], None, ([0, 1], [[0, 0, 0], [5, 0, 0]])),
            InvalidInput,
            r"full_kv_indices \(row 1, entry 0\) is out of range; .*got 5$",
        ),
        (
            made([1, 1], [[0, 0, 0], [1, 0, 0]], None, ([0, 1], [[0, 0, 0], [1, 0, 0]])),
            InvalidInput,
            r"kv_indices repeat a block; expected each once, got row 1, block 1$",
        ),
        (
            made([1, 1], [[0, 0, 0], [1, 0, 0]], seq=(48, 48)),
            InvalidInput,
            r"kv_num_blocks has a wrong shape; expected \[1, 1, 3\], got \[1, 1, 2\]$",
        ),
        (
            flex.create_block_mask(causal, None, None, 96, 96, device="cpu", BLOCK_SIZE=48),
            InvalidInput,
            r"block_size is unsupported; .*got \(48, 48\)$",
        ),
    ],
)
def test_refuses(source, error, text):
    with pytest.raises(error, match=r"^BlockMask.from_flex: " + text):
        BlockMask.from_flex(source)
