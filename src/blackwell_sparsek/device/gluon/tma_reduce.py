"""TMA copies that add to memory, which Triton 3.6 can build but does not export to Gluon."""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """Start adding a shared-memory tile to the tile of a tensor at `coord`.

    Additions of several programs to one tile come in any order.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)
