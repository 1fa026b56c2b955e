"""Compile cases made by the launchers, so that tests compile what would be launched.

A launcher runs on tensors of the meta device while launches only record the kernel, its arguments
and its options. Nothing is compiled or run, and no GPU is needed.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from ..core import arch
from ..launch import launcher
from ..launch.descriptors import Descriptor, descriptor_type
from .compile_cases import CompileCase

# An H200; launchers ask how many programs fill the GPU.
_H200 = arch.Arch("cuda", 90, 132, 232448, False)


class Launch(NamedTuple):
    """One captured launch: the kernel, its arguments in order, its launch options."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def launches_taken_by(
    take: Callable[..., None],
    sm: int,
    *,
    processors: int = _H200.num_sms,
    answers: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
) -> Iterator[None]:
    """Hand launches to `take`, with the arguments of `launcher.launch_kernel`.

    To launchers, every device looks like a GPU of compute capability `sm` with `processors`
    multiprocessors. `answers` replaces further functions that host code asks.
    """
    gpu = replace(_H200, sm=sm, num_sms=processors)
    replaced = {arch.arch_of: lambda device: gpu, **(answers or {})}
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(launcher, "launch_kernel", take))
        # modules import these functions by name, so each of them needs the patch
        for module, name, function in _holders(replaced):
            patches.enter_context(mock.patch.object(module, name, replaced[function]))
        yield


def _holders(functions: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """Where modules of this package hold these functions: module, name, function."""
    # most launchers take less time than this search would take by equality
    wanted = {id(function) for function in functions}
    return [
        (module, name, value)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("blackwell_sparsek")
        for name, value in list(vars(module).items())
        if id(value) in wanted
    ]


@contextmanager
def captured_launches(sm: int = 90) -> Iterator[list[Launch]]:
    """Record launches of Triton and Gluon kernels in the list, without making them.

    To launchers, every device looks like an H200, except for its compute capability `sm`.
    """
    launches: list[Launch] = []

    def note(kernel: Any, grid: int, args: Any, cluster: int, options: dict[str, Any]) -> None:
        launches.append(Launch(kernel, tuple(args), options))

    with launches_taken_by(note, sm):
        yield launches


def launched_case(
    name: str,
    launcher: Callable[..., Any],
    *args: Any,
    kernel: Any = None,
    sm: int = 90,
    expect: dict[str, int] | None = None,
    forbid: tuple[str, ...] = (),
    max_spill_bytes: int = 0,
    archs: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> CompileCase:
    """The compile case of what `launcher(*args, **kwargs)` launches, on tensors of the meta device.

    Parameters
    ----------
    name : name of the case
    kernel : if there are several launches, take the last one of this kernel
    sm : the compute capability that the launcher sees
    expect, forbid, max_spill_bytes, archs : as in `CompileCase`
    """
    with captured_launches(sm) as launches:
        launcher(*args, **kwargs)
    made = [launch for launch in launches if kernel is None or launch.kernel is kernel]
    if not made:
        raise ValueError(f"{name}: the launcher launched nothing of that kernel")
    if kernel is None and len(made) > 1:
        raise ValueError(f"{name}: {len(made)} launches; `kernel` says which is meant")
    launch = made[-1]
    names = [parameter.name for parameter in launch.kernel.params]
    options = dict(launch.options)
    values = dict(zip(names, launch.args, strict=True))
    known: dict[str, Any] = {}
    if archs is not None:
        known["archs"] = archs
    for option in ("num_warps", "num_stages"):
        if option in options:
            known[option] = options.pop(option)
    return CompileCase(
        name=name,
        kernel=launch.kernel,
        args={key: _described(value) for key, value in values.items()},
        options=options,
        expect=expect or {},
        forbid=forbid,
        max_spill_bytes=max_spill_bytes,
        **known,
    )


def _described(value: Any) -> Any:
    """An argument of a launch as a compile case names it: tensors by dtype, descriptors by type."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, Descriptor):
        return descriptor_type(value.block, value.base.dtype)
    if isinstance(value, tuple):
        described = [_described(x) for x in value]
        return type(value)(*described) if hasattr(value, "_fields") else tuple(described)
    return value


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory, for launchers whose launches are captured."""
    return torch.empty(shape, dtype=dtype, device="meta")
