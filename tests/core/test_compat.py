import importlib.metadata
import importlib.util

import pytest
import torch

from blackwell_sparsek._version import __version__
from blackwell_sparsek.core import compat


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.13.0+cpu", (2, 13)), ("3.6.0", (3, 6)), ("2.14.0a0+git1234", (2, 14)), ("3.10", (3, 10))],
)
def test_releases(text, expected):
    assert compat._release(text) == expected


def test_this_torch_is_supported():
    assert compat.torch_version() >= compat.MIN_TORCH


@pytest.fixture
def triton_of(monkeypatch):
    """Pretend that some triton, or none, is installed."""

    def install(version):
        compat.triton_version.cache_clear()
        compat._why_import_fails.cache_clear()
        found = None if version is None else object()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)

    yield install
    compat.triton_version.cache_clear()
    compat._why_import_fails.cache_clear()


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "triton is not installed (pip install 'blackwell-sparsek[triton]')"),
        ("3.5.1", "triton 3.5 is older than 3.6; torch 2.10 and newer bring a newer one"),
        ("2.9.0", "triton 2.9 is older than 3.6; torch 2.10 and newer bring a newer one"),
        ("3.6.0", None),
        ("3.10.0+git", None),
    ],
)
def test_why_no_triton(triton_of, version, reason):
    triton_of(version)
    assert compat.why_no_triton() == reason


def test_a_triton_that_cannot_be_imported(triton_of, monkeypatch):
    triton_of("3.5.1")
    assert compat.why_triton_fails().startswith("triton 3.5 is older than 3.6")
    triton_of("3.6.0")
    tried = []

    def broken(name):
        tried.append(name)
        raise ImportError(f"lib{name}.so: undefined symbol")

    monkeypatch.setattr(importlib, "import_module", broken)
    expected = "triton is installed, but importing it fails: ImportError: libtriton.so: undefined"
    for _ in range(2):
        assert compat.why_triton_fails() == f"{expected} symbol"
    assert tried == ["triton"]  # a failed import is slow, and calls ask each time
    triton_of("3.6.0")
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    assert compat.why_triton_fails() is None


@pytest.mark.parametrize(("brought_by", "found"), [({}, None), ({"triton": ["other"]}, (3, 7))])
def test_a_triton_without_metadata_of_its_own(triton_of, monkeypatch, brought_by, found):
    triton_of("3.6.0")

    def version(name):
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return "3.7.1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: brought_by)
    assert compat.triton_version() == found
    assert ("triton" in compat.installed_versions()) is (found is not None)


def test_versions_for_reports(triton_of):
    triton_of("3.6.0")
    found = compat.installed_versions()
    assert found["blackwell_sparsek"] == __version__ and found["torch"] == torch.__version__
    assert found["triton"] == "3.6.0"
    triton_of(None)
    assert "triton" not in compat.installed_versions()


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_these_releases_are_launched_directly(triton_of, release):
    triton_of(release)
    assert compat.why_no_launcher() is None


@pytest.mark.parametrize(
    ("release", "named"), [("3.5.1", "3.5"), ("3.10.0", "3.10"), (None, "none")]
)
def test_other_releases_are_launched_by_their_front_end(triton_of, release, named):
    triton_of(release)
    expected = f"direct launches are known for triton 3.6 to 3.9, got {named}"
    assert compat.why_no_launcher() == expected


@pytest.mark.parametrize("version", [None, "3.5.1", "3.10.0", "4.0.0"])
def test_hopper_kernels_are_refused_for_releases_that_nobody_checked(triton_of, version):
    triton_of(version)
    got = "none" if version is None else ".".join(version.split(".")[:2])
    first, last = compat.WARPS_TRITON[0], compat.WARPS_TRITON[-1]
    known = f"triton {first[0]}.{first[1]} to {last[0]}.{last[1]}"
    expected = f"Hopper kernels are known to work with {known}, got {got}"
    assert compat.why_no_gluon() == expected


@pytest.mark.parametrize("release", compat.WARPS_TRITON)
def test_hopper_kernels_are_built_with_these_releases(triton_of, release):
    triton_of(".".join(map(str, (*release, 0))))
    assert compat.why_no_gluon() is None


@pytest.fixture
def torch_on(monkeypatch, tmp_path):
    """Pretend that torch was built for some CUDA, or for none, on a machine with these GPUs."""

    def install(cuda, *devices):
        compat.why_torch_misses_gpu.cache_clear()
        for name in devices:
            (tmp_path / name).touch()
        monkeypatch.setattr(torch.version, "cuda", cuda)
        # dlopen takes None for the program itself: a driver that can be loaded
        monkeypatch.setattr(compat, "_DRIVER", None)
        monkeypatch.setattr(compat, "_GPU_DEVICES", f"{tmp_path}/nvidia[0-9]*")
        return tmp_path

    yield install
    compat.why_torch_misses_gpu.cache_clear()


def test_a_torch_without_cuda_beside_a_gpu(torch_on):
    folder = torch_on(None, "nvidia1", "nvidia2", "nvidiactl")
    assert compat.why_torch_misses_gpu() == (
        f"this machine has an NVIDIA GPU ({folder}/nvidia1), but torch {torch.__version__} is "
        "built without CUDA: install a build with it (https://pytorch.org/get-started)"
    )


def test_a_gpu_without_its_driver(torch_on, monkeypatch):
    folder = torch_on("13.0", "nvidia0")
    monkeypatch.setattr(compat, "_DRIVER", "libmissing.so.1")
    reason = compat.why_torch_misses_gpu()
    assert reason.startswith(
        f"this machine has an NVIDIA GPU ({folder}/nvidia0), but libmissing.so.1 of its driver "
        "cannot be loaded ("
    )
    assert reason.endswith(
        "): install the driver, or give the container its libraries (docker run --gpus all)"
    )


@pytest.mark.parametrize(
    ("cuda", "devices"), [(None, ()), (None, ("nvidiactl",)), ("13.0", ()), ("13.0", ("nvidia0",))]
)
def test_no_gpu_is_missed(torch_on, cuda, devices):
    torch_on(cuda, *devices)
    assert compat.why_torch_misses_gpu() is None


@pytest.mark.parametrize(
    ("release", "first"), [("3.6.0", True), ("3.7.1", False), ("3.9.0", False)]
)
def test_which_of_two_dimensions_gets_neighbouring_threads(triton_of, release, first):
    triton_of(release)
    assert compat.threads_along_first() is first
