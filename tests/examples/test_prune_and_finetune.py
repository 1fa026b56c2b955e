import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_fine_tuning_recovers_what_pruning_lost():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "prune_and_finetune.py", "--steps", "40"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    lines = re.findall(r"^(\S+) +loss ([\d.]+) +([\d,]+) bytes$", result.stdout, re.MULTILINE)
    loss = {name: float(value) for name, value, _ in lines}
    size = {name: int(count.replace(",", "")) for name, _, count in lines}
    assert list(loss) == ["dense", "pruned", "fine-tuned", "gradual"]
    assert loss["dense"] < 0.75 * loss["pruned"]
    assert loss["fine-tuned"] < 0.75 * loss["pruned"]
    assert loss["gradual"] < 0.75 * loss["pruned"]
    # A fifth of the values, and the pattern.
    assert size["pruned"] == size["fine-tuned"] == size["gradual"] < 0.25 * size["dense"]
    assert "4 layers, density 0.199" in result.stdout
