"""Compile cases made by the launchers, so that tests compile what would be launched.

A launcher runs on tensors of the meta device while launches only record the kernel, its arguments
and its options. Nothing is compiled or run, and no GPU is needed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from ..core import arch
from ..launch import launcher
from ..launch.descriptors import Descriptor, descriptor_type
from .compile_cases import CompileCase

# An H200, except for the compute capability: launchers ask how many programs fill the GPU.
_GPU = arch.Arch("cuda", 90, 132, 232448, False)


class Launch(NamedTuple):
    """One captured launch: the kernel, its arguments in order, its launch options."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def captured_launches(sm: int = 90) -> Iterator[list[Launch]]:
    """Record launches of Triton and Gluon kernels in the list, without making them.

    To launchers, every device looks like a GPU of compute capability `sm`.
    """
    launches: list[Launch] = []

    def note(kernel: Any, grid: int, args: Any, cluster: int, options: dict[str, Any]) -> None:
        launches.append(Launch(kernel, tuple(args), options))

    gpu = replace(_GPU, sm=sm)
    # modules import `arch_of` by name, so each needs the patch; a module that loads its names when
    # asked for them would fail here if one of its packages is missing
    modules = [
        module
        for module in list(sys.modules.values())
        if getattr(module, "__dict__", {}).get("arch_of") is arch.arch_of
    ]
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(launcher, "launch_kernel", note))
        for module in modules:
            patches.enter_context(mock.patch.object(module, "arch_of", lambda device: gpu))
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
