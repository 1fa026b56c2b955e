"""The comparison with a control run, on planted suites."""

import argparse
import pathlib
import tarfile

import pytest

from . import run as tool
from .run import Side, Skipped, Suite, findings, read_accepted, read_report

REPORT = """<testsuites><testsuite>
<testcase classname="a.B" name="good"/>
<testcase classname="a.B" name="bad"><failure message="wrong&#10;more">text</failure></testcase>
<testcase classname="a.B" name="off"><skipped message="no GPU"/></testcase>
<testcase classname="" name="a"><error message="collection failure">x
E   ModuleNotFoundError: y</error></testcase>
</testsuite></testsuites>"""


def test_reports_are_read(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    side = read_report(path)
    assert side.outcomes == {
        "a.B::good": "passed", "a.B::bad": "failed", "a.B::off": "skipped", "::a": "failed",
    }  # fmt: skip
    assert side.reasons["a.B::bad"] == "wrong"
    assert side.reasons["::a"] == "E   ModuleNotFoundError: y"


def test_findings_pass_in_the_control_run_only():
    control = Side({"a": "passed", "b": "failed", "c": "passed", "d": "passed", "e": "passed"}, {})
    ours = Side({"a": "passed", "b": "failed", "c": "failed", "d": "skipped"}, {"c": "wrong"})
    found = findings(ours, control, {})
    assert found == {
        "c": "failed: wrong",
        "d": "skipped: no such test in this run",
        "e": "missing: no such test in this run",
    }
    assert findings(ours, control, {"[cd]": "refused", "e": "gone"}) == {}


def test_accepted_failures_have_reasons(tmp_path):
    path = tmp_path / "accepted.txt"
    path.write_text("# comment\n*dropout*  # attention dropout is refused\n")
    assert read_accepted(path) == {"*dropout*": "attention dropout is refused"}
    path.write_text("*dropout*\n")
    with pytest.raises(ValueError, match="has no reason"):
        read_accepted(path)
    read_accepted(pathlib.Path(tool.HERE) / "accepted.txt")


def suite(**given):
    known = {"name": "planted", "package": "pytest", "repository": "x/y", "folder": "y"}
    return Suite(**{**known, "needs": (), "files": ("test_it.py",), **given})


def test_what_is_missing_is_the_reason(tmp_path):
    with pytest.raises(Skipped, match="needs no-such-package"):
        tool.sources(suite(needs=("no-such-package",)), tmp_path, tmp_path)
    with pytest.raises(Skipped, match=r"has no test_it\.py"):
        tool.sources(suite(), tmp_path, tmp_path)


def test_sources_are_fetched_once(tmp_path):
    inner = tmp_path / "y-1"
    inner.mkdir()
    (inner / "test_it.py").write_text("")
    archive = tmp_path / "y.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(inner, "y-1")
    folder = tmp_path / "cache" / "y"
    folder.parent.mkdir()
    tool.fetch(archive.as_uri(), folder)
    assert (folder / "test_it.py").is_file()
    with pytest.raises(Skipped, match="cannot fetch"):
        tool.fetch((tmp_path / "none.tar.gz").as_uri(), tmp_path / "cache" / "z")


@pytest.mark.exhaustive
def test_both_sides_are_run(tmp_path):
    """A suite whose test fails where this package takes part."""
    folder = tmp_path / "y"
    folder.mkdir()
    (folder / "test_it.py").write_text(
        "import torch\n\n\ndef test_patched():\n"
        "    assert torch.nn.functional.scaled_dot_product_attention.__name__ != 'ours'\n"
    )
    options = argparse.Namespace(cache=tmp_path / "cache", select="", workers=1)
    planted = suite(name="torch-sdpa")
    control, ours = (tool.run_side(planted, folder, x, options) for x in ("control", "ours"))
    assert list(findings(ours, control, {})) == ["test_it::test_patched"]
