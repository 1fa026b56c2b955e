# mypy: ignore-errors
"""Differences between Triton releases: names (here the newest) and the place of descriptors."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

from ...core.compat import triton_version

# LLVM of Triton 3.9 computes the descriptors of many WGMMA before the first of them. They do not
# fit into uniform registers, and ptxas moves each back by R2UR.
EARLY_DESCRIPTORS = gl.constexpr((triton_version() or (0, 0)) >= (3, 9))

# Wait for all threads of this role. `gl.barrier` since Triton 3.7.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

# TMA copies of tiles: from a tensor to shared memory, and back. Renamed in Triton 3.8; 3.9 keeps
# the old names only to report that.
if hasattr(tma, "async_load"):
    async_load, async_store = tma.async_load, tma.async_store
else:
    async_load, async_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

# cp.async: copies of elements at any address to shared memory. Renamed in Triton 3.8 as well.
if hasattr(async_copy, "async_load"):
    async_gather = async_copy.async_load
else:
    async_gather = async_copy.async_copy_global_to_shared

if hasattr(tma, "async_atomic_add"):
    async_atomic_add = tma.async_atomic_add
else:

    @builtin
    def async_atomic_add(tensor_desc, coord, src, _semantic=None):
        """Start adding a shared-memory tile to the tile of a tensor at `coord`.

        Triton 3.6 and 3.7 can compile it but do not export it.
        """
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


@builtin
def reinterpret(smem, dtype, shape, layout, _semantic=None):
    """Shared memory as another type, shape and layout of as many bytes.

    A public method since Triton 3.9; 3.8 refuses other sizes.
    """
    view = smem.reinterpret if hasattr(smem, "reinterpret") else smem._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def placed(index):
    """A tile index that keeps the compiler from computing descriptors any earlier than here."""
    if EARLY_DESCRIPTORS:
        index = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,~{memory}", [index], gl.int32, False, 1
        )
    return index
