"""The report in a real browser, where one is installed: `make browser`."""

import pathlib
import re
import shutil
import subprocess
import zlib

import pytest

from blackwell_sparsek.bench import cli

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RESULTS = pathlib.Path(__file__).parents[3] / "benchmarks" / "results"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

# Sorts the first table by its third column, twice, and tells what it saw in the title. The bars of
# a single case are the lowest picture there may be.
_CLICKS = """
<script>
const first = document.querySelector("table.sortable");
const head = first.querySelectorAll("thead th")[2];
const column = () => [...first.tBodies[0].rows].map(row => Number(row.cells[2].dataset.value));
const seen = [];
for (let i = 0; i < 2; i++) { head.click(); seen.push(column()); }
const falls = seen[0].every((x, i, all) => i === 0 || all[i - 1] >= x);
const rises = seen[1].every((x, i, all) => i === 0 || all[i - 1] <= x);
const wide = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
// of each figure, one of its two drawings is shown
const shown = [...document.querySelectorAll("svg")].filter(s => s.getBoundingClientRect().height);
const clipped = shown.flatMap(svg => [...svg.querySelectorAll("text")].filter(text => {
  const [inner, outer] = [text.getBoundingClientRect(), svg.getBoundingClientRect()];
  return inner.left < outer.left - 1 || inner.right > outer.right + 1;
}).map(text => text.textContent));
const small = shown.flatMap(svg => [...svg.querySelectorAll("text")].filter(
  text => text.getBoundingClientRect().height < 11).map(text => text.textContent));
document.title = JSON.stringify({falls, rises, rows: seen[0].length, wide,
  drawn: shown.length > 0 && 2 * shown.length === document.querySelectorAll("svg").length,
  tall: shown.every(s => s.getBoundingClientRect().height > 50), clipped, small});
</script>
"""


def _chromium(tmp_path, *args):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0"]
    return subprocess.run([*command, *args], capture_output=True, text=True, timeout=120)


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "report.html"
    assert cli.main(["report", *map(str, sorted(RESULTS.glob("*.json"))), "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize("width", [1400, 420])
def test_tables_sort_pictures_are_drawn_and_nothing_overflows(report, tmp_path, width):
    report.write_text(report.read_text().replace("</body>", f"{_CLICKS}</body>"))
    done = _chromium(tmp_path, f"--window-size={width},900", "--dump-dom", report.as_uri())
    title = re.search(r"<title>(.*?)</title>", done.stdout).group(1).replace("&quot;", '"')
    assert '"falls":true,"rises":true' in title and '"drawn":true' in title, title
    assert '"wide":true' in title and '"tall":true' in title, title
    # no label leaves its picture, and none is too small to be read
    assert '"clipped":[],"small":[]' in title, title
    assert "CONSOLE" not in done.stderr, done.stderr


def test_a_screenshot_shows_something(report, tmp_path):
    path = tmp_path / "shot.png"
    _chromium(tmp_path, "--window-size=1200,1600", f"--screenshot={path}", report.as_uri())
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    parts = re.findall(rb"IDAT(.*?)(?=....IDAT|....IEND)", data, re.DOTALL)
    pixels = zlib.decompressobj().decompress(b"".join(part[:-4] for part in parts) or b"")
    # a blank page has a handful of byte values
    assert len(set(pixels)) > 60
