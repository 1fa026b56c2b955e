"""KeySelection: what it holds, refuses and converts to."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import blackwell_sparsek as bsk
from blackwell_sparsek.masks.key_selection import (
    GRANULARITIES,
    BlocksOfSequences,
    queries_of_blocks,
)

from .. import fuzzing


def drawn(batch, heads, tokens, most, kv_len, granularity, seed=0):
    """Random entries in random order, -1 for none, as sets too."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-kv_len // granularity)
    indices = torch.full((batch, heads, tokens, most), -1)
    sets = {}
    for place in torch.cartesian_prod(*map(torch.arange, (batch, heads, tokens))).tolist():
        count = int(torch.randint(0, min(most, blocks) + 1, (), generator=generator))
        entries = torch.randperm(blocks, generator=generator)[:count]
        where = torch.randperm(most, generator=generator)[:count]
        indices[(*place, where)] = entries
        sets[tuple(place)] = set(entries.tolist())
    return indices, sets


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_indices_in_any_order(granularity):
    kv_len = 5 * granularity + 1
    indices, sets = drawn(2, 3, 7, 4, kv_len, granularity)
    chosen = bsk.KeySelection.from_indices(indices, granularity=granularity, kv_len=kv_len)
    dense = chosen.to_dense()
    assert dense.shape == (2, 3, 7, kv_len) and chosen.ids.dtype == torch.int32
    total = 0
    for (b, h, t), entries in sets.items():
        count = int(chosen.counts[b, h, t])
        assert chosen.ids[b, h, t, :count].tolist() == sorted(entries)
        keys = {c * granularity + i for c in entries for i in range(granularity)}
        keys = {key for key in keys if key < kv_len}
        assert set(dense[b, h, t].nonzero().flatten().tolist()) == keys
        assert int(chosen.keys_of_entries()[b, h, t]) == len(keys)
        total += len(keys)
    assert chosen.density == pytest.approx(total / (2 * 3 * 7 * kv_len))
    chosen.validate()


def test_as_a_block_mask():
    indices, _ = drawn(2, 2, 37, 3, 90, 16)
    chosen = bsk.KeySelection.from_indices(indices, granularity=16, kv_len=90)
    mask = chosen.to_block_mask((32, 64), heads=4)
    assert (mask.batch, mask.heads) == (2, 4)
    assert torch.equal(mask.to_element_mask(), chosen.to_dense().repeat_interleave(2, 1))
    with pytest.raises(bsk.InvalidInput, match="heads does not fit; expected a multiple of the 2"):
        chosen.to_block_mask(32, heads=3)


