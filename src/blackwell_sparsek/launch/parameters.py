"""The parameters of a compiled kernel, in the order in which the CUDA driver takes them.

This is all that must be known of a Triton release in order to launch its kernels without its front
end: constants are no parameters; tuples are flattened; a tensor descriptor becomes a tensor map,
its sizes and its strides; two pointers to workspaces of Triton's own come last. `parameters_of`
checks this against the parameters that the kernel's PTX declares.
"""

import re
from typing import Any, NamedTuple

from ..core.compat import why_no_launcher

POINTER = "Q"
_MAP_BYTES = 128
# How a value of each type is packed. Every parameter gets 8 bytes of its own.
_FORMATS = {
    "i1": "B7x",
    "u1": "B7x",
    "i8": "b7x",
    "u8": "B7x",
    "i16": "h6x",
    "u16": "H6x",
    "i32": "i4x",
    "u32": "I4x",
    "i64": "q",
    "u64": "Q",
    "fp16": "e6x",
    "fp32": "f4x",
    "f32": "f4x",
    "fp64": "d",
}
_BYTES = {"B": 1, "b": 1, "h": 2, "H": 2, "e": 2, "i": 4, "I": 4, "f": 4, "q": 8, "Q": 8, "d": 8}
_PTX_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
# Pointers to Triton's workspaces, after the kernel's own parameters.
_WORKSPACES = 2
_ENTRY = re.compile(r"\.entry\s+\w+\s*\((.*?)\)\s*(?:\.|\{)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z])(\d+)\b([^,]*)")
_COUNT = re.compile(r"\[(\d+)\]\s*$")


class MapParameters(NamedTuple):
    """The parameters of one tensor descriptor: the place of its map, and its encoding."""

    place: int
    box: tuple[int, ...]
    swizzle: int


class Parameters(NamedTuple):
    """The parameters of a kernel: how each is packed, which take tensors and which tensor maps."""

    formats: tuple[str, ...]
    pointers: tuple[int, ...]
    maps: tuple[MapParameters, ...]

    @property
    def own(self) -> int:
        """How many are the kernel's own: the others are pointers to Triton's workspaces."""
        return len(self.formats) - _WORKSPACES


class UnknownParameters(Exception):
    """Says why a kernel must be launched by Triton's front end."""


def parameters_of(compiled: Any) -> Parameters:
    """The parameters of a kernel that Triton compiled; raises UnknownParameters."""
    if (reason := why_no_launcher()) is not None:
        raise UnknownParameters(reason)
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise UnknownParameters("the kernel needs a workspace that Triton allocates")
    if metadata.num_ctas != 1:
        raise UnknownParameters("the kernel is compiled for clusters by Triton")
    found = _expected(compiled.src.signature, metadata.tensordesc_meta)
    places = {part.place for part in found.maps}
    sizes = [
        _MAP_BYTES if place in places else _BYTES[form[0]]
        for place, form in enumerate(found.formats)
    ]
    declared = declared_sizes(compiled.asm["ptx"])
    if sizes != declared:
        raise UnknownParameters(
            f"the kernel's PTX declares parameters of {declared} bytes, expected {sizes}"
        )
    return found


def _expected(signature: dict[str, Any], metadata: list[Any] | None) -> Parameters:
    """The parameters that Triton makes of a signature and the metadata of its descriptors."""
    formats: list[str] = []
    pointers: list[int] = []
    maps: list[MapParameters] = []
    encodings = iter(metadata or ())

    def add(kind: Any) -> None:
        if isinstance(kind, tuple):
            for item in kind:
                add(item)
        elif kind == "constexpr":
            return
        elif kind.startswith("tensordesc"):
            encoding = next(encodings, None)
            if encoding is None or encoding.get("fp4_padded") or encoding.get("is_im2col"):
                raise UnknownParameters(f"no tiled tensor map was compiled for {kind}")
            box = tuple(encoding["block_size"])
            maps.append(MapParameters(len(formats), box, encoding["swizzle"]))
            formats.extend([POINTER, *[_FORMATS["i32"]] * len(box), *[_FORMATS["i64"]] * len(box)])
        elif kind.startswith("*"):
            pointers.append(len(formats))
            formats.append(POINTER)
        elif kind in _FORMATS:
            formats.append(_FORMATS[kind])
        else:
            raise UnknownParameters(f"a parameter of type {kind} cannot be packed")

    for kind in signature.values():
        add(kind)
    formats += [POINTER] * _WORKSPACES
    return Parameters(tuple(formats), tuple(pointers), tuple(maps))


def declared_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter that a kernel's PTX declares."""
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise UnknownParameters("the kernel's PTX declares no entry")
    sizes = []
    for _, bits, rest in _PARAMETER.findall(entry[1]):
        count = _COUNT.search(rest)
        sizes.append(_PTX_BYTES[bits] * (1 if count is None else int(count[1])))
    return sizes
