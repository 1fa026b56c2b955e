"""Child process of `compile_only`: builds cases with Triton and prints one JSON line for each.

Runs without TRITON_INTERPRET, even if it is set in the parent.
"""

import argparse
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..core.compat import installed_versions, spills_are_judged
from ..launch.assembler import assembler_options
from ..launch.parameters import UnknownParameters, parameters_of
from ..launch.signature import Signature, pointer_type
from .compile_cases import CompileCase, registered_cases
from .machine_code import misplaced_barriers
from .machine_facts import assembler_log, facts_of

# The most shared memory of one program, in bytes.
SHARED_LIMIT = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


class Specialised(Signature):
    """Signature, constants and attributes of a compile case."""

    def __init__(self, case: CompileCase):
        names = [p.name for p in case.kernel.params]
        if set(names) != set(case.args):
            wrong = sorted(set(names) ^ set(case.args))
            raise ValueError(f"{case.name}: args and kernel parameters differ in {wrong}")
        super().__init__(case.kernel, [_typed(case.args[name]) for name in names])


def _typed(value: Any) -> Any:
    """An argument with the types of pointers in place of dtypes."""
    if isinstance(value, torch.dtype):
        return pointer_type(value)
    if isinstance(value, tuple):
        items = [_typed(x) for x in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def build(case: CompileCase, sm: int, counts: tuple[str, ...]) -> dict[str, Any]:
    """Compile one case for one architecture; return the record that `compile_only` reports."""
    started = time.perf_counter()
    special = Specialised(case)
    launched_with = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    with assembler_log() as log:
        compiled = special.compiled(sm, launched_with)
    extra = case.options.get("ptx_options", "").split()
    # marked kernels are assembled by the one for Blackwell
    brought_for = 100 if assembler_options(case.kernel, sm) else sm
    wanted = dict.fromkeys((*case.expect, *case.forbid, *counts))
    record = facts_of(compiled, brought_for, extra, [*wanted], log.getvalue())
    unwritten = record.pop("unwritten")
    # kernels with asynchronous copies get shared memory at launch, which ptxas does not see
    record["shared"] = max(record["shared"], compiled.metadata.shared)
    record["num_warps"] = case.num_warps
    record["triton"] = installed_versions()["triton"]
    record["problems"] = _problems(case, sm, record) + _unknown_parameters(compiled) + unwritten
    if (places := getattr(case.args.get("CFG"), "placed_barriers", None)) is not None:
        record["problems"] += misplaced_barriers(compiled.asm["ptx"], places())
    record["seconds"] = time.perf_counter() - started
    return record


def _unknown_parameters(compiled: Any) -> list[str]:
    """Why the kernel could not be launched by the CUDA driver, if it could not."""
    try:
        parameters_of(compiled)
    except UnknownParameters as error:
        return [f"cannot be launched directly: {error}"]
    return []


def _problems(case: CompileCase, sm: int, record: dict[str, Any]) -> list[str]:
    problems = []
    spilled = record["spill_stores"] + record["spill_loads"]
    if spilled > case.max_spill_bytes and spills_are_judged():
        problems.append(f"spills {spilled} bytes (accepted: {case.max_spill_bytes})")
    if sm in SHARED_LIMIT and record["shared"] > SHARED_LIMIT[sm]:
        problems.append(f"shared memory {record['shared']} is over {SHARED_LIMIT[sm]}")
    for what, least in case.expect.items():
        if record["counts"][what] < least:
            problems.append(f"{what} occurs {record['counts'][what]} times (at least {least})")
    for what in case.forbid:
        if count := record["counts"][what]:
            problems.append(f"{what} occurs {count} times (at most 0)")
    return problems


def load_cases(package: str, one_of_each: bool = False) -> list[CompileCase]:
    """Import the modules of a package, and return all cases that are registered then."""
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        importlib.import_module(module.name)
    return registered_cases(one_of_each)


def _work(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    jobs = [
        (case, sm)
        for case in load_cases(args.package, args.one_of_each)
        for sm in case.archs
        if sm in args.arch and args.filter in case.name
    ]
    mine = jobs[args.shard :: args.shards]
    yield {"total": len(mine)}
    for case, sm in mine:
        record: dict[str, Any] = {"name": case.name, "arch": sm}
        try:
            record |= build(case, sm, tuple(args.count))
        except Exception as error:  # a kernel that does not build is a result, not a crash
            record["problems"] = [f"{type(error).__name__}: {error}"]
        yield record


def main() -> None:
    """Print the records of this process's share of the cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", required=True)
    parser.add_argument("--arch", type=int, nargs="+", required=True)
    parser.add_argument("--filter", default="")
    parser.add_argument("--count", nargs="*", default=[])
    parser.add_argument("--one-of-each", action="store_true")
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    out = sys.stdout
    sys.stdout = sys.stderr  # output of compilers must not mix with the records
    for record in _work(parser.parse_args()):
        print(json.dumps(record), file=out, flush=True)


if __name__ == "__main__":
    main()
