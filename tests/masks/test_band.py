"""Bands against golden tables, brute force and each other."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.masks.band import (
    EVERYTHING,
    UNBOUNDED,
    Band,
    band_of,
    classify_tile,
    covers,
    kv_range,
    q_range,
)

# (Sq, Sk, causal, window) and what each query sees: one line a query, one column a key
GOLDEN = {
    (4, 4, True, None): """
        #...
        ##..
        ###.
        ####""",
    (2, 4, True, None): """
        ###.
        ####""",
    (4, 2, True, None): """
        ..
        ..
        #.
        ##""",
    (1, 4, True, None): """
        ####""",
    (5, 5, True, 1): """
        #....
        .#...
        ..#..
        ...#.
        ....#""",
    (5, 5, True, 3): """
        #....
        ##...
        ###..
        .###.
        ..###""",
    (5, 5, False, 2): """
        ##...
        ###..
        .###.
        ..###
        ...##""",
    (3, 6, False, (2, 1)): """
        .####.
        ..####
        ...###""",
    (3, 6, True, (2, 1)): """
        .###..
        ..###.
        ...###""",
    (5, 2, False, (1, 2)): """
        ..
        #.
        ##
        ##
        ##""",
    (4, 4, False, (None, 1)): """
        ##..
        ###.
        ####
        ####""",
    (4, 4, False, (0, None)): """
        ####
        .###
        ..##
        ...#""",
    (3, 3, False, None): """
        ###
        ###
        ###""",
}


def visible(band: Band, sq: int, sk: int) -> torch.Tensor:
    left, right = band.scalars()
    position = torch.arange(sq).unsqueeze(1) + sk - sq
    key = torch.arange(sk)
    return (key >= position - left) & (key <= position + right)


def picture(mask: torch.Tensor) -> list[str]:
    return ["".join("#" if x else "." for x in row) for row in mask.tolist()]


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_golden_tables(case):
    sq, sk, causal, window = case
    assert picture(visible(band_of("op", causal, window), sq, sk)) == GOLDEN[case].split()


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_one_query_tiles_give_the_golden_rows(case):
    sq, sk, causal, window = case
    band = band_of("op", causal, window)
    rows = []
    for i in range(sq):
        lo, hi = kv_range(band, i, i + 1, sq, sk)
        rows.append("." * lo + "#" * (hi - lo) + "." * (sk - hi))
    assert rows == GOLDEN[case].split()


@pytest.mark.parametrize(
    ("causal", "window", "expected"),
    [
        (False, None, EVERYTHING),
        (True, None, Band(None, 0)),
        (True, 1, Band(0, 0)),
        (True, 128, Band(127, 0)),
        (False, 128, Band(127, 127)),
        (False, (0, 0), Band(0, 0)),
        (False, [3, None], Band(3, None)),
        (True, (3, 7), Band(3, 0)),
        (True, (None, None), Band(None, 0)),
        (False, (UNBOUNDED, UNBOUNDED - 1), Band(None, UNBOUNDED - 1)),
        (False, UNBOUNDED + 1, EVERYTHING),
    ],
)
def test_band_of(causal, window, expected):
    assert band_of("attention", causal, window) == expected


@pytest.mark.parametrize(
    ("causal", "window", "error", "text"),
    [
        (True, 0, InvalidInput, r"attention: window sees no key; expected .*int >= 1.*, got 0$"),
        (False, -1, InvalidInput, r"window sees no key; .* got -1$"),
        (False, (-1, 0), InvalidInput, r"window is negative; expected ints >= 0 or None, got \(-1"),
        (True, (0, -1), InvalidInput, r"window is negative; .*, got \(0, -1\)$"),
        (False, (1, 2, 3), InvalidType, r"window is malformed; .*, got \(1, 2, 3\)$"),
        (False, (1.0, 2), InvalidType, r"window is malformed; .*, got \(1.0, 2\)$"),
        (False, (True, 2), InvalidType, r"window is malformed; .*, got \(True, 2\)$"),
        (False, True, InvalidType, r"window is malformed; .*, got True$"),
        (False, 4.0, InvalidType, r"window is malformed; .*, got 4.0$"),
        (False, "4", InvalidType, r"window is malformed; .*, got 4$"),
        (1, None, InvalidType, r"attention: causal is not a bool; expected bool, got int$"),
        (None, None, InvalidType, r"causal is not a bool; .* got NoneType$"),
    ],
)
def test_band_of_refuses(causal, window, error, text):
    with pytest.raises(error, match=text) as caught:
        band_of("attention", causal, window)
    assert type(caught.value) is error


@pytest.mark.parametrize("band", [Band(None, 0), Band(3, None), Band(0, 0), EVERYTHING])
def test_scalars_round_trip(band):
    left, right = band.scalars()
    assert isinstance(left, int) and isinstance(right, int)
    assert Band.from_scalars(left, right) == band


sides = st.one_of(st.none(), st.integers(0, 12))
bands = st.builds(Band, sides, sides)
sizes = st.integers(0, 14)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(bands, sizes, sizes, st.integers(0, 14), st.integers(0, 6))
def test_ranges_are_tight(band, sq, sk, start, length):
    shown = visible(band, sq, sk)
    for function, mask in ((kv_range, shown), (q_range, shown.T)):
        seen = mask[start : start + length].any(0).nonzero().flatten().tolist()
        lo, hi = function(band, start, start + length, sq, sk)
        assert list(range(lo, hi)) == seen


@settings(derandomize=True, max_examples=300, deadline=None)
@given(bands, sizes, sizes, st.integers(1, 5), st.integers(1, 5))
def test_kv_range_and_q_range_are_adjoint(band, sq, sk, tile_q, tile_k):
    """Query tile a visits key tile b exactly when key tile b visits query tile a."""
    for q0, k0 in itertools.product(range(0, sq, tile_q), range(0, sk, tile_k)):
        lo, hi = kv_range(band, q0, q0 + tile_q, sq, sk)
        forward = max(lo, k0) < min(hi, k0 + tile_k)
        lo, hi = q_range(band, k0, k0 + tile_k, sq, sk)
        assert forward == (max(lo, q0) < min(hi, q0 + tile_q))


@settings(derandomize=True, max_examples=300, deadline=None)
@given(bands, st.integers(1, 14), st.integers(1, 14), st.integers(1, 5), st.integers(1, 5))
def test_tiles_are_classified_by_their_existing_elements(band, sq, sk, tile_q, tile_k):
    shown = visible(band, sq, sk)
    for q0, k0 in itertools.product(range(0, sq, tile_q), range(0, sk, tile_k)):
        tile = shown[q0 : q0 + tile_q, k0 : k0 + tile_k]
        kind = "empty" if not tile.any() else "full" if tile.all() else "partial"
        where = (q0, q0 + tile_q, k0, k0 + tile_k, sq, sk)
        assert classify_tile(band, *where) == kind
        assert covers(band, *where) == bool(tile.all())


def test_transposed_band_is_the_band_of_the_transposed_mask():
    for band, sq, sk in itertools.product([Band(2, 0), Band(None, 1), Band(0, 3)], [3, 7], [4, 5]):
        assert torch.equal(visible(band.T, sk, sq), visible(band, sq, sk).T)
