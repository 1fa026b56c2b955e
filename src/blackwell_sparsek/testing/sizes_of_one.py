"""Builds kernels for sizes and strides of 1, which Triton turns into constants.

A head dimension of 1 gives a token stride of 1, a single KV head a count of 1, and so on. Triton
passes such an argument to the kernel as a constexpr, also inside a tuple, so that code which is
fine for every other size may not compile. `python -m blackwell_sparsek.testing.sizes_of_one
[filter]` takes the compile cases, sets their integers to 1, all together and one field name at a
time, and runs Triton's front end, where such errors arise. No GPU is needed.

It also looks at the records that launches pass. Triton 3.6 loses constants inside a record that
holds both plain values and other records: it derives the type of the outer record before the
constants of the inner ones are known, and after the next branch or loop they are None. Records
must hold one kind or the other.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from ..core.compat import installed_versions
from .compile_cases import CompileCase
from .compile_only import CASES
from .compile_worker import Specialised, load_cases
from .kept import kept


def run_time_arguments(case: CompileCase) -> dict[str, Any]:
    """The arguments of a case that are not constants of the kernel."""
    constants = {p.name for p in case.kernel.params if p.is_constexpr}
    return {name: value for name, value in case.args.items() if name not in constants}


def mixed_records(value: Any, path: str) -> list[str]:
    """Where a tuple holds both plain values and tuples that Triton may find constants in."""
    if not isinstance(value, tuple):
        return []
    problems = []
    plain = [name for name, x in _fields(value) if not isinstance(x, tuple)]
    for name, x in _fields(value):
        if isinstance(x, tuple):
            if plain and _may_hold_constants(x):
                problems.append(
                    f"{path} ({type(value).__name__}) holds the record {name} beside the plain "
                    f"values {', '.join(plain)}: put these into a record of their own"
                )
            problems += mixed_records(x, f"{path}.{name}")
    return problems


def _may_hold_constants(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_may_hold_constants(x) for x in value)
    return value is None or type(value) is int or callable(value)


def _fields(value: tuple[Any, ...]) -> list[tuple[str, Any]]:
    names = getattr(value, "_fields", None) or map(str, range(len(value)))
    return list(zip(names, value, strict=True))


def variants(case: CompileCase, every_field: bool) -> Iterator[tuple[str, CompileCase]]:
    """The case with all its integers set to 1, then with those of each field name in turn."""
    arguments = run_time_arguments(case)
    names: list[str | None] = [None]
    if every_field:
        names += sorted(set(_integer_fields("", tuple(arguments.values()))) - {""})
    for name in names:
        ones = {key: _with_ones(key, value, name) for key, value in arguments.items()}
        yield name or "all", replace(case, args={**case.args, **ones})


def _integer_fields(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, tuple):
        # the arguments themselves have names that only one value bears
        named = _fields(value) if hasattr(value, "_fields") else [("", x) for x in value]
        for field, x in named:
            yield from _integer_fields(field, x)
    elif type(value) is int:
        yield name


def _with_ones(name: str, value: Any, wanted: str | None) -> Any:
    if isinstance(value, tuple):
        values = [_with_ones(field, x, wanted) for field, x in _fields(value)]
        return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
    return 1 if type(value) is int and wanted in (None, name) else value


def build_ir(case: CompileCase, sm: int) -> Any:
    """Run Triton's front end; raises what a compilation would raise there."""
    code = _source(case)
    target = GPUTarget("cuda", sm, 32)
    backend = make_backend(target)
    asked = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    options = backend.parse_options({**asked, **code.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    return code.make_ir(target, options, functions, backend.get_module_map(), context)


def _source(case: CompileCase) -> ASTSource:
    special = Specialised(case)
    source: type[ASTSource] = ASTSource
    if getattr(case.kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource
    return source(case.kernel, special.signature, special.constants, special.attrs)


def _reason(error: BaseException) -> str:
    """The innermost message: Triton wraps an error once for each function it passes through."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _kind(case: CompileCase) -> tuple[Any, ...]:
    """Cases of one kind have the same kernel and the same arguments that are None."""

    def absent(value: Any) -> Any:
        return tuple(map(absent, value)) if isinstance(value, tuple) else value is None

    return case.kernel, tuple(map(absent, run_time_arguments(case).values()))


def check(contains: str, quick: bool, part: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Records with `name`, `variant` and `problems`, empty where all is well.

    Parameters
    ----------
    contains : only cases whose name contains this
    quick : one case of each kernel, with all integers 1 at once
    part : (i, n), only every n-th kind of case from the i-th on
    """
    kinds: dict[Any, CompileCase] = {}
    for case in load_cases(CASES):
        if contains not in case.name:
            continue
        records = run_time_arguments(case).items()
        if problems := [p for name, value in records for p in mixed_records(value, name)]:
            yield {"name": case.name, "variant": "records", "problems": problems}
        kinds.setdefault(case.kernel if quick else _kind(case), case)
    for case in list(kinds.values())[part[0] :: part[1]]:
        sm = 90 if 90 in case.archs else case.archs[0]
        for label, variant in variants(case, every_field=not quick):
            yield {"name": case.name, "variant": label, "problems": _problems(variant, sm)}


def _problems(case: CompileCase, sm: int) -> list[str]:
    """Why Triton's front end refuses a case; nothing if it does not."""
    try:
        kept("front_end", _asked(case, sm), lambda: build_ir(case, sm) is not None)
    except Exception as error:  # a kernel that does not build is a result, not a crash
        return [_reason(error)]
    return []


def _asked(case: CompileCase, sm: int) -> str:
    """All that the front end's answer depends on, functions among the arguments included."""
    options = (case.num_warps, case.num_stages, case.options, sm, installed_versions()["triton"])
    return f"{_source(case).hash()} {options} {pathlib.Path(__file__).read_text()}"


def main() -> int:
    """Command line: a line for each build, as JSON with `--json`; 1 when one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m blackwell_sparsek.testing.sizes_of_one", description=__doc__
    )
    parser.add_argument("filter", nargs="?", default="", help="only cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one build of each kernel")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"))
    parser.add_argument("--json", action="store_true", help="print records as JSON lines")
    args = parser.parse_args()
    failed = 0
    for record in check(args.filter, args.quick, tuple(args.part)):
        failed += bool(record["problems"])
        if args.json:
            print(json.dumps(record), flush=True)
        else:
            verdict = "\n    ".join(["FAILED", *record["problems"]]) if record["problems"] else "ok"
            print(f"{record['name']}  {record['variant']}  {verdict}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    if triton.knobs.runtime.interpret:
        sys.exit("unset TRITON_INTERPRET: kernels that are interpreted cannot be compiled")
    sys.exit(main())
