"""The only file that asks which versions of torch and triton are installed.

It imports neither: programs without torch ask for the release of Triton too.
"""

import ctypes
import glob
import importlib
import importlib.metadata
import importlib.util
from functools import cache

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
# What Linux calls the GPUs that NVIDIA's driver serves.
_GPU_DEVICES = "/dev/nvidia[0-9]*"
# The library of NVIDIA's driver that torch needs; containers can lack it although they have a GPU.
_DRIVER = "libcuda.so.1"


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _named(release: tuple[int, int] | None) -> str:
    return "none" if release is None else ".".join(map(str, release))


def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch."""
    import torch

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
        older = f"triton {_named(version)} is older than {_named(MIN_TRITON)}"
        return f"{older}; torch {_named(MIN_TORCH)} and newer bring a newer one"
    return None


def why_triton_fails() -> str | None:
    """`why_no_triton`, or why the installed triton cannot be imported; trying takes a moment."""
    if (reason := why_no_triton()) is not None:
        return reason
    return _why_import_fails()


@cache
def _why_import_fails() -> str | None:
    try:
        importlib.import_module("triton")
    except Exception as error:
        return f"triton is installed, but importing it fails: {type(error).__name__}: {error}"
    return None


@cache
def why_torch_misses_gpu() -> str | None:
    """Say that torch cannot use the NVIDIA GPU of this machine, or None: it can, or has none."""
    import torch

    found = sorted(glob.glob(_GPU_DEVICES))
    if not found:
        return None
    there = f"this machine has an NVIDIA GPU ({found[0]}), but"
    if torch.version.cuda is None:
        return (
            f"{there} torch {torch.__version__} is built without CUDA: install a build with it "
            "(https://pytorch.org/get-started)"
        )
    # not `torch.cuda.is_available`: it starts CUDA, which forked processes then cannot use
    try:
        ctypes.CDLL(_DRIVER)
    except OSError as error:
        return (
            f"{there} {_DRIVER} of its driver cannot be loaded ({error}): install the driver, or "
            "give the container its libraries (docker run --gpus all)"
        )
    return None


def _why_unknown(what: str, known: tuple[tuple[int, int], ...]) -> str | None:
    version = triton_version()
    if version in known:
        return None
    return f"{what} triton {_named(known[0])} to {_named(known[-1])}, got {_named(version)}"


def why_no_gluon() -> str | None:
    """Why Hopper kernels are not built with this Triton, or None when they are.

    They are written in Gluon, which changes with every release, and some rely on where Triton puts
    barriers, which is checked in the machine code of each release.
    """
    return _why_unknown("Hopper kernels are known to work with", WARPS_TRITON)


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


def threads_along_first() -> bool:
    """Which of two dimensions that are equally contiguous in memory gets neighbouring threads.

    The first with Triton 3.6, the last with newer releases. A kernel that multiplies what each
    thread has loaded, and orders its dimensions otherwise, passes every value through shared
    memory: products of one column took 1.5 to 1.7 times as long with 3.9 as with 3.6.
    """
    return triton_version() == (3, 6)


def spills_are_judged() -> bool:
    """Whether excess spills fail a compile case: only in the release they were counted with."""
    return triton_version() == SPILLS_TRITON


def why_no_launcher() -> str | None:
    """Why kernels are launched by Triton's front end, which takes longer, or None if not."""
    return _why_unknown("direct launches are known for", LAUNCHER_TRITON)


def installed_versions() -> dict[str, str]:
    """Return the versions that results depend on, for reports; imports torch alone."""
    import torch

    versions = {"blackwell_sparsek": __version__, "torch": torch.__version__}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    for package in ("triton", "numpy"):
        if (version := _installed(package)) is not None:
            versions[package] = version
    return versions
