"""Portable kernels for Hopper are assembled by a ptxas that keeps addresses in shared memory."""

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler

from blackwell_sparsek.launch import assembler
from blackwell_sparsek.launch.assembler import assembler_options
from blackwell_sparsek.launch.signature import Signature

PORTABLE = SimpleNamespace(is_gluon=lambda: False)
HOPPER = SimpleNamespace(is_gluon=lambda: True)
NEWER = {"ptx_version": 87}


@pytest.fixture
def releases(monkeypatch):
    """The releases of CUDA of the two that Triton brings; assembling returns that of the tool."""
    found = {90: "12.8", 100: "12.9"}

    def make_cubin(self, ptx, metadata, options, capability):
        if ptx == "wrong":
            raise ValueError("why")
        return chosen(self.target.arch)

    monkeypatch.setattr(
        compiler, "get_ptxas", lambda arch: SimpleNamespace(version=found[arch]), raising=False
    )
    monkeypatch.setattr(compiler.CUDABackend, "make_cubin", make_cubin)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assembler._can_choose.cache_clear()
    yield found
    assembler._can_choose.cache_clear()


def chosen(arch=90):
    return compiler.get_ptxas(arch).version


def assembled(options, sm=90, ptx=""):
    """What assembles a kernel with these options."""
    backend = compiler.CUDABackend(GPUTarget("cuda", sm, 32))
    given = SimpleNamespace(**{"ptx_version": None, **options})
    return backend.make_cubin(ptx, {}, given, sm)


def test_portable_kernels_for_hopper_take_the_newer_one(releases):
    more = assembler_options(PORTABLE, 90)
    assert more == NEWER and assembled(more) == "12.9"
    assert assembled({}) == "12.8"


@pytest.mark.parametrize("kernel, sm", [(HOPPER, 90), (PORTABLE, 80), (PORTABLE, 100)])
def test_others_take_the_usual_one(releases, kernel, sm):
    releases[80] = "12.8"
    assert assembler_options(PORTABLE, 90) == NEWER
    more = assembler_options(kernel, sm)
    assert more == {} and assembled(more, sm) == releases[sm]


def test_a_kernel_takes_the_newer_one_in_threads_of_triton_too(releases):
    """`triton.AsyncCompileMode` compiles in an executor, which knows nothing of the caller."""
    more, found = assembler_options(PORTABLE, 90), []
    threads = [
        threading.Thread(target=lambda given=given: found.append(assembled(given)))
        for given in (more, {})
    ]
    for thread in threads:
        thread.start()
        thread.join()
    assert found == ["12.9", "12.8"]


def test_keys_of_compiled_kernels_do_not_depend_on_it(releases, monkeypatch):
    """Triton asks for a version once, and keeps it for the keys of everybody's kernels."""
    kernel = SimpleNamespace(is_gluon=lambda: False, params=[])
    asked = []

    def compiled(source, target, options):
        asked.append((chosen(), options["ptx_version"]))

    monkeypatch.setattr(triton.compiler, "ASTSource", lambda *args: None)
    monkeypatch.setattr(triton, "compile", compiled)
    Signature(kernel, []).compiled(90, {})
    assert asked == [("12.8", 87)]


def test_an_exception_ends_it(releases):
    more = assembler_options(PORTABLE, 90)
    with pytest.raises(ValueError, match="why"):
        assembled(more, ptx="wrong")
    assert chosen() == "12.8"


@pytest.mark.parametrize("usual, other", [("12.9", "12.9"), ("13.4", "13.4"), ("12.8", "12.8")])
def test_nothing_changes_if_it_is_sound_or_there_is_no_other(releases, usual, other):
    releases |= {90: usual, 100: other}
    asked, make = compiler.get_ptxas, compiler.CUDABackend.make_cubin
    assert assembler_options(PORTABLE, 90) == {}
    assert compiler.get_ptxas is asked and compiler.CUDABackend.make_cubin is make


def test_a_triton_that_brings_one_only(releases, monkeypatch):
    def found(arch):
        if arch == 100:
            raise RuntimeError("Cannot find ptxas-blackwell")
        return SimpleNamespace(version="12.8")

    monkeypatch.setattr(compiler, "get_ptxas", found)
    assert assembler_options(PORTABLE, 90) == {} and compiler.get_ptxas is found


def test_a_ptxas_that_the_user_names_is_taken(releases, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/mine/ptxas")
    assert assembler_options(PORTABLE, 90) == {} and assembled({}) == "12.8"
