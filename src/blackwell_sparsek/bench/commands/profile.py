"""`bsk profile`: how a kernel uses a GPU, measured by ncu or read from its machine code.

Run as a module, this file is the child process that ncu watches.
"""

import argparse
import csv
import io
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import torch

from ...core.errors import InvalidInput, Unsupported
from ..arguments import why_no_kernel
from ..case import Case, Suite
from ..machine import peak_of
from ..suites import SUITES
from .precompile import architectures, built

# Occupancy: how many warps of a kernel fit on an SM, and what limits them.

REGISTERS = 65536
# By architecture: warps and blocks of an SM, and its shared memory in bytes.
_LIMITS = {
    80: (64, 32, 167936),
    89: (48, 24, 102400),
    90: (64, 32, 233472),
    100: (64, 32, 233472),
    120: (48, 24, 102400),
}
# Bytes of shared memory that the driver reserves for each block.
_RESERVED = 1024


class Occupancy(NamedTuple):
    """Warps of a kernel on an SM, the most that an SM holds, and the limiting resource."""

    warps: int
    most: int
    limit: str


def occupancy(arch: int, registers: int, shared: int, num_warps: int) -> Occupancy:
    """Warps that fit, by registers per thread, shared memory per block and warps per block.

    Examples
    --------
    >>> occupancy(90, registers=128, shared=200000, num_warps=8)
    Occupancy(warps=8, most=64, limit='shared memory')
    """
    most, blocks, memory = _LIMITS.get(arch, _LIMITS[90])
    # registers are allocated to warps in units of 256
    each = -(-max(registers, 1) * 32 // 256) * 256 * num_warps
    fitting = {
        "warps": most // num_warps,
        "blocks": blocks,
        "registers": REGISTERS // each,
        "shared memory": memory // (shared + _RESERVED),
    }
    limit = min(fitting, key=lambda name: fitting[name])
    return Occupancy(fitting[limit] * num_warps, most, limit)


# Nsight Compute: its metrics, and the records parsed from its output.

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
    """Kernels with their metrics, from the CSV after any other printed output."""
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


# Instructions that show how a kernel multiplies, copies and computes exponentials.
COUNTS = ("wgmma.mma_async", "mma.sync", "tcgen05.mma", "cp.async.bulk", "ex2")


def run(args: argparse.Namespace) -> int:
    """Profile with ncu if it can run here, else statically."""
    archs = args.arch
    if archs is None:
        reason = why_not() if torch.cuda.is_available() else "there is no GPU here"
        if reason is None:
            return _measured(args.case)
        print(f"Static profile, because {reason}.", file=sys.stderr)
        archs = architectures(None) if torch.cuda.is_available() else [90]
    if (unknown := why_no_kernel(args.case)) is not None:
        raise InvalidInput(f"bsk profile: {unknown}{_hint(args.case)}")
    records = built("bsk profile", archs, args.case, args.jobs, COUNTS)
    print(static_table(records))
    return int(any(record["problems"] for record in records))


def _hint(name: str) -> str:
    try:
        suite, case = find_case(name)
    except InvalidInput:
        return ""
    return (
        f"; {case.name!r} of the suite {suite.name} is a benchmark case, which can be profiled "
        "where a GPU and ncu are"
    )


def find_case(name: str) -> tuple[Suite, Case]:
    """The first benchmark case whose name contains `name`."""
    for suite in SUITES.values():
        for case in suite.cases(False):
            if name in case.name or name in f"{suite.name}: {case.name}":
                return suite, case
    raise InvalidInput(f"bsk profile: no benchmark case has {name!r} in its name")


def _measured(name: str) -> int:
    suite, case = find_case(name)
    print(f"{suite.name}: {case.name}: running under ncu", file=sys.stderr, flush=True)
    worker = [
        sys.executable,
        "-m",
        "blackwell_sparsek.bench.commands.profile",
        suite.name,
        case.name,
    ]
    for record in profile(worker):
        print(measured_lines(record, torch.cuda.get_device_name()))
    return 0


def measured_lines(record: dict[str, Any], device_name: str) -> str:
    """One kernel: its metrics, and its memory traffic against the peak of the device."""
    lines = [record["kernel"]]
    for name, value in record.items():
        if name != "kernel":
            number, unit = value
            lines.append(f"  {name:<14} {number:>12.4g} {unit}")
    peak, time = peak_of(device_name), record.get("time")
    if peak is not None and time is not None and {"read", "written"} <= record.keys():
        seconds = time[0] * _scale(time[1])
        moved = sum(record[name][0] * _scale(record[name][1]) for name in ("read", "written"))
        share = moved / seconds / (peak.terabytes * 1e12)
        lines.append(f"  {'memory roof':<14} {100 * share:>12.4g} % of {peak.terabytes} TB/s")
    return "\n".join(lines)


def _scale(unit: str) -> float:
    """Seconds or bytes per unit of ncu."""
    known = {"second": 1.0, "s": 1.0, "msecond": 1e-3, "ms": 1e-3, "usecond": 1e-6, "us": 1e-6}
    known |= {"nsecond": 1e-9, "ns": 1e-9, "byte": 1.0}
    known |= {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
    return known.get(unit, 1.0)


def static_table(records: list[dict[str, Any]]) -> str:
    """Registers, shared memory, spills, instructions and the warps that fit on an SM."""
    used = [what for what in COUNTS if any(r.get("counts", {}).get(what) for r in records)]
    rows = [["case", "arch", "regs", "shared", "spills", "warps/SM", "limit", *used]]
    for r in records:
        if "registers" not in r:
            rows.append([r["name"], f"sm_{r['arch']}", *(["-"] * (5 + len(used)))])
            continue
        fits = occupancy(r["arch"], r["registers"], r["shared"], r.get("num_warps", 4))
        spills = r["spill_stores"] + r["spill_loads"]
        cells = [r["registers"], r["shared"], spills, f"{fits.warps} of {fits.most}", fits.limit]
        cells += [r["counts"].get(what, 0) for what in used]
        rows.append([r["name"], f"sm_{r['arch']}", *map(str, cells)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(padded).rstrip())
    for r in records:
        lines += [f"{r['name']} sm_{r['arch']}: {problem}" for problem in r["problems"]]
    return "\n".join(lines)


def main(suite_name: str, case_name: str) -> None:
    """Build the case, warm up, then run once between the profiler marks."""
    suite = SUITES[suite_name]
    case = next(case for case in suite.cases(False) if case.name == case_name)
    with torch.no_grad():
        run = suite.peers[suite.ours].prepare(case.build(torch.device("cuda"))).run
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        cudart: Any = torch.cuda.cudart
        profiler = cudart()
        profiler.cudaProfilerStart()
        run()
        torch.cuda.synchronize()
        profiler.cudaProfilerStop()


if __name__ == "__main__":
    main(*sys.argv[1:])
