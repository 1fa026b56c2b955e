"""Described launches (`launch.description`) compiled and launched by the CUDA driver; no framework.

The counterpart of `launch.variants`, which does this for tensors of torch.
"""

import hashlib
import threading
from typing import Any, NamedTuple

from .description import ArraySpec, KernelLaunch
from .descriptors import Descriptor, descriptor_type
from .driver import context_of, loaded_function, zeroed_words
from .parameters import parameters_of
from .prepared import MapSlot, Slot, Template, Variant
from .signature import Signature, Unaligned, is_one, pointer_type

# The least number of counters that are allocated for a stream, 4 bytes each.
_LEAST_COUNTERS = 4096
_ALIGNMENT = 16


class _Address(NamedTuple):
    """Where a view of an array begins."""

    array: str
    offset: int
    """In bytes."""


class _MapOf(NamedTuple):
    """A tensor map among the values of parameters."""

    place: int
    descriptor: Descriptor


class _Arguments:
    """One pass over the arguments of a launch: their types, and the values of parameters."""

    def __init__(self, planned: KernelLaunch):
        self.types: list[Any] = []
        self.values: list[Any] = []
        self.pointers: dict[int, _Address] = {}
        self.maps: list[_MapOf] = []
        for parameter, x in zip(planned.kernel.params, planned.args, strict=True):
            constant = parameter.is_constexpr
            self.types.append(x if constant else self._add(x, not parameter.do_not_specialize))

    def _add(self, x: Any, specialise: bool) -> Any:
        """The type of an argument; adds its values."""
        if isinstance(x, Descriptor):
            self.maps.append(_MapOf(len(self.values), x))
            self.values += (0, *x.shape, *x.strides)
            return descriptor_type(x.block, x.base.dtype)
        if isinstance(x, ArraySpec):
            found = _address(x)
            self.pointers[len(self.values)] = found
            self.values.append(0)
            kind = pointer_type(x.dtype)
            return Unaligned(kind) if found.offset % _ALIGNMENT else kind
        if isinstance(x, tuple):
            types = [self._add(item, specialise) for item in x]
            return type(x)(*types) if hasattr(x, "_fields") else tuple(types)
        if isinstance(x, (bool, int, float)) and not (specialise and is_one(x)):
            self.values.append(x)
        return x


def _address(x: ArraySpec) -> _Address:
    return _Address(x.name, x.offset * x.dtype.itemsize)


class DescribedLaunch:
    """A compiled launch, repeated with arrays at other addresses, on any GPU of its kind.

    Parameters
    ----------
    planned : a launch whose arrays are described
    names : the arrays that `run` is given, in order; others have the role "counters"
    counters : how many of these there are
    sm : the compute capability to compile for
    """

    def __init__(self, planned: KernelLaunch, names: tuple[str, ...], counters: int, sm: int):
        found = _Arguments(planned)
        signature = Signature(planned.kernel, found.types)
        self._compiled = _compiled(planned, signature, sm)
        self._grid = planned.programs
        self._values = found.values
        self._counters = counters
        addresses = [*found.pointers.values(), *(_address(x.descriptor.base) for x in found.maps)]
        # counters come after the arrays that are given
        self._roles = list(dict.fromkeys(addresses))
        place_of = {name: place for place, name in enumerate(names)}
        self._sources = [(place_of.get(x.array, len(names)), x.offset) for x in self._roles]
        self._pointers = found.pointers
        self._maps = found.maps
        own = parameters_of(self._compiled).own
        assert own == len(found.values), f"{own} parameters, {len(found.values)} values"
        self._templates: dict[int, Template] = {}
        described = (
            planned.kernel.cache_key, signature.signature, signature.constants, signature.attrs,
            planned.options, planned.programs, found.values, found.pointers,
            [(x.place, _address(x.descriptor.base)) for x in found.maps], names, counters, sm,
        )  # fmt: skip
        self.digest: str = hashlib.sha256(repr(described).encode()).hexdigest()[:32]
        """Says all that a launch depends on: programs compiled elsewhere name it too."""

    def run(self, stream: int, arrays: list[int]) -> None:
        """Launch on a stream with arrays at these addresses."""
        for address in arrays:
            if address % _ALIGNMENT:
                raise RuntimeError(f"an array lies at {address:#x}, which 16 does not divide")
        with context_of(stream) as context:
            template = self._templates.get(context)
            if template is None:
                template = self._templates[context] = self._loaded(context)
            known = arrays
            if self._counters:
                known = [*arrays, _counters_of(context, stream, self._counters)]
            template.run(stream, [known[place] + offset for place, offset in self._sources])

    def _loaded(self, context: int) -> Template:
        """The launch in the current context."""
        dtypes = [x.descriptor.base.dtype for x in self._maps]
        variant = _variant(self._compiled, dtypes, context)
        role_of = {x: role for role, x in enumerate(self._roles)}
        slots = [Slot(place, role_of[x]) for place, x in self._pointers.items()]
        maps = [
            MapSlot(place, role_of[_address(x.base)], encode, x.shape, x.strides, {})
            for encode, (place, x) in zip(variant.encoders, self._maps, strict=True)
        ]
        return Template(variant, self._grid, self._values, slots, maps)


_lock = threading.Lock()
_kernels: dict[Any, Any] = {}
_variants: dict[tuple[int, int], Variant] = {}
# (context, stream) -> the words that its launches share.
_counters: dict[tuple[int, int], "_Counters"] = {}


class _Counters(NamedTuple):
    """Words of device memory that are zero between launches."""

    address: int
    room: int
    """How many there are."""


def _compiled(planned: KernelLaunch, signature: Signature, sm: int) -> Any:
    """The kernel compiled for a launch, once for all launches that differ only in numbers."""
    kinds, constants = signature.signature, signature.constants
    known = (*kinds.items(), *constants.items(), *signature.attrs, *planned.options.items())
    key = (planned.kernel, known, sm)
    if key not in _kernels:
        _kernels[key] = signature.compiled(sm, planned.options)
    return _kernels[key]


def _variant(compiled: Any, dtypes: list[Any], context: int) -> Variant:
    """A kernel loaded into the current context, once."""
    # compiled kernels are never freed, so no other object gets the same id
    key = (id(compiled), context)
    with _lock:
        if key not in _variants:
            _variants[key] = Variant(compiled, _load, dtypes, cluster=1)
        return _variants[key]


def _load(compiled: Any) -> int:
    metadata = compiled.metadata
    return loaded_function(compiled.asm["cubin"], metadata.name, metadata.shared)


def _counters_of(context: int, stream: int, count: int) -> int:
    """The address of `count` or more words that are zero whenever a launch on the stream begins.

    Launches on one stream follow each other, and each leaves them zero. One under programmatic
    dependent launch does not touch them before the one ahead has ended.
    """
    found = _counters.get((context, stream))
    if found is None or found.room < count:
        with _lock:
            room = max(_LEAST_COUNTERS, 1 << (count - 1).bit_length())
            # what a launch may still be using is left alone
            found = _Counters(zeroed_words(room, stream), room)
            _counters[context, stream] = found
    return found.address
