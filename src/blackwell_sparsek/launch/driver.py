"""The CUDA driver's functions for launching kernels and encoding tensor maps, through ctypes.

The driver's interface is stable, unlike that of Triton's launchers, which differ from release to
release.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import mul
from struct import Struct
from typing import Any

from ..core.sizes import dtype_name

# Values of CUlaunchAttributeID.
_COOPERATIVE = 2
_CLUSTER_DIMENSION = 4
_CLUSTER_SCHEDULING_POLICY = 5
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
# CUclusterSchedulingPolicy: programs of a cluster on different SMs where there is a choice.
_SPREAD = 1
# CUtensorMapL2promotion: fetches into L2 take 128 bytes.
_L2_128B = 2
# CUfunction_attribute: the most shared memory that a launch may ask for. More than the default must
# be allowed for each kernel.
_MOST_SHARED = 8
# CUfunc_cache: shared memory before L1, as much as a multiprocessor has.
_PREFER_SHARED = 1
_DEFAULT_SHARED = 48 * 1024
_INVALID_CONTEXT = 201
# Drivers up to 13.1 may fetch past the end of tensors that span less than this many bytes, unless
# this bit in the second word of the tensor map is clear.
_FIXED_DRIVER = 13020
_SMALL_TENSOR = 128 * 1024
_SMALL_TENSOR_BIT = 1 << 21

# CUtensorMapDataType by dtype.
_DATA_TYPES = {
    "uint8": 0,
    "float8_e4m3fn": 0,
    "float8_e5m2": 0,
    "int32": 3,
    "float16": 6,
    "float32": 7,
    "bfloat16": 9,
}


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; the value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16))


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


# The types of the arguments of cuTensorMapEncodeTiled: the map; type, rank, address, sizes and
# strides of the tensor; the box, its steps, and four enumerations.
_ENCODE_TYPES: tuple[Any, ...] = (
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    *(ctypes.c_void_p, ctypes.c_void_p),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
)
_BASE = 3


@cache
def _encode_function() -> Any:
    """cuTensorMapEncodeTiled, for arguments that are C values of these types.

    Declared, the types would be compared in every call. It computes and returns, so that there is
    no need to let other threads run meanwhile, as for launches.
    """
    return ctypes.PyDLL("libcuda.so.1").cuTensorMapEncodeTiled


def _message(code: int) -> str:
    text = ctypes.c_char_p()
    _library().cuGetErrorString(code, ctypes.byref(text))
    return f"error {code}" if text.value is None else text.value.decode()


@cache
def _fetches_past_small_tensors() -> bool:
    version = ctypes.c_int()
    _library().cuDriverGetVersion(ctypes.byref(version))
    return version.value < _FIXED_DRIVER


def launch_attributes(cluster: int, pdl: bool, cooperative: bool) -> Any:
    """The attributes of launches in clusters, or under programmatic dependent launch (PDL).

    A cooperative launch has all its programs resident at once, or fails.
    """
    made: list[tuple[int, tuple[int, ...]]] = []
    if cooperative:
        made.append((_COOPERATIVE, (1,)))
    if pdl:
        made.append((_PROGRAMMATIC_STREAM_SERIALIZATION, (1,)))
    if cluster > 1:
        made.append((_CLUSTER_DIMENSION, (cluster, 1, 1)))
        made.append((_CLUSTER_SCHEDULING_POLICY, (_SPREAD,)))
    attributes = (_LaunchAttribute * max(1, len(made)))()
    for attribute, (name, value) in zip(attributes, made, strict=False):
        attribute.id = name
        attribute.value[: len(value)] = value
    return attributes, len(made)


_launch: Any = None


def launch_kernel(config: int, function: int, parameters: int) -> None:
    """Launch `function`, given the addresses of a LaunchConfig and of a list of parameters."""
    global _launch
    if _launch is None:
        _launch = _library().cuLaunchKernelEx
        _launch.argtypes = [ctypes.c_void_p] * 4
    code = _launch(config, function, parameters, None)
    if code == _INVALID_CONTEXT:
        # a new thread has no context until it uses the CUDA runtime; JAX has set one
        import torch

        torch.cuda.set_device(torch.cuda.current_device())
        code = _launch(config, function, parameters, None)
    if code:
        raise RuntimeError(f"cuLaunchKernelEx failed: {_message(code)}")


# Contexts, modules and memory.


def _checked(name: str, *args: Any) -> None:
    code = getattr(_library(), name)(*args)
    if code:
        raise RuntimeError(f"{name} failed: {_message(code)}")


@contextmanager
def context_of(stream: int) -> Iterator[int]:
    """Make the context of a stream current, since a thread may have none; yields the context."""
    own, current = ctypes.c_void_p(), ctypes.c_void_p()
    _checked("cuStreamGetCtx", ctypes.c_void_p(stream), ctypes.byref(own))
    _checked("cuCtxGetCurrent", ctypes.byref(current))
    context = own.value or 0
    if current.value == own.value:
        yield context
        return
    _checked("cuCtxPushCurrent_v2", own)
    try:
        yield context
    finally:
        _checked("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def loaded_function(cubin: bytes, name: str, shared: int) -> int:
    """The handle of a kernel in the current context, where its module stays loaded."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _checked("cuModuleLoadData", ctypes.byref(module), cubin)
    _checked("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    if shared > _DEFAULT_SHARED:
        _checked("cuFuncSetCacheConfig", function, _PREFER_SHARED)
        _checked("cuFuncSetAttribute", function, _MOST_SHARED, shared)
    assert function.value is not None
    return function.value


def zeroed_words(count: int, stream: int) -> int:
    """Allocate `count` words of 4 bytes in the current context and return their address.

    They are zero for all later work on `stream`, and are never freed.
    """
    address = ctypes.c_uint64()
    _checked("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * count))
    _checked("cuMemsetD32Async", address, 0, ctypes.c_size_t(count), ctypes.c_void_p(stream))
    return address.value


_address = ctypes.addressof
# A tensor map and room to align it; sizes and strides of up to five dimensions for its encoding,
# strides once more for the kernel.
_MAP_BYTES, _ALIGNMENT = 128, 64
_SIZES = _MAP_BYTES + _ALIGNMENT
_MapMemory = ctypes.c_char * (_SIZES + 8 * (5 + 4 + 5))


class TensorMap:
    """One encoded tensor map: 128 bytes at an address that is a multiple of 64."""

    __slots__ = ("address", "arguments", "base", "memory", "parameters", "second_word")

    def __init__(self) -> None:
        self.memory: ctypes.Array[ctypes.c_char] = _MapMemory()
        self.address: int = (_address(self.memory) + _ALIGNMENT - 1) & -_ALIGNMENT
        # those of its encoder, kept for the next tensor that it encodes here
        self.arguments: tuple[Any, ...] = ()
        self.base: ctypes.c_void_p = ctypes.c_void_p()
        self.second_word: ctypes.c_uint64 = ctypes.c_uint64.from_address(self.address + 8)
        self.parameters: list[int] = []
        """Where shape and strides lie as parameters of a kernel, which has them after the map."""


class TensorMapEncoder:
    """Encodes the tensor maps of one descriptor of a kernel.

    Parameters
    ----------
    dtype : the dtype of the tensors, of torch or NumPy
    box : sizes of the tile that one TMA instruction copies
    swizzle : CUtensorMapSwizzle, as the tile lies in shared memory
    """

    def __init__(self, dtype: Any, box: Sequence[int], swizzle: int):
        self._data_type = _DATA_TYPES[dtype_name(dtype)]
        self._element = dtype.itemsize
        self._rank = rank = len(box)
        self._small = _SMALL_TENSOR // self._element
        # the driver counts dimensions from the contiguous one
        self._box = (ctypes.c_uint32 * rank)(*reversed(box))
        self._steps = (ctypes.c_uint32 * rank)(*[1] * rank)
        self._pack: Callable[..., None] = Struct(f"={2 * rank - 1}Q{rank - 1}q").pack_into
        # no interleaving; elements out of bounds are zero
        tile = (_address(self._box), _address(self._steps), 0, swizzle, _L2_128B, 0)
        self._tile = tuple(kind(x) for kind, x in zip(_ENCODE_TYPES[6:], tile, strict=True))

    def __call__(self, address: int, shape: Sequence[int], strides: Sequence[int]) -> TensorMap:
        """The map of a tensor at `address`, strides in elements."""
        made = self.empty()
        self.encode(made, address, shape, strides)
        return made

    def empty(self) -> TensorMap:
        """Memory for maps of this encoder alone, with the arguments of cuTensorMapEncodeTiled.

        They are C values: converting them takes half of a call.
        """
        made, rank = TensorMap(), self._rank
        sizes = _address(made.memory) + _SIZES
        byte_strides = sizes + 8 * rank
        strides = byte_strides + 8 * (rank - 1)
        tensor = (made.address, self._data_type, rank, 0, sizes, byte_strides)
        given = [kind(x) for kind, x in zip(_ENCODE_TYPES, tensor, strict=False)]
        given[_BASE] = made.base
        made.arguments = (*given, *self._tile)
        made.parameters = [*range(byte_strides - 8, sizes - 8, -8)]
        made.parameters += range(strides, strides + 8 * rank, 8)
        # the contiguous dimension, whose stride `encode` leaves alone
        ctypes.c_int64.from_address(strides + 8 * (rank - 1)).value = 1
        return made

    def encode(
        self, made: TensorMap, address: int, shape: Sequence[int], strides: Sequence[int]
    ) -> None:
        """Write the map of a tensor, and its sizes, into the memory of `made`."""
        element = self._element
        made.base.value = address
        # the contiguous dimension comes first, and has no stride
        if self._rank == 4:
            # nearly all tensors, without lists in between
            a, b, c, d = shape
            over_a, over_b, over_c, _ = strides
            steps = element * over_c, element * over_b, element * over_a
            self._pack(made.memory, _SIZES, d, c, b, a, *steps, over_a, over_b, over_c)
            span = (a - 1) * over_a + (b - 1) * over_b + (c - 1) * over_c + d
        else:
            *outer, _ = strides
            inner_first = [element * stride for stride in reversed(outer)]
            self._pack(made.memory, _SIZES, *reversed(shape), *inner_first, *outer)
            span = sum(map(mul, shape, strides)) - sum(strides) + 1
        code = _encode_function()(*made.arguments)
        if code:
            raise RuntimeError(
                f"cuTensorMapEncodeTiled failed: {_message(code)} (address {address:#x}, shape "
                f"{list(shape)}, strides {list(strides)}, box {list(self._box)[::-1]})"
            )
        if span < self._small and _fetches_past_small_tensors():
            made.second_word.value &= ~_SMALL_TENSOR_BIT
