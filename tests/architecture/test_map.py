"""Files and pages that the documentation points to exist."""

import pathlib
import re

import pytest

from .source import ROOT, write_tree

REPOSITORY = ROOT.parents[1]
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
# Logs name files as they were called then.
LOGS = {"CHANGELOG.md"}


def dangling_paths(text, roots):
    """Source files such as `core/env.py` that are below none of the roots."""
    paths = re.findall(r"`([\w.]+(?:/[\w.]+)+\.py)`", text)
    return [path for path in paths if not any((root / path).exists() for root in roots)]


def dangling_links(page):
    """Links of a page to files that do not exist, or to headings that are not in them."""
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        if "://" in name:
            continue
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target.read_text())):
            missing.append(link)
    return missing


def _anchors(text):
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_what_a_page_points_to_exists(page):
    if page.name not in LOGS:
        assert dangling_paths(page.read_text(), (ROOT, REPOSITORY)) == []
    assert dangling_links(page) == []


def test_every_decision_and_every_suite_is_listed():
    for folder in ("decisions", "results"):
        index = REPOSITORY / "docs" / folder / "index.md"
        others = {page.name for page in index.parent.glob("*.md")} - {"index.md"}
        assert others == set(re.findall(r"\]\((\w[\w.-]+\.md)\)", index.read_text()))


def test_planted_dangling_paths_and_links_are_found(tmp_path: pathlib.Path):
    write_tree(tmp_path, {"src/a/b.py": "", "c.md": "# A `b` & C\n"})
    text = "`a/b.py`, `a/d.py`, `d.py`, [](c.md), [](c.md#a-b--c), [](c.md#d), [](e.md), [](#f)"
    (tmp_path / "page.md").write_text(text)
    assert dangling_paths(text, (tmp_path / "src", tmp_path)) == ["a/d.py"]
    assert dangling_links(tmp_path / "page.md") == ["c.md#d", "e.md", "#f"]
