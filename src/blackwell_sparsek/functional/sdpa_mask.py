"""Bool masks, as torch takes them, as block masks."""

import torch

from ..formats.block_mask import BlockMask
from ..formats.pattern_segments import every_block, every_key_block, segments


def block_mask_of(mask: torch.Tensor, sq: int) -> BlockMask:
    """The block mask of bool `[B or 1, H or 1, Sq or 1, Sk]`.

    One row for all queries, as padding has it, takes no memory of Sq x Sk. Waits for the device
    where that can be done; elsewhere the mask lists all its blocks.
    """
    sk = mask.shape[3]
    side = 64 if min(sq, sk) >= 64 else 16
    block = (side, max(side, 32))
    same_keys = mask.shape[2] == 1 and mask.shape[1] == 1 and sq > 1
    if may_wait(mask.device):
        if same_keys:
            keys = mask[:, 0, 0].int() - 1
            return segments(keys.new_zeros(keys.shape[0], sq), keys, block)
        return BlockMask.from_element_mask(mask.expand(-1, -1, sq, -1), block)
    if same_keys:
        return every_key_block(mask[:, 0, 0], sq, block)
    return every_block(mask.expand(-1, -1, sq, -1), block)


def may_wait(device: torch.device) -> bool:
    """Whether a number can be read back from `device` here."""
    if torch.compiler.is_compiling():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
