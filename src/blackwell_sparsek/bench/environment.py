"""What a benchmark ran on."""

import os
import pathlib
import platform
import subprocess
from typing import Any

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
    """The version of the GPU driver, as nvidia-smi tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def source_commit() -> str | None:
    """The commit that this package was checked out at, `+` when changed since; None elsewhere."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(pathlib.Path(__file__).parent), *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
