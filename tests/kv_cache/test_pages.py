import random

import pytest

from blackwell_sparsek.core.errors import InvalidInput, OutOfPages
from blackwell_sparsek.kv_cache.pages import NO_PAGE, PagePool, SequencePages


def book(num_pages=8, page_size=4, max_sequences=4, max_pages=6):
    return SequencePages(PagePool(num_pages), page_size, max_sequences, max_pages)


def test_pages_are_taken_from_the_lowest_and_come_back_when_nobody_holds_them():
    pool = PagePool(3)
    a, b = pool.take(2)
    assert (a, b) == (0, 1) and pool.free_pages == 1
    pool.share([a])
    pool.give_back([a, b])
    assert pool.free_pages == 2 and pool.users(a) == 1 and pool.users(b) == 0
    pool.give_back([a])
    assert pool.free_pages == 3 and sorted(pool.take(3)) == [0, 1, 2]


def test_too_few_pages_says_how_many():
    with pytest.raises(OutOfPages, match=r"expected 4 .*, got 3 free") as caught:
        PagePool(3).check_room("cache.append", 4)
    assert "cache.append: cache has too few free pages, of 3 in all" in str(caught.value)


def test_growth_lists_new_entries_only():
    pages = book()
    a, b = pages.add("op", 2)
    assert pages.grow("op", [a, b], [5, 4]).entries == [(0, 0, 0), (0, 1, 1), (1, 0, 2)]
    assert pages.grow("op", [b, a], [1, 3]).entries == [(1, 1, 3)]
    assert pages.grow("op", [a], [0]).entries == []
    assert [s.length for s in pages.states("op", [a, b])] == [8, 5]


@pytest.mark.parametrize(
    ("sequences", "counts", "error"),
    [([0, 1], [8, 30], "expected at most 24"), ([0, 1], [16, 20], "too few free pages"),
     ([0, 7], [1, 1], "sequence is unknown; .*, got 7"), ([1, 1], [1, 1], "name one twice")],
)  # fmt: skip
def test_what_does_not_fit_changes_nothing(sequences, counts, error):
    pages = book()
    pages.add("op", 2)
    pages.grow("op", [0], [3])
    with pytest.raises((InvalidInput, OutOfPages), match=error):
        pages.grow("op", sequences, counts)
    assert pages.pool.free_pages == 7
    assert [(s.length, s.pages) for s in pages.states("op", [0, 1])] == [(3, [0]), (0, [])]


def test_only_the_first_to_write_into_a_shared_page_copies_it():
    pages = book()
    (a,) = pages.add("op", 1)
    pages.grow("op", [a], [6])
    b, shared = pages.fork("op", a)
    assert shared.entries == [(1, 0, 0), (1, 1, 1)] and pages.pool.free_pages == 6
    grown = pages.grow("op", [a, b], [1, 1])
    assert grown.copies == [(1, 2)] and grown.entries == [(0, 1, 2)]
    assert [s.pages for s in pages.states("op", [a, b])] == [[0, 2], [0, 1]]
    assert pages.grow("op", [a, b], [1, 1]).copies == []


def test_full_pages_are_never_copied():
    pages = book()
    (a,) = pages.add("op", 1)
    pages.grow("op", [a], [4])
    b, _ = pages.fork("op", a)
    grown = pages.grow("op", [a, b], [1, 1])
    assert grown.copies == [] and grown.entries == [(0, 1, 1), (1, 1, 2)]


def test_a_copy_needs_a_free_page():
    pages = book(num_pages=2)
    (a,) = pages.add("op", 1)
    pages.grow("op", [a], [6])
    b, _ = pages.fork("op", a)
    with pytest.raises(OutOfPages, match="expected 1 "):
        pages.grow("op", [b], [1])
    pages.release("op", [a])
    assert pages.grow("op", [b], [1]).copies == []


def test_a_released_id_is_gone_for_good():
    pages = book()
    a, b = pages.add("op", 2)
    pages.grow("op", [a, b], [6, 1])
    assert pages.release("op", [a]).entries == [(0, 0, NO_PAGE), (0, 1, NO_PAGE)]
    with pytest.raises(InvalidInput, match=r"op: sequence was released; .*, got 0"):
        pages.release("op", [a])
    (c,) = pages.add("op", 1)
    assert c == 2 and pages.states("op", [c])[0].row == 0 and pages.ids == [b, c]
    with pytest.raises(InvalidInput, match="name one twice"):
        pages.release("op", [b, b])
    assert pages.ids == [b, c]


def test_no_more_sequences_than_rows():
    pages = book(max_sequences=2)
    pages.add("op", 2)
    with pytest.raises(InvalidInput, match=r"expected at most 0 more \(max_sequences=2\), got 1"):
        pages.add("op", 1)
    with pytest.raises(InvalidInput, match="are too many"):
        pages.fork("op", 0)


def test_truncated_sequences_give_pages_back_and_copy_what_is_shared():
    pages = book()
    (a,) = pages.add("op", 1)
    pages.grow("op", [a], [12])
    b, _ = pages.fork("op", a)
    assert pages.truncate("op", [b], [6]).entries == [(1, 2, NO_PAGE)]
    assert pages.grow("op", [b], [1]).copies == [(1, 3)]
    with pytest.raises(InvalidInput, match="expected 0 to 7, got 8 for sequence 1"):
        pages.truncate("op", [a, b], [2, 8])
    assert pages.states("op", [a])[0].length == 12
    pages.release("op", [a, b])
    assert pages.pool.free_pages == 8


def test_random_histories_keep_the_accounts():
    """No page is lost or held twice, and nobody writes into a page that another one reads."""
    rng = random.Random(5)
    pages = book(num_pages=20, page_size=3, max_sequences=6, max_pages=8)
    for _ in range(3000):
        ids = pages.ids
        action = rng.choice("aggggftr")
        try:
            if action == "a" or not ids:
                pages.add("op", 1)
            elif action == "g":
                chosen = rng.sample(ids, rng.randint(1, len(ids)))
                pages.grow("op", chosen, counts := [rng.randint(0, 4) for _ in chosen])
                for state, count in zip(pages.states("op", chosen), counts, strict=True):
                    first = (state.length - count) // 3
                    assert count == 0 or all(pages.pool.users(p) == 1 for p in state.pages[first:])
            elif action == "f":
                pages.fork("op", rng.choice(ids))
            elif action == "t":
                (state,) = pages.states("op", chosen := [rng.choice(ids)])
                pages.truncate("op", chosen, [rng.randint(0, state.length)])
            else:
                pages.release("op", [rng.choice(ids)])
        except (InvalidInput, OutOfPages):
            pass
        states = pages.states("op", pages.ids)
        held = [page for state in states for page in state.pages]
        assert all(len(state.pages) == -(-state.length // 3) for state in states)
        assert all(held.count(page) == pages.pool.users(page) for page in range(20))
        assert pages.pool.free_pages == 20 - len(set(held))
        assert len({state.row for state in states}) == len(states)
