"""The code of guides runs, block after block."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["choosing_keys.md"]


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs(page, capsys):
    text = (DOCS / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    assert "eager" in capsys.readouterr().out
