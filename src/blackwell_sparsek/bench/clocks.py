"""Clocks, power and temperature of a GPU while something runs, through nvidia-smi."""

import shutil
import statistics
import subprocess
import threading
import time
from typing import Any

import torch

FIELDS = {"sm_mhz": "clocks.sm", "watts": "power.draw", "celsius": "temperature.gpu"}
_EVERY_MS = 100
# Beyond this share of its median, a moving clock moves ratios too.
_STEADY_SHARE = 0.08


def parse_line(line: str) -> dict[str, float] | None:
    """One line of nvidia-smi as numbers, or None where it has anything else."""
    try:
        return dict(zip(FIELDS, (float(cell) for cell in line.split(",")), strict=True))
    except ValueError:
        return None


def unsteady(clocks: dict[str, Any]) -> str | None:
    """How far the clock moved while a case was timed, where that makes its times doubtful.

    Examples
    --------
    >>> unsteady({"sm_mhz": {"min": 1200.0, "p50": 1900.0, "max": 1980.0}})
    'the SM clock moved between 1200 and 1980 MHz'
    """
    speed = clocks.get("sm_mhz")
    if speed is None or speed["max"] - speed["min"] <= _STEADY_SHARE * speed["p50"]:
        return None
    return f"the SM clock moved between {speed['min']:.0f} and {speed['max']:.0f} MHz"


class ClockLog:
    """Samples taken by one background process; nothing at all without nvidia-smi or a GPU."""

    def __init__(self, device: torch.device):
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._process: subprocess.Popen[str] | None = None
        if device.type != "cuda" or shutil.which("nvidia-smi") is None:
            return
        query = ",".join(FIELDS.values())
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        command += ["-lms", str(_EVERY_MS), "-i", str(device.index or 0)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if (values := parse_line(line)) is not None:
                self.samples.append((time.monotonic(), values))

    def between(self, start: float, end: float) -> dict[str, Any]:
        """Least, median and greatest of each field, of samples between two `time.monotonic()`."""
        found = [values for at, values in self.samples if start <= at <= end]
        if not found:
            return {}
        columns = {name: sorted(values[name] for values in found) for name in FIELDS}
        return {
            name: {"min": column[0], "p50": statistics.median(column), "max": column[-1]}
            for name, column in columns.items()
        }

    def __enter__(self) -> "ClockLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
