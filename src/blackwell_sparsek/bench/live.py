"""Where a suite is: a bar where rich draws on a terminal, plain lines anywhere else."""

import importlib.util
import sys
import time
from typing import Any

from .case import Suite


class Live:
    """Progress on stderr, and one line for each case that is done."""

    def __init__(self, title: str, total: int):
        self.title, self.total = title, total
        self.started = time.monotonic()
        self.bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
            self.bar = _rich_bar()
            self.task = self.bar.add_task(title, total=total)

    def stage(self, index: int, text: str) -> None:
        """Say what case `index` (from 0) is doing now."""
        if self.bar is None:
            self._line(f"[{index + 1}/{self.total}] {text}")
        else:
            self.bar.update(self.task, completed=index, description=_escaped(text))

    def done(self, index: int, name: str, result: dict[str, Any], suite: Suite) -> None:
        """Show what a case gave."""
        text = f"[{index + 1}/{self.total}] {name}: {summary(result, suite.ours)}"
        if self.bar is None:
            self._line(text)
        else:
            self.bar.update(self.task, completed=index + 1)
            self.bar.console.print(_escaped(text), highlight=False)

    def _line(self, text: str) -> None:
        seconds = time.monotonic() - self.started
        print(f"{seconds:6.1f} s  {self.title} {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> "Live":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


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


def summary(result: dict[str, Any], ours: str) -> str:
    """The figures of one case in one line."""
    if "error" in result:
        return str(result["error"])
    parts = []
    for mode, ratio in result.get("ratios", {}).items():
        figures = result["peers"][ours]["times"][mode]
        text = f"{mode} {_time(figures['quantiles_s']['p50'])}"
        if "executed_tflops" in figures:
            text += f", {_rate(figures['executed_tflops'])}"
        if "over_dense" in ratio:
            text += f", {ratio['over_dense']:.2f}x dense"
        if "best_peer" in ratio:
            text += f", {ratio['over_best_peer']:.2f}x {ratio['best_peer']}"
        parts.append(text)
    for name, entry in result["peers"].items():
        for word in ("failed", "crashed"):
            if word in entry:
                parts.append(f"{name} {word}: {entry[word]}")
        if name == ours and "n/a" in entry:
            parts.append(f"n/a: {entry['n/a']}")
    if "unsteady" in result:
        parts.append(result["unsteady"])
    return "; ".join(parts) or "nothing to time"


def _rate(tflops: float) -> str:
    return f"{tflops:.0f} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:.3g} GFLOP/s"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
