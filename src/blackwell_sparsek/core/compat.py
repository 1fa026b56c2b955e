"""The only file that asks which versions of torch and triton are installed."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .._version import __version__

MIN_TORCH = (2, 10)
MIN_TRITON = (3, 6)
# Releases whose kernels `launch.parameters` knows how to launch.
LAUNCHER_TRITON = ((3, 6), (3, 7), (3, 8), (3, 9))
# Releases in whose code tests read what `device/gluon/warps.py` and kernels with barriers of their
# own take for granted: where barriers lie, and that no others come into loops of single warps.
WARPS_TRITON = ((3, 6), (3, 7), (3, 8), (3, 9))
# The release in which spills of kernels were counted: others allocate registers differently.
SPILLS_TRITON = (3, 6)


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch."""
    return _release(torch.__version__)


def _installed(package: str) -> str | None:
    """The version of a package that can be imported, or None; does not import it."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # a folder of that name on the path, or a package that another distribution brings
        names = importlib.metadata.packages_distributions().get(package)
        return importlib.metadata.version(names[0]) if names else None


@cache
def triton_version() -> tuple[int, int] | None:
    """(major, minor) of the installed triton, or None; does not import it."""
    version = _installed("triton")
    return None if version is None else _release(version)


def why_no_triton() -> str | None:
    """Why Triton kernels cannot be built here, or None when they can."""
    version = triton_version()
    if version is None:
        return "triton is not installed (pip install 'blackwell-sparsek[triton]')"
    if version < MIN_TRITON:
        return f"triton {version[0]}.{version[1]} is older than {MIN_TRITON[0]}.{MIN_TRITON[1]}"
    return None


def why_triton_fails() -> str | None:
    """`why_no_triton`, or why the installed triton cannot be imported; trying takes a moment."""
    if (reason := why_no_triton()) is not None:
        return reason
    try:
        importlib.import_module("triton")
    except Exception as error:
        return f"triton is installed, but importing it fails: {type(error).__name__}: {error}"
    return None


def why_places_unknown() -> str | None:
    """Why it is not known where Triton puts a kernel's barriers, or None when it is."""
    version = triton_version()
    if version in WARPS_TRITON:
        return None
    first, last = (".".join(map(str, release)) for release in (WARPS_TRITON[0], WARPS_TRITON[-1]))
    got = "none" if version is None else f"{version[0]}.{version[1]}"
    return f"needs triton {first} to {last}, which put barriers where it looks for them, got {got}"


def warps_may_part() -> bool:
    """Whether warps of a program may diverge, as `device/gluon/warps.py` lets them."""
    return triton_version() in WARPS_TRITON


def ptxas_options() -> list[str]:
    """Options of Triton's own for ptxas that affect registers; `ptx_options` come after them."""
    version = triton_version()
    return ["--regAllocOptLevel=2"] if version is not None and version >= (3, 7) else []


@cache
def hopper_options() -> dict[str, str]:
    """Launch options of every Hopper kernel, besides its own.

    Triton 3.7 and later lower ptxas's effort at allocating registers. It made no difference to the
    ptxas of CUDA 12 that they use for sm_90; that of 13.4, which 3.9 uses, spills two to four times
    as much (backward, D 128: 500 instead of 140 bytes loaded). Level 4 is what ptxas does unasked.
    """
    version = triton_version()
    if version is None or version < (3, 9):
        return {}
    return {"ptx_options": "--regAllocOptLevel=4"}


def spills_are_judged() -> bool:
    """Whether excess spills fail a compile case: only in the release they were counted with."""
    return triton_version() == SPILLS_TRITON


def why_no_launcher() -> str | None:
    """Why kernels are launched by Triton's front end, which takes longer, or None if not."""
    version = triton_version()
    if version in LAUNCHER_TRITON:
        return None
    ends = (LAUNCHER_TRITON[0], LAUNCHER_TRITON[-1])
    first, last = (".".join(map(str, release)) for release in ends)
    got = "none" if version is None else f"{version[0]}.{version[1]}"
    return f"direct launches are known for triton {first} to {last}, got {got}"


# Private functions of torch, because the public ones make checks that a launch cannot afford.
# Where a private function is missing, its public counterpart takes its place.
raw_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _public_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)


def _public_empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# (shape, strides, dtype) -> memory on the current GPU; compiled models allocate with it
empty_on_gpu: Callable[..., torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _public_empty
)


def installed_versions() -> dict[str, str]:
    """Return the versions that results depend on, for reports, without importing packages."""
    versions = {"blackwell_sparsek": __version__, "torch": torch.__version__}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    for package in ("triton", "numpy"):
        if (version := _installed(package)) is not None:
            versions[package] = version
    return versions
