"""Launches made again with other sizes: the same kernel, other addresses, integers and grid.

`launch.templates` repeats launches whose integers never change. Here whoever repeats a launch says
which integers differ, and what they are.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .driver import TensorMap, TensorMapEncoder
from .recording import Launch
from .variants import Launchable, value_places


class MapSource(NamedTuple):
    """What the tensor map of one tensor is made from; strides in elements."""

    address: int
    shape: Sequence[int]
    strides: Sequence[int]


class _Map(NamedTuple):
    """Where a descriptor stands among the parameters, and how its tensor map is made."""

    place: int
    encoder: TensorMapEncoder
    sizes: slice


class ResizableLaunch:
    """A launch to be made again.

    Parameters
    ----------
    launch : as the CUDA driver made it
    names : the parameters that differ from launch to launch, as `value_places` names them: tensors,
        and integers on which the kernel is not specialised
    """

    def __init__(self, launch: Launch, names: Sequence[str]):
        launched: Launchable = launch.launched
        places = value_places(launch.kernel, launch.args)
        self._variant = launched.variant
        self._values = launched.values
        self._places = [places[name] for name in names]
        encoders = launched.variant.encoders
        self._maps = [
            _Map(place, encoder, slice(place + 1, place + 1 + 2 * len(x.shape)))
            for encoder, (place, x) in zip(encoders, launched.descriptors, strict=True)
        ]
        self._free: list[list[TensorMap]] = []

    def run(
        self, grid: int, stream: int, values: Sequence[int], tensors: Sequence[MapSource]
    ) -> None:
        """Launch with `values` for the parameters named, and these tensors for the descriptors."""
        made = self._values.copy()
        for place, value in zip(self._places, values, strict=True):
            made[place] = value
        # one set for each thread that launches at the same time; the driver copies maps
        try:
            encoded = self._free.pop()
        except IndexError:
            encoded = [TensorMap() for _ in self._maps]
        maps = []
        for (place, encoder, sizes), x, to in zip(self._maps, tensors, encoded, strict=True):
            encoder.encode(to, *x)
            made[sizes] = (*x.shape, *x.strides)
            maps.append((place, to))
        self._variant.launch(grid, stream, made, maps)
        self._free.append(encoded)
