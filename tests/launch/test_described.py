"""Described launches on a driver that notes what it is asked for; nothing is compiled."""

from types import SimpleNamespace

import numpy as np
import pytest

from blackwell_sparsek.launch import described, driver, prepared
from blackwell_sparsek.launch.description import ArraySpec, KernelLaunch, arrays_of
from blackwell_sparsek.launch.descriptors import tensor_descriptor
from blackwell_sparsek.launch.parameters import MapParameters, Parameters
from blackwell_sparsek.launch.signature import Signature, Unaligned, pointer_type

from .fake_cuda import CONTEXT, FIRST_STREAM, FUNCTION, MEMORY, FakeCuda

HALF, WORD = np.dtype("float16"), np.dtype("int32")
# The map with its sizes and strides, the first half of a vector and the rest, counters, a number
# and two workspaces of Triton's.
FORMATS = ("Q", "i4x", "i4x", "q", "q", "Q", "Q", "Q", "i4x", "Q", "Q")
SIZES = [128, 4, 4, 8, 8, 8, 8, 8, 4, 8, 8]


class Kernel:
    """Takes a descriptor, two views of an array, counters, a number and a constant."""

    cache_key = "source"
    params = tuple(
        SimpleNamespace(name=name, is_constexpr=name == "CFG", do_not_specialize=name == "n")
        for name in ("x_desc", "halves", "counters", "n", "one", "CFG")
    )


KERNEL = Kernel()


def launch(rows=6, number=7, programs=9):
    x = ArraySpec.contiguous_of("x", "input", (rows, 8), HALF)
    vector = ArraySpec.contiguous_of("vector", "input", (6,), WORD)
    counters = ArraySpec.contiguous_of("counters", "counters", (5000,), WORD)
    args = (tensor_descriptor(x, (4, 8)), vector.halves(), counters, number, 1, "config")
    return KernelLaunch(KERNEL, programs, args, {"num_warps": 4})


@pytest.fixture
def cuda(monkeypatch):
    """The fake driver, and a compiler that notes what it compiles."""
    fake, compiled = FakeCuda(), []
    fake.sizes = SIZES

    def compile_it(signature, sm, options):
        compiled.append((signature.signature, signature.constants, signature.attrs, sm, options))
        metadata = SimpleNamespace(name="kernel", num_warps=12, shared=100_000)
        metadata.launch_pdl, metadata.launch_cooperative_grid = True, False
        return SimpleNamespace(metadata=metadata, asm={"cubin": b"code"})

    found = Parameters(FORMATS, (5, 6, 7), (MapParameters(0, (4, 8), 3),))
    monkeypatch.setattr(Signature, "compiled", compile_it)
    monkeypatch.setattr(described, "descriptor_type", lambda block, dtype: f"desc{block}")
    for module in (described, prepared):
        monkeypatch.setattr(module, "parameters_of", lambda compiled: found)
    for name in ("_kernels", "_variants", "_counters"):
        monkeypatch.setattr(described, name, {})
    monkeypatch.setattr(driver, "_library", lambda: fake.library)
    monkeypatch.setattr(driver, "_launch", fake.library.cuLaunchKernelEx)
    monkeypatch.setattr(driver, "_encode_function", lambda: fake.library.cuTensorMapEncodeTiled)
    monkeypatch.setattr(driver, "_fetches_past_small_tensors", lambda: False)
    fake.compiled = compiled
    return fake


def test_types_are_those_of_a_launch(cuda):
    planned = launch()
    described.DescribedLaunch(planned, ("x", "vector"), 5000, 90)
    ((signature, constants, attrs, sm, options),) = cuda.compiled
    assert signature == {
        "x_desc": "desc(4, 8)",
        "halves": ("*i32", "*i32"),
        "counters": "*i32",
        "n": "i32",
        "one": "constexpr",
        "CFG": "constexpr",
    }
    assert constants == {(4,): 1, (5,): "config"}
    # the second half begins at 12 bytes
    assert sorted(attrs) == [(1, 0), (2,)] and (sm, options) == (90, {"num_warps": 4})


