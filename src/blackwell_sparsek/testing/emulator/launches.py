"""Launches of Triton and Gluon kernels on tensors of the CPU, through the emulator.

    with emulated_launches(seed=0):
        launch_attn_fwd_sm90(out, lse, call, config)

compiles what the launcher launches for sm_90, and runs the PTX. Public functions work as well, with
`impl="sm90"`. Triton must not interpret kernels in this process.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from ...core import torch_private
from ...launch.descriptors import Descriptor, descriptor_type
from ...launch.parameters import MapParameters, parameters_of
from ...launch.signature import Signature, Unaligned, pointer_type
from ...launch.variants import _Walk
from ...launch.workspace import made_outside_pool
from ..captured_launches import launches_taken_by
from .hopper import TensorMap
from .instructions import compiled
from .machine import Machine
from .memory import GlobalMemory
from .program import Program, parse


class _Built(NamedTuple):
    """A compiled kernel."""

    program: Program
    maps: tuple[MapParameters, ...]
    parameters: int
    warps: int
    shared: int


_built: dict[Any, _Built] = {}


@contextmanager
def emulated_launches(
    *, seed: int = 0, processors: int = 4, sm: int = 90, seconds: float | None = None
) -> Iterator[list[Machine]]:
    """Run launches of kernels in the emulator; yields the list of those that were run.

    Parameters
    ----------
    seed : draws the order of warps and the delays of copies
    processors : how many multiprocessors launchers see, which sets the number of programs
    sm : the compute capability that launchers see
    seconds : the longest launch; a longer one raises TimeoutError
    """
    machines: list[Machine] = []

    def run(kernel: Any, grid: int, args: Any, cluster: int, options: dict[str, Any]) -> None:
        machine = _machine(kernel, grid, args, cluster, options, sm, seed)
        machines.append(machine)
        machine.run(seconds)

    # what host code asks of a GPU besides its architecture
    answers: dict[Any, Any] = {
        torch_private.raw_device: lambda: None,
        torch_private.raw_stream: lambda device: 0,
        made_outside_pool: lambda make, device: make(),
    }
    no_capture = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)
    with no_capture, launches_taken_by(run, sm, processors=processors, answers=answers):
        yield machines


def _machine(
    kernel: Any,
    grid: int,
    args: Sequence[Any],
    cluster: int,
    options: dict[str, Any],
    sm: int,
    seed: int,
) -> Machine:
    walk = _Walk()
    for value, parameter in zip(args, kernel.params, strict=True):
        if not parameter.is_constexpr:
            walk.add(value, not parameter.do_not_specialize)
    constants = tuple(v for v, p in zip(args, kernel.params, strict=True) if p.is_constexpr)
    key = (id(kernel), *walk.key, constants, sm, *options.items())
    built = _built.get(key)
    if built is None:
        built = _built[key] = _build(kernel, args, options, sm)
    if len(walk.values) != built.parameters:
        raise ValueError(f"{len(walk.values)} values for {built.parameters} parameters")
    values: list[Any] = [*walk.values, 0, 0]
    for part, (place, given) in zip(built.maps, walk.descriptors, strict=True):
        assert part.place == place
        values[place] = _tensor_map(given, part)
    return Machine(
        built.program,
        values,
        GlobalMemory(list(_tensors(args))),
        grid * cluster,
        built.warps,
        built.shared,
        cluster,
        seed=seed,
        compile_step=compiled,
    )


def _build(kernel: Any, args: Sequence[Any], options: dict[str, Any], sm: int) -> _Built:
    special = Signature(kernel, [_typed(x) for x in args])
    compiled = special.compiled(sm, options)
    parameters = parameters_of(compiled)
    program = parse(compiled.asm["ptx"])
    # warps of roles come on top of those of the launch
    warps = max(compiled.metadata.num_warps, program.threads // 32)
    return _Built(program, parameters.maps, parameters.own, warps, compiled.metadata.shared)


def _typed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        kind = pointer_type(value.dtype)
        return Unaligned(kind) if value.data_ptr() & 15 else kind
    if isinstance(value, Descriptor):
        return descriptor_type(value.block, value.base.dtype)
    if isinstance(value, tuple):
        items = [_typed(x) for x in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Descriptor):
            yield value.base
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _tensor_map(given: Descriptor, part: MapParameters) -> TensorMap:
    element = given.base.element_size()
    return TensorMap(
        given.base.data_ptr(),
        tuple(given.shape),
        tuple(x * element for x in given.strides),
        part.box,
        element,
        part.swizzle,
        given.base.dtype.is_floating_point,
    )
