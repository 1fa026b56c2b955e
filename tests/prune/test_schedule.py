from itertools import pairwise

import pytest

from blackwell_sparsek.core.errors import InvalidInput
from blackwell_sparsek.prune import CubicSchedule


def test_follows_the_cubic_and_holds_its_ends():
    schedule = CubicSchedule(final=0.9, initial=0.1, begin=10, end=30)
    assert [schedule(step) for step in (0, 10)] == [0.1, 0.1]
    assert schedule(20) == pytest.approx(0.9 - 0.8 / 8)
    assert [schedule(step) for step in (30, 10**9)] == [0.9, 0.9]
    values = [schedule(step) for step in range(10, 31)]
    gains = [b - a for a, b in pairwise(values)]
    assert all(gain > 0 for gain in gains)
    assert all(b < a for a, b in pairwise(gains))


def test_errors():
    with pytest.raises(InvalidInput, match=r"begin is too late; expected a step before end = 5"):
        CubicSchedule(final=0.5, begin=5, end=5)
    CubicSchedule(final=0.5, begin=4, end=5)
    with pytest.raises(InvalidInput, match=r"initial is too large; expected at most final = 0.5"):
        CubicSchedule(final=0.5, initial=0.6, end=5)
    CubicSchedule(final=0.5, initial=0.5, end=5)
    with pytest.raises(InvalidInput, match=r"final: sparsity is out of range"):
        CubicSchedule(final=1.5, end=5)
