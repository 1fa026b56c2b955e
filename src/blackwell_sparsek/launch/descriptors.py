"""Host code that the Hopper kernels share: sizes, layouts, descriptors.

Configurations must be readable without Triton, so functions import it when they need it. Dtypes
are those of torch or NumPy, arrays tensors of torch or an `ArraySpec`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from ..core.sizes import dtype_name

# Rows of one WGMMA instruction, and so of one consumer warp group.
GROUP_ROWS = 64
# Shared memory for the tiles of one program: the 228 KiB of an SM less barriers and tile numbers.
SMEM_BYTES = 226 * 1024

# Dtypes in Triton's spelling. JAX has words of bits as uint32, torch as int32; kernels read int32.
TRITON_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int64": "i64",
    "int32": "i32",
    "uint32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
}


def accumulator_layout(columns: int, depth: int = 16) -> object:
    """Register layout of a [64, columns] WGMMA accumulator; `depth` is 32 for operands in fp8."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth]
    )


def warp_rows_layout(warps: int) -> object:
    """Register layout of sums of `mma.sync`, 16 rows to each warp."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@cache
def shared_layout(block: tuple[int, ...], dtype: Any) -> Any:
    """Layout of a tile of this shape in shared memory."""
    from triton.experimental.gluon import language as gl

    element = {
        "float16": gl.float16,
        "bfloat16": gl.bfloat16,
        "float32": gl.float32,
        "int32": gl.int32,
        "float8_e4m3fn": gl.float8e4nv,
    }[dtype_name(dtype)]
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


class Descriptor(NamedTuple):
    """An array that a kernel copies by TMA, in tiles of shape `block`; strides in elements."""

    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def for_triton(self) -> Any:
        """The same as a descriptor of Triton's."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        layout = shared_layout(self.block, self.base.dtype)
        lists = (list(x) for x in (self.shape, self.strides, self.block))
        return TensorDescriptor(self.base, *lists, layout)


def tensor_descriptor(
    x: Any, block: Sequence[int], strides: tuple[int, ...] | None = None
) -> Descriptor:
    """TMA descriptor that copies tiles of shape `block`; `strides` replace those of `x`."""
    # a torch.Size is a tuple
    return Descriptor(x, x.shape, x.stride() if strides is None else strides, tuple(block))


def packed_descriptor(x: Any, block: tuple[int, ...]) -> Descriptor:
    """TMA descriptor of packed sequences [T, H, D], as `device.gluon.pipeline` addresses them.

    `block` is that of the dense layout, [1, 1, rows, width].
    """
    return Descriptor(x, *packed_sizes(x.shape, x.stride()), (1, *block))


def packed_sizes(
    shape: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the descriptor of packed sequences."""
    tokens, heads, width = shape
    beyond, row_end, wrap = _packed_constants()
    # a dimension of size 1 may have any stride, even one that TMA refuses
    token = strides[0] if tokens > 1 else width
    head = strides[1] if heads > 1 else width
    return (beyond, beyond, heads, row_end, width), (wrap - token, token, head, token, 1)


@cache
def _packed_constants() -> tuple[int, int, int]:
    from ..device.gluon.pipeline import BEYOND, ROW_END, WRAP

    return BEYOND.value, ROW_END.value, WRAP.value


def descriptor_type(block: Sequence[int], dtype: Any) -> str:
    """The type of a tensor descriptor in Triton's spelling."""
    element = TRITON_NAMES[dtype_name(dtype)]
    return f"tensordesc<{element}{list(block)},{shared_layout(tuple(block), dtype)!r}>"
