"""Runs the Hopper forward of JAX on a CUDA driver that only notes what it is asked for.

XLA's CPU backend compiles and runs the program and calls the same Python function as on a GPU; the
kernels are compiled for sm_90. Prints what was launched as JSON. torch cannot be imported. Run as
`python -m tests.jax.launch_on_fake_gpu`.
"""

import importlib.abc
import json
import sys


class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")


sys.meta_path.insert(0, NoTorch())

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import blackwell_sparsek.jax as bsk_jax  # noqa: E402
import jax  # noqa: E402
from blackwell_sparsek.core.target import Arch  # noqa: E402
from blackwell_sparsek.jax import driver_calls, ffi  # noqa: E402
from blackwell_sparsek.launch import described, driver  # noqa: E402
from blackwell_sparsek.launch.parameters import declared_sizes  # noqa: E402

from ..launch.fake_cuda import FIRST_STREAM, FakeCuda  # noqa: E402

CUDA = FakeCuda()
ADDRESSES = []
attention = sys.modules["blackwell_sparsek.jax.attention"]
attention.why_no_kernels = lambda *_: None
attention.arch_of = lambda _: Arch("gpu", 90, 132, 232448, False)
driver._library = lambda: CUDA.library
driver._encode_function = lambda: CUDA.library.cuTensorMapEncodeTiled
ffi.Call.stream = lambda call: FIRST_STREAM


def execute(call):
    ADDRESSES.append((call.arguments, call.results))
    driver_calls.execute(call)


ffi.register(driver_calls.TARGET, execute, "cpu")


def attend(q, k, v, **options):
    return bsk_jax.attention(q, k, v, impl="sm90", return_lse=True, **options)


def run(name, function, *arrays):
    """Run a jitted function twice; what it launched, with the names of its arrays."""
    CUDA.launched.clear()
    ADDRESSES.clear()
    jitted = jax.jit(function)
    for _ in range(2):
        jax.block_until_ready(jitted(*arrays))
        assert (driver_calls.TARGET, "CUDA") in ffi._registered
    found = []
    for (arguments, results), launched in zip(ADDRESSES, CUDA.launched, strict=True):
        names = {x: f"argument {i}" for i, x in enumerate(arguments)}
        names |= {x: f"result {i}" for i, x in enumerate(results)}
        _, stream, _, (grid, threads, _), attributes, values = launched
        maps = [
            (names.get(x[1]), *x[2:5]) if isinstance(x, tuple) else names.get(x, x) for x in values
        ]
        found.append([stream - FIRST_STREAM, grid, threads, attributes, maps])
    return {"name": name, "launched": found, "traced": jitted._cache_size()}


def main():
    # the parameters of every kernel, as its code declares them
    loaded = described._load

    def noted(compiled):
        CUDA.sizes = declared_sizes(compiled.asm["ptx"])
        return loaded(compiled)

    described._load = noted
    q, k = jnp.zeros((2, 4, 300, 64), jnp.bfloat16), jnp.zeros((2, 2, 500, 64), jnp.bfloat16)
    v = jnp.ones_like(k)
    devices = np.array(jax.devices()[:1])
    mesh, spec = jax.sharding.Mesh(devices, "batch"), jax.sharding.PartitionSpec("batch")
    causal = {"causal": True, "softcap": 2.0}
    sharded = jax.shard_map(
        lambda q, k, v: attend(q, k, v, **causal), mesh=mesh, in_specs=spec, out_specs=spec
    )
    shared = jax.vmap(lambda q, k, v: attend(q, k, v, **causal), in_axes=(0, None, None))
    results = [
        run("plain", lambda q, k, v: attend(q, k, v, **causal), q, k, v),
        run("other lengths", lambda q, k, v: attend(q, k, v, **causal), q[:, :, :200], k, v),
        run("sharded", sharded, q, k, v),
        run("mapped", shared, jnp.stack([q[:1], q[:1]]), k[:1], v[:1]),
    ]
    print(json.dumps([*results, {"name": "compiled", "count": len(described._kernels)}]))
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