def test_arrays_of_a_launch():
    """Of what is nested in records, each array once, in the order of the arguments."""
    planned = launch()
    found = arrays_of(planned)
    # that of a descriptor too
    assert list(found) == ["x", "vector", "counters"]
    first, second = planned.args[1]
    # views of one array are one array
    assert found["vector"] is first and second.name == "vector"
    nested = KernelLaunch(KERNEL, 1, ((None, (second, 7)), found["counters"], first), {})
    assert arrays_of(nested) == {"vector": second, "counters": found["counters"]}


def test_a_launch_by_the_driver(cuda):
    made = described.DescribedLaunch(launch(), ("x", "vector"), 5000, 90)
    for address in (4096, 8192, 4096):
        made.run(FIRST_STREAM, [address, 1024])
    assert cuda.loaded == [(CONTEXT, b"code", b"kernel")]
    assert cuda.shared == {FUNCTION + 1: (8, 100_000)} and cuda.preferred == {FUNCTION + 1: 1}
    # once for the stream, and room for more
    assert cuda.zeroed == [(CONTEXT, MEMORY, 8192, FIRST_STREAM)]
    expected = [
        (
            *(CONTEXT, FIRST_STREAM, FUNCTION + 1, (9, 384, 100_000), [6]),
            [(6, x, (8, 6), (16,), (8, 4), 3), 6, 8, 8, 1, 1024, 1024 + 12, MEMORY, 7, 0, 0],
        )
        for x in (4096, 8192, 4096)
    ]
    assert cuda.launched == expected
    # a map for each address, and no context left behind
    assert len(cuda.encoded) == 2 and cuda.current == []


def test_devices_have_their_own_kernels_and_counters(cuda):
    made = described.DescribedLaunch(launch(), ("x", "vector"), 5000, 90)
    cuda.current.append(CONTEXT + 1)
    for stream in (0, 1, 0, 1):
        made.run(FIRST_STREAM + stream, [4096, 1024])
    assert [context for context, *_ in cuda.loaded] == [CONTEXT, CONTEXT + 1]
    found = [(context, stream, values[7]) for context, stream, *_, values in cuda.launched]
    first, second = (CONTEXT, FIRST_STREAM, MEMORY), (CONTEXT + 1, FIRST_STREAM + 1, MEMORY + 2**16)
    assert found == [first, second, first, second]
    assert cuda.current == [CONTEXT + 1]


def test_lengths_share_a_kernel_and_differ_in_their_digest(cuda):
    first, same, longer, other = (
        described.DescribedLaunch(launch(*sizes), ("x", "vector"), 5000, 90)
        for sizes in ((), (), (60,), (6, 16))
    )
    assert first.digest == same.digest
    assert len({first.digest, longer.digest, other.digest}) == 3
    assert len(cuda.compiled) == 1
    longer.run(FIRST_STREAM, [4096, 1024])
    assert cuda.launched[0][-1][0][2] == (8, 60)


def test_what_goes_wrong_is_said(cuda):
    made = described.DescribedLaunch(launch(), ("x", "vector"), 5000, 90)
    with pytest.raises(RuntimeError, match="an array lies at 0x1008, which 16 does not divide"):
        made.run(FIRST_STREAM, [0x1008, 1024])
    cuda.fails["cuMemAlloc_v2"] = 2
    with pytest.raises(RuntimeError, match="cuMemAlloc_v2 failed: out of luck"):
        made.run(FIRST_STREAM, [4096, 1024])
    assert cuda.current == []
    cuda.fails = {"cuLaunchKernelEx": 1}
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed: out of luck"):
        made.run(FIRST_STREAM, [4096, 1024])
    assert cuda.current == []


def test_pointers_in_tritons_spelling():
    assert [pointer_type(np.dtype(x)) for x in ("float32", "uint32")] == ["*fp32", "*i32"]
    assert str(Unaligned("*i32")) == "*i32"
