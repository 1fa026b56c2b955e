"""The notebooks run, and show what their files hold."""

import copy
import json

import pytest
import torch

from tests.tools import notebooks

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_file_holds(path):
    stored = json.loads(path.read_text())
    assert notebooks.differences(stored, notebooks.executed(path)) == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_one_that_jupyter_reads(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    identities = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identities)) == len(identities)
    assert "".join(notebook["cells"][0]["source"]).startswith("# ")
    for cell in notebook["cells"]:
        keys = {"cell_type", "id", "metadata", "source"}
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == keys | code
    assert path.stat().st_size < 60_000


def notebook_of(*sources):
    cells = [{"cell_type": "code", "source": source.splitlines(True)} for source in sources]
    return {"cells": cells}


def test_outputs_are_what_is_printed_and_the_last_value(tmp_path):
    picture = (
        "class P:\n    def _repr_svg_(self):\n        return '<svg/>'\n    __repr__ = _repr_svg_"
    )
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook_of("a = 1\nprint(a)\na + 1", picture, "P()", "a;")))
    printed, defined, shown, plain = (c["outputs"] for c in notebooks.executed(path)["cells"])
    assert printed == [
        {"output_type": "stream", "name": "stdout", "text": ["1\n"]},
        {"output_type": "display_data", "metadata": {}, "data": {"text/plain": ["2"]}},
    ]
    assert defined == [] and plain[0]["data"] == {"text/plain": ["1"]}
    assert shown[0]["data"]["image/svg+xml"] == ["<svg/>"]
    path.write_text(json.dumps(notebook_of("x = 0", "1 / x")))
    with pytest.raises(ZeroDivisionError):
        notebooks.executed(path)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("loss 0.123, 45 %, 7 blocks", []),
        ("loss 0.124, 44 %, 7 blocks", []),
        ("loss 0.125, 45 %, 7 blocks", ["cell 1: 0.123 in the file, 0.125 now"]),
        ("loss 0.123, 47 %, 7 blocks", ["cell 1: 45 % in the file, 47 % now"]),
        ("loss 0.123, 45 %, 8 blocks", ["cell 1: 7 in the file, 8 now"]),
        ("lost 0.123, 45 %, 7 blocks", ["cell 1: shows something else"]),
    ],
)
def test_another_output_is_found(shown, expected):
    stored = notebook_of("a", "b")
    stored["cells"][1]["outputs"] = [{"text": ["loss 0.123, 45 %, 7 blocks\n"]}]
    made = copy.deepcopy(stored)
    made["cells"][1]["outputs"][0]["text"] = [f"{shown}\n"]
    assert notebooks.differences(stored, made) == expected
