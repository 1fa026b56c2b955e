"""Peers that installed packages bring along."""

import json
import pathlib
import re
import sys
from importlib.metadata import EntryPoint

import pytest

from blackwell_sparsek import InvalidInput
from blackwell_sparsek.bench import cli
from blackwell_sparsek.bench.outside import GROUP, with_outside_peers

from .fakes import case, peer, suite

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "benchmarking.md"


def _installed(tmp_path, monkeypatch, code, value="strangers_peer:peers"):
    """A package with one entry point, as an installer leaves it."""
    (tmp_path / "strangers_peer.py").write_text(code)
    metadata = tmp_path / "stranger-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nmine = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strangers_peer", raising=False)


def _suites():
    return {"fake": suite(cases=lambda tiny: [case("one")]), "other": suite(name="other")}


def test_the_recipe_of_the_guide_is_measured_like_any_other(tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1]
    _installed(tmp_path, monkeypatch, code)
    out = tmp_path / "results"
    args = ["bench", "attention_window", "--device", "cpu", "--quick", "--peers", "mine"]
    assert cli.main([*args, "-o", str(out)]) == 0
    document = json.loads((out / "attention_window.json").read_text())
    for found in document["cases"]:
        assert set(found["peers"]) == {"bsk", "mine"}
        # the guide's peer takes no windows, and says so
        assert found["peers"]["mine"]["n/a"] == "takes no windows and no block masks"
    args[1] = "attention_dense"
    assert cli.main([*args, "-o", str(out)]) == 0
    document = json.loads((out / "attention_dense.json").read_text())
    timed = [found["ratios"]["eager"]["best_peer"] for found in document["cases"]]
    assert timed == ["mine"] * len(document["cases"]) and timed
    assert f'"{GROUP}"' in GUIDE.read_text()
    assert cli.main(["bench", "--list"]) == 0
    assert re.search(r"^  mine +my library$", capsys.readouterr().out, re.MULTILINE)


def test_a_peer_joins_the_suites_it_names_behind_the_others(monkeypatch):
    entry = EntryPoint("mine", "strangers:peers", GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: lambda: {"fake": peer("mine")})
    found = with_outside_peers(_suites(), [entry])
    assert list(found["fake"].peers)[-1] == "mine" and "mine" not in found["other"].peers
    (one,) = found["fake"].cases(True)
    (before,) = _suites()["fake"].cases(True)
    assert one.peers == (*before.peers, "mine") and one.problem == before.problem


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "expected a dict from suites to peers, got list"),
        ({"fake": "me"}, "expected a Peer for fake, got str"),
        ({"fakes": peer("mine")}, "unknown suite 'fakes'; choose from fake, other"),
        ({"fake": peer("bsk")}, "the suite fake has a peer 'bsk'"),
    ],
)
def test_what_an_entry_point_gives_is_checked(monkeypatch, given, message):
    entry = EntryPoint("mine", "strangers:peers", GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: lambda: given)
    with pytest.raises(InvalidInput) as caught:
        with_outside_peers(_suites(), [entry])
    assert str(caught.value) == f"bsk bench: entry point 'mine' (strangers:peers): {message}"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("def peers(): raise RuntimeError('boom')", "RuntimeError: boom"),
        ("", "AttributeError: module 'strangers_peer' has no attribute 'peers'"),
    ],
)
def test_an_entry_point_that_fails_is_named(tmp_path, monkeypatch, capsys, code, why):
    _installed(tmp_path, monkeypatch, code)
    assert cli.main(["bench", "--list"]) == 2
    assert capsys.readouterr().err == (
        "bsk bench: entry point 'mine' of stranger (strangers_peer:peers) fails: "
        f"{why}; fix or uninstall its package\n"
    )
