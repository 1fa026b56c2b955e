"""Python functions that XLA calls: the layout of its structures, and real calls on a CPU."""

import ctypes
import itertools
import shutil
import subprocess

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")

import jax.numpy as jnp  # noqa: E402

from blackwell_sparsek.jax import ffi  # noqa: E402

_numbers = itertools.count()
STRUCTURES = {
    "XLA_FFI_Extension_Base": ffi.Extension,
    "XLA_FFI_Api_Version": ffi.ApiVersion,
    "XLA_FFI_Metadata": ffi.Metadata,
    "XLA_FFI_Metadata_Extension": ffi.MetadataExtension,
    "XLA_FFI_Buffer": ffi.Buffer,
    "XLA_FFI_ByteSpan": ffi.ByteSpan,
    "XLA_FFI_Scalar": ffi.Scalar,
    "XLA_FFI_Args": ffi.Args,
    "XLA_FFI_Rets": ffi.Rets,
    "XLA_FFI_Attrs": ffi.Attrs,
    "XLA_FFI_Api": ffi.Api,
    "XLA_FFI_CallFrame": ffi.CallFrame,
    "XLA_FFI_Error_Create_Args": ffi.ErrorCreateArgs,
    "XLA_FFI_Error_GetMessage_Args": ffi.ErrorGetMessageArgs,
    "XLA_FFI_Error_Destroy_Args": ffi.ErrorDestroyArgs,
    "XLA_FFI_Stream_Get_Args": ffi.StreamGetArgs,
}
# Those that end with the last field that is used here.
CUT_OFF = ("XLA_FFI_Metadata", "XLA_FFI_Api", "XLA_FFI_CallFrame")


