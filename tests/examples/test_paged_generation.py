import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generates_what_recomputing_does_and_shares_pages():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "paged_generation.py", "--steps", "20"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    lines = result.stdout.splitlines()
    assert lines[0].startswith("4 sequences of [57, 25, 36, 57] tokens")
    # 47 tokens are common: two full pages
    assert lines[1] == "11 pages in use, 13 without sharing"
    assert lines[2] == "40 pages free after release"
