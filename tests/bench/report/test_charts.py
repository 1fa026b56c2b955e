import math

import pytest

from blackwell_sparsek.bench.report.charts import axis


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        [1e17, math.nextafter(1e17, math.inf)],
        [989246640.7794185, 989246640.7794186],
        [1e18] * 2,
        [-1e18] * 2,
        [5.0],
        [0.0],
        [1e-18, 1e-18],
        [1e-18, 1e18],
        [math.inf, math.nan, 3.0],
        [],
    ],
    ids=str,
)
def test_an_axis_has_room_for_any_values(values, zero, is_log):
    """Equal values, and those that differ in their last digit, must not divide by zero."""
    made = axis(values, 0.0, 100.0, is_log=is_log, zero=zero)
    assert made.low < made.high and len(made.ticks()) < 200
    for value in values:
        assert math.isnan(value) or -1e-9 <= made.at(value) <= 100.0 + 1e-9