@pytest.mark.parametrize("granularity", [1, 16])
def test_queries_of_each_block(granularity):
    kv_len = 6 * granularity
    indices, sets = drawn(2, 2, 9, 4, kv_len, granularity, seed=1)
    chosen = bsk.KeySelection.from_indices(indices, granularity=granularity, kv_len=kv_len)
    starts, places = chosen.transpose()
    assert starts.dtype == places.dtype == torch.int32
    for b in range(2):
        for h in range(2):
            row = b * 2 + h
            for block in range(6):
                own = places[row, int(starts[row, block]) : int(starts[row, block + 1])]
                queries = (own // 4).tolist()
                assert queries == [t for t in range(9) if block in sets[b, h, t]]
                assert (chosen.ids[b, h].flatten()[own.long()] == block).all()


def test_blocks_of_packed_sequences_are_numbered_through():
    ids = torch.tensor([[[[0, 1], [0, 0], [1, 0]]]], dtype=torch.int32)
    counts = torch.tensor([[[2, 1, 1]]], dtype=torch.int32)
    own = BlocksOfSequences(torch.tensor([0, 2, 2]), torch.tensor([2, 2, 2]))
    starts, places = queries_of_blocks(ids, counts, 5, own)
    assert starts.tolist() == [[0, 1, 2, 3, 4, 4]] and places[0, :4].tolist() == [0, 1, 2, 4]
    # block 1 of a sequence of one block must not become the first block of the next sequence
    own = BlocksOfSequences(torch.tensor([0, 1, 1]), torch.tensor([1, 2, 2]))
    starts, places = queries_of_blocks(ids, counts, 3, own)
    assert starts.tolist() == [[0, 1, 2, 3]] and places[0, :3].tolist() == [0, 2, 4]


def test_entries_out_of_range_are_in_no_transposed_list():
    indices = torch.tensor([[[[7, 0, -5]]]])
    chosen = bsk.KeySelection.from_indices(indices, granularity=1, kv_len=3, check=False)
    starts, _ = chosen.transpose()
    assert starts.tolist() == [[0, 1, 1, 1]] and chosen.counts.item() == 3


def test_nothing_chosen():
    none = torch.full((1, 1, 3, 0), -1)
    chosen = bsk.KeySelection.from_indices(none, granularity=64, kv_len=100)
    assert chosen.density == 0 and not chosen.to_dense().any()
    assert chosen.transpose().starts.tolist() == [[0, 0, 0]]
    empty = bsk.KeySelection.from_indices(none, granularity=64, kv_len=0)
    assert empty.density == 0 and empty.to_dense().shape == (1, 1, 3, 0)


def test_moves_and_describes_itself():
    chosen = bsk.KeySelection.from_indices(torch.zeros(1, 1, 2, 1).long(), granularity=4, kv_len=9)
    assert chosen.to("meta").device.type == "meta"
    assert repr(chosen) == "KeySelection([1, 1, 2, 1], granularity=4, kv_len=9, device=cpu)"


def test_saved_and_copied(tmp_path):
    chosen = bsk.KeySelection(IDS, COUNTS, granularity=4, kv_len=10)
    torch.save(chosen, tmp_path / "chosen.pt")
    loaded = torch.load(tmp_path / "chosen.pt", weights_only=True)
    for made in (loaded, copy.deepcopy(chosen), pickle.loads(pickle.dumps(chosen))):
        assert torch.equal(made.to_dense(), chosen.to_dense())
    state = chosen.__getstate__()
    for wrong in ({**state, "ids": IDS.long()}, {**state, "kv_len": 8}, {"ids": IDS}, [IDS]):
        with pytest.raises(bsk.BskError, match="KeySelection: "):
            loaded.__setstate__(wrong)


def test_made_inside_a_compiled_function():
    def density(indices):
        chosen = bsk.KeySelection.from_indices(indices, granularity=4, kv_len=12, check=False)
        return chosen.to_dense().float().mean()

    indices = torch.tensor([[[[2, -1], [0, 1]]]])
    compiled = torch.compile(density, fullgraph=True, backend="aot_eager")
    assert compiled(indices) == density(indices) == 0.5


IDS = torch.tensor([[[[0, 2], [1, 0]]]], dtype=torch.int32)
COUNTS = torch.tensor([[[2, 1]]], dtype=torch.int32)


def changed(x, at, value):
    x = x.clone()
    x[at] = value
    return x


@pytest.mark.parametrize(
    ("ids", "counts", "text"),
    [
        (IDS, changed(COUNTS, (0, 0, 1), 3), r"counts\[0, 0, 1\] is out of range; .*0 to 2, got 3"),
        (IDS, changed(COUNTS, (0, 0, 0), -1), r"counts\[0, 0, 0\] is out of range; .*got -1"),
        (
            changed(IDS, (0, 0, 0, 1), 3),
            COUNTS,
            r"ids\[0, 0, 0, 1\] is out of range.*0 to 2, got 3",
        ),
        (changed(IDS, (0, 0, 1, 0), -1), COUNTS, r"ids\[0, 0, 1, 0\] is out of range.*got -1"),
        (changed(IDS, (0, 0, 0, 1), 0), COUNTS, r"ids\[0, 0, 0, 1\] is listed twice.*got 0"),
        (IDS.flip(-1).contiguous(), COUNTS, r"ids\[0, 0, 0, 1\] does not ascend.*got 0"),
    ],
)
def test_the_first_wrong_place_is_named(ids, counts, text):
    with pytest.raises(bsk.InvalidInput, match=text):
        bsk.KeySelection(ids, counts, granularity=4, kv_len=10)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0, 5, 1], r"indices\[0, 0, 0, 1\] is out of range; expected 0 to 2, got 5"),
        ([0, 1, -2], r"indices\[0, 0, 0, 2\] is out of range; expected 0 to 2, got -2"),
        ([2, 0, 2], r"indices\[0, 0, 0, [02]\] is listed twice; expected each entry once, got 2"),
    ],
)
def test_wrong_indices_are_named_where_the_user_put_them(indices, text):
    with pytest.raises(bsk.InvalidInput, match=text):
        bsk.KeySelection.from_indices(
            torch.tensor(indices).view(1, 1, 1, 3), granularity=4, kv_len=10
        )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"granularity": 8}, bsk.InvalidInput, "granularity is unknown; expected one of 1, 4, 16"),
        ({"kv_len": -1}, bsk.InvalidInput, "kv_len is too small"),
        ({"kv_len": 2**30}, bsk.InvalidInput, "kv_len is out of range"),
        ({"ids": IDS[0]}, bsk.InvalidInput, r"ids has a wrong rank; expected \[B, Hs, Tq, K\]"),
        ({"ids": IDS.mT.contiguous().mT}, bsk.InvalidInput, "ids is not contiguous in its last"),
        ({"ids": IDS.long()}, bsk.InvalidType, "ids has an unsupported dtype"),
        ({"counts": COUNTS[..., :1]}, bsk.InvalidInput, "counts has a wrong shape"),
        ({"counts": COUNTS.long()}, bsk.InvalidType, "counts has an unsupported dtype"),
        ({"ids": IDS.to("meta"), "counts": COUNTS.to("meta")}, bsk.Unsupported, "meta device"),
    ],
)
def test_refusals(arguments, error, text):
    given = {"ids": IDS, "counts": COUNTS, "granularity": 4, "kv_len": 10, **arguments}
    with pytest.raises(error, match=text):
        bsk.KeySelection(**given)


