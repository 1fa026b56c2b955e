"""Answers of ptxas and nvdisasm, which are asked once for each kernel."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.testing import machine_facts

LOG = """ptxas info    : Function properties for kernel
    0 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 1040 bytes smem
"""
PTX = "// wgmma\n.target sm_90a\nwgmma.mma_async;\n  wgmma.wait_group;\n.reg .b32 wgmma;\n"
SASS = "/*0010*/ HGMMA.64x8x16 R4, gdesc[UR4] ;"


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Names of the tools that were asked, in order; answers are kept in a folder of the test."""
    names = []

    def answer(name, text):
        names.append(name)
        return text

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine_facts, "_assembled", lambda *args: answer("ptxas", LOG))
    sass = property(lambda code: answer("nvdisasm", SASS))
    monkeypatch.setattr(machine_facts._Code, "sass", sass)
    monkeypatch.setattr(machine_facts, "code_digest", lambda cubin: cubin.hex())
    return names


def examine(ptx=PTX, cubin=b"code", sm=90, options=(), wanted=("wgmma", "sass:HGMMA"), log=""):
    compiled = SimpleNamespace(asm={"ptx": ptx, "cubin": cubin})
    return machine_facts.facts_of(compiled, sm, options, wanted, log)


def test_facts(asked):
    assert examine() == {
        "registers": 168,
        "spill_stores": 24,
        "spill_loads": 32,
        "shared": 1040,
        "target": "sm_90a",
        "digest": b"code".hex(),
        "counts": {"wgmma": 2, "sass:HGMMA": 1},
        "unwritten": [
            f"HGMMA.64x8x16 at 0010 reads UR{x}, which nothing wrote" for x in range(4, 8)
        ],
    }


def test_kernels_for_other_gpus_are_not_searched_for_lost_addresses(asked):
    assert examine(PTX.replace("sm_90a", "sm_80"), wanted=())["unwritten"] == []
    assert asked == ["ptxas"]


def test_tools_are_asked_once(asked):
    first = examine()
    assert asked
    asked.clear()
    assert examine() == first and not asked


@pytest.mark.parametrize(
    "change",
    [
        {"ptx": PTX + "ret;"},
        {"cubin": b"edoc"},
        {"sm": 100},
        {"options": ("--maxrregcount=40",)},
        {"wanted": ("mma",)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_tools_are_asked_again_about_another_kernel(asked, change):
    examine()
    asked.clear()
    examine(**change)
    assert "ptxas" in asked


def test_tools_are_asked_again_when_the_checks_have_changed(asked, monkeypatch):
    examine()
    asked.clear()
    monkeypatch.setattr(machine_facts.inspect, "getsource", lambda module: "other checks")
    examine()
    assert asked


def test_ptxas_is_not_asked_again_for_what_it_said_to_triton(asked):
    log = LOG.replace("168", "90")
    assert examine(log=log)["registers"] == 90 and "ptxas" not in asked
    # nothing was assembled: Triton had the kernel
    assert examine(log="\n", cubin=b"kept")["registers"] == 168 and "ptxas" in asked


def test_ptx_without_a_target_is_refused(asked):
    with pytest.raises(ValueError, match="names no target"):
        examine(ptx="ret;")
