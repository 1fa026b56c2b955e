"""What mkdocs cannot do by its configuration alone.

The pages in the root of the repository join the site, notebooks become pages, a folder in the
navigation stands for all of its pages, lists may follow a paragraph without a blank line, as on
GitHub, and types of parameters lose the backticks that docstrings have around shapes.
"""

import json
import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
# Pages of the root, by their name in the site.
FROM_ROOT = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "code_of_conduct.md": "CODE_OF_CONDUCT.md",
}


def from_root(text):
    """A page of the root with its links as they are in the site."""
    in_site = {source: page for page, source in FROM_ROOT.items()}

    def moved(link):
        path, mark, anchor = link[1].partition("#")
        return f"]({in_site.get(path, path.removeprefix('docs/'))}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", moved, text)


def from_notebook(path):
    """A notebook as a page: its text, its code, and what the code showed."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/svg+xml" in data:
                # on one line, as Markdown takes HTML
                picture = "".join(data["image/svg+xml"]).replace("\n", "")
                parts.append(f'<div class="picture">{picture}</div>')
            else:
                text = "".join(output.get("text") or data["text/plain"])
                parts.append(f"```text\n{text.rstrip()}\n```")
    parts.append(f"[The notebook itself]({path.name})")
    return "\n\n".join(parts) + "\n"


def title_of(page):
    """The first heading of a page, or of a notebook."""
    text = from_notebook(page) if page.suffix == ".ipynb" else page.read_text()
    return re.search(r"^# (.+)$", text, re.MULTILINE)[1]


def listed(entry):
    """An entry of the navigation with the pages of a folder in place of its name."""
    ((title, target),) = entry.items() if isinstance(entry, dict) else ((None, entry),)
    if isinstance(target, list):
        return {title: [listed(part) for part in target]}
    if not target.endswith("/"):
        return entry
    folder = ROOT / "docs" / target
    pages = sorted([*folder.glob("*.md"), *folder.glob("*.ipynb")])
    others = [{title_of(page): f"{target}{page.stem}.md"} for page in pages if page.stem != "index"]
    return {title: [f"{target}index.md", *others]}


def with_blank_lines(markdown):
    """Markdown in which a blank line precedes every list, outside of code."""
    lines, in_code, in_list = [], False, False
    for line in markdown.splitlines():
        if line.startswith("```"):
            in_code = not in_code
        item = not in_code and re.match(r"(-|\d+\.) ", line) is not None
        if item and not in_list and lines and lines[-1].strip():
            lines.append("")
        in_list = item or (in_list and line.startswith("  "))
        lines.append(line)
    return "\n".join(lines) + "\n"


def on_config(config):
    """Fill folders of the navigation."""
    config.nav = [listed(entry) for entry in config.nav]


def on_files(files, config):
    """Add the pages of the root and those of notebooks."""
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=from_root((ROOT / source).read_text())))
    for path in sorted((ROOT / "docs").glob("**/*.ipynb")):
        page = path.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=from_notebook(path)))


def on_page_markdown(markdown, page, **_):
    """Separate lists from what precedes them; links to notebooks lead to their pages."""
    if page.file.abs_src_path is not None:
        markdown = re.sub(r"\]\(([\w./-]+)\.ipynb\)", r"](\1.md)", markdown)
    return with_blank_lines(markdown)


def on_page_content(html, page, **_):
    """Remove backticks inside of code, in the reference."""
    if page.file.src_uri.startswith("api/"):
        html = re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("`", ""), html)
    return html
