"""Python functions that XLA calls while a compiled program runs.

XLA's foreign functions are C functions that get one `XLA_FFI_CallFrame`: arguments, results,
attributes, and the table of functions that XLA offers. Here ctypes makes the C function of a Python
one, so that nothing has to be compiled on the user's machine. Structures and their order are those
of `xla/ffi/api/c_api.h`, which jaxlib ships; within a major version new fields only come last.
"""

import ctypes
import pathlib
import re
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from typing import Any

import jax

# The version of the interface that is spelled out below.
MAJOR, MINOR = 0, 3
# Values of enumerations of the interface.
_METADATA = 1
_EXECUTE = 3
_INTERNAL_ERROR = 13
_SCALAR, _STRING = 3, 4
_SCALARS: dict[int, Any] = {4: c_int, 5: c_int64, 11: ctypes.c_float, 12: ctypes.c_double}
_LONGEST_MESSAGE = 4000


class Extension(Structure):
    """XLA_FFI_Extension_Base."""


Extension._fields_ = [
    ("struct_size", c_size_t),
    ("type", c_int),
    ("next", POINTER(Extension)),
]


class ApiVersion(Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("major_version", c_int),
        ("minor_version", c_int),
    )


class Metadata(Structure):
    """XLA_FFI_Metadata, up to the fields that are set here."""

    _fields_ = (("struct_size", c_size_t), ("api_version", ApiVersion), ("traits", c_uint32))


class MetadataExtension(Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = (("extension_base", Extension), ("metadata", POINTER(Metadata)))


class Buffer(Structure):
    """XLA_FFI_Buffer."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )


class ByteSpan(Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = (("ptr", c_void_p), ("len", c_size_t))


class Scalar(Structure):
    """XLA_FFI_Scalar."""

    _fields_ = (("dtype", c_int), ("value", c_void_p))


class Args(Structure):
    """XLA_FFI_Args."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("args", POINTER(POINTER(Buffer))),
    )


class Rets(Structure):
    """XLA_FFI_Rets."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("rets", POINTER(POINTER(Buffer))),
    )


class Attrs(Structure):
    """XLA_FFI_Attrs."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("names", POINTER(POINTER(ByteSpan))),
        ("attrs", POINTER(c_void_p)),
    )


class Api(Structure):
    """XLA_FFI_Api, up to the functions that are called here."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("api_version", ApiVersion),
        ("internal_api", c_void_p),
        ("XLA_FFI_Error_Create", c_void_p),
        ("XLA_FFI_Error_GetMessage", c_void_p),
        ("XLA_FFI_Error_Destroy", c_void_p),
        ("XLA_FFI_Handler_Register", c_void_p),
        ("XLA_FFI_Stream_Get", c_void_p),
    )


class CallFrame(Structure):
    """XLA_FFI_CallFrame, up to the attributes."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", POINTER(Extension)),
        ("api", POINTER(Api)),
        ("ctx", c_void_p),
        ("stage", c_int),
        ("args", Args),
        ("rets", Rets),
        ("attrs", Attrs),
    )


class ErrorCreateArgs(Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("message", c_char_p),
        ("errc", c_int),
    )


class ErrorGetMessageArgs(Structure):
    """XLA_FFI_Error_GetMessage_Args."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("error", c_void_p),
        ("message", c_char_p),
    )


class ErrorDestroyArgs(Structure):
    """XLA_FFI_Error_Destroy_Args."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("error", c_void_p),
    )


class StreamGetArgs(Structure):
    """XLA_FFI_Stream_Get_Args."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", c_void_p),
        ("ctx", c_void_p),
        ("stream", c_void_p),
    )


# What XLA calls; and what is called of XLA, which takes no longer than to give up the GIL would.
_Handler = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_Function = ctypes.PYFUNCTYPE(c_void_p, c_void_p)


class Call:
    """One execution of a foreign function, valid until the function returns."""

    __slots__ = ("_frame", "arguments", "results")

    def __init__(self, frame: CallFrame):
        self._frame = frame
        args, rets = frame.args, frame.rets
        self.arguments: list[int] = [args.args[i][0].data or 0 for i in range(args.size)]
        """Addresses, on the device of the call."""
        self.results: list[int] = [rets.rets[i][0].data or 0 for i in range(rets.size)]

    def attribute(self, name: str) -> Any:
        """The string or number that the program was compiled with under this name."""
        attrs = self._frame.attrs
        for i in range(attrs.size):
            if _text(attrs.names[i][0]) != name:
                continue
            if attrs.types[i] == _STRING:
                return _text(ByteSpan.from_address(attrs.attrs[i]))
            if attrs.types[i] == _SCALAR:
                found = Scalar.from_address(attrs.attrs[i])
                return _SCALARS[found.dtype].from_address(found.value).value
            raise TypeError(f"the attribute {name} is of kind {attrs.types[i]}")
        raise KeyError(f"the call has no attribute {name}")

    def shapes(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Shapes of arguments and results."""
        args, rets = self._frame.args, self._frame.rets
        return (
            [_shape(args.args[i][0]) for i in range(args.size)],
            [_shape(rets.rets[i][0]) for i in range(rets.size)],
        )

    def stream(self) -> int:
        """The stream to launch on."""
        given = StreamGetArgs(ctypes.sizeof(StreamGetArgs), None, self._frame.ctx, None)
        api = self._frame.api[0]
        error = _Function(api.XLA_FFI_Stream_Get)(ctypes.addressof(given))
        if error:
            raise RuntimeError(f"XLA has no stream: {_taken(api, error)}")
        return given.stream or 0


