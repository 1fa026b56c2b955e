"""Compile cases that launchers make are those of their launches."""

import json
import subprocess
import sys
from types import ModuleType

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.core.env import environment_for_compiler
from blackwell_sparsek.testing.captured_launches import captured_launches

PROGRAM = """
import json
from blackwell_sparsek.masks.list_kernels import (
    _count_kept_kernel, _list_kept_kernel, launch_kept_lists
)
from blackwell_sparsek.testing.captured_launches import captured_launches, launched_case, meta
from blackwell_sparsek.testing.compile_worker import Specialised
import torch

lists = [meta(n, dtype=torch.int32) for n in (17, 16, 99, 99)]
values = meta(2, 1, 8, 40, dtype=torch.int8)
found = {}
with captured_launches() as launches:
    launch_kept_lists(*lists, values)
found["kernels"] = [x.kernel is y for x, y in
                    zip(launches, (_count_kept_kernel, _list_kept_kernel), strict=True)]

def error(*args, **kwargs):
    try:
        launched_case("name", *args, **kwargs)
    except ValueError as e:
        return str(e)

found["two"] = error(launch_kept_lists, *lists, values)
found["none"] = error(lambda: None)
case = launched_case("name", launch_kept_lists, *lists, values, kernel=_count_kept_kernel,
                     archs=(90,), expect={"add": 1}, max_spill_bytes=8)
special = Specialised(case)
found["case"] = [case.num_warps, case.num_stages, dict(case.options), case.archs, case.expect,
                 case.max_spill_bytes]
found["signature"] = special.signature
found["constants"] = list(special.constants.values())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment_for_compiler(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_launches_are_noted_in_their_order(found):
    assert found["kernels"] == [True, True]


def test_one_launch_must_be_meant(found):
    assert "2 launches; `kernel` says which" in found["two"]
    assert "launched nothing" in found["none"]


def test_a_case_has_the_arguments_and_options_of_the_launch(found):
    assert found["case"] == [4, 3, {}, [90], {"add": 1}, 8]
    names = ["step_b", "step_h", "step_r", "step_c", "heads", "mb", "nb", "rows", "chunk"]
    assert found["signature"] == {
        "totals_ptr": "*i32",
        "map_ptr": "*i8",
        **dict.fromkeys(names, "i32"),
        "TILE_ROWS": "constexpr",
        "TILE_COLS": "constexpr",
    }
    assert found["constants"] == [8, 128]


def test_modules_that_load_names_late_are_left_alone(monkeypatch):
    late = ModuleType("late")

    def missing(name):
        raise ModuleNotFoundError(name)

    late.__getattr__ = missing
    monkeypatch.setitem(sys.modules, "late", late)
    with captured_launches() as found:
        pass
    assert found == []
