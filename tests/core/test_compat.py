import importlib.metadata
import importlib.util
from types import SimpleNamespace

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
        found = None if version is None else object()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)

    yield install
    compat.triton_version.cache_clear()


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "triton is not installed (pip install 'blackwell-sparsek[triton]')"),
        ("3.5.1", "triton 3.5 is older than 3.6"),
        ("2.9.0", "triton 2.9 is older than 3.6"),
        ("3.6.0", None),
        ("3.10.0+git", None),
    ],
)
def test_why_no_triton(triton_of, version, reason):
    triton_of(version)
    assert compat.why_no_triton() == reason


def test_a_triton_that_cannot_be_imported(triton_of, monkeypatch):
    triton_of("3.5.1")
    assert compat.why_triton_fails() == "triton 3.5 is older than 3.6"
    triton_of("3.6.0")

    def broken(name):
        raise ImportError(f"lib{name}.so: undefined symbol")

    monkeypatch.setattr(importlib, "import_module", broken)
    expected = "triton is installed, but importing it fails: ImportError: libtriton.so: undefined"
    assert compat.why_triton_fails() == f"{expected} symbol"
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


@pytest.fixture
def known_launcher(monkeypatch):
    """As with the release whose launcher is known, whichever is installed."""
    monkeypatch.setattr(compat, "triton_version", lambda: compat.LAUNCHER_TRITON)


def _compiled(launch, **changed):
    run = {
        "launch": launch,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "launch_cooperative_grid": False,
        "launch_pdl": True,
    }
    run = SimpleNamespace(**(run | changed))
    return SimpleNamespace(run=run, function=7, packed_metadata="meta")


def test_a_launcher_without_descriptors_is_taken_as_it_is(known_launcher):
    found = compat.kernel_launcher(_compiled(print))
    assert found.launch is print and found.descriptors == []
    assert found.prefix == (7, False, True, None, None, "meta", None, None, None)


def test_the_wrapper_for_descriptors_is_looked_through(known_launcher):
    launcher, tensordesc_meta = print, ["first", "second"]

    def wrapper(*args):
        return launcher(tensordesc_meta, *args)

    found = compat.kernel_launcher(_compiled(wrapper))
    assert found.launch is print and found.descriptors == ["first", "second"]


@pytest.mark.parametrize("version", [(3, 7), (3, 9), None])
def test_launchers_of_other_releases_are_left_alone(monkeypatch, known_launcher, version):
    assert compat.kernel_launcher(_compiled(print)) is not None
    monkeypatch.setattr(compat, "triton_version", lambda: version)
    assert compat.kernel_launcher(_compiled(print)) is None


@pytest.mark.parametrize(
    "compiled",
    [
        _compiled(print, global_scratch_size=64),
        _compiled(print, profile_scratch_size=64),
        _compiled(None),
        SimpleNamespace(),
        SimpleNamespace(run=SimpleNamespace()),
        None,
    ],
)
def test_what_cannot_be_launched_directly_gives_none(known_launcher, compiled):
    assert compat.kernel_launcher(compiled) is None
