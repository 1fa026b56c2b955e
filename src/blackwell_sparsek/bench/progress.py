"""Where a benchmark is, on stderr."""

import sys
import time
from collections.abc import Callable


class Progress:
    """One line on stderr that is rewritten on a terminal, and a plain log anywhere else."""

    def __init__(self, total: int):
        self.total = total
        self.live = sys.stderr.isatty()
        self.started = time.monotonic()

    def stage(self, index: int, text: str) -> None:
        """Say what case `index` (from 0) is doing now."""
        self._show(f"[{index + 1}/{self.total}] {text}", end="" if self.live else "\n")

    def rounds(self, index: int, name: str) -> Callable[[int, int], None]:
        """Progress callback of a timing; only a terminal sees every round."""

        def show(done: int, count: int) -> None:
            if self.live:
                bar = "#" * (20 * done // count)
                self._show(f"[{index + 1}/{self.total}] {name}: timing [{bar:<20}]", end="")

        return show

    def close(self) -> None:
        """Leave the terminal on a clean line."""
        if self.live:
            self._show("", end="")

    def _show(self, text: str, end: str) -> None:
        if self.live:
            text = f"\r\x1b[K{text}"
        else:
            text = f"{time.monotonic() - self.started:6.1f} s  {text}"
        print(text, end=end, file=sys.stderr, flush=True)
