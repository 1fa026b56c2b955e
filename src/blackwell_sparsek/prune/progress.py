"""A line on stderr for work that takes more than a few seconds."""

import sys
import time

QUIET_SECONDS = 2.0
# A log file should not fill with lines; a terminal may be rewritten often.
SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_UPDATES = 0.2


class Progress:
    """Count items of known or unknown number; says nothing in the first two seconds."""

    def __init__(self, what: str, total: int | None):
        self.what = what
        self.total = total
        self.done = 0
        self.started = time.monotonic()
        self.last = self.started + QUIET_SECONDS - SECONDS_BETWEEN_LINES
        self.shown = False

    def advance(self, item: str = "") -> None:
        """One more is done; `item` names it."""
        self.done += 1
        now = time.monotonic()
        rewrite = sys.stderr.isatty()
        pause = SECONDS_BETWEEN_UPDATES if rewrite else SECONDS_BETWEEN_LINES
        if now - self.started < QUIET_SECONDS or now - self.last < pause:
            return
        self.last = now
        self.shown = True
        of = "" if self.total is None else f"/{self.total}"
        line = f"{self.what}: {self.done}{of} after {now - self.started:.0f} s {item}"
        start, end = ("\r\033[K", "") if rewrite else ("", "\n")
        print(start + line.rstrip(), end=end, file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Leave the line."""
        if self.shown and sys.stderr.isatty():
            print(file=sys.stderr, flush=True)
