"""Launches kernels from JAX: the portable ones through jax-triton, others by the CUDA driver."""

import inspect
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax

from ..core.env import kept_variable
from ..core.target import Arch
from ..launch.description import ArraySpec, KernelLaunch, Role, arrays_of
from ..launch.descriptors import Descriptor
from .arrays import vary_like
from .driver_calls import launch_by_driver
from .flat_kernels import flat_kernel

MIN_SM = 80
DTYPES = ("float16", "bfloat16", "float32")
# Shared memory that one program may have; elsewhere planners assume the least of all GPUs.
SMEM_BYTES = {80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448}
# Precisions of JAX that multiply fp32 in full, or closely: kernels then use the CUDA cores.
FULL_PRECISIONS = ("highest", "float32", "high", "bfloat16_3x", "tensorfloat32_3x")
OPTIONS = {"num_warps", "num_stages"}


class Arrays:
    """The arrays that launches are given, by name."""

    def __init__(self) -> None:
        self.given: dict[str, jax.Array] = {}

    def add(self, name: str, x: jax.Array) -> ArraySpec:
        """Take an array, and describe it: in JAX the last dimension is the fastest."""
        self.given[name] = x
        return ArraySpec.contiguous_of(name, "input", x.shape, x.dtype)

    def add_if(self, name: str, x: jax.Array | None) -> ArraySpec | None:
        """The same, or None for None."""
        return None if x is None else self.add(name, x)


def made(name: str, role: Role, shape: Iterable[int], dtype: Any) -> ArraySpec:
    """The description of an array that a launch makes."""
    return ArraySpec.contiguous_of(name, role, shape, jnp.dtype(dtype))


def run_launches(
    launches: Iterable[KernelLaunch | None], arrays: dict[str, jax.Array], arch: Arch
) -> dict[str, jax.Array]:
    """Run launches one after another; return `arrays` and all that was written, by name.

    An array that an earlier launch wrote is read by later ones, and updated where its role is
    "output". None is a launch with nothing to compute: what it would write is missing.
    """
    known = dict(arrays)
    for launch in launches:
        if launch is None:
            continue
        used = arrays_of(launch)
        read = [name for name in used if name in known]
        made = [n for n, x in used.items() if x.role == "output" or n not in known]
        written = [name for name in made if used[name].role != "counters"]
        # jax-triton passes no descriptors
        by_tma = any(isinstance(x, Descriptor) for x in launch.args)
        start = launch_by_driver if by_tma else launch_kernel
        results = start(launch, used, {name: known[name] for name in read}, written, arch)
        marked = (vary_like(x, *arrays.values()) for x in results)
        known.update(zip(written, marked, strict=True))
    return known


def launch_kernel(
    launch: KernelLaunch,
    used: dict[str, ArraySpec],
    given: dict[str, jax.Array],
    written: list[str],
    arch: Arch,
) -> list[jax.Array]:
    """What one launch writes, in the order of `written`; an array in `given` too is updated."""
    unknown = set(launch.options) - OPTIONS
    assert not unknown, f"jax-triton has no option {sorted(unknown)}"
    read = list(given)
    kernel, numbers = flat_kernel(launch, read, written)
    triton_call, takes_types = _triton_call()
    outputs = [jax.ShapeDtypeStruct(used[name].memory, used[name].dtype) for name in written]
    options = {"out_type" if takes_types else "out_shape": outputs, **launch.options}
    # before it took types, jax-triton passed Python's floats as fp64
    passed = [np.float32(n) if isinstance(n, float) and not takes_types else n for n in numbers]
    return triton_call(
        *given.values(),
        *passed,
        kernel=kernel,
        grid=launch.programs,
        name=kernel.fn.__name__,
        compute_capability=arch.sm,
        zeroed_outputs=tuple(i for i, n in enumerate(written) if used[n].role == "zeroed"),
        input_output_aliases={read.index(n): i for i, n in enumerate(written) if n in given},
        **options,
    )


@cache
def _triton_call() -> tuple[Any, bool]:
    """`jax_triton.triton_call`, and whether it takes `out_type` (0.4) or `out_shape` (0.3)."""
    # jax-triton turns off Triton's cache on disk for the whole process when it is imported
    with kept_variable("TRITON_CACHE_DIR"):
        import jax_triton
    call = jax_triton.triton_call
    return call, "out_type" in inspect.signature(call).parameters


def why_no_kernels(device: Any, dtype: Any) -> str | None:
    """Why no kernel can run on arrays of `dtype` on a device, or None when some may."""
    if device.platform not in ("gpu", "cuda"):
        return f"needs a CUDA GPU, the arrays are on {device.platform}"
    for package, name in (("triton", "triton"), ("jax_triton", "jax-triton")):
        if find_spec(package) is None:
            return f"needs {name}, which is not installed: pip install {name}"
    arch = arch_of(device)
    if arch.sm < MIN_SM:
        return f"needs a CUDA GPU of sm_{MIN_SM} or newer, got {arch}"
    if dtype.name not in DTYPES:
        return f"needs {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {dtype.name}"
    return None


def device_of(x: jax.Array) -> Any:
    """Where an array lies; a traced one counts as on JAX's default device."""
    if isinstance(x, jax.core.Tracer):
        default = jax.config.jax_default_device
        return jax.devices()[0] if default is None or isinstance(default, str) else default
    return next(iter(x.devices()))


@cache
def arch_of(device: Any) -> Arch:
    """A GPU of JAX as planners see it."""
    sm = round(10 * float(getattr(device, "compute_capability", 0)))
    sms = getattr(device, "core_count", 1)
    return Arch(device.platform, sm, sms, SMEM_BYTES.get(sm, 0), False)


def fp32_precision(dtype: Any) -> str:
    """Multiply float32 as JAX's own products may on a GPU: in tf32 unless told otherwise."""
    precision = jax.config.jax_default_matmul_precision
    full = dtype.itemsize != 4 or str(precision).lower() in FULL_PRECISIONS
    return "ieee" if full else "tf32"
