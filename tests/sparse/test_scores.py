import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.prune import block_magnitude, wanda
from blackwell_sparsek.sparse.scores import keep_best, kept_count, random_blocks
from blackwell_sparsek.testing.inputs import normal


def brute_scores(w, block_shape, power):
    """Norms by a loop over blocks, in float64."""
    (m, k), (bh, bw) = w.shape, block_shape
    rows = []
    for top in range(0, m, bh):
        blocks = [w[top : top + bh, left : left + bw].double() for left in range(0, k, bw)]
        rows.append([block.abs().pow(power).sum().pow(1 / power).item() for block in blocks])
    return rows


def brute_keep(scores, count):
    """The best `count`, ties to the first, by Python's stable sort."""
    places = [(r, c) for r, row in enumerate(scores) for c in range(len(row))]
    best = set(sorted(places, key=lambda p: -scores[p[0]][p[1]])[:count])
    return [[(r, c) in best for c in range(len(row))] for r, row in enumerate(scores)]


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("shape", "block"), [((64, 48), (16, 16)), ((65, 47), (16, 8)), ((1, 1), (4, 4))]
)
def test_magnitude_keeps_the_largest_norms(shape, block, dtype, norm):
    w = normal(*shape, seed=0, dtype=dtype)
    scores = brute_scores(w, block, {"l1": 1, "l2": 2}[norm])
    blocks = len(scores) * len(scores[0])
    for sparsity in (0, 0.3, 0.5, 1.0):
        keep = block_magnitude(w, block, sparsity, norm=norm)
        assert keep.tolist() == brute_keep(scores, blocks - round(sparsity * blocks))


def test_the_norms_differ():
    w = torch.tensor([[3.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    assert block_magnitude(w, (2, 2), 0.5, norm="l2").tolist() == [[True, False]]
    assert block_magnitude(w, (2, 2), 0.5, norm="l1").tolist() == [[False, True]]


def test_ties_go_to_the_first():
    keep = block_magnitude(torch.ones(64, 64), (16, 16), 0.5)
    assert keep.flatten().tolist() == [True] * 8 + [False] * 8
    keep = block_magnitude(torch.ones(64, 64), (16, 16), 10 / 16, per_row=True)
    assert keep.tolist() == [[True, True, False, False]] * 2 + [[True, False, False, False]] * 2


def test_per_row_balances_and_gives_the_rest_to_the_best():
    scores = torch.tensor([[9.0, 8.0, 1.0], [5.0, 4.0, 3.0], [7.0, 6.0, 0.0]])
    keep = keep_best("t", scores, 4 / 9, per_row=True)
    assert keep.tolist() == [[True, True, False], [True, False, False], [True, True, False]]


@given(
    rows=st.integers(0, 6),
    cols=st.integers(0, 7),
    sparsity=st.floats(0, 1),
    per_row=st.booleans(),
    distinct=st.integers(1, 4),
)
def test_the_count_is_exact_and_nothing_better_is_dropped(rows, cols, sparsity, per_row, distinct):
    scores = torch.randint(distinct, (rows, cols)).float()
    keep = keep_best("t", scores, sparsity, per_row)
    assert int(keep.sum()) == rows * cols - round(sparsity * rows * cols)
    assert torch.equal(keep, keep_best("t", scores, sparsity, per_row))
    groups = zip(scores, keep, strict=True) if per_row else [(scores, keep)]
    for group, kept in groups:
        if kept.any() and not kept.all():
            assert group[kept].min() >= group[~kept].max()
    if per_row and rows:
        counts = keep.sum(1)
        assert counts.max() - counts.min() <= 1


def test_wanda_weighs_by_the_inputs():
    w, x = normal(40, 50, seed=1), normal(6, 5, 50, seed=2) * torch.linspace(0, 3, 50)
    norms = x.flatten(0, 1).double().square().sum(0).sqrt()
    scores = brute_scores(w.double() * norms, (8, 16), 1)
    total = brute_keep(scores, kept_count(0.6, 20))
    assert wanda(w, x, (8, 16), 0.6, per_row=False).tolist() == total
    assert torch.equal(wanda(w, norms, (8, 16), 0.6), wanda(w, x, (8, 16), 0.6))
    by_row = wanda(w, x, (8, 16), 0.5)
    assert by_row.tolist() == [brute_keep([row], 2)[0] for row in scores]
    assert not torch.equal(by_row, block_magnitude(w, (8, 16), 0.5, norm="l1", per_row=True))


def test_random_blocks_are_balanced_and_seeded():
    torch.manual_seed(1)
    keep = random_blocks(5, 7, 0.5)
    assert keep.sum() == 35 - round(17.5) and keep.sum(1).max() - keep.sum(1).min() <= 1
    torch.manual_seed(1)
    assert torch.equal(keep, random_blocks(5, 7, 0.5))


def test_errors():
    w = torch.ones(32, 32)
    for bad in (-0.01, 1.01, math.nan):
        with pytest.raises(InvalidInput, match=r"sparsity is out of range; expected a number in"):
            block_magnitude(w, (16, 16), bad)
    with pytest.raises(InvalidType, match=r"sparsity is not a number.*got str"):
        block_magnitude(w, (16, 16), "0.5")
    with pytest.raises(InvalidInput, match=r"norm is unknown; expected one of 'l1', 'l2'"):
        block_magnitude(w, (16, 16), 0.5, norm="linf")
    with pytest.raises(InvalidInput, match=r"w has a wrong rank; expected \[M, K\]"):
        block_magnitude(w[0], (16, 16), 0.5)
    with pytest.raises(InvalidType, match=r"w is not a tensor.*got list"):
        block_magnitude([[1.0]], (16, 16), 0.5)
    with pytest.raises(InvalidType, match="w has an unsupported dtype"):
        block_magnitude(w.int(), (16, 16), 0.5)
    with pytest.raises(InvalidInput, match="w has no values; expected a real device"):
        block_magnitude(w.to("meta"), (16, 16), 0.5)
    with pytest.raises(InvalidInput, match="are on different devices"):
        wanda(w, torch.ones(32, device="meta"), (16, 16), 0.5)
    for inputs in (torch.full((32,), math.nan), torch.full((2, 32), math.inf)):
        with pytest.raises(InvalidInput, match="inputs gives a norm that is not finite"):
            wanda(w, inputs, (16, 16), 0.5)
    w[3, 3] = math.nan
    with pytest.raises(InvalidInput, match="gives a block score that is not finite"):
        block_magnitude(w, (16, 16), 0.5)
    with pytest.raises(InvalidInput, match=r"inputs does not fit the weight.* \[32\] norms"):
        wanda(torch.ones(32, 32), torch.ones(31), (16, 16), 0.5)
