import math
import xml.etree.ElementTree as ET

import pytest

from blackwell_sparsek.bench.report.charts import Bar, around, axis, bar_chart


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


def _texts(picture):
    return [
        (float(x.get("x")), x.get("text-anchor"), x.text)
        for x in ET.fromstring(picture).iter("text")
    ]


@pytest.mark.parametrize("width", [960.0, 354.0])
@pytest.mark.parametrize(
    "name",
    ["short", "kept blocks, B1 H16 S16k D128 blocks 128x128 at 22% with bits " * 2, "W" * 90],
)
def test_labels_stay_inside_of_bar_charts(name, width):
    bars = [Bar("bsk", 1234.5, 1200.0, 1300.0), Bar("sdpa_cudnn", 7.0, 6.0, 1500.0)]
    picture = bar_chart([(name, bars)], "TFLOP/s", {"bsk": 0}, width)
    found = _texts(picture)
    # the widest character of the fonts that the page asks for
    for x, anchor, text in found:
        wide = 11.5 if set(text) == {"W"} else 6.6
        left = x - len(text) * wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        assert left >= -1.0 and left + len(text) * wide <= width + 1.0, text
    # nothing is left out: the lines of a label make up the name
    lines = "".join(text for _, _, text in found if text in name)
    assert lines.replace(" ", "") == name.replace(" ", "")


def test_ratios_are_bars_from_one_on_so_that_losses_go_left():
    def bar(peer, value):
        return Bar(peer, value, value, value)

    groups = [("a", [bar("wins", 1.25), bar("loses", 0.8), bar("even", 1.0)])]
    root = ET.fromstring(bar_chart(groups, "times", {}, 640.0, level=1.0))
    level = float(root.find("line[@class='level']").get("x1"))
    wins, loses, even = (
        (float(r.get("x")), float(r.get("x")) + float(r.get("width"))) for r in root.iter("rect")
    )
    assert wins[0] == loses[1] == even[0] == level
    # as much faster is as long as that much slower
    assert wins[1] - level == pytest.approx(level - loses[0], abs=0.02)
    assert "0" not in [text for _, _, text in _texts(bar_chart(groups, "times", {}, 640.0, 1.0))]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.98, 1.06], {1.0, 1.05}),
        ([1.0], {1.0}),
        ([1.0001, 0.9999], {1.0}),
        ([0.3, 7.0], {0.5, 1.0, 2.0, 5.0}),
        ([1.3, 1.4], {1.0, 1.2, 1.4}),
    ],
)
def test_axes_of_ratios_show_what_is_around_one(values, ticks):
    found = around(values, 1.0, 0.0, 100.0)
    assert ticks <= set(found.ticks()) and len(found.ticks()) <= 10
    assert 0 < found.at(1.0) < 100 and found.low > min([*values, 1.0]) / 1.3
    # the values take up the axis: no part of it is empty for the sake of a zero
    if max(values) / min(values) > 1.05:
        assert found.high / found.low < 1.5 * max([*values, 1.0]) / min([*values, 1.0])