def test_the_layout_is_that_of_the_header(tmp_path):
    """A C compiler says where the header of jaxlib has each field, and what its constants are."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    lines, expected = [], []
    for name, structure in STRUCTURES.items():
        for field, kind in structure._fields_:
            lines.append(f"(size_t)offsetof({name}, {field}), sizeof((({name}*)0)->{field})")
            expected += [getattr(structure, field).offset, ctypes.sizeof(kind)]
        if name not in CUT_OFF:
            lines.append(f"sizeof({name})")
            expected.append(ctypes.sizeof(structure))
    for constant, value in {
        "XLA_FFI_API_MAJOR": ffi.MAJOR,
        "XLA_FFI_Extension_Metadata": ffi._METADATA,
        "XLA_FFI_ExecutionStage_EXECUTE": ffi._EXECUTE,
        "XLA_FFI_Error_Code_INTERNAL": ffi._INTERNAL_ERROR,
        "XLA_FFI_AttrType_SCALAR": ffi._SCALAR,
        "XLA_FFI_AttrType_STRING": ffi._STRING,
    }.items():
        lines.append(f"(size_t){constant}")
        expected.append(value)
    values = ",\n".join(lines)
    source = tmp_path / "layout.c"
    source.write_text(
        '#include <stdio.h>\n#include "xla/ffi/api/c_api.h"\n'
        f"int main(void) {{ size_t found[] = {{{values}}};\n"
        'for (size_t i = 0; i < sizeof(found) / 8; ++i) printf("%zu\\n", found[i]);\n'
        "return 0; }\n"
    )
    program = tmp_path / "layout"
    command = [compiler, f"-I{jax.ffi.include_dir()}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in printed.split()] == expected


def called(run, *shapes, **attributes):
    """A function of arrays that has XLA call `run` on the CPU."""
    name = f"blackwell_sparsek_test_{next(_numbers)}"
    ffi.register(name, run, "cpu")
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return lambda *arrays: jax.ffi.ffi_call(name, results)(*arrays, **attributes)


def array_at(address, shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)


def test_arguments_results_and_attributes():
    seen = []

    def run(call):
        (x_shape, n_shape), (sum_shape, flag_shape) = call.shapes()
        x, n = (
            array_at(call.arguments[0], x_shape, "f4"),
            array_at(call.arguments[1], n_shape, "i4"),
        )
        array_at(call.results[0], sum_shape, "f4")[:] = x.sum(1) * n
        array_at(call.results[1], flag_shape, "i4")[...] = call.attribute("number")
        seen.append([call.attribute(n) for n in ("number", "small", "factor", "text")])

    given = {"number": np.int64(2**40 + 3), "small": np.int32(-7), "factor": np.float32(0.5)}
    small = called(run, ((2,), jnp.float32), ((), jnp.int32), **given, text="größer")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"OverflowError|out of bounds"):
        jax.block_until_ready(jax.jit(small)(jnp.ones((2, 3)), jnp.full((2,), 4, jnp.int32)))
    fits = called(run, ((2,), jnp.float32), ((), jnp.int32), **given | {"number": 5}, text="größer")
    total, number = jax.jit(fits)(jnp.ones((2, 3)), jnp.array([4, 5], jnp.int32))
    np.testing.assert_array_equal(total, [12, 15])
    assert number == 5 and seen == [[5, -7, 0.5, "größer"]]


def test_many_calls_in_a_loop_and_from_threads():
    def run(call):
        (shape,), _ = call.shapes()
        array_at(call.results[0], shape, "f4")[:] = array_at(call.arguments[0], shape, "f4") + 1

    add_one = called(run, ((8,), jnp.float32))
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, y: add_one(y)[0], x))
    np.testing.assert_array_equal(loop(jnp.zeros(8)), np.full(8, 100.0))


def test_an_exception_is_the_error_of_the_program():
    def run(call):
        raise ValueError(f"no\0t this {len(call.arguments)}")

    refused = jax.jit(called(run, ((1,), jnp.float32)))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"ValueError: no\?t this 1"):
            jax.block_until_ready(refused(jnp.zeros(1)))
    interrupted = jax.jit(called(lambda call: exec("raise KeyboardInterrupt"), ((1,), jnp.float32)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="KeyboardInterrupt"):
        jax.block_until_ready(interrupted())


def test_what_is_not_there_is_said():
    def no_attribute(call):
        call.attribute("launch")

    with pytest.raises(jax.errors.JaxRuntimeError, match="the call has no attribute launch"):
        jax.block_until_ready(jax.jit(called(no_attribute, ((1,), jnp.float32), other=1))())
    with pytest.raises(jax.errors.JaxRuntimeError, match="the attribute launch is of kind"):
        several = called(no_attribute, ((1,), jnp.float32), launch=np.arange(3))
        jax.block_until_ready(jax.jit(several)())

    def no_stream(call):
        call.stream()

    # a CPU has none; the error of XLA comes back as one of Python, and as one of XLA again
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RuntimeError: XLA has no stream: .+"):
        jax.block_until_ready(jax.jit(called(no_stream, ((1,), jnp.float32)))())


def test_another_version_of_the_interface():
    api = ffi.Api()
    api.api_version.major_version = 1
    frame = ffi.CallFrame(api=ctypes.pointer(api))
    with pytest.raises(RuntimeError, match=r"XLA's foreign functions 1\.x are not known"):
        ffi._answer(frame, ffi.Metadata())
    for spoken, answered in ((1, 1), (ffi.MINOR, ffi.MINOR), (ffi.MINOR + 4, ffi.MINOR)):
        api.api_version.major_version, api.api_version.minor_version = 0, spoken
        metadata = ffi.Metadata(traits=1)
        ffi._answer(frame, metadata)
        assert metadata.api_version.minor_version == answered and metadata.traits == 0


def test_a_jaxlib_of_another_version(monkeypatch, tmp_path):
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert "cannot be read" in ffi.why_no_ffi.__wrapped__()
    header.parent.mkdir(parents=True)
    for text, why in (("#define XLA_FFI_API_MAJOR 1", "got 1"), ("", "got none")):
        header.write_text(text)
        assert ffi.why_no_ffi.__wrapped__().endswith(why)
    header.write_text("#define XLA_FFI_API_MAJOR 0")
    assert ffi.why_no_ffi.__wrapped__() is None
