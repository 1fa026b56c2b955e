"""docs/map.md points to files that exist."""

import pathlib
import re

from .source import ROOT, write_tree

REPOSITORY = ROOT.parents[1]


def dangling(text, source, tests):
    """Paths in the table that are neither there nor marked as planned."""
    missing = []
    for row in re.findall(r"^\|(.+)\|$", text, re.MULTILINE):
        _, places, checks = (*row.split("|"), "", "")[:3]
        for column, root in ((places, source), (checks, tests)):
            for path, planned in re.findall(r"`([\w/]+\.py)`(\s+\*planned\*)?", column):
                if not planned and not (root / path).exists():
                    missing.append(path)
    return missing


def test_every_place_exists():
    text = (REPOSITORY / "docs" / "map.md").read_text()
    assert text.count("`core/env.py`") == 1
    assert dangling(text, ROOT, REPOSITORY / "tests") == []


def test_a_planted_dangling_path_is_found(tmp_path: pathlib.Path):
    write_tree(tmp_path, {"src/a.py": "", "tests/test_a.py": ""})
    text = "| I | `a.py`, `b.py` | `test_a.py` |\n| you | `c.py` *planned* | `test_c.py` |\n"
    assert dangling(text, tmp_path / "src", tmp_path / "tests") == ["b.py", "test_c.py"]
