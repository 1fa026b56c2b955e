"""Keys of variants, against what Triton specialises on, and the launches of a variant."""

import ctypes
import itertools
import struct
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.jit import native_specialize_impl

from blackwell_sparsek.core.target import Arch
from blackwell_sparsek.launch import driver, prepared, variants
from blackwell_sparsek.launch.descriptors import tensor_descriptor
from blackwell_sparsek.launch.parameters import MapParameters, Parameters, UnknownParameters

from .fake_cuda import FUNCTION, FakeCuda


class Pair(NamedTuple):
    first: object
    second: object


def aligned(dtype=torch.float16):
    x = torch.empty(64, dtype=dtype)
    return x[x.data_ptr() % 16 // x.element_size() :] if x.data_ptr() % 16 else x


def key_of(x, specialise=True):
    walk = variants._Walk()
    walk.add(x, specialise)
    return tuple(walk.key), walk.values


LONG = aligned()
ARGUMENTS = [
    *(0, 1, 2, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**40),
    *(1.0, 0.5, True, False, None, (), (1,), (2,), (16,), (1, 2), (None, 3), ((1,), 16)),
    *(Pair(1, 16), Pair(16, 1), Pair(None, 3), (LONG, 1), Pair(LONG, 2)),
    *(LONG, LONG[1:], aligned(torch.bfloat16), aligned(torch.int32), torch.nn.Parameter(LONG)),
]


@pytest.mark.parametrize("specialise", [True, False])
def test_arguments_with_one_key_are_one_specialisation(specialise):
    """A key may tell apart what Triton does not; the reverse would launch the wrong variant."""
    from triton.backends.nvidia.compiler import CUDABackend

    def specialised(x):
        return native_specialize_impl(CUDABackend, x, False, specialise, specialise)

    for a, b in itertools.combinations(ARGUMENTS, 2):
        if key_of(a, specialise)[0] == key_of(b, specialise)[0]:
            assert specialised(a) == specialised(b), (a, b)


def test_the_values_of_parameters_are_flat_and_without_constants():
    x, y = aligned(), aligned()
    walk = variants._Walk()
    described = tensor_descriptor(y.view(8, 8), (4, 8))
    for argument in (x, (1, (5, None)), described, 0.5, True, 7):
        walk.add(argument, True)
    assert walk.values == [x.data_ptr(), 5, 0, 8, 8, 8, 1, 0.5, True, 7]
    assert walk.descriptors == [(2, described)]
    walk = variants._Walk()
    for argument in (1, 16, (1, 16)):
        walk.add(argument, False)
    assert walk.values == [1, 16, 16]


@pytest.fixture
def fake_driver(monkeypatch):
    """Reads back what is launched, as the driver does."""
    state = SimpleNamespace(launched=[], formats=(), compiled=0)

    def launch(config, function, places):
        at = driver.LaunchConfig.from_address(config)
        values = []
        for i, form in enumerate(state.formats):
            address = ctypes.c_uint64.from_address(places + 8 * i).value
            size = struct.calcsize("=" + form[0])
            values += struct.unpack("=" + form[0], ctypes.string_at(address, size))
        attributes = []
        for i in range(at.attribute_count):
            attribute = driver._LaunchAttribute.from_address(at.attributes + i * 72)
            attributes.append((attribute.id, tuple(attribute.value[:3])))
        shape = (at.grid_x, at.grid_y, at.grid_z, at.block_x, at.block_y, at.block_z)
        state.launched.append((shape, at.shared_bytes, at.stream, attributes, function, values))

    monkeypatch.setattr(prepared, "launch_kernel", launch)
    monkeypatch.setattr(variants, "raw_device", lambda: 0)
    monkeypatch.setattr(variants, "_loaded", lambda compiled: 77)
    monkeypatch.setattr(variants, "_kernels", {})
    return state


class Kernel:
    """Compiles to a variant with these parameters."""

    def __init__(self, state, formats, maps=(), unknown=False, **options):
        names = ("x", "n", "factor", "CONFIG")
        self.params = [
            SimpleNamespace(is_constexpr=name == "CONFIG", do_not_specialize=False)
            for name in names
        ]
        self.compiled = []
        state.formats = formats
        options = {"launch_pdl": False, "launch_cooperative_grid": False} | options
        metadata = SimpleNamespace(num_warps=12, shared=1000, **options)
        self._compiled = SimpleNamespace(metadata=metadata)
        self.parameters = Parameters(formats, (0,), maps)
        self.unknown = unknown

    def warmup(self, *args, grid, **options):
        self.compiled.append((args, options))
        return self._compiled

    def parameters_of(self, compiled):
        if self.unknown:
            raise UnknownParameters("why")
        return self.parameters


def test_a_variant_is_compiled_once_and_launched_with_its_parameters(fake_driver, monkeypatch):
    kernel = Kernel(fake_driver, ("Q", "i4x", "f4x", "Q", "Q"))
    monkeypatch.setattr(prepared, "parameters_of", kernel.parameters_of)
    x, y = aligned(), aligned()
    for tensor, n in ((x, 3), (y, 5)):
        found = variants.find_variant(kernel, (tensor, n, 0.5, "c"), 1, {"num_warps": 4})
        found.launch(9, 1234)
    options = {"enable_fp_fusion": True, "num_warps": 4}
    assert len(kernel.compiled) == 1 and kernel.compiled[0][1] == options
    expected = [
        ((9, 1, 1, 384, 1, 1), 1000, 1234, [], 77, [t.data_ptr(), n, 0.5, 0, 0])
        for t, n in ((x, 3), (y, 5))
    ]
    assert fake_driver.launched == expected


@pytest.mark.parametrize("changed", ["n", "constant", "option", "cluster", "device", "alignment"])
def test_other_variants(fake_driver, monkeypatch, changed):
    kernel = Kernel(fake_driver, ("Q", "i4x", "f4x", "Q", "Q"))
    monkeypatch.setattr(prepared, "parameters_of", kernel.parameters_of)
    x = aligned()
    first = variants.find_variant(kernel, (x, 3, 0.5, "c"), 1, {"num_warps": 4})
    if changed == "device":
        monkeypatch.setattr(variants, "raw_device", lambda: 1)
    second = variants.find_variant(
        kernel,
        (
            x[1:] if changed == "alignment" else x,
            16 if changed == "n" else 3,
            0.5,
            "d" if changed == "constant" else "c",
        ),
        2 if changed == "cluster" else 1,
        {"num_warps": 8 if changed == "option" else 4},
    )
    assert second.variant is not first.variant and len(kernel.compiled) == 2


def test_clusters_and_pdl_are_attributes_of_a_launch(fake_driver, monkeypatch):
    kernel = Kernel(fake_driver, ("Q", "i4x", "f4x", "Q", "Q"), launch_pdl=True)
    monkeypatch.setattr(prepared, "parameters_of", kernel.parameters_of)
    found = variants.find_variant(kernel, (aligned(), 3, 0.5, "c"), 2, {})
    found.launch(66, 0)
    shape, *_, attributes, _, _ = fake_driver.launched[0]
    assert shape[0] == 132
    assert attributes == [(6, (1, 0, 0)), (4, (2, 1, 1)), (5, (1, 0, 0))]


def test_programs_that_wait_for_each_other_are_launched_cooperatively(fake_driver, monkeypatch):
    kernel = Kernel(fake_driver, ("Q", "i4x", "f4x", "Q", "Q"), launch_cooperative_grid=True)
    monkeypatch.setattr(prepared, "parameters_of", kernel.parameters_of)
    variants.find_variant(kernel, (aligned(), 3, 0.5, "c"), 1, {}).launch(5, 0)
    *_, attributes, _, _ = fake_driver.launched[0]
    assert attributes == [(2, (1, 0, 0))]


def test_a_kernel_with_unknown_parameters_has_no_variant(fake_driver, monkeypatch):
    kernel = Kernel(fake_driver, ("Q", "i4x", "f4x", "Q", "Q"), unknown=True)
    monkeypatch.setattr(prepared, "parameters_of", kernel.parameters_of)
    for _ in range(2):
        assert variants.find_variant(kernel, (aligned(), 3, 0.5, "c"), 1, {}) is None
    assert len(kernel.compiled) == 1
    # as many values as parameters, or it is another kernel than it looks
    kernel = Kernel(fake_driver, ("Q", "i4x", "Q", "Q"))
    monkeypatch.setattr(prepared, "parameters_of", kernel.parameters_of)
    assert variants.find_variant(kernel, (aligned(), 3, 0.5, "c"), 1, {}) is None


def test_threads_do_not_share_memory(fake_driver, monkeypatch):
    kernel = Kernel(fake_driver, ("Q", "i4x", "f4x", "Q", "Q"))
    monkeypatch.setattr(prepared, "parameters_of", kernel.parameters_of)
    x = aligned()
    found = variants.find_variant(kernel, (x, 3, 0.5, "c"), 1, {})
    launch, during = prepared.launch_kernel, []

    def interrupted(*args):
        if not during:
            during.append("another thread launches before the driver reads")
            found.variant.launch(1, 0, [x.data_ptr(), 4, 0.5], [])
        launch(*args)

    monkeypatch.setattr(prepared, "launch_kernel", interrupted)
    for grid, n in ((1, 3), (2, 5)):
        found.variant.launch(grid, 0, [x.data_ptr(), n, 0.5], [])
    launched = [(shape[0], values[1]) for shape, *_, values in fake_driver.launched]
    assert launched == [(1, 4), (1, 3), (2, 5)]


def test_a_tensor_map_is_encoded_from_the_contiguous_dimension(fake_driver, monkeypatch):
    encoded = []

    def encode(*given):
        made, kind, rank, address, sizes, strides, box, _, *rest = [x.value for x in given]
        read = [ctypes.c_uint64.from_address(sizes + 8 * i).value for i in range(rank)]
        walked = [ctypes.c_uint64.from_address(strides + 8 * i).value for i in range(rank - 1)]
        tile = [ctypes.c_uint32.from_address(box + 4 * i).value for i in range(rank)]
        encoded.append((made % 64, kind, rank, address, read, walked, tile, rest))
        return 0

    monkeypatch.setattr(driver, "_encode_function", lambda: encode)
    monkeypatch.setattr(driver, "_fetches_past_small_tensors", lambda: False)
    formats = ("Q", "i4x", "i4x", "q", "q", "i4x", "f4x", "Q", "Q")
    kernel = Kernel(fake_driver, formats, (MapParameters(0, (4, 8), 3),))
    fake_driver.formats = formats[1:2]
    monkeypatch.setattr(prepared, "parameters_of", kernel.parameters_of)
    monkeypatch.setattr(prepared, "launch_kernel", lambda *args: None)
    x = torch.empty(6, 16, dtype=torch.bfloat16)
    args = (tensor_descriptor(x[:, :8], (4, 8)), 3, 0.5, "c")
    variants.find_variant(kernel, args, 1, {}).launch(1, 0)
    assert encoded == [(0, 9, 2, x.data_ptr(), [8, 6], [32], [8, 4], [0, 3, 2, 0])]


@pytest.mark.parametrize(("rows", "cleared"), [(6, True), (4096 * 64, False)])
def test_maps_of_small_tensors_on_drivers_that_fetch_too_much(monkeypatch, rows, cleared):
    def encode(made, *rest):
        ctypes.c_uint64.from_address(made.value + 8).value = 2**64 - 1
        return 0

    monkeypatch.setattr(driver, "_encode_function", lambda: encode)
    monkeypatch.setattr(driver, "_fetches_past_small_tensors", lambda: True)
    made = driver.TensorMapEncoder(torch.float16, (4, 8), 3)(4096, (rows, 8), (8, 1))
    word = ctypes.c_uint64.from_address(made.address + 8).value
    assert word == 2**64 - 1 - (2**21 if cleared else 0)


def test_a_map_that_the_driver_refuses(monkeypatch):
    monkeypatch.setattr(driver, "_encode_function", lambda: lambda *args: 1)
    monkeypatch.setattr(driver, "_message", lambda code: "invalid argument")
    encode = driver.TensorMapEncoder(torch.float16, (4, 8), 3)
    with pytest.raises(RuntimeError, match=r"invalid argument .*0x7, shape \[6, 8\]"):
        encode(7, (6, 8), (8, 1))


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_the_sizes_of_a_map_are_parameters_where_they_are_encoded(monkeypatch, rank):
    monkeypatch.setattr(driver, "_encode_function", lambda: lambda *args: 0)
    monkeypatch.setattr(driver, "_fetches_past_small_tensors", lambda: False)
    encoder = driver.TensorMapEncoder(torch.bfloat16, (1,) * (rank - 1) + (8,), 3)
    made = encoder.empty()
    for factor in (1, 7):
        shape = [factor * size for size in (2, 3, 5, 11, 64)][-rank:]
        outer = [factor * stride for stride in (2**35, 2**31, 4096, 128)][1 - rank :]
        strides = [*outer, 1]
        encoder.encode(made, 4096 * factor, shape, strides)
        sizes, *_ = (x.value for x in made.arguments[4:6])
        assert made.base.value == 4096 * factor
        assert [ctypes.c_uint64.from_address(sizes + 8 * i).value for i in range(rank)] == [
            *reversed(shape)
        ]
        assert [ctypes.c_int32.from_address(x).value for x in made.parameters[:rank]] == shape
        assert [ctypes.c_int64.from_address(x).value for x in made.parameters[rank:]] == strides


@pytest.fixture
def cuda(monkeypatch):
    """The driver of a GPU with 2000 bytes of shared memory."""
    fake = FakeCuda()
    gpu = Arch("cuda", 90, 132, 2000, False)
    monkeypatch.setattr(driver, "_library", lambda: fake.library)
    monkeypatch.setattr(variants, "raw_device", lambda: 3)
    monkeypatch.setattr(variants, "arch_of", lambda device: gpu if device.index == 3 else None)
    # makes the device's context current in this thread
    monkeypatch.setattr(torch.cuda, "set_device", fake.current.append)
    return fake


def compiled_kernel(shared):
    metadata = SimpleNamespace(name="kernel", shared=shared)
    return SimpleNamespace(metadata=metadata, asm={"cubin": b"code"})


def test_a_kernel_is_loaded_without_a_launcher_of_tritons(cuda):
    """In whichever thread: one that only launches has no context yet."""
    kernel = compiled_kernel(shared=1000)
    with ThreadPoolExecutor(1) as pool:
        handles = [variants._loaded(kernel), pool.submit(variants._loaded, kernel).result()]
    assert handles == [FUNCTION + 1, FUNCTION + 2]
    assert cuda.loaded == [(3, b"code", b"kernel")] * 2


def test_a_kernel_that_does_not_fit_is_refused_every_time(cuda):
    from triton.runtime.errors import OutOfResources

    for _ in range(2):
        with pytest.raises(OutOfResources, match=r"shared memory, Required: 3000, .* 2000"):
            variants._loaded(compiled_kernel(shared=3000))
    assert not cuda.loaded
