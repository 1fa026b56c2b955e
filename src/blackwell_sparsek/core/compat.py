"""The only file that asks which versions of torch and triton are installed."""

import importlib.metadata
import importlib.util
from functools import cache

import torch

from .._version import __version__

MIN_TORCH = (2, 10)
MIN_TRITON = (3, 6)


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch."""
    return _release(torch.__version__)


@cache
def triton_version() -> tuple[int, int] | None:
    """(major, minor) of the installed triton, or None; does not import it."""
    if importlib.util.find_spec("triton") is None:
        return None
    return _release(importlib.metadata.version("triton"))


def why_no_triton() -> str | None:
    """Why Triton kernels cannot be built here, or None when they can."""
    version = triton_version()
    if version is None:
        return "triton is not installed (pip install 'blackwell-sparsek[triton]')"
    if version < MIN_TRITON:
        return f"triton {version[0]}.{version[1]} is older than {MIN_TRITON[0]}.{MIN_TRITON[1]}"
    return None


def installed_versions() -> dict[str, str]:
    """Return the versions that results depend on, for reports, without importing packages."""
    versions = {"blackwell_sparsek": __version__, "torch": torch.__version__}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    for package in ("triton", "numpy"):
        if importlib.util.find_spec(package) is not None:
            versions[package] = importlib.metadata.version(package)
    return versions
