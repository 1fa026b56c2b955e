"""Progress on a terminal with rich and without, and in a log."""

import pytest

from blackwell_sparsek.core.progress import Progress


def _steps(progress):
    with progress:
        progress.stage(0, "[bold]one[/bold]: timing")
        progress.done(0, "one: [red]2 ms")
        progress.stage(1, "two")


def test_a_log_has_a_line_for_each_call(capsys):
    _steps(Progress("suite", 2))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" s  ")[1] for line in lines] == [
        "suite [1/2] [bold]one[/bold]: timing",
        "suite [1/2] one: [red]2 ms",
        "suite [2/2] two",
    ]
    assert all(float(line.split(" s ")[0]) >= 0 for line in lines)


def test_without_a_total_nothing_is_counted(capsys):
    Progress("bsk compile").stage(0, "collecting")
    assert capsys.readouterr().err.endswith(" s  bsk compile collecting\n")


def test_a_terminal_without_rich_rewrites_its_line(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _steps(Progress("suite", 2))
    assert capsys.readouterr().err == (
        "\r\x1b[K[1/2] [bold]one[/bold]: timing"
        "\r\x1b[K[1/2] one: [red]2 ms\n"
        "\r\x1b[K[2/2] two"
        "\r\x1b[K"
    )


def test_a_terminal_with_rich_has_a_bar(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = Progress("suite", 2)
    assert progress.bar is not None
    _steps(progress)
    assert progress.bar.tasks[0].completed == 1 and progress.bar.tasks[0].total == 2
    # markup in the names of cases is text
    assert progress.bar.tasks[0].description == "two" and "[red]2 ms" in capsys.readouterr().err
