"""Lists that kernels need besides the lists of a mask: derived in the first call and cached.

A recorded call notes how they are made, so that it can be replayed with another mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.torch_private import raw_device, raw_stream
from ..launch.recording import note_derived
from ..launch.workspace import hold_for_graph, made_outside_pool
from .block_mask import BlockMask

# Lists kept for one mask. For each band and each shape of layer, the forward pass needs one and
# gradients up to four; a mask is used with one or two of each.
MAX_LISTS = 16

# For masks that operators know only as tensors; keyed by the row pointers, which live as long as
# the mask.
_LISTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def derived_list(mask: BlockMask, make: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """`make(mask, *args)`, made once for the current stream of the mask's device.

    Each stream makes a separate list: code that uses the mask on another stream has synchronised
    with the stream that made the mask, not with the one that made this list.
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
        # cached lists were made before the capture; a list made here must not be used outside it
        of_streams = of_streams or _LISTS.get(mask._listed.indptr, {}).get(key)
        if of_streams:
            made = next(iter(of_streams.values()))
            hold_for_graph(mask._listed.indptr, (made,))
        else:
            made = make(_copy(mask), *args)
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
    # a list may be derived from another, which must be the one that launches get
    copy._derived = mask._derived
    return copy
