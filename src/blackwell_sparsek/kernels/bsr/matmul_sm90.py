"""`bsk::bsr_matmul` on Hopper: turns operands into what `_spmm_sm90_kernel` reads and launches it.

dense @ A is computed as (A.T @ dense.T).T: the kernel reads and writes the transposed views.
"""

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...core.launch import cdiv, on_device_of
from .config_sm90 import GROUP_ROWS, SpmmSm90Config
from .pack import PackedPattern, launch_pack, pack_pattern
from .plan import SpmmPlan
from .spmm import launch_reduce
from .spmm_sm90 import _spmm_sm90_kernel

# Registers per thread the kernel is compiled for; the roles then trade them among themselves.
MAX_REGISTERS = 168
_GLUON_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}
# Packed patterns by the row pointers they were made from, which live as long as their pattern.
_PACKED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packed_pattern(indptr: torch.Tensor, indices: torch.Tensor, cols_b: int, block_h: int) -> PackedPattern:
    """The pattern of 64-row blocks over rows of `block_h`, made once (one synchronisation)."""
    if indptr not in _PACKED:
        _PACKED[indptr] = pack_pattern(indptr, indices, cols_b, GROUP_ROWS // block_h)
    return _PACKED[indptr]
