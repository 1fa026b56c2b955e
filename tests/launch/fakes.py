"""Launches without a GPU: variants that only note what they are launched with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.runtime import JITFunction

from blackwell_sparsek.launch import launcher
from blackwell_sparsek.launch.descriptors import Descriptor
from blackwell_sparsek.launch.driver import TensorMap
from blackwell_sparsek.launch.variants import Launchable, _Walk


class FakeMap:
    def __init__(self, address: int):
        self.address = address


class FakeVariant:
    """Notes the arguments of each launch: addresses for tensors, `("map", address)` for maps."""

    overlaps = False

    def __init__(self, walk: _Walk, args: Any, note: Callable[..., None]):
        maps = {place for place, _ in walk.descriptors}
        tensors = {x.data_ptr() for x in _tensors(args)}
        self.args = _without_tensors(args)
        places = range(len(walk.values))
        self.pointers = [i for i in places if walk.values[i] in tensors and i not in maps]
        self.encoded: list[int] = []
        self.encoders = [self._encode] * len(maps)
        self.note = note

    def _encode(self, address: int, shape: Any, strides: Any) -> FakeMap:
        self.encoded.append(address)
        return FakeMap(address)

    def prepared(self, grid: int, values: list[Any]) -> "FakePrepared":
        return FakePrepared(self, grid, values)


class FakePrepared:
    def __init__(self, variant: FakeVariant, grid: int, values: list[Any]):
        self.words, self.places = list(values), {}
        self._variant, self._grid = variant, grid

    def launch(self, stream: int) -> None:
        values = list(self.words)
        for place, address in self.places.items():
            values[place] = ("map", address)
        left = iter(values)
        args = [_filled(x, left) for x in self._variant.args]
        self._variant.note(self._grid, stream, args)


class _Made(Launchable):
    def launch(self, grid: int, stream: int) -> None:
        """The launch of a call that is made in full."""


def fake_variants(
    monkeypatch: pytest.MonkeyPatch, note: Callable[[int, int, list[Any]], None]
) -> None:
    """Let every kernel have a variant, whose repeated launches `note` gets."""

    def find(kernel: Any, args: Any, cluster: int, options: Any) -> Launchable:
        walk = _Walk()
        if any(torch._C._functorch.is_batchedtensor(x) for x in _tensors(args)):
            args = ()  # tensors without an address
        for x in args:
            walk.add(x, False)
        made = FakeVariant(walk, args, note)
        return _Made(made, walk.values, walk.descriptors)  # type: ignore[arg-type]

    monkeypatch.setattr(launcher, "find_variant", find)
    monkeypatch.setattr(launcher, "raw_device", lambda: 0)
    monkeypatch.setattr(launcher, "raw_stream", lambda device: 0)


class _NotingEncoder:
    """Notes what each tensor map was made from, by the address of the map."""

    def __init__(self, sources: dict[int, Any]):
        self._sources = sources

    def __call__(self, *source: Any) -> TensorMap:
        made = self.empty()
        self.encode(made, *source)
        return made

    def empty(self) -> TensorMap:
        return TensorMap()

    def encode(self, made: TensorMap, *source: Any) -> None:
        self._sources[made.address] = source


class _NotingVariant:
    overlaps = False
    pointers = ()

    def __init__(self, walk: _Walk, kernel: Any, launched: list[Any]):
        self._sources: dict[int, Any] = {}
        self.encoders = [_NotingEncoder(self._sources) for _ in walk.descriptors]
        self._kernel, self._launched = kernel, launched

    def prepared(self, grid: int, values: Any) -> "_NotingPrepared":
        return _NotingPrepared(self, grid, values)

    def launch(self, grid: int, stream: int, values: Any, maps: Any) -> None:
        self.note(grid, stream, values, {place: encoded.address for place, encoded in maps})

    def note(self, grid: int, stream: int, values: Any, maps: dict[int, int]) -> None:
        sources = {place: self._sources[address] for place, address in maps.items()}
        self._launched.append((self._kernel, grid, stream, list(values), sources))


class _NotingPrepared:
    def __init__(self, variant: _NotingVariant, grid: int, values: Any):
        self.words, self.places = list(values), {}
        self._variant, self._grid = variant, grid

    def launch(self, stream: int) -> None:
        self.launch_on(self._grid, stream)

    def launch_on(self, grid: int, stream: int) -> None:
        self._variant.note(grid, stream, self.words, self.places)


def resizing_on_the_cpu(monkeypatch: pytest.MonkeyPatch, resizing: Any, *launching: Any) -> None:
    """Let a module that makes launches again, and those that make them in full, do without a GPU.

    Results lie in the memory of the CPU, and all launches have the same counters.
    """
    words = torch.zeros(4096, dtype=torch.int32)
    monkeypatch.setattr(resizing, "raw_stream", lambda device: 0)
    empty = torch._C._dynamo.guards._empty_strided_cpu
    monkeypatch.setattr(resizing, "empty_on_gpu", empty)
    monkeypatch.setattr(resizing, "counters_of_stream", lambda *given: words)
    for module in launching:
        monkeypatch.setattr(module, "self_resetting_counters", lambda *given: words)


def noting_variants(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    """Let every kernel have a variant; `launched` gets (kernel, grid, stream, values, maps)."""

    def find(kernel: Any, args: Any, cluster: int, options: Any) -> Launchable:
        walk = _Walk()
        # compiled kernels know their parameters, interpreted ones do not
        if not hasattr(kernel, "params"):
            kernel = JITFunction(kernel.fn, **getattr(kernel, "kwargs", {}))
        for parameter, x in zip(kernel.params, args, strict=True):
            if not parameter.is_constexpr:
                walk.add(x, not parameter.do_not_specialize)
        variant: Any = _NotingVariant(walk, kernel, launched)
        return Launchable(variant, walk.values, walk.descriptors)

    monkeypatch.setattr(launcher, "find_variant", find)
    monkeypatch.setattr(launcher, "raw_device", lambda: 0)
    monkeypatch.setattr(launcher, "raw_stream", lambda device: 0)


def _tensors(args: Any) -> list[torch.Tensor]:
    found = []
    for x in args:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, tuple) and not isinstance(x, Descriptor):
            found += _tensors(x)
    return found


_TENSOR, _MAP = object(), object()


def _without_tensors(args: Any) -> tuple[Any, ...]:
    """The arguments with something in place of tensors, which must not be kept alive."""
    kept: list[Any] = []
    for x in args:
        if isinstance(x, Descriptor):
            kept.append((_MAP, 2 * len(x.shape)))
        elif isinstance(x, tuple):
            kept.append(_without_tensors(x))
        else:
            kept.append(_TENSOR if isinstance(x, torch.Tensor) else x)
    return tuple(kept)


def _filled(x: Any, values: Any, nested: bool = False) -> Any:
    """An argument again, from the values of parameters."""
    if isinstance(x, tuple) and x and x[0] is _MAP:
        made = next(values)
        for _ in range(x[1]):
            next(values)
        return made
    if isinstance(x, tuple):
        return tuple(_filled(item, values, nested=True) for item in x)
    # an item that is 1 is a constant
    value = x is _TENSOR or (isinstance(x, (int, float)) and not (nested and x == 1))
    return next(values) if value else x
