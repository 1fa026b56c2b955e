import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("transformers", minversion="5.17")


def run(name, *options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment["HF_HUB_OFFLINE"] = "1"
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.exhaustive
def test_sparse_long_context():
    text = run("sparse_long_context.py", "--length", "2048", "--new-tokens", "3")
    pattern = r"^(.+?) +([\d.]+)% of the blocks +[\d.]+ ms +moved ([\d.]+) +then \[(.*)\]$"
    lines = {m[0].strip(): m[1:] for m in re.findall(pattern, text, re.MULTILINE)}
    assert list(lines) == ["dense", "window + sinks", "top-k blocks", "all but layer 0"]
    shares = {name: float(line[0]) for name, line in lines.items()}
    assert shares["dense"] == 100 and shares["window + sinks"] < 60 > shares["top-k blocks"]
    assert float(lines["dense"][1]) == 0 < float(lines["window + sinks"][1])
    assert all(len(line[2].split(",")) == 3 for line in lines.values())


@pytest.mark.exhaustive
def test_pruned_llama_mlp():
    text = run("pruned_llama_mlp.py", "--sparsity", "0.8")
    lines = re.findall(r"^(\w+) +([\d,]+) bytes .* token +([\d.]+)%$", text, re.MULTILINE)
    (dense, dense_size, _), (pruned, pruned_size, same) = lines
    assert (dense, pruned) == ("dense", "pruned")
    assert int(pruned_size.replace(",", "")) < 0.5 * int(dense_size.replace(",", ""))
    assert float(same) > 90
    assert "BSRLinear(in_features=256, out_features=1024" in text


@pytest.mark.exhaustive
def test_train_with_window():
    text = run("train_with_window.py", "--steps", "80")
    loss = {name: float(x) for name, x in re.findall(r"^(.+?) +loss ([\d.]+)", text, re.MULTILINE)}
    assert list(loss) == ["dense", "window", "too short"]
    assert max(loss["window"], loss["dense"]) < 0.5 * loss["too short"]
