"""The compiled variants of kernels, found by their arguments and launched by the CUDA driver.

Triton compiles a kernel anew for each set of constants, types, and properties of arguments that its
code may rely on: integers that are 1 or multiples of 16, addresses that are multiples of 16.
Finding the variant again in Triton's front end takes longer than everything else in a call. Here
one pass over the arguments gives both the key of the variant and the values of its parameters.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ..core.arch import arch_of
from ..core.env import triton_interpreted
from ..core.torch_private import raw_device
from .assembler import assembler_options
from .cache_keys import settle_cache_keys
from .compile_hooks import constants_as_text
from .descriptors import Descriptor
from .driver import loaded_function
from .parameters import UnknownParameters
from .prepared import COMPILE_OPTIONS, Variant

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_INT32 = 2**31
# An integer in a key: 1 as it is, others by their size, plus _ALIGNED if 16 divides them. No other
# part of a key is an integer.
_ONE, _NARROW, _WIDE, _ALIGNED = 1, 32, 64, 1000


class _Walk:
    """One pass over the arguments of a launch."""

    __slots__ = ("descriptors", "key", "values")

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.values: list[Any] = []
        # the places of descriptors in `values`, where their tensor maps go
        self.descriptors: list[tuple[int, Descriptor]] = []

    def add(self, x: Any, specialise: bool) -> None:
        """Add an argument that is not a constant of the kernel."""
        kind, key, values = type(x), self.key, self.values
        if kind is int:
            size = _NARROW if -_INT32 <= x < _INT32 else _WIDE
            if not specialise:
                key.append(size)
                values.append(x)
            elif x == 1:
                key.append(_ONE)
            else:
                key.append(size if x & 15 else size + _ALIGNED)
                values.append(x)
        elif kind in _TENSORS:
            address = x.data_ptr()
            key.append(x.dtype)
            if address & 15:
                key.append("unaligned")
            values.append(address)
        elif kind is Descriptor:
            key += (x.base.dtype, x.block)
            self.descriptors.append((len(values), x))
            values.append(0)
            values += x.shape
            values += x.strides
        elif isinstance(x, tuple):
            key += (kind, len(x), "items")
            for item in x:
                # Triton specialises the items of a tuple, whatever the parameter says
                self.add(item, True)
        elif kind is float:
            key.append(float)
            values.append(x)
        elif kind is bool:
            key.append("true" if x else "false")
            values.append(x)
        else:
            # None, functions and the like are constants
            key += (kind, x)


class Launchable(NamedTuple):
    """A variant with the values of its parameters for one launch."""

    variant: Variant
    values: list[Any]
    descriptors: list[tuple[int, Descriptor]]

    def launch(self, grid: int, stream: int) -> None:
        """Launch on `grid` clusters, which may be single programs."""
        maps = [
            (place, encode(x.base.data_ptr(), x.shape, x.strides))
            for encode, (place, x) in zip(self.variant.encoders, self.descriptors, strict=True)
        ]
        self.variant.launch(grid, stream, self.values, maps)


class _Kernel:
    """A kernel's parameters by kind, and its variants."""

    def __init__(self, kernel: Any):
        settle_cache_keys()
        # kept alive, so that its id stays unique
        self.kernel = kernel
        self.runtime: list[tuple[int, bool]] = []
        constants: list[int] = []
        for i, parameter in enumerate(kernel.params):
            if parameter.is_constexpr:
                constants.append(i)
            else:
                self.runtime.append((i, not parameter.do_not_specialize))
        self.constants = itemgetter(*constants) if constants else _no_constants
        self.variants: dict[Any, Variant | None] = {}


def _no_constants(args: Sequence[Any]) -> None:
    return None


_kernels: dict[int, _Kernel] = {}


def find_variant(
    kernel: Any, args: Sequence[Any], cluster: int, options: dict[str, Any]
) -> Launchable | None:
    """The variant of `kernel` for these arguments on the current GPU, compiled if need be.

    It launches clusters of `cluster` programs; machine code does not depend on that.

    None if Triton's front end must launch the kernel: if it is interpreted, or compiled by a
    release whose order of parameters is not known.
    """
    known = _kernels.get(id(kernel))
    if known is None:
        if not hasattr(kernel, "params") or not hasattr(kernel, "warmup"):
            return None
        known = _kernels[id(kernel)] = _Kernel(kernel)
    walk = _Walk()
    add = walk.add
    for i, specialise in known.runtime:
        add(args[i], specialise)
    constants = known.constants(args)
    key = (*walk.key, constants, type(constants), cluster, *options.items(), raw_device())
    try:
        variant = known.variants[key]
    except KeyError:
        variant = known.variants[key] = _compiled_variant(kernel, args, cluster, options, walk)
    return None if variant is None else Launchable(variant, walk.values, walk.descriptors)


def value_places(kernel: Any, args: Sequence[Any]) -> dict[str, int]:
    """The index of each parameter in the values of `find_variant`; for descriptors, the first.

    Items of tuples are named "parameter.field", or "parameter.0". Constants have no place.
    """
    walk, places = _Walk(), {}

    def add(name: str, x: Any, specialise: bool) -> None:
        start = len(walk.values)
        walk.add(x, specialise)
        if len(walk.values) > start:
            places[name] = start

    for parameter, x in zip(kernel.params, args, strict=True):
        if parameter.is_constexpr:
            continue
        if isinstance(x, tuple) and type(x) is not Descriptor:
            for field, item in zip(getattr(x, "_fields", range(len(x))), x, strict=True):
                add(f"{parameter.name}.{field}", item, True)
        else:
            add(parameter.name, x, not parameter.do_not_specialize)
    return places


def _compiled_variant(
    kernel: Any, args: Sequence[Any], cluster: int, options: dict[str, Any], walk: _Walk
) -> Variant | None:
    options = COMPILE_OPTIONS | assembler_options(kernel, current_sm()) | options
    with constants_as_text():
        compiled = kernel.warmup(*map(for_triton, args), grid=(1,), **options)
    try:
        variant = Variant(compiled, _loaded, [x.base.dtype for _, x in walk.descriptors], cluster)
    except UnknownParameters:
        return None
    return variant if len(walk.values) == variant.own else None


def current_sm() -> int:
    """The compute capability of the current GPU, such as 90; 0 if kernels run on none."""
    if triton_interpreted() or not torch.cuda.is_available():
        return 0
    return arch_of(torch.device("cuda", raw_device())).sm


def _loaded(compiled: Any) -> int:
    """The kernel's handle on the current device, onto which it is loaded.

    Not by Triton: 3.6 has gcc compile a launcher for the types of the arguments first, 0.7 s each,
    and takes a kernel with a launcher for loaded, so that a second thread would get no handle.
    """
    index = raw_device()
    metadata, most = compiled.metadata, arch_of(torch.device("cuda", index)).smem_bytes
    if metadata.shared > most:
        from triton.runtime.errors import OutOfResources

        raise OutOfResources(metadata.shared, most, "shared memory")
    # a new thread has no context until it uses the CUDA runtime
    torch.cuda.set_device(index)
    return loaded_function(compiled.asm["cubin"], metadata.name, metadata.shared)


def for_triton(x: Any) -> Any:
    """An argument as Triton's front end takes it."""
    if type(x) is Descriptor:
        return x.for_triton()
    if isinstance(x, tuple) and any(type(item) is Descriptor for item in x):
        items = [for_triton(item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    return x
