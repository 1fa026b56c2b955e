"""`bsk profile`: what a kernel does with a GPU, measured by ncu or read from its machine code."""

import argparse
import sys
from typing import Any

import torch

from ...core.errors import InvalidInput
from .. import ncu
from ..case import Case, Suite
from ..occupancy import occupancy
from ..peaks import peak_of
from ..suites import SUITES
from .options import positive
from .precompile import architectures, built

# Instructions that tell how a kernel multiplies, copies and waits.
COUNTS = ("wgmma.mma_async", "mma.sync", "tcgen05.mma", "cp.async.bulk", "ex2")


def add_to(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "profile",
        help="measure a case with ncu, or read registers and instructions of a kernel",
        description="CASE is part of the name of a benchmark case (see `bsk bench`) where ncu and "
        "a GPU are here. Otherwise, and with --arch, it is part of the name of a kernel variant, "
        "and the profile is static: what the compiler made of it, for any GPU.",
    )
    parser.add_argument("case", metavar="CASE", help="part of a name")
    parser.add_argument("--arch", action="append", metavar="sm_90", help="static, for this GPU")
    parser.add_argument("--jobs", type=positive, default=2, help="compiling processes (default 2)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Profile with ncu where that is possible, statically elsewhere."""
    if args.arch is None:
        reason = ncu.why_not() if torch.cuda.is_available() else "there is no GPU here"
        if reason is None:
            return _measured(args.case)
        print(f"Static profile, because {reason}.", file=sys.stderr)
        args.arch = None if torch.cuda.is_available() else ["sm_90"]
    try:
        records = built(architectures(args.arch), args.case, args.jobs, COUNTS)
    except InvalidInput as error:
        if not _is_benchmark(args.case):
            raise
        raise InvalidInput(
            f"{error}; as a benchmark case it can be profiled where a GPU and ncu are, and here "
            "the kernel that it runs, such as attn_fwd or spmm_sm90"
        ) from None
    print(static_table(records))
    return int(any(record["problems"] for record in records))


def _is_benchmark(name: str) -> bool:
    try:
        return bool(find_case(name))
    except InvalidInput:
        return False


def find_case(name: str) -> tuple[Suite, Case]:
    """The first benchmark case with this in its name."""
    for suite in SUITES.values():
        for case in suite.cases(False):
            if name in case.name or name in f"{suite.name}: {case.name}":
                return suite, case
    raise InvalidInput(f"bsk profile: no benchmark case has {name!r} in its name")


def _measured(name: str) -> int:
    suite, case = find_case(name)
    print(f"{suite.name}: {case.name}", file=sys.stderr)
    worker = [sys.executable, "-m", "blackwell_sparsek.bench.profile_worker", suite.name, case.name]
    for record in ncu.profile(worker):
        print(measured_lines(record, torch.cuda.get_device_name()))
    return 0


def measured_lines(record: dict[str, Any], device_name: str) -> str:
    """One kernel: its metrics, and memory traffic against the roof of the device."""
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
    """How many seconds or bytes a unit of ncu is."""
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