def _text(span: ByteSpan) -> str:
    return ctypes.string_at(span.ptr, span.len).decode()


def _shape(buffer: Buffer) -> tuple[int, ...]:
    return tuple(buffer.dims[: buffer.rank])


def _taken(api: Api, error: int) -> str:
    """The message of an error of XLA's, which is freed."""
    size = ctypes.sizeof(ErrorGetMessageArgs)
    asked = ErrorGetMessageArgs(size, None, error, None)
    _Function(api.XLA_FFI_Error_GetMessage)(ctypes.addressof(asked))
    message = (asked.message or b"").decode(errors="replace")
    freed = ErrorDestroyArgs(ctypes.sizeof(ErrorDestroyArgs), None, error)
    _Function(api.XLA_FFI_Error_Destroy)(ctypes.addressof(freed))
    return message


def _error(api: Api, error: BaseException) -> int:
    """An error of XLA's that says what went wrong; XLA frees it."""
    text = f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE].encode()
    size = ctypes.sizeof(ErrorCreateArgs)
    # a zero would end the message
    given = ErrorCreateArgs(size, None, text.replace(b"\0", b"?"), _INTERNAL_ERROR)
    return _Function(api.XLA_FFI_Error_Create)(ctypes.addressof(given))


def _metadata(frame: CallFrame) -> Metadata | None:
    """Where XLA wants to know about the function, before the first call; None in a call."""
    found = frame.extension_start
    while found:
        if found[0].type == _METADATA:
            return MetadataExtension.from_address(ctypes.addressof(found[0])).metadata[0]
        found = found[0].next
    return None


def _answer(frame: CallFrame, metadata: Metadata) -> None:
    """Say which version of the interface is spoken, and promise nothing.

    Without the trait for it, XLA takes no call into a command buffer (a CUDA graph): a graph would
    repeat its launches with counters of another stream.
    """
    spoken = frame.api[0].api_version
    if spoken.major_version != MAJOR:
        raise RuntimeError(f"XLA's foreign functions {spoken.major_version}.x are not known here")
    metadata.api_version.major_version = MAJOR
    # an older XLA knows no newer version, a newer one knows older versions
    metadata.api_version.minor_version = min(MINOR, spoken.minor_version)
    metadata.traits = 0


# C functions that XLA may call as long as the process lives.
_registered: dict[tuple[str, str], Any] = {}


def register(name: str, run: Callable[[Call], None], platform: str) -> None:
    """Let compiled programs call `run` as the foreign function `name` on a platform.

    An exception in `run` becomes the error of the program.
    """

    def handle(address: int) -> int | None:
        frame = CallFrame.from_address(address)
        try:
            metadata = _metadata(frame)
            if metadata is not None:
                _answer(frame, metadata)
            elif frame.stage == _EXECUTE:
                run(Call(frame))
        except BaseException as error:  # nothing may leave through C, not even an interrupt
            return _error(frame.api[0], error)
        return None

    function = _Handler(handle)
    _registered[name, platform] = function
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform=platform)


@cache
def why_no_ffi() -> str | None:
    """Why Python functions cannot be called by this XLA, or None when they can."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        found = re.search(r"#define XLA_FFI_API_MAJOR (\d+)", header.read_text())
    except OSError as error:
        return f"needs the headers of jaxlib, which cannot be read: {error}"
    if found is None or int(found[1]) != MAJOR:
        got = "none" if found is None else found[1]
        return f"needs version {MAJOR} of XLA's foreign functions, got {got}"
    return None
