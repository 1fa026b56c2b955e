"""Malformed block-sparse input is refused, with the row or entry named."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.sparse.matrix import BSRMatrix, BSRPattern

# 3 x 4 blocks of 2 x 3: rows hold 2, 0 and 3 blocks
INDPTR = [0, 2, 2, 5]
INDICES = [0, 3, 0, 1, 3]
SHAPE = (6, 12)


def parts(index_dtype=torch.int32, device="cpu"):
    data = torch.arange(30.0, device=device).view(5, 2, 3) + 1
    indices = torch.tensor(INDICES, dtype=index_dtype, device=device)
    indptr = torch.tensor(INDPTR, dtype=index_dtype, device=device)
    return data, indices, indptr


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_well_formed_is_accepted(index_dtype, device):
    matrix = BSRMatrix(*parts(index_dtype, device), SHAPE)
    assert matrix.indices.dtype == matrix.indptr.dtype == torch.int32
    assert matrix.indices.tolist() == INDICES
    matrix.validate()


MALFORMED = {
    "column too large": (
        {"indices": [0, 4, 0, 1, 3]},
        r"indices is out of range at entry 1 \(block row 0\); expected block columns in \[0, 4\), "
        r"got 4",
    ),
    "column negative": (
        {"indices": [0, 3, -1, 1, 3]},
        r"indices is out of range at entry 2 \(block row 2\); .*got -1",
    ),
    "column duplicate": (
        {"indices": [0, 3, 0, 0, 3]},
        r"indices has a duplicate at entry 3 \(block row 2\); .*got 0 then 0",
    ),
    "column unsorted": (
        {"indices": [0, 3, 0, 3, 1]},
        r"indices is not sorted at entry 4 \(block row 2\); .*got 3 then 1",
    ),
    "indptr decreasing": (
        {"indptr": [0, 3, 2, 5]},
        r"indptr decreases at row 1; .*got 3 then 2",
    ),
    "indptr too small an end": (
        {"indptr": [0, 2, 2, 4]},
        r"indptr has a wrong end; expected indptr\[-1\] = 5, .*got 4",
    ),
    "indptr too large an end": (
        {"indptr": [0, 2, 2, 9]},
        r"indptr has a wrong end; expected indptr\[-1\] = 5, .*got 9",
    ),
    "indptr wrong start": (
        {"indptr": [1, 2, 2, 5]},
        r"indptr has a wrong start; expected indptr\[0\] = 0, got 1",
    ),
    "indptr negative": (
        {"indptr": [0, -7, 2, 5]},
        r"indptr decreases at row 0; .*got 0 then -7",
    ),
    "indptr too short": (
        {"indptr": [0, 2, 5]},
        r"indptr has a wrong length; expected 4 \(3 block rows of 2 in 6, plus 1\), got 3",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_malformed_contents(case, index_dtype, device):
    changes, expected = MALFORMED[case]
    data, indices, indptr = parts(index_dtype, device)
    new = {k: torch.tensor(v, dtype=index_dtype, device=device) for k, v in changes.items()}
    indices, indptr = new.get("indices", indices), new.get("indptr", indptr)
    with pytest.raises(InvalidInput, match="BSRMatrix: " + expected):
        BSRMatrix(data, indices, indptr, SHAPE)
    with pytest.raises(InvalidInput, match="BSRPattern: " + expected):
        BSRPattern(indptr, indices, SHAPE, (2, 3))


@pytest.mark.parametrize("value", [2**32, 2**32 + 1, 2**31])
def test_int64_column_does_not_wrap_when_narrowed(value):
    data, indices, indptr = parts(torch.int64)
    indices[1] = value
    with pytest.raises(InvalidInput, match=f"out of range at entry 1 .*got {value}"):
        BSRMatrix(data, indices, indptr, SHAPE)


def test_wrong_number_of_values():
    data, indices, indptr = parts()
    with pytest.raises(InvalidInput, match=r"data has a wrong number of blocks; expected 5, .*4"):
        BSRMatrix(data[:4], indices, indptr, SHAPE)


def test_block_size_that_does_not_fit_the_metadata():
    _, indices, indptr = parts()
    with pytest.raises(InvalidInput, match=r"indptr has a wrong length; expected 3 \(2 block rows"):
        BSRMatrix(torch.ones(5, 3, 3), indices, indptr, SHAPE)


@pytest.mark.parametrize("block", [(0, 3), (2, 0)])
def test_empty_blocks(block):
    _, indices, indptr = parts()
    with pytest.raises(InvalidInput, match="block_shape is out of range; expected two integers of"):
        BSRMatrix(torch.ones(5, *block), indices, indptr, SHAPE)


def test_mixed_index_dtypes():
    data, indices, indptr = parts()
    with pytest.raises(InvalidType, match=r"indptr/indices have different dtypes; .*int64.*int32"):
        BSRMatrix(data, indices, indptr.long(), SHAPE)


@pytest.mark.parametrize(
    ("at", "value", "entry"),
    [((4, 1, 0), 1.0, 4), ((4, 0, 2), 1.0, 4), ((1, 0, 2), float("nan"), 1)],
)
def test_nonzero_padding(at, value, entry, device):
    data, indices, indptr = parts(device=device)
    ragged = (5, 11)
    data[2:, 1, :] = 0
    data[indices == 3, :, 2] = 0
    BSRMatrix(data, indices, indptr, ragged).validate()
    data[at] = value
    with pytest.raises(InvalidInput, match=rf"data is not zero beyond the shape at entry {entry} "):
        BSRMatrix(data, indices, indptr, ragged)


def test_padding_rule_of_with_data_and_validate():
    matrix = BSRMatrix.from_mask(torch.ones(3, 3), torch.ones(2, 2, dtype=torch.bool), (2, 2))
    matrix.with_data(matrix.data * 2)
    with pytest.raises(InvalidInput, match=r"BSRMatrix.with_data: data is not zero beyond"):
        matrix.with_data(torch.ones(4, 2, 2))
    with pytest.raises(InvalidInput, match=r"data has a wrong shape; expected \[4, 2, 2\]"):
        matrix.with_data(torch.ones(3, 2, 2))
    matrix.storage[3, 1, 1] = 1.0
    with pytest.raises(InvalidInput, match="entry 3 \\(block row 1, block column 1\\)"):
        matrix.validate()


@pytest.mark.parametrize(
    ("arg", "value", "error", "expected"),
    [
        ("data", [1.0], InvalidType, "data is not a tensor; expected torch.Tensor, got list"),
        ("data", torch.ones(5, 2, 3).int(), InvalidType, "data has an unsupported dtype"),
        ("data", torch.ones(5, 2, 3).cfloat(), InvalidType, "data has an unsupported dtype"),
        ("data", torch.ones(5, 6), InvalidInput, r"data has a wrong rank; expected \[nnzb, bh"),
        ("indices", torch.ones(5), InvalidType, "indices has an unsupported dtype; .*int32"),
        ("indices", torch.ones(5, 1).int(), InvalidInput, "indices has a wrong rank"),
        ("indptr", None, InvalidType, "indptr is not a tensor"),
        ("shape", (6,), InvalidInput, "shape is not a pair"),
        ("shape", 6, InvalidType, "shape is not a pair; .*got int"),
        ("shape", (6.0, 12), InvalidType, "shape is not a pair of integers"),
        ("shape", (-6, 12), InvalidInput, "shape is out of range"),
        ("shape", (6, 2**31), InvalidInput, "shape is out of range; .* at most 2147483647"),
    ],
)
def test_wrong_arguments(arg, value, error, expected):
    data, indices, indptr = parts()
    arguments = {"data": data, "indices": indices, "indptr": indptr, "shape": SHAPE}
    arguments[arg] = value
    with pytest.raises(error, match="BSRMatrix: " + expected):
        BSRMatrix(**arguments)


def test_metadata_is_copied():
    data, indices, indptr = parts()
    matrix = BSRMatrix(data, indices, indptr, SHAPE)
    indices.fill_(99)
    indptr.fill_(99)
    matrix.validate()


def test_corrupted_metadata_is_found_by_validate():
    matrix = BSRMatrix(*parts(), SHAPE)
    matrix.indices[0] = 77
    with pytest.raises(InvalidInput, match="out of range at entry 0"):
        matrix.validate()


TORCH_ACCEPTS = [case for case in MALFORMED if case != "indptr too short"]


@pytest.mark.parametrize("case", TORCH_ACCEPTS)
def test_malformed_torch_tensors_are_refused(case):
    changes, expected = MALFORMED[case]
    data, indices, indptr = parts(torch.int64)
    new = {k: torch.tensor(v) for k, v in changes.items()}
    t = torch.sparse_bsr_tensor(
        new.get("indptr", indptr),
        new.get("indices", indices),
        data,
        size=SHAPE,
        check_invariants=False,
    )
    with pytest.raises(InvalidInput, match=expected):
        BSRMatrix.from_torch(t)


def test_messages_follow_the_grammar():
    data, _, indptr = parts()
    with pytest.raises(InvalidInput) as caught:
        BSRMatrix(data, torch.tensor([0, 4, 0, 1, 3], dtype=torch.int32), indptr, SHAPE)
    assert re.fullmatch(r"\w+: \w+ .+; expected .+, got .+", str(caught.value))


LARGE = st.sampled_from([2**31 - 1, -(2**31), 2**62])


@st.composite
def some_lists(draw):
    """Row pointers and columns, valid to begin with, of which up to two numbers are replaced."""
    per_row = [sorted(draw(st.sets(st.integers(0, 3)))) for _ in range(3)]
    indptr = [0]
    for columns in per_row:
        indptr.append(indptr[-1] + len(columns))
    made = [indptr, [column for columns in per_row for column in columns]]
    for _ in range(draw(st.integers(0, 2))):
        changed = draw(st.sampled_from([x for x in made if x]))
        changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(-1, 6) | LARGE)
    return made


def is_valid(indptr, indices):
    if indptr[0] != 0 or indptr[-1] != len(indices) or indptr != sorted(indptr):
        return False
    rows = [indices[a:b] for a, b in pairwise(indptr)]
    return all(row == sorted(set(row)) and set(row) <= {0, 1, 2, 3} for row in rows)


@settings(max_examples=300)
@given(lists=some_lists())
def test_exactly_the_valid_lists_are_accepted(lists):
    indptr, indices = (torch.tensor(x, dtype=torch.int64) for x in lists)
    data = torch.ones(indices.numel(), 2, 3)
    try:
        matrix = BSRMatrix(data, indices, indptr, SHAPE)
    except InvalidInput:
        assert not is_valid(*lists)
    else:
        assert is_valid(*lists)
        expected = torch.zeros(3, 4)
        for row in range(3):
            expected[row, indices[indptr[row] : indptr[row + 1]]] = 6.0
        assert torch.equal(matrix.to_dense().view(3, 2, 4, 3).sum((1, 3)), expected)
