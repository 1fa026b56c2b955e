"""`bsk compile`: build kernels for a GPU before their first use, with or without that GPU."""

import argparse
import sys
from typing import Any

import torch

from ...core.arch import arch_of
from ...core.compat import why_triton_fails
from ...core.env import triton_cache_dir
from ...core.errors import InvalidInput, Unsupported
from ...testing.compile_cases import ALL_ARCHS
from ...testing.compile_only import compile_kernels, table
from . import positive


def add_to(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "compile",
        help="compile kernels for a GPU ahead of their first use",
        description="Builds every variant that is listed for a kernel into Triton's cache. Works "
        "without a GPU: copy the cache, or make it part of an image.",
    )
    parser.add_argument("filter", nargs="?", default="", help="only variants with this in the name")
    parser.add_argument("--arch", action="append", metavar="sm_90", help=f"this GPU's; {_known()}")
    parser.add_argument("--jobs", type=positive, default=2, help="processes (default 2)")
    parser.set_defaults(run=run)


def _known() -> str:
    return ", ".join(f"sm_{sm}" for sm in ALL_ARCHS)


def architectures(asked: list[str] | None) -> list[int]:
    """Compute capabilities for names such as sm_90; by default those of this machine.

    Examples
    --------
    >>> architectures(["sm_90", "80"])
    [90, 80]
    """
    if asked is None:
        if torch.cuda.is_available():
            return [arch_of(torch.device("cuda")).sm]
        raise InvalidInput(f"no GPU here: --arch says for which to compile, of {_known()}")
    found = []
    for name in asked:
        digits = name.removeprefix("sm_").rstrip("a")
        if not digits.isdigit() or int(digits) not in ALL_ARCHS:
            raise InvalidInput(f"--arch is {name!r}; expected one of {_known()}")
        found.append(int(digits))
    return found


Records = list[dict[str, Any]]


def built(archs: list[int], contains: str, jobs: int, counts: tuple[str, ...]) -> Records:
    """Build kernels, showing progress on stderr."""
    if (reason := why_triton_fails()) is not None:
        raise Unsupported(f"kernels cannot be compiled here: {reason}")

    def progress(done: int, total: int, record: dict[str, Any]) -> None:
        text = f"{done}/{total} {record['name']} sm_{record['arch']}"
        live = sys.stderr.isatty()
        print(f"\r\x1b[K{text}" if live else text, end="" if live else "\n", file=sys.stderr)

    try:
        records = compile_kernels(archs, contains, counts=counts, jobs=jobs, progress=progress)
    except RuntimeError as error:  # a compiler process has ended, for example on a failed import
        print(error, file=sys.stderr)
        last = str(error).strip().splitlines()[-1]
        raise Unsupported(f"kernels cannot be compiled here: {last}") from error
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if not records:
        raise InvalidInput(f"no kernel variant for these GPUs has {contains!r} in its name")
    return records


def run(args: argparse.Namespace) -> int:
    """Build and print the table; 1 when a variant fails."""
    records = built(architectures(args.arch), args.filter, args.jobs, ())
    print(table(records))
    failed = sum(bool(record["problems"]) for record in records)
    print(f"{len(records) - failed} of {len(records)} built, into {triton_cache_dir()}")
    return int(failed > 0)
