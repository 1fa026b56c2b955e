"""Portable kernels for Hopper are assembled by a ptxas that keeps addresses in shared memory."""

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from triton.backends.nvidia import compiler

from blackwell_sparsek.launch import assembler
from blackwell_sparsek.launch.assembler import sound_assembler

PORTABLE = SimpleNamespace(is_gluon=lambda: False)
HOPPER = SimpleNamespace(is_gluon=lambda: True)
NEWER = {"ptx_version": 87}


@pytest.fixture
def releases(monkeypatch):
    """The releases of CUDA of the two that Triton brings."""
    found = {90: "12.8", 100: "12.9"}
    monkeypatch.setattr(
        compiler, "get_ptxas", lambda arch: SimpleNamespace(version=found[arch]), raising=False
    )
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assembler._can_choose.cache_clear()
    yield found
    assembler._can_choose.cache_clear()


def chosen(arch=90):
    return compiler.get_ptxas(arch).version


def test_portable_kernels_for_hopper_take_the_newer_one(releases):
    with sound_assembler(PORTABLE, 90) as more:
        assert more == NEWER and chosen() == "12.9"
    assert chosen() == "12.8"


@pytest.mark.parametrize("kernel, sm", [(HOPPER, 90), (PORTABLE, 80), (PORTABLE, 100)])
def test_others_take_the_usual_one(releases, kernel, sm):
    with sound_assembler(kernel, sm) as more:
        assert more == {} and chosen() == "12.8"


def test_other_threads_take_the_usual_one(releases):
    found = []
    with sound_assembler(PORTABLE, 90):
        thread = threading.Thread(target=lambda: found.append(chosen()))
        thread.start()
        thread.join()
    assert found == ["12.8"]


def test_an_exception_ends_it(releases):
    with pytest.raises(ValueError, match="why"), sound_assembler(PORTABLE, 90):
        raise ValueError("why")
    assert chosen() == "12.8"


@pytest.mark.parametrize("usual, other", [("12.9", "12.9"), ("13.4", "13.4"), ("12.8", "12.8")])
def test_nothing_changes_if_it_is_sound_or_there_is_no_other(releases, usual, other):
    releases |= {90: usual, 100: other}
    asked = compiler.get_ptxas
    with sound_assembler(PORTABLE, 90) as more:
        assert more == {} and compiler.get_ptxas is asked


def test_a_triton_that_brings_one_only(releases, monkeypatch):
    def found(arch):
        if arch == 100:
            raise RuntimeError("Cannot find ptxas-blackwell")
        return SimpleNamespace(version="12.8")

    monkeypatch.setattr(compiler, "get_ptxas", found)
    with sound_assembler(PORTABLE, 90) as more:
        assert more == {} and compiler.get_ptxas is found


def test_a_ptxas_that_the_user_names_is_taken(releases, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/mine/ptxas")
    with sound_assembler(PORTABLE, 90) as more:
        assert more == {} and chosen() == "12.8"
