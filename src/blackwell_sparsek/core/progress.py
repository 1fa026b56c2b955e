"""Progress of commands on stderr: a bar of rich, one rewritten line, or lines of a log."""

import importlib.util
import sys
import time
from typing import Any


class Progress:
    """What step `index` of `total` is doing now, and what was done.

    On a terminal the present step is a bar where rich is installed, else a line that is rewritten.
    Elsewhere every call is a line with the seconds since the start.
    """

    def __init__(self, title: str, total: int = 0):
        self.title: str = title
        self.total: int = total
        self.started: float = time.monotonic()
        self.live: bool = sys.stderr.isatty()
        self.bar: Any = None
        if self.live and importlib.util.find_spec("rich") is not None:
            self.bar = _rich_bar()
            self.task: Any = self.bar.add_task(title, total=total or None)

    def stage(self, index: int, text: str) -> None:
        """Show what step `index` (from 0) is doing now."""
        if self.bar is not None:
            self.bar.update(
                self.task, completed=index, total=self.total or None, description=_escaped(text)
            )
        else:
            self._show(self._counted(index, text), lasting=False)

    def done(self, index: int, text: str) -> None:
        """Show the result of step `index` (from 0); it stays on the terminal."""
        if self.bar is not None:
            self.bar.update(self.task, completed=index + 1, total=self.total or None)
            line = _escaped(self._counted(index, text))
            self.bar.console.print(line, highlight=False, soft_wrap=True)
        else:
            self._show(self._counted(index, text), lasting=True)

    def close(self) -> None:
        """Leave the terminal on a clean line."""
        if self.bar is not None:
            self.bar.stop()
        elif self.live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _counted(self, index: int, text: str) -> str:
        return f"[{index + 1}/{self.total}] {text}" if self.total else text

    def _show(self, text: str, lasting: bool) -> None:
        if self.live:
            print(f"\r\x1b[K{text}", end="\n" if lasting else "", file=sys.stderr, flush=True)
            return
        seconds = time.monotonic() - self.started
        title = f"{self.title} " if self.title else ""
        print(f"{seconds:6.1f} s  {title}{text}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rich_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return str(escape(text))
