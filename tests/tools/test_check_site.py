"""The look at the site sees what it should."""

import shutil

import pytest

from . import check_site

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_planted_faults_are_found(tmp_path, capsys):
    (tmp_path / "good.html").write_text("<!doctype html><p>fine</p>")
    assert check_site.main([str(tmp_path)]) == 0
    assert "1 pages" in capsys.readouterr().out
    (tmp_path / "wide.html").write_text("<!doctype html><div style='width:700px'>x</div>")
    (tmp_path / "picture.html").write_text("<!doctype html><img src='none.svg'>")
    (tmp_path / "script.html").write_text("<!doctype html><script>nothing()</script>")
    assert check_site.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "/wide.html at 420: 708 pixels wide" in out and "/wide.html at 1400" not in out
    assert "/picture.html: no http" in out and "nothing is not defined" in out


def test_without_a_browser_nothing_is_checked_and_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert check_site.main([str(tmp_path)]) == 0
    assert "not looked at" in capsys.readouterr().out