CHOSEN = {"ids": IDS, "counts": COUNTS, "granularity": 4, "kv_len": 10}
INDICES = {"indices": IDS.long(), "granularity": 4, "kv_len": 10}
MAKERS = {"lists": (bsk.KeySelection, CHOSEN), "indices": (bsk.KeySelection.from_indices, INDICES)}


def assert_refused_or_selects(name, changes):
    """Whether the arguments are taken; if not, an error names the one at fault."""
    make, arguments = MAKERS[name]
    try:
        made = make(**{**arguments, **changes})
    except bsk.BskError as error:
        assert str(error).startswith("KeySelection") and fuzzing.is_one_sentence(error), error
        return False
    made.validate()
    assert type(made.granularity) is int and type(made.kv_len) is int
    assert repr(made).startswith("KeySelection(")
    assert (made.keys_of_entries() <= made.kv_len).all()
    if made.kv_len < 2**20:
        assert torch.equal(made.to_dense().sum(-1), made.keys_of_entries())
        assert made.transpose().starts.shape[-1] == made.num_blocks + 1
    return True


@pytest.mark.parametrize("name", MAKERS)
def test_any_wrong_argument_is_refused_or_makes_a_selection(name):
    assert assert_refused_or_selects(name, {})
    for arg in MAKERS[name][1]:
        for value in [*fuzzing.ODD_STATES, 1.0, 16.0, torch.tensor(4)]:
            try:
                assert_refused_or_selects(name, {arg: value})
            except Exception as error:
                raise AssertionError(f"{type(value)} as {arg}") from error


NUMBERS = st.integers(-2, 4) | st.sampled_from([2**31 - 1, -(2**31)])
FAR = st.sampled_from([2**31, 2**32, 2**32 + 1, -(2**32), -(2**40), 2**63 - 1, -(2**63)])


@settings(max_examples=200)
@given(data=st.data())
def test_any_lists_are_refused_or_ascend_within_the_keys(data):
    most = data.draw(st.integers(0, 3))
    rows = st.lists(st.lists(NUMBERS, min_size=most, max_size=most), min_size=2, max_size=2)
    ids = torch.tensor(data.draw(rows), dtype=torch.int32).view(1, 1, 2, most)
    counts = torch.tensor([[data.draw(st.lists(NUMBERS, min_size=2, max_size=2))]])
    assert_refused_or_selects("lists", {"ids": ids, "counts": counts.int()})


@settings(max_examples=200)
@given(row=st.lists(NUMBERS | FAR, min_size=1, max_size=4), check=st.booleans())
def test_any_indices_are_refused_or_selected(row, check):
    """Without a check, what is out of range stays out of range: kernels then answer with NaN."""
    given_indices = torch.tensor([[[row]]])
    good = all(-1 <= x <= 2 for x in row) and len({x for x in row if x >= 0}) == sum(
        x >= 0 for x in row
    )
    if check:
        assert assert_refused_or_selects("indices", {"indices": given_indices}) == good
        return
    made = bsk.KeySelection.from_indices(given_indices, granularity=4, kv_len=10, check=False)
    listed = made.ids[made.listed()].tolist()
    assert len(listed) == sum(x != -1 for x in row)
    assert sum(0 <= x <= 2 for x in listed) == sum(0 <= x <= 2 for x in row)
