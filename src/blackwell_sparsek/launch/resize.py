"""Launches made again with other sizes: the same kernel, other addresses, integers and grid.

`launch.templates` repeats launches whose integers never change. Here the caller says which integers
differ, and passes their values.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .driver import TensorMap
from .prepared import Prepared
from .recording import Launch
from .variants import Launchable, value_places

# The source of a tensor map: address, shape, strides in elements. A plain tuple, because a
# NamedTuple takes seven times as long to make.
MapSource = tuple[int, Sequence[int], Sequence[int]]


class _OwnMap(NamedTuple):
    """A tensor map that belongs to one prepared launch, and the function that encodes it."""

    encode: Callable[[TensorMap, int, Sequence[int], Sequence[int]], None]
    made: TensorMap


class _Resizable(NamedTuple):
    """A prepared launch with its tensor maps."""

    prepared: Prepared
    maps: list[_OwnMap]


class ResizableLaunch:
    """A launch that can be made again with other values.

    Parameters
    ----------
    launch : recorded, by the CUDA driver
    names : the parameters that differ between launches, as `value_places` names them: tensors, and
        integers on which the kernel is not specialised
    """

    def __init__(self, launch: Launch, names: Sequence[str]):
        launched: Launchable = launch.launched
        places = value_places(launch.kernel, launch.args)
        self._variant = launched.variant
        self._values = launched.values
        self._places = [places[name] for name in names]
        self._map_places = [place for place, _ in launched.descriptors]
        self._free: list[_Resizable] = []

    def run(
        self, grid: int, stream: int, values: Sequence[int], tensors: Sequence[MapSource]
    ) -> None:
        """Launch with `values` for the parameters named, and these tensors for the descriptors."""
        # one per thread that launches at the same time; the driver copies parameters and maps
        try:
            made = self._free.pop()
        except IndexError:
            made = self._new()
        prepared, maps = made
        words = prepared.words
        for place, value in zip(self._places, values, strict=True):
            words[place] = value
        for (encode, to), (address, shape, strides) in zip(maps, tensors, strict=True):
            encode(to, address, shape, strides)
        prepared.launch_on(grid, stream)
        self._free.append(made)

    def _new(self) -> _Resizable:
        """A launch that takes its tensor maps, and their sizes, from where `encode` writes them."""
        prepared, maps = self._variant.prepared(1, self._values), []
        for place, encoder in zip(self._map_places, self._variant.encoders, strict=True):
            encoded = encoder.empty()
            prepared.places[place] = encoded.address
            for i, parameter in enumerate(encoded.parameters, place + 1):
                prepared.places[i] = parameter
            maps.append(_OwnMap(encoder.encode, encoded))
        return _Resizable(prepared, maps)
