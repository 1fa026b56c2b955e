from types import SimpleNamespace

import pytest
import torch

from blackwell_sparsek.core import arch
from blackwell_sparsek.core.arch import Arch, arch_of


@pytest.fixture
def two_gpus(monkeypatch):
    """A Hopper and an older GPU; the second is current. Yields the indices that were asked."""
    asked = []
    known = {
        0: SimpleNamespace(
            major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448
        ),
        1: SimpleNamespace(major=8, minor=6, multi_processor_count=84),
    }

    def properties(index):
        asked.append(index)
        return known[index]

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    arch._cuda_arch.cache_clear()
    yield asked
    arch._cuda_arch.cache_clear()


def test_each_gpu_is_described_once(two_gpus, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    hopper = Arch("cuda", 90, 132, 232448, False)
    assert arch_of(torch.device("cuda", 0)) == arch_of(torch.device("cuda", 0)) == hopper
    assert two_gpus == [0]
    # without an index, the current one; shared memory is 0 where torch does not tell
    assert arch_of(torch.device("cuda")) == Arch("cuda", 86, 84, 0, False)
    assert two_gpus == [0, 1]


def test_an_interpreter_is_told_of_a_gpu_too(two_gpus, monkeypatch):
    for value, interpreted in (("1", True), ("0", False)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert arch_of(torch.device("cuda", 0)).interpreted is interpreted
    assert two_gpus == [0]


def test_a_gpu_of_another_vendor_has_no_sm(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert arch_of(torch.device("cuda", 0)).sm == 0
    assert two_gpus == []


@pytest.mark.parametrize(("value", "interpreted"), [("1", True), ("0", False)])
def test_anything_else_follows_the_environment(monkeypatch, value, interpreted):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert arch_of(torch.device("cpu")) == Arch("cpu", 0, 1, 0, interpreted)
    assert arch_of(torch.device("meta")).kind == "meta"


def test_names():
    assert str(Arch("cuda", 90, 132, 0, False)) == "sm_90"
    assert str(Arch("cpu", 0, 1, 0, True)) == "cpu"
