"""The model of 64 ranks: its page shows what the script computes."""

import importlib.util
from pathlib import Path

from blackwell_sparsek.distributed import Band

ROOT = Path(__file__).parents[2]


def test_the_page_shows_what_the_script_computes():
    path = ROOT / "benchmarks" / "context_parallel_model.py"
    spec = importlib.util.spec_from_file_location("context_parallel_model", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = [line.split(" | ") for line in script.PAGE.read_text().splitlines()]
    (row,) = (cells for cells in rows if cells[:2] == ["| 128k", "causal, window 4096"])
    for method, cell in zip(script.METHODS, row[3:], strict=False):
        found = script.model(Band(4095, 0), 2**17, method, "window")
        assert cell == f"{found.total * 1e3:.2f}"
        assert found.total >= found.computing or method == "ulysses"
    assert row[-1] == "needed |"
