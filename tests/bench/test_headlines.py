import pathlib

import pytest

from blackwell_sparsek.bench.report.markdown import HEADLINES, RESULTS, committed, headlines
from blackwell_sparsek.bench.suites import SUITES

REPOSITORY = pathlib.Path(__file__).parents[2]
SUITE, NAME, MODE = HEADLINES[0]


def _times(seconds, **more):
    return {"times": {MODE: {"quantiles_s": {"p50": seconds}, **more}}}


def _document(ours, ratio):
    peers = {"bsk": ours, "torch|bsr": _times(2e-3)}
    case = {"name": NAME, "problem": {}, "peers": peers, "ratios": {MODE: ratio}}
    return {"suite": SUITE, "cases": [case, case | {"name": "another"}]}


@pytest.mark.parametrize("suite", sorted({suite for suite, _, _ in HEADLINES}))
def test_headlines_are_cases_of_their_suites(suite):
    named = {(name, mode) for s, name, mode in HEADLINES if s == suite}
    assert named <= {(c.name, mode) for c in SUITES[suite].cases(False) for mode in c.modes}


def test_all_headlines_are_recorded():
    lines = headlines(committed(REPOSITORY / RESULTS)).splitlines()
    assert len(lines) == 2 + len(HEADLINES)


def test_a_headline_has_times_rates_and_ratios():
    ratio = {"best_peer": "torch|bsr", "over_best_peer": 2.0, "over_dense": 4.0}
    row = headlines([_document(_times(1e-3, executed_tflops=671.2), ratio)]).splitlines()[2]
    assert row.startswith("| matmul founding: 8192^3, blocks 128x128")
    assert row.endswith("| 1 ms, 671 TFLOP/s | 2 ms (torch\\|bsr) | 2.00x | 4.00x |")


def test_what_was_not_compared_is_empty_and_slow_arithmetic_has_no_rate():
    (row,) = headlines([_document(_times(5e-6, executed_tflops=12.0), {})]).splitlines()[2:]
    assert row.endswith("| 5 us |  |  |  |")


def test_cases_without_a_time_of_ours_have_no_row():
    assert headlines([_document({"failed": "over the budget"}, {})]) == ""
    assert headlines([]) == ""
