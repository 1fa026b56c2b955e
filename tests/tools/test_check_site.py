"""The look at the site sees what it should."""

import shutil
import threading

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


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_page_that_never_loads_is_named_and_the_others_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(check_site, "PAGE_S", 0.5)
    (tmp_path / "wide.html").write_text("<!doctype html><div style='width:700px'>x</div>")
    # the browser waits for this picture, because the server never answers
    (tmp_path / "hangs.html").write_text("<!doctype html><img src='/slow.png'>")
    answer = check_site.Handler.do_GET
    over = threading.Event()

    def slow(self):
        return over.wait(30) if self.path == "/slow.png" else answer(self)

    monkeypatch.setattr(check_site.Handler, "do_GET", slow)
    try:
        found, looked = check_site.problems(tmp_path, CHROMIUM)
    finally:
        over.set()
    assert looked == 2
    assert found == [
        "/hangs.html: did not load in 0.5 s",
        "/wide.html at 420: 708 pixels wide",
    ] or (found == ["/wide.html at 420: 708 pixels wide", "/hangs.html: did not load in 0.5 s"])


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_that_says_nothing_is_ended(tmp_path):
    (tmp_path / "page.html").write_text("<!doctype html><p>fine</p>")
    found, looked = check_site.problems(tmp_path, shutil.which("yes"), limit_s=0.5)
    assert found == ["the check did not end in 0.5 s"] and looked == 0


def test_without_a_browser_nothing_is_checked_and_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert check_site.main([str(tmp_path)]) == 0
    assert "not looked at" in capsys.readouterr().out
