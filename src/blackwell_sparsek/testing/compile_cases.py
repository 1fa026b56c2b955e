"""Compile cases: variants of kernels that are compiled without their GPU.

Functions under `@compile_cases` yield the variants worth building; `testing/cases` has one file for
each operation. `blackwell_sparsek.testing.compile_only` builds them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ALL_ARCHS = (80, 89, 90, 100, 120)


@dataclass(frozen=True)
class CompileCase:
    """One kernel with the types and constants of one launch.

    Parameters
    ----------
    name : unique, `<kernel>/<variant>`
    kernel : a `@triton.jit` or `@gluon.jit` function
    args : a value for each parameter, as a launch would pass it. A `torch.dtype` stands for an
        aligned tensor of it, a `str` for a type in Triton's spelling; ints, floats, None, tuples
        and constexpr values are passed as they are, and specialise as in a launch.
    archs : the compute capabilities it is built for, 90 for sm_90
    num_warps, num_stages : launch options
    options : further launch options, such as `maxnreg`
    expect : for each instruction the least number of times it must occur, `wgmma` in the PTX or
        `sass:HGMMA` in the machine code
    forbid : instructions that must not occur
    max_spill_bytes : spilled bytes (stores and loads) that are accepted with the release of
        Triton they were counted with; with other releases spills are only reported
    """

    name: str
    kernel: Any
    args: Mapping[str, Any]
    archs: tuple[int, ...] = ALL_ARCHS
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    expect: Mapping[str, int] = field(default_factory=dict)
    forbid: tuple[str, ...] = ()
    max_spill_bytes: int = 0


CaseSource = Callable[[], Iterator[CompileCase]]
_sources: list[CaseSource] = []


def compile_cases(source: CaseSource) -> CaseSource:
    """Register a function that yields `CompileCase`s."""
    _sources.append(source)
    return source


def registered_cases(one_of_each: bool = False) -> list[CompileCase]:
    """All cases of the files imported so far; names must be unique.

    With `one_of_each`, only the first one of each kernel that a function yields.
    """
    cases = []
    for source in _sources:
        kernels: set[str] = set()
        for case in source():
            kernel = case.name.split("/")[0]
            if not (one_of_each and kernel in kernels):
                cases.append(case)
            kernels.add(kernel)
    names = [case.name for case in cases]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"compile cases with the same name: {', '.join(duplicates)}")
    return cases
