"""Lists that kernels need besides those of a mask, made from it in the first call and cached.

A recorded call notes how they are made, so that it can be repeated with another mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.compat import raw_device, raw_stream
from ..launch.recording import note_derived
from ..launch.workspace import made_outside_pool
from .block_mask import BlockMask

# Lists kept for one mask: used with a band or two by layers of one or two shapes, it has one for
# the forward pass and up to four for gradients.
MAX_LISTS = 16

# Of masks that operators know as tensors: by their row pointers, which live as long as the mask.
_LISTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def derived_list(mask: BlockMask, make: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """`make(mask, *args)`: made once, for the current stream of the mask's device.

    Another stream makes its own: code that uses the mask there has synchronised with the stream
    that made the mask, not with the one that made this list.
    """
    device = mask.device
    if raw_device() != device.index:
        with torch.cuda.device(device):
            return derived_list(mask, make, *args)
    known = mask._derived
    if known is None:
        known = _LISTS.setdefault(mask._listed.indptr, {})
    key = (make, args, mask._seq_lengths, mask._block_size)
    of_streams = known.get(key)
    if torch.cuda.is_current_stream_capturing():
        # what is known was made before the capture; what is made here may not leave its graph
        of_streams = of_streams or _LISTS.get(mask._listed.indptr, {}).get(key)
        made = next(iter(of_streams.values())) if of_streams else make(_copy(mask), *args)
    else:
        stream = raw_stream(device.index)
        made = of_streams.get(stream) if of_streams else None
        if made is None:
            made = made_outside_pool(lambda: make(_copy(mask), *args), device)
            if len(known) >= MAX_LISTS:
                known.clear()
            known.setdefault(key, {})[stream] = made
    note_derived((make, args), made)
    return made


def _copy(mask: BlockMask) -> BlockMask:
    """A copy that `make` may trim, because launches take the lists that the operator was given."""
    copy = BlockMask._from_parts(
        mask._listed,
        mask.bits,
        mask.batch,
        mask.heads,
        mask.seq_lengths,
        mask.block_size,
        mask._transposed,
        mask._exact,
    )
    # a list may be made from another, which must be the one that launches get
    copy._derived = mask._derived
    return copy
