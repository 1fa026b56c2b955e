"""`bsk compile`: build kernels for a GPU before their first use, with or without that GPU."""

import argparse
import sys
from typing import Any

import torch

from ...core.arch import arch_of
from ...core.compat import why_triton_fails
from ...core.env import triton_cache_dir
from ...core.errors import InvalidInput, Unsupported
from ...core.progress import Progress
from ...testing.compile_only import compile_kernels, table
from ..arguments import known_architectures


def architectures(asked: list[int] | None) -> list[int]:
    """The compute capabilities that were asked for; by default that of this machine."""
    if asked is not None:
        return asked
    if torch.cuda.is_available():
        return [arch_of(torch.device("cuda")).sm]
    known = known_architectures()
    raise InvalidInput(f"there is no GPU here; name one to compile for with --arch: {known}")


Records = list[dict[str, Any]]


def built(
    command: str, archs: list[int], contains: str, jobs: int, counts: tuple[str, ...]
) -> Records:
    """Build kernels, showing progress on stderr."""
    if (reason := why_triton_fails()) is not None:
        raise Unsupported(f"kernels cannot be compiled here: {reason}")
    with Progress(command) as progress:
        names = ", ".join(f"sm_{arch}" for arch in archs)
        progress.stage(0, f"collecting variants of {contains or 'all kernels'} for {names}")

        def show(done: int, total: int, record: dict[str, Any]) -> None:
            progress.total = total
            progress.stage(done - 1, f"{record['name']} sm_{record['arch']}")

        try:
            records = compile_kernels(archs, contains, counts=counts, jobs=jobs, progress=show)
        except RuntimeError as error:  # a compiler process has ended, as on a failed import
            print(error, file=sys.stderr)
            last = str(error).strip().splitlines()[-1]
            raise Unsupported(f"kernels cannot be compiled here: {last}") from error
    if not records:
        raise InvalidInput(f"no kernel variant for these GPUs has {contains!r} in its name")
    return records


def run(args: argparse.Namespace) -> int:
    """Build and print the table; 1 when a variant fails."""
    records = built("bsk compile", architectures(args.arch), args.filter, args.jobs, ())
    print(table(records))
    failed = sum(bool(record["problems"]) for record in records)
    print(f"{len(records) - failed} of {len(records)} built, into {triton_cache_dir()}")
    return int(failed > 0)
