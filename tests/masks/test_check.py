"""Every index that could lead a kernel astray is refused, and named."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.masks.block_mask import BlockMask


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def lists(**changes):
    """Two rows over three columns: row 0 partial 0, 2 and full 1; row 1 partial 1."""
    bits = torch.zeros(2, 16, 1, dtype=torch.int32)
    bits[0, 3, 0] = 1 << 15
    bits[1, 15, 0] = 1
    arguments = {
        "indptr": ints(0, 3, 4),
        "indices": ints(0, 2, 1, 1),
        "partial_end": ints(2, 4),
        "bits_id": ints(0, 1, -1, 1),
        "bits": bits,
        "seq_lengths": (32, 48),
        "block_size": 16,
    }
    return arguments | changes


def changed_bits(row, i, word):
    bits = lists()["bits"].clone()
    bits[row, i, 0] = word
    return bits


def test_the_untouched_lists_are_accepted():
    mask = BlockMask(**lists())
    expected = torch.zeros(32, 48, dtype=torch.bool)
    expected[3, 15] = expected[15, 32] = expected[31, 16] = True
    expected[:16, 16:32] = True
    assert torch.equal(mask.to_element_mask()[0, 0], expected)


def test_full_blocks_need_two_lists_only():
    mask = BlockMask(ints(0, 2, 3), ints(0, 2, 1), seq_lengths=(32, 48), block_size=16)
    assert mask.to_dense()[0, 0].tolist() == [[True, False, True], [False, True, False]]
    mask.validate()


def test_rows_run_over_batch_heads_and_query_blocks():
    indptr = torch.arange(9, dtype=torch.int32)
    indices = ints(0, 1, 2, 0, 1, 2, 0, 1)
    mask = BlockMask(indptr, indices, seq_lengths=(32, 48), block_size=16, batch=2, heads=2)
    assert mask.to_dense().nonzero().tolist() == [
        [b, h, q, (4 * b + 2 * h + q) % 3] for b in (0, 1) for h in (0, 1) for q in (0, 1)
    ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"indptr": ints(1, 3, 4)}, r"indptr\[0\] is wrong; expected 0, got 1$"),
        ({"indptr": ints(0, 5, 4)}, r"indptr\[2\] falls; expected at least 5, got 4$"),
        ({"indptr": ints(0, 3, 5)}, r"indptr\[2\] is not the number of entries; expected 4, got 5"),
        ({"indptr": ints(0, 3, 3)}, r"indptr\[2\] is not the number of entries; expected 4, got 3"),
        ({"indptr": ints(0, 4)}, r"indptr has a wrong shape; expected \[3\], got \[2\]$"),
        ({"indptr": ints()}, r"indptr has a wrong shape; expected \[3\], got \[0\]$"),
        (
            {"partial_end": ints(4, 4)},
            r"partial_end\[0\] leaves its row; .* 0 \.\. 3, got 4$",
        ),
        (
            {"partial_end": ints(2, 2)},
            r"partial_end\[1\] leaves its row; .* 3 \.\. 4, got 2$",
        ),
        ({"partial_end": ints(-1, 4)}, r"partial_end\[0\] leaves its row; .*got -1$"),
        ({"partial_end": ints(2)}, r"partial_end has a wrong shape; expected \[2\], got \[1\]$"),
        (
            {"indices": ints(0, 2, 3, 1)},
            r"indices \(entry 2, row 0\) is out of range; expected 0 \.\. 2, got 3$",
        ),
        (
            {"indices": ints(0, 2, 1, -1)},
            r"indices \(entry 3, row 1\) is out of range; expected 0 \.\. 2, got -1$",
        ),
        (
            {"indices": ints(2, 0, 1, 1)},
            r"indices \(entry 1, row 0\) does not ascend; expected more than 2, got 0$",
        ),
        ({"indices": ints(2, 2, 1, 1)}, r"indices \(entry 1, row 0\) does not ascend"),
        (
            {"indices": ints(0, 2, 2, 1)},
            r"indices \(entry 2, row 0\) is partial and full; .*each block once, got block 2",
        ),
        ({"indices": ints(0, 2, 1)}, r"bits_id has a wrong shape; expected \[3\], got \[4\]$"),
        (
            {"bits_id": ints(0, 2, -1, 1)},
            r"bits_id \(entry 1, row 0\) is out of range; expected 0 \.\. 1 .*got 2$",
        ),
        (
            {"bits_id": ints(0, 1, -1, -1)},
            r"bits_id \(entry 3, row 1\) is out of range; .*partial block, got -1$",
        ),
        (
            {"bits_id": ints(0, 1, 0, 1)},
            r"bits_id \(entry 2, row 0\) is wrong; expected -1 for a full block, got 0$",
        ),
        ({"bits_id": ints(0, 1)}, r"bits_id has a wrong shape; expected \[4\], got \[2\]$"),
        (
            {"bits": torch.zeros(2, 16, 2, dtype=torch.int32)},
            r"bits has a wrong shape; expected \['pool', 16, 1\], got \[2, 16, 2\]$",
        ),
        ({"bits": changed_bits(1, 0, 1 << 16)}, r"bits\[1\] sets unused bits; expected 16 bits"),
        (
            {"seq_lengths": (31, 48)},
            r"bits \(entry 3, row 1\) show elements that do not exist; .*\(31, 48\), got ones$",
        ),
        (
            {"seq_lengths": (32, 40), "bits": changed_bits(1, 15, 1 << 8)},
            r"bits \(entry 1, row 0\) show elements that do not exist",
        ),
        ({"seq_lengths": (49, 48)}, r"indptr has a wrong shape; expected \[5\], got \[3\]$"),
        ({"seq_lengths": (32, 32)}, r"indices \(entry 1, row 0\) is out of range"),
        ({"batch": 2}, r"indptr has a wrong shape; expected \[5\], got \[3\]$"),
        ({"heads": -1}, r"heads is too small; expected at least 0, got -1$"),
        ({"bits": None}, r"partial_end, bits_id and bits belong together; expected all or none"),
    ],
)
def test_damaged_lists_are_refused(changes, text):
    with pytest.raises(InvalidInput, match=r"^BlockMask: " + text):
        BlockMask(**lists(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_lengths": (32, 33)},
        {"seq_lengths": (32, 40), "bits": changed_bits(1, 15, 1 << 7)},
        {"partial_end": ints(2, 4), "bits": changed_bits(0, 0, 0xFFFF)},
    ],
)
def test_the_boundary_is_accepted(changes):
    BlockMask(**lists(**changes)).validate()


@pytest.mark.parametrize("name", ["indptr", "indices", "partial_end", "bits_id", "bits"])
def test_lists_must_be_int32_tensors(name):
    with pytest.raises(InvalidType, match=rf"{name} has an unsupported dtype; .*got torch.int64$"):
        BlockMask(**lists(**{name: lists()[name].long()}))
    with pytest.raises(InvalidType, match=rf"{name} is not a tensor; .*got list$"):
        BlockMask(**lists(**{name: lists()[name].tolist()}))
    with pytest.raises(InvalidInput, match=r"are on different devices; .*on meta"):
        BlockMask(**lists(**{name: lists()[name].to("meta")}))


def test_two_lists_must_be_int32_vectors():
    sizes = {"seq_lengths": (32, 48), "block_size": 16}
    with pytest.raises(InvalidType, match=r"indices has an unsupported dtype"):
        BlockMask(ints(0, 1, 1), ints(0).long(), **sizes)
    with pytest.raises(InvalidInput, match=r"indices has a wrong rank; .*\[n\], got \[1, 1\]$"):
        BlockMask(ints(0, 1, 1), ints(0).view(1, 1), **sizes)
    with pytest.raises(InvalidType, match=r"batch is not an int; expected int, got float$"):
        BlockMask(ints(0, 1, 1), ints(0), batch=1.0, **sizes)


NAMES = ("indptr", "indices", "partial_end", "bits_id")
NUMBERS = st.integers(-2, 5) | st.sampled_from([2**31 - 1, -(2**31)])


def is_valid(indptr, indices, partial_end, bits_id):
    """The rules one by one, for two rows over three columns and two bit masks."""
    if indptr[0] != 0 or indptr[2] != len(indices) or not indptr[0] <= indptr[1] <= indptr[2]:
        return False
    for row in range(2):
        lo, middle, hi = indptr[row], partial_end[row], indptr[row + 1]
        if not lo <= middle <= hi:
            return False
        partial, full = indices[lo:middle], indices[middle:hi]
        if any(list(x) != sorted(set(x)) for x in (partial, full)) or set(partial) & set(full):
            return False
        if not all(0 <= x < 3 for x in (*partial, *full)):
            return False
        if not all(0 <= x < 2 for x in bits_id[lo:middle]):
            return False
        if not all(x == -1 for x in bits_id[middle:hi]):
            return False
    return True


@settings(max_examples=400)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(0, 3), NUMBERS), min_size=0, max_size=4
    )
)
def test_exactly_the_valid_lists_are_accepted(changes):
    made = {name: lists()[name].tolist() for name in NAMES}
    for name, at, number in changes:
        made[name][at % len(made[name])] = number
    try:
        mask = BlockMask(**lists(**{name: ints(*values) for name, values in made.items()}))
    except InvalidInput:
        assert not is_valid(**made)
    else:
        assert is_valid(**made)
        kept = {
            (row, x) for row in (0, 1) for x in made["indices"][slice(*made["indptr"][row:][:2])]
        }
        assert {(q, k) for _, _, q, k in mask.to_dense().nonzero().tolist()} == kept


def test_lists_of_full_blocks_have_one_dimension():
    sizes = {"seq_lengths": (32, 48), "block_size": 16}
    with pytest.raises(
        InvalidInput, match=r"indptr has a wrong rank; expected \[n\], got \[1, 3\]"
    ):
        BlockMask(ints(0, 2, 3)[None], ints(0, 2, 1), **sizes)
    with pytest.raises(InvalidInput, match=r"indices has a wrong rank; expected \[n\], got \[\]"):
        BlockMask(ints(0, 2, 3), torch.tensor(1, dtype=torch.int32), **sizes)
