"""The model of 64 ranks: its page shows what the script computes."""

import importlib.util
from pathlib import Path

import pytest

from blackwell_sparsek.distributed import Band

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    path = ROOT / "benchmarks" / "context_parallel_model.py"
    spec = importlib.util.spec_from_file_location("context_parallel_model", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("length", [2**17, pytest.param(2**19, marks=pytest.mark.exhaustive)])
def test_the_page_shows_what_the_script_computes(script, length):
    assert length in script.LENGTHS
    page = script.PAGE.read_text().split(script.BEGIN)[1].split(script.END)[0].splitlines()
    shown = [line for line in page if line.startswith(f"| {length // 1024}k |")]
    # after a change: python benchmarks/context_parallel_model.py --write
    assert shown == list(script.rows(length))


def test_nothing_is_faster_than_computing(script):
    for method in script.METHODS:
        found = script.model(Band(4095, 0), 2**17, method, "window")
        assert found.total >= found.computing


def test_transfers_hide_behind_what_is_computed(script):
    """Seconds by hand: own keys, then pieces that were under way meanwhile."""
    assert script.fetched_in(1, 2.0, 5.0, 3.0) == 3.0 + 5.0
    assert script.fetched_in(2, 2.0, 6.0, 4.0) == 2.0 + 3.0 + 3.0
    # the second piece is late, and gradients of the first return beside the computing of the second
    assert script.fetched_in(2, 1.0, 2.0, 8.0) == 4.0 + 4.0 + 1.0
    assert script.fetched_in(2, 1.0, 2.0, 8.0, back=6.0) == 4.0 + 4.0 + 3.0
