"""Compiled kernels and their packed parameters, as the CUDA driver takes them; no framework."""

import ctypes
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, NamedTuple

from .driver import (
    LaunchConfig,
    TensorMap,
    TensorMapEncoder,
    launch_attributes,
    launch_kernel,
)
from .parameters import parameters_of

# Options that every kernel is compiled with, besides its own. Multiplications and additions are
# fused as they always were, whatever a release or TRITON_DEFAULT_FP_FUSION takes for a default:
# Triton 3.9 warns that 3.10 will not fuse.
COMPILE_OPTIONS = {"enable_fp_fusion": True}
# Tensor maps kept for each descriptor, 128 bytes each: the layers of a model have tensors of one
# shape at many addresses, which recur in every step.
MAX_TENSOR_MAPS = 256


class Prepared:
    """A launch whose parameters are packed in host memory, for one thread at a time.

    `words` are the parameters, 8 bytes each, in which addresses and integers may be replaced before
    a launch. `places` is where the driver finds each parameter: that of a tensor map is set to the
    map.
    """

    __slots__ = (
        *("_cluster", "_config", "_config_address", "_function", "_places_address"),
        *("places", "words"),
    )

    def __init__(self, function: int, size: int, config: LaunchConfig, cluster: int):
        self.words: Any = (ctypes.c_uint64 * size)()
        start = ctypes.addressof(self.words)
        self.places: Any = (ctypes.c_void_p * size)(*[start + 8 * i for i in range(size)])
        self._config = config
        self._cluster = cluster
        self._function = function
        self._config_address = ctypes.addressof(config)
        self._places_address = ctypes.addressof(self.places)

    def launch(self, stream: int) -> None:
        """Launch; the driver copies the parameters before it returns."""
        self._config.stream = stream
        launch_kernel(self._config_address, self._function, self._places_address)

    def launch_on(self, grid: int, stream: int) -> None:
        """Launch on `grid` clusters, which may be single programs."""
        self._config.grid_x = grid * self._cluster
        self.launch(stream)


class Variant:
    """A compiled kernel that the CUDA driver launches.

    `load` takes it to the current device and returns its handle there; `dtypes` are those of the
    arrays that it copies by TMA.
    """

    def __init__(
        self, compiled: Any, load: Callable[[Any], int], dtypes: Sequence[Any], cluster: int
    ):
        parameters = parameters_of(compiled)
        metadata = compiled.metadata
        self.overlaps: bool = bool(metadata.launch_pdl)
        self.own: int = parameters.own
        self.pointers: tuple[int, ...] = parameters.pointers
        self.encoders: list[TensorMapEncoder] = [
            TensorMapEncoder(dtype, part.box, part.swizzle)
            for dtype, part in zip(dtypes, parameters.maps, strict=True)
        ]
        self._function = load(compiled)
        self._cluster = cluster
        self._threads = 32 * metadata.num_warps
        self._shared: int = metadata.shared
        self._size = len(parameters.formats)
        self._pack: Callable[..., None] = Struct("=" + "".join(parameters.formats)).pack_into
        # nothing is allocated for Triton's workspaces, which this kernel does not use
        self._workspaces = [0] * (self._size - self.own)
        self._attributes, self._attribute_count = launch_attributes(
            cluster, self.overlaps, bool(metadata.launch_cooperative_grid)
        )
        self._free: list[Prepared] = []
        # keeps the kernel loaded
        self._compiled = compiled

    def prepared(self, grid: int, values: Sequence[Any]) -> Prepared:
        """A launch on `grid` clusters, which may be single programs, but for its tensor maps.

        `values` has one for each of the kernel's own parameters, addresses for tensors.
        """
        config = LaunchConfig(grid * self._cluster, 1, 1, self._threads, 1, 1, self._shared)
        config.attributes = ctypes.addressof(self._attributes)
        config.attribute_count = self._attribute_count
        made = Prepared(self._function, self._size, config, self._cluster)
        self._pack(made.words, 0, *values, *self._workspaces)
        return made

    def launch(
        self, grid: int, stream: int, values: Sequence[Any], maps: Sequence[tuple[int, TensorMap]]
    ) -> None:
        """Launch with `values` as in `prepared`, and each tensor map in its place."""
        # two threads must not write to the same memory: the driver reads it without the GIL
        try:
            made = self._free.pop()
        except IndexError:
            made = self.prepared(grid, values)
        else:
            self._pack(made.words, 0, *values, *self._workspaces)
        places = made.places
        for place, encoded in maps:
            places[place] = encoded.address
        made.launch_on(grid, stream)
        self._free.append(made)


class Slot(NamedTuple):
    """A parameter that takes the address of the array with this role."""

    place: int
    role: int


class MapSlot(NamedTuple):
    """A parameter that takes the tensor map of an array; `maps` keeps those made, by address."""

    place: int
    role: int
    encode: Callable[..., TensorMap]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    maps: dict[int, TensorMap]


class Template:
    """One launch with packed parameters, some of which differ between calls."""

    def __init__(
        self,
        variant: Variant,
        grid: int,
        values: Sequence[Any],
        slots: Sequence[Slot],
        maps: Sequence[MapSlot],
    ):
        self.variant = variant
        self._grid = grid
        self._values = values
        self._slots = slots
        self._maps = maps
        self._free: list[Prepared] = []

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch with arrays at these addresses, by role."""
        # one for each thread that launches at the same time
        try:
            prepared = self._free.pop()
        except IndexError:
            prepared = self.variant.prepared(self._grid, self._values)
        words = prepared.words
        for place, role in self._slots:
            words[place] = addresses[role]
        # another thread may clear `slot.maps` before the launch
        held = []
        for slot in self._maps:
            address = addresses[slot.role]
            encoded = slot.maps.get(address) or _encoded(slot, address)
            held.append(encoded)
            prepared.places[slot.place] = encoded.address
        prepared.launch(stream)
        self._free.append(prepared)


def _encoded(slot: MapSlot, address: int) -> TensorMap:
    """The tensor map for an array at `address`, kept for later launches."""
    if len(slot.maps) >= MAX_TENSOR_MAPS:
        slot.maps.clear()
    slot.maps[address] = made = slot.encode(address, slot.shape, slot.strides)
    return made
