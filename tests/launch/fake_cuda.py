"""A CUDA driver without a GPU: notes what it is asked for. Imports no framework."""

import ctypes
import struct
from types import SimpleNamespace

from blackwell_sparsek.launch import driver

FIRST_STREAM = 0x5000
CONTEXT, FUNCTION, MEMORY = 0xC0, 0xF0, 0x70000


class FakeCuda:
    """The functions that `launch.driver` calls.

    The stream `FIRST_STREAM + i` belongs to context `CONTEXT + i`; none is current at first.
    Kernels have parameters of `sizes` bytes, 128 for a tensor map, whose address stands for it.
    """

    def __init__(self):
        self.sizes = []
        self.launched, self.encoded, self.loaded, self.zeroed = [], {}, [], []
        self.current, self.shared, self.preferred, self.fails = [], {}, {}, {}
        functions = {name: getattr(self, name) for name in dir(self) if name.startswith("cu")}
        # plain functions, whose argument types may be set
        self.library = SimpleNamespace(**{n: self._plain(n, f) for n, f in functions.items()})

    def _plain(self, name, function):
        return lambda *args: self.fails.get(name) or function(*args) or 0

    def cuGetErrorString(self, code, text):
        text._obj.value = b"out of luck"

    def cuDriverGetVersion(self, version):
        version._obj.value = 13020

    def cuStreamGetCtx(self, stream, context):
        context._obj.value = CONTEXT + stream.value - FIRST_STREAM

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.current[-1] if self.current else None

    def cuCtxPushCurrent_v2(self, context):
        self.current.append(context.value)

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.current.pop()

    def cuModuleLoadData(self, module, image):
        self.loaded.append((self.current[-1], image))
        module._obj.value = len(self.loaded)

    def cuModuleGetFunction(self, function, module, name):
        function._obj.value = FUNCTION + module.value
        self.loaded[-1] += (name,)

    def cuFuncSetCacheConfig(self, function, config):
        self.preferred[function.value] = config

    def cuFuncSetAttribute(self, function, name, value):
        self.shared[function.value] = (name, value)

    def cuMemAlloc_v2(self, address, size):
        address._obj.value = MEMORY + 0x10000 * len(self.zeroed)

    def cuMemsetD32Async(self, address, value, count, stream):
        self.zeroed.append((self.current[-1], address.value, count.value, stream.value))

    def cuTensorMapEncodeTiled(self, *given):
        made, kind, rank, address, sizes, strides, box, _, *rest = [x.value for x in given]
        read = [ctypes.c_uint64.from_address(sizes + 8 * i).value for i in range(rank)]
        walked = [ctypes.c_uint64.from_address(strides + 8 * i).value for i in range(rank - 1)]
        tile = [ctypes.c_uint32.from_address(box + 4 * i).value for i in range(rank)]
        self.encoded[made] = (kind, address, tuple(read), tuple(walked), tuple(tile), rest[1])

    def cuLaunchKernelEx(self, config, function, places, _):
        at = driver.LaunchConfig.from_address(config)
        values = []
        for i, size in enumerate(self.sizes):
            address = ctypes.c_uint64.from_address(places + 8 * i).value
            if size == 128:
                values.append(self.encoded[address])
            else:
                form = {1: "=b", 4: "=i", 8: "=q"}[size]
                values += struct.unpack(form, ctypes.string_at(address, size))
        ids = []
        for i in range(at.attribute_count):
            ids.append(driver._LaunchAttribute.from_address(at.attributes + i * 72).id)
        shape = (at.grid_x, at.block_x, at.shared_bytes)
        self.launched.append((self.current[-1], at.stream, function, shape, ids, values))
