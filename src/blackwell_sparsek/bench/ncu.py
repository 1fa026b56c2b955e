"""Nsight Compute: what to ask it, and what it says."""

import csv
import io
import shutil
import subprocess
from typing import Any

from ..core.errors import Unsupported

# Valid from sm_80 to sm_100.
METRICS = {
    "gpu__time_duration.sum": "time",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor cores",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "DRAM",
    "lts__t_sector_hit_rate.pct": "L2 hits",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "launch__registers_per_thread": "registers",
    "launch__shared_mem_per_block": "shared memory",
}


def why_not() -> str | None:
    """Why ncu cannot be run here, or None."""
    return None if shutil.which("ncu") else "ncu is not installed"


def profile(command: list[str], timeout_s: float = 300.0) -> list[dict[str, Any]]:
    """Profile what `command` launches between `cudaProfilerStart` and `Stop`."""
    asked = ["ncu", "--csv", "--page", "raw", "--metrics", ",".join(METRICS)]
    asked += ["--profile-from-start", "off", "--target-processes", "all"]
    done = subprocess.run([*asked, *command], capture_output=True, text=True, timeout=timeout_s)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise Unsupported(
            "ncu: this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or "
            "allow it with the driver option NVreg_RestrictProfilingToAdminUsers=0"
        )
    records = parse(done.stdout)
    if not records:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        raise Unsupported(f"ncu ended with status {done.returncode} and no kernels: {last[0]}")
    return records


def parse(text: str) -> list[dict[str, Any]]:
    """Kernels with their metrics, from the CSV that follows whatever else was printed."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    units, kernels = (rows[0], rows[1:]) if rows and not rows[0]["ID"] else ({}, rows)
    return [
        {
            "kernel": row.get("Kernel Name", "?"),
            **{
                name: (_number(row[metric]), units.get(metric, ""))
                for metric, name in METRICS.items()
                if row.get(metric)
            },
        }
        for row in kernels
    ]


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")
