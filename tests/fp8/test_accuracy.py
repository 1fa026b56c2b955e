"""The accuracy that docs/numerics.md tells."""

import importlib.util
import pathlib

import pytest
import torch

from blackwell_sparsek.testing import fp8_accuracy
from blackwell_sparsek.testing.fp8_accuracy import INPUTS, SCHEMES, error

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "numerics.md"


def errors(inputs):
    torch.manual_seed(1)
    made = INPUTS[inputs](1, 256, 64)
    return {name.split("(")[0].strip(): error(made, scheme) for name, scheme in SCHEMES.items()}


@pytest.mark.parametrize("inputs", ["shifted channels", "like a model"])
def test_smoothing_takes_a_third_of_the_error_of_one_scale(inputs):
    found = errors(inputs)
    assert found["... and smoothed keys"] <= found["one scale for a tensor"] / 1.5
    assert found["bf16"] < found["... and smoothed keys"]


def test_rotation_helps_scattered_outliers_and_harms_large_channels():
    found = errors("scattered outliers")
    assert found["... and rotated"] < found["one scale for a tensor"]
    found = errors("swinging channels")
    assert found["... and rotated"] > found["128 tokens, values by channel"]


def test_the_page_has_what_was_measured_on_a_gpu():
    path = ROOT / "benchmarks" / "fp8_accuracy.py"
    spec = importlib.util.spec_from_file_location("measured_accuracy", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    # after a change: python benchmarks/fp8_accuracy.py --write
    assert f"{script.BEGIN}\n{script.table()}\n{script.END}" in PAGE.read_text()


@pytest.mark.exhaustive
def test_the_page_has_the_table_of_the_script():
    page = PAGE.read_text()
    expected = fp8_accuracy.table().splitlines()
    start = page.index(fp8_accuracy.BEGIN)
    found = page[start : page.index(fp8_accuracy.END)].strip().splitlines()[1:]
    assert found[:2] == expected[:2]
    for line, made in zip(found[2:], expected[2:], strict=True):
        name, *numbers = line.strip("|").split("|")
        assert made.strip("|").split("|")[0] == name
        # other processors add in another order
        for x, y in zip(numbers, made.strip("|").split("|")[1:], strict=True):
            assert abs(float(x) - float(y)) <= 0.02 + 0.02 * float(y)
