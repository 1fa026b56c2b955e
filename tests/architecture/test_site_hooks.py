"""What docs/site_hooks.py does to pages; the site itself is built by `make docs`."""

import importlib.util
import json
import pathlib
import sys
import types

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture
def hooks(monkeypatch):
    # mkdocs need not be installed for this
    files = types.ModuleType("mkdocs.structure.files")
    files.File = None
    for name in ("mkdocs", "mkdocs.structure"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "mkdocs.structure.files", files)
    path = REPOSITORY / "docs" / "site_hooks.py"
    spec = importlib.util.spec_from_file_location("site_hooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_pages_in_the_root_lead_to_pages_of_the_site(hooks):
    text = "[a](docs/map.md#b) [c](CHANGELOG.md) ![d](docs/plots/d.svg) [e](https://e.org/docs/)"
    moved = "[a](map.md#b) [c](changelog.md) ![d](plots/d.svg) [e](https://e.org/docs/)"
    assert hooks.from_root(text) == moved
    assert all((REPOSITORY / source).exists() for source in hooks.FROM_ROOT.values())


def test_a_folder_in_the_navigation_lists_its_pages(hooks):
    assert hooks.listed("index.md") == "index.md"
    assert hooks.listed({"A": "a.md"}) == {"A": "a.md"}
    ((title, pages),) = hooks.listed({"Outer": [{"Why": "decisions/"}]})["Outer"][0].items()
    assert title == "Why" and pages[0] == "decisions/index.md"
    assert {"Decoding": "decisions/decode.md"} in pages
    names = [path.stem for path in (REPOSITORY / "docs/decisions").glob("*.md")]
    assert len(pages) == len(names)


def test_a_list_is_a_list_after_a_paragraph_and_code_stays_as_it_is(hooks):
    text = "**Why.**\n- a\n  more\n- b\n\n```bash\nx\n- y\n```\ntext\n1. c\n2. d\n"
    assert hooks.with_blank_lines(text) == text.replace("**\n-", "**\n\n-").replace(
        "text\n1", "text\n\n1"
    )


def test_backticks_inside_of_code_go_in_the_reference_only(hooks):
    html = "<code>fp16 `[B, H]`</code> ` <code>x</code>"
    for uri, expected in (("api/a.md", html.replace("`[B, H]`", "[B, H]")), ("a.md", html)):
        page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=uri))
        assert hooks.on_page_content(html, page) == expected


def test_a_notebook_becomes_a_page_with_its_outputs(hooks, tmp_path):
    code = {"cell_type": "code", "source": ["a\n", "b"]}
    svg = {"data": {"text/plain": ["x"], "image/svg+xml": ["<svg>\n", "</svg>"]}}
    cells = [
        {"cell_type": "markdown", "source": ["# T & U\n", "text"]},
        {**code, "outputs": [{"text": ["1\n"]}, {"data": {"text/plain": ["2"]}}]},
        {**code, "outputs": [svg]},
    ]
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    block = "```python\na\nb\n```"
    assert hooks.from_notebook(path).split("\n\n") == [
        "# T & U\ntext",
        *(block, "```text\n1\n```", "```text\n2\n```"),
        *(block, '<div class="picture"><svg></svg></div>', "[The notebook itself](n.ipynb)\n"),
    ]
    assert hooks.title_of(path) == "T & U"


def test_notebooks_are_in_the_navigation_and_links_lead_to_their_pages(hooks):
    ((_, pages),) = hooks.listed({"Notebooks": "notebooks/"}).items()
    names = [path.stem for path in sorted((REPOSITORY / "docs/notebooks").glob("*.ipynb"))]
    assert names == ["long-context", "masks", "pruning"]
    assert pages[0] == "notebooks/index.md"
    assert [uri for page in pages[1:] for uri in page.values()] == [
        f"notebooks/{name}.md" for name in names
    ]
    text = "[a](b/c-d.ipynb) [e](f.md)"
    for path, expected in (("x.md", "[a](b/c-d.md) [e](f.md)\n"), (None, f"{text}\n")):
        page = types.SimpleNamespace(file=types.SimpleNamespace(abs_src_path=path))
        assert hooks.on_page_markdown(text, page) == expected
