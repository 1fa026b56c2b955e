"""Block-sparse attention of the cuDNN front end."""

from typing import Any

import torch

from ..case import Contender, Peer
from ..problems.attention import AttentionInputs
from .importing import load, needs
from .torch_attention import block_lists, contender_of, on_gpu

CUDNN_BLOCKS = "cudnn_blocks"
MODULE = "cudnn.block_sparse_attention"


def blocks_of(inputs: AttentionInputs) -> dict[str, Any]:
    """The kept blocks as its functions take them."""
    assert inputs.keep is not None and inputs.problem.block is not None
    counts, order = (
        x[None].expand(inputs.problem.batch, *x.shape).contiguous()
        for x in block_lists(inputs.keep)
    )
    fewest, most = int(counts.min()), int(counts.max())
    blocks = {
        "q2k_block_index": order[..., :most].contiguous(),
        "sparse_block_size": inputs.problem.block[0],
        "layout": "bhsd",
    }
    # where all rows have as many, its kernels are made for that number
    return blocks if fewest == most else blocks | {"q2k_block_nums": counts}


def _prepare(inputs: AttentionInputs) -> Contender:
    forward = load(MODULE, "block_sparse_attention_forward")
    blocks = blocks_of(inputs)

    def call(x: AttentionInputs) -> torch.Tensor:
        out: torch.Tensor = forward(x.q, x.k, x.v, **blocks)["o_tensor"]
        return out

    return contender_of(inputs, call)


def supports_blocks(inputs: AttentionInputs) -> str | None:
    """Why it does not take this mask, or None."""
    block = inputs.problem.block
    if block is None:
        return "measured with block masks only"
    if block not in ((64, 64), (128, 128)):
        return f"takes blocks of 64x64 and 128x128, not {block[0]}x{block[1]}"
    return on_gpu(inputs)


cudnn_blocks = Peer(
    CUDNN_BLOCKS,
    "cuDNN front end, block-sparse",
    _prepare,
    available=needs(MODULE, "block_sparse_attention_forward"),
    supports=supports_blocks,
    rival=True,
)
