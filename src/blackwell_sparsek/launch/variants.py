"""The compiled variants of kernels, found by their arguments and launched by the CUDA driver.

Triton compiles a kernel anew for each set of constants, types, and properties of arguments that its
code may rely on: integers that are 1 or multiples of 16, addresses that are multiples of 16.
Finding the variant again in Triton's front end takes longer than everything else in a call. Here
one pass over the arguments gives both the key of the variant and the values of its parameters.
"""

import ctypes
from collections.abc import Callable, Sequence
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

import torch

from ..core.compat import raw_device
from .descriptors import Descriptor
from .driver import (
    LaunchConfig,
    TensorMap,
    TensorMapEncoder,
    launch_attributes,
    launch_kernel,
)
from .parameters import MapParameters, UnknownParameters, parameters_of

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_INT32 = 2**31
# What a key holds of an integer: that it is 1, or its size, plus this if 16 divides it. Other parts
# of keys are no integers.
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
        """Add an argument that is no constant of the kernel."""
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


class _Buffers:
    """Host memory that one launch at a time reads its configuration and parameters from."""

    __slots__ = ("config", "config_address", "parameters", "places", "places_address")

    def __init__(self, size: int, config: LaunchConfig):
        self.parameters = ctypes.create_string_buffer(8 * size)
        start = ctypes.addressof(self.parameters)
        self.places = (ctypes.c_void_p * size)(*[start + 8 * i for i in range(size)])
        self.config = config
        self.config_address = ctypes.addressof(config)
        self.places_address = ctypes.addressof(self.places)


class Variant:
    """A compiled kernel that the CUDA driver launches."""

    def __init__(self, compiled: Any, descriptors: Sequence[Descriptor], cluster: int):
        parameters = parameters_of(compiled)
        # loads the kernel onto the current device
        compiled.run  # noqa: B018
        metadata = compiled.metadata
        self.overlaps = bool(metadata.launch_pdl)
        self.own, self.pointers = parameters.own, parameters.pointers
        self.encoders = [
            _encoder(x, part) for x, part in zip(descriptors, parameters.maps, strict=True)
        ]
        self._function: int = compiled.function
        self._cluster = cluster
        self._threads = 32 * metadata.num_warps
        self._shared: int = metadata.shared
        self._size = len(parameters.formats)
        self._pack: Callable[..., None] = Struct("=" + "".join(parameters.formats)).pack_into
        # nothing is allocated for Triton's workspaces, which this kernel does not use
        self._workspaces = [0] * (self._size - self.own)
        self._attributes, self._attribute_count = launch_attributes(cluster, self.overlaps)
        self._free: list[_Buffers] = []
        # keeps the kernel loaded
        self._compiled = compiled

    def _buffers(self) -> _Buffers:
        config = LaunchConfig(1, 1, 1, self._threads, 1, 1, self._shared)
        config.attributes = ctypes.addressof(self._attributes)
        config.attribute_count = self._attribute_count
        return _Buffers(self._size, config)

    def launch(
        self, grid: int, stream: int, values: Sequence[Any], maps: Sequence[tuple[int, TensorMap]]
    ) -> None:
        """Launch on `grid` clusters, which may be single programs.

        Parameters
        ----------
        values : one for each of the kernel's own parameters, addresses for tensors
        maps : the tensor maps, each with its place among the parameters
        """
        # two threads must not write to the same buffers: the driver reads them without the GIL
        try:
            buffers = self._free.pop()
        except IndexError:
            buffers = self._buffers()
        self._pack(buffers.parameters, 0, *values, *self._workspaces)
        places = buffers.places
        for place, made in maps:
            places[place] = made.address
        config = buffers.config
        config.grid_x = grid * self._cluster
        config.stream = stream
        launch_kernel(buffers.config_address, self._function, buffers.places_address)
        self._free.append(buffers)


def _encoder(descriptor: Descriptor, part: MapParameters) -> TensorMapEncoder:
    return TensorMapEncoder(descriptor.base.dtype, part.box, part.swizzle)


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
        # held, so that nothing else gets its id
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

    Its launches are in clusters of `cluster` programs: machine code does not depend on that.

    None if Triton's front end must launch it: kernels that are interpreted, or compiled by a
    release whose parameters are not known.
    """
    known = _kernels.get(id(kernel))
    if known is None:
        if not hasattr(kernel, "params") or not hasattr(kernel, "warmup"):
            return None
        known = _kernels[id(kernel)] = _Kernel(kernel)
    walk = _Walk()
    # most arguments are integers and tensors: they are added here, without a call
    add, add_key, add_value = walk.add, walk.key.append, walk.values.append
    for i, specialise in known.runtime:
        x = args[i]
        kind = type(x)
        if kind is int and not specialise:
            add_key(_NARROW if -_INT32 <= x < _INT32 else _WIDE)
            add_value(x)
        elif kind is torch.Tensor and not (address := x.data_ptr()) & 15:
            add_key(x.dtype)
            add_value(address)
        else:
            add(x, specialise)
    constants = known.constants(args)
    key = (*walk.key, constants, type(constants), cluster, *options.items(), raw_device())
    try:
        variant = known.variants[key]
    except KeyError:
        variant = known.variants[key] = _compiled_variant(kernel, args, cluster, options, walk)
    return None if variant is None else Launchable(variant, walk.values, walk.descriptors)


def _compiled_variant(
    kernel: Any, args: Sequence[Any], cluster: int, options: dict[str, Any], walk: _Walk
) -> Variant | None:
    compiled = kernel.warmup(*map(for_triton, args), grid=(1,), **options)
    try:
        variant = Variant(compiled, [x for _, x in walk.descriptors], cluster)
    except UnknownParameters:
        return None
    return variant if len(walk.values) == variant.own else None


def for_triton(x: Any) -> Any:
    """An argument as Triton's front end takes it."""
    if type(x) is Descriptor:
        return x.for_triton()
    if isinstance(x, tuple) and any(type(item) is Descriptor for item in x):
        items = [for_triton(item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    return x
