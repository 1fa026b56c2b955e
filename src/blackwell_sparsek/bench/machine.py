"""The machine that runs a benchmark: its description, clocks during the run and peak rates."""

import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import threading
import time
from typing import Any, NamedTuple

import torch

from ..core.arch import arch_of
from ..core.compat import installed_versions
from ..core.env import relevant_variables


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Device, system, versions and load at this moment, as they go into a results file."""
    found: dict[str, Any] = {
        "device": device.type,
        "arch": str(arch_of(device)),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": installed_versions(),
        "variables": relevant_variables(),
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found["device_name"] = torch.cuda.get_device_name(device)
        found["gpu_count"] = torch.cuda.device_count()
        found["driver"] = _driver()
        found["memory_gib"] = {"free": round(free / 2**30, 1), "total": round(total / 2**30, 1)}
    else:
        found["device_name"] = platform.processor() or platform.machine()
    return found


def _driver() -> str:
    """The version of the GPU driver, as nvidia-smi reports it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def source_commit() -> str | None:
    """The commit of this checkout, with `+` if files changed since; None outside a checkout."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(pathlib.Path(__file__).parent), *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


FIELDS = {"sm_mhz": "clocks.sm", "watts": "power.draw", "celsius": "temperature.gpu"}
_EVERY_MS = 100
# If the clock varies by more than this share of its median, ratios become unreliable too.
_STEADY_SHARE = 0.08


def parse_line(line: str) -> dict[str, float] | None:
    """One line of nvidia-smi as numbers, or None if it holds anything else."""
    try:
        return dict(zip(FIELDS, (float(cell) for cell in line.split(",")), strict=True))
    except ValueError:
        return None


def unsteady(clocks: dict[str, Any]) -> str | None:
    """How far the clock moved while a case was timed, if far enough to make its times doubtful.

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
    """Clock samples from one background process; empty without nvidia-smi or a GPU."""

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
        """Minimum, median and maximum of each field between two times of `time.monotonic()`."""
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


# Peak rates from the data sheets, for dense fp16 and bf16.


class Peak(NamedTuple):
    """TFLOP/s of the tensor cores and TB/s of the memory."""

    tflops: float
    terabytes: float


_PEAKS = {
    "H200": Peak(989.0, 4.8),
    "H100 PCIe": Peak(756.0, 2.0),
    "H100": Peak(989.0, 3.35),
    "GH200": Peak(989.0, 4.0),
    "B200": Peak(2250.0, 8.0),
    "A100": Peak(312.0, 2.04),
    "L40S": Peak(362.0, 0.864),
    "RTX 4090": Peak(165.0, 1.008),
}


def peak_of(device_name: str) -> Peak | None:
    """The peak rates of a device by its name, or None.

    Examples
    --------
    >>> peak_of("NVIDIA H200")
    Peak(tflops=989.0, terabytes=4.8)
    """
    # the longest name that matches: a GH200 is not an H200
    fitting = [name for name in _PEAKS if name in device_name]
    return _PEAKS[max(fitting, key=len)] if fitting else None
