"""Launches kernels for Hopper from JAX: XLA calls Python, which launches by the CUDA driver.

jax-triton cannot: TMA descriptors hold addresses that are known only when a program runs
(docs/decisions/launching.md).
"""

import threading

import jax

from ..core.target import Arch
from ..launch.described import DescribedLaunch
from ..launch.description import ArraySpec, KernelLaunch
from . import ffi

TARGET = "blackwell_sparsek_launch"
_lock = threading.Lock()
# Launches by their digest, which is what a compiled program knows of them: a program that JAX
# stored names the launch that tracing it again describes.
_launches: dict[str, DescribedLaunch] = {}


def launch_by_driver(
    launch: KernelLaunch,
    used: dict[str, ArraySpec],
    given: dict[str, jax.Array],
    written: list[str],
    arch: Arch,
) -> list[jax.Array]:
    """What one launch writes, in the order of `written`. No array is updated, and none zeroed."""
    counters = [x.numel() for x in used.values() if x.role == "counters"]
    assert len(counters) <= 1 and not set(given) & set(written), f"{sorted(used)}"
    assert not any(x.role == "zeroed" for x in used.values()), f"{sorted(used)}"
    described = DescribedLaunch(launch, (*given, *written), sum(counters), arch.sm)
    with _lock:
        if not _launches:
            ffi.register(TARGET, execute, "CUDA")
        _launches.setdefault(described.digest, described)
    results = [jax.ShapeDtypeStruct(used[name].memory, used[name].dtype) for name in written]
    call = jax.ffi.ffi_call(TARGET, results)
    return list(call(*given.values(), launch=described.digest))


def execute(call: ffi.Call) -> None:
    """Launch what a compiled program names, on its stream."""
    digest = call.attribute("launch")
    launch = _launches.get(digest)
    if launch is None:
        raise RuntimeError(
            f"no launch {digest} was described in this process: trace the function here instead of "
            "loading what was compiled or exported elsewhere"
        )
    launch.run(call.stream(), [*call.arguments, *call.results])
