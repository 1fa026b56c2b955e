"""All peers of the forward pass; those that run code of their own come last."""

from .cudnn_frontend import CUDNN_BLOCKS, cudnn_blocks
from .flash import FA2, FA3, FA4, fa2, fa3, fa4
from .flashinfer import FLASHINFER, flashinfer
from .ours import OURS, ours, ours_dense
from .torch_attention import (
    CUDNN,
    DENSE,
    FLASH,
    SDPA,
    flex,
    sdpa,
    sdpa_cudnn,
    sdpa_dense,
    sdpa_flash,
)

FORWARD = {
    peer.name: peer
    for peer in (
        ours,
        ours_dense,
        sdpa_dense,
        sdpa,
        sdpa_cudnn,
        sdpa_flash,
        flex,
        fa2,
        fa3,
        fa4,
        flashinfer,
        cudnn_blocks,
    )
}
# FlexAttention compiles anew for each shape and mask: suites name the cases it takes part in.
ON_BAND = (OURS, SDPA, CUDNN, FLASH, FA2, FA3, FA4, FLASHINFER)
ON_WINDOW = (OURS, DENSE, FA2, FA3, FA4, FLASHINFER)
ON_BLOCKS = (OURS, DENSE, FA4, FLASHINFER, CUDNN_BLOCKS)
