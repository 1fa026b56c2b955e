"""Lowers what JAX launches for a CUDA GPU, on a machine without one; prints the kernels as JSON.

Triton compiles every kernel down to PTX. Only the last step, which needs CUDA's plugin of JAX, is
replaced: the classes that hold a compiled kernel. torch cannot be imported.
"""

import importlib.abc
import json
import re
import sys
from functools import partial


class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")


sys.meta_path.insert(0, NoTorch())

import jax.numpy as jnp  # noqa: E402
import jaxlib.gpu_triton as compiled  # noqa: E402
import numpy as np  # noqa: E402

import blackwell_sparsek.jax as bsk_jax  # noqa: E402
import jax  # noqa: E402
from blackwell_sparsek.core.target import Arch  # noqa: E402

ARCH = Arch("gpu", 90, 132, 232448, False)
CALLS = []


class Kernel:
    def __init__(self, name, num_warps, num_ctas, shared, ptx, ttir, capability, *rest):
        self.name, self.ptx = name, ptx


class Call:
    def __init__(self, kernel, x, y, z, parameters):
        CALLS.append([kernel.name, x, len(parameters), parameters])
        # a pointer or a number for each parameter, and two that Triton adds
        entry = kernel.ptx[kernel.ptx.index(".entry") :]
        taken = entry[: entry.index(")")].count(".param")
        assert taken == len(parameters) + 2, (kernel.name, taken, len(parameters))

    def to_proto(self, name, metadata):
        return name.encode()


compiled.TritonKernel, compiled.TritonKernelCall = Kernel, Call
compiled.get_compute_capability = compiled.get_serialized_metadata = None
compiled.create_array_parameter = lambda zeroed, divisible: ["array", zeroed]
compiled.create_scalar_parameter = lambda value, dtype: [dtype, value]

for module in ("attention", "decode", "matmul"):
    found = sys.modules[f"blackwell_sparsek.jax.{module}"]
    found.why_no_kernels, found.arch_of = (lambda *_: None), (lambda _: ARCH)


def lower(name, function, *arrays):
    """Lower a function, and note the kernels that it calls and what Triton was given."""
    CALLS.clear()
    lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    operations = sorted(set(re.findall(r"stablehlo\.(\w+)", text)))
    count = text.count("@triton_kernel_call")
    return {"name": name, "calls": list(CALLS), "custom_calls": count, "operations": operations}


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


def attention():
    """Gradients under `shard_map`, whose checks follow along which axes each array varies."""
    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    mesh, names = jax.sharding.Mesh(devices, ("batch", "heads")), jax.sharding.PartitionSpec
    blocks = bsk_jax.BlockMask.from_element_mask(np.tri(48, 64, dtype=bool), 16)

    def attend(q, k, v, sinks, blocks):
        return bsk_jax.attention(
            q, k, v, sinks=sinks, block_mask=blocks, window=9, softcap=2.0, impl="triton"
        )

    spec, shared = names("batch", "heads"), names("batch", None)
    mask = blocks.partition_spec("batch", "heads")
    sharded = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(spec, shared, shared, names("heads"), mask),
        out_specs=spec,
    )

    def loss(q, k, v, sinks):
        return sharded(q, k, v, sinks, blocks).astype(jnp.float32).sum()

    arrays = zeros(1, 2, 48, 16), zeros(1, 1, 64, 16), zeros(1, 1, 64, 16)
    return jax.grad(loss, (0, 1, 2, 3)), *arrays, zeros(2, dtype=jnp.float32)


def forward():
    """Four masks with partial blocks: nothing of them is sorted, scattered or converted."""
    blocks = bsk_jax.BlockMask.from_element_mask(np.tri(48, 64, dtype=bool)[None].repeat(4, 0), 16)

    def attend(q, k, v, blocks):
        return bsk_jax.attention(q, k, v, block_mask=blocks, impl="triton")

    return attend, zeros(1, 4, 48, 16), zeros(1, 2, 64, 16), zeros(1, 2, 64, 16), blocks


def decode():
    def step(q, pages, lengths, table):
        return bsk_jax.attention_decode(
            q, pages, pages, cache_seqlens=lengths, page_table=table, impl="triton"
        )

    integers = partial(zeros, dtype=jnp.int32)
    return step, zeros(2, 4, 1, 64), zeros(8, 16, 2, 64), integers(2), integers(2, 4)


def products():
    matrix = bsk_jax.BSRMatrix.from_dense(np.ones((32, 48), np.float16), (16, 16))

    def loss(data, x):
        return bsk_jax.matmul(x, matrix.with_data(data), impl="triton").sum()

    return jax.grad(loss, (0, 1)), matrix.data, zeros(20, 32, dtype=jnp.float16)


if __name__ == "__main__":
    cases = {"attention": attention, "forward": forward, "decode": decode, "products": products}
    chosen = sys.argv[1:] or list(cases)
    print(json.dumps([lower(name, *cases[name]()) for name in chosen]))
    assert "torch" not in sys.modules
