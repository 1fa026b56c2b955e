"""transformers' mask interface: from its description of a mask to `VisibleKeys`."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ...attention.sdpa import may_wait
from ...masks.band import Band
from ...masks.segments import every_key_block
from .visible_keys import VisibleKeys, block_size_for, visible_elements

CAUSAL = Band(None, 0)


class Pattern(NamedTuple):
    """A mask function in terms of this package."""

    band: Band
    documents: torch.Tensor | None = None
    """Number of each token's document, int `[B, S]`, where several are packed."""


def make_visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    **options: Any,
) -> VisibleKeys | None:
    """The mask function that `register` gives to transformers, with transformers' arguments.

    Causality, windows, padding on either side and packed sequences are recognised; they cost no
    memory of Sq x Sk. Any other `mask_function` is evaluated element by element.

    With a 2-D `attention_mask` this waits for the device once per forward pass, except under
    `torch.compile` and CUDA graph capture. There, all blocks are listed with bits.

    Returns
    -------
    None where causality and the layer's own window say everything.
    """
    if isinstance(attention_mask, VisibleKeys):
        # `generate` makes masks ahead of the forward pass, which then asks again
        return attention_mask
    sizes = (batch_size, q_length, kv_length)
    pattern = _traced_pattern(mask_function, options) if torch.compiler.is_compiling() else None
    if not torch.compiler.is_compiling() and not options.get("use_vmap", False):
        pattern = recognise(mask_function)
    bidirectional = pattern is not None and pattern.band.right != 0
    end: Any = kv_length if bidirectional else q_offset + q_length - kv_offset
    if isinstance(end, torch.Tensor) and q_length > 1 and may_wait(end.device):
        end = int(end)
    unplaced = isinstance(end, torch.Tensor) and q_length > 1
    if pattern is None or unplaced:
        arguments = (*sizes, q_offset, kv_offset, mask_function, attention_mask)
        return _evaluated(*arguments, **options)
    real = _real_keys(attention_mask, kv_length, kv_offset)
    if q_length == 1 and not bidirectional:
        return _of_one_query(sizes, end, pattern.band, real, options["device"])
    if real is not None:
        real = real[:, :end]
        if may_wait(real.device):
            real = real if _padding_matters(real, causal=not bidirectional) else None
    nothing = real is None and pattern.documents is None
    if nothing and end == kv_length and pattern.band == CAUSAL:
        return None
    plan = VisibleKeys(q_length, kv_length, band=pattern.band, key_length=end, batch=batch_size)
    if pattern.documents is not None:
        plan.segments = (pattern.documents, pattern.documents[:, :end])
    elif real is not None and may_wait(real.device):
        k_segment = real.int() - 1
        plan.segments = (k_segment.new_zeros(batch_size, q_length), k_segment)
    elif real is not None:
        plan.block_mask = every_key_block(real, q_length, block_size_for(q_length, end))
    return plan


def _of_one_query(
    sizes: tuple[int, int, int],
    end: int | torch.Tensor,
    band: Band,
    real: torch.Tensor | None,
    device: torch.device,
) -> VisibleKeys:
    """One query at slot `end - 1`, which may be known on the device alone."""
    batch, _, kv_length = sizes
    lengths = torch.as_tensor(end, dtype=torch.int32, device=device).expand(batch).contiguous()
    plan = VisibleKeys(1, kv_length, band=band, lengths=lengths, batch=batch)
    if real is None:
        return plan
    slot = torch.arange(kv_length, device=device)
    visible = slot < lengths[:, None]
    if band.left is not None:
        visible &= slot >= lengths[:, None] - 1 - band.left
    if not may_wait(real.device) or bool((visible & ~real).any()):
        plan.visible = visible & real
    return plan


def _real_keys(
    attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int
) -> torch.Tensor | None:
    """The 2-D padding mask over the slots of the keys, bool `[B, kv_length]`."""
    if attention_mask is None:
        return None
    missing = kv_length + kv_offset - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)


def _padding_matters(real: torch.Tensor, *, causal: bool) -> bool:
    """Whether a real query could see a key that is padding. Waits for the device."""
    if causal:
        # with padding on the right only, causality hides it from every real query
        return bool((real[:, 1:] & ~real[:, :-1]).any())
    return not bool(real.all())


def _evaluated(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    mask_function: Any,
    attention_mask: torch.Tensor | None,
    *,
    device: Any = "cpu",
    use_vmap: bool = False,
    **unused: Any,
) -> VisibleKeys:
    from transformers.masking_utils import sdpa_mask

    visible = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    return visible_elements(visible)


def recognise(mask_function: Any) -> Pattern | None:
    """A mask function made of transformers' own parts as a `Pattern`; None for any other."""
    from transformers import masking_utils

    left: int | None = None
    right: int | None = None
    documents = None
    for part in _parts(mask_function):
        captured = _captured(part)
        if part is masking_utils.causal_mask_function:
            right = 0
        elif part is masking_utils.bidirectional_mask_function:
            pass
        elif _made_by(part, "sliding_window_overlay"):
            left = captured["sliding_window"] - 1
        elif _made_by(part, "sliding_window_bidirectional_overlay"):
            left = right = captured["sliding_window"]
        elif _made_by(part, "packed_sequence_mask_function") and documents is None:
            documents = captured["packed_sequence_mask"]
        else:
            return None
    return Pattern(Band(left, right), documents)


def _parts(mask_function: Any) -> Iterator[Any]:
    """The functions whose results are joined by and."""
    if not _made_by(mask_function, "and_masks", "and_mask"):
        yield mask_function
        return
    for part in _captured(mask_function)["mask_functions"]:
        yield from _parts(part)


def _made_by(function: Any, maker: str, name: str = "inner_mask") -> bool:
    return (
        getattr(function, "__module__", None) == "transformers.masking_utils"
        and function.__qualname__ == f"{maker}.<locals>.{name}"
    )


def _captured(function: Any) -> dict[str, Any]:
    """The variables that a function took from where it was made."""
    cells = getattr(function, "__closure__", None) or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


def _traced_pattern(mask_function: Any, options: dict[str, Any]) -> Pattern | None:
    """What can be said of a function while `torch.compile` traces, which shows no closures.

    Packed sequences, chunks and functions of the user come without permission to skip the mask, so
    with it a local size is that of a sliding window.
    """
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return Pattern(CAUSAL)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern(Band(None, None))
    local = options.get("local_size")
    chunked = getattr(options.get("config"), "attention_chunk_size", None) is not None
    if local is not None and options.get("allow_is_causal_skip", False) and not chunked:
        return Pattern(Band(local - 1, 0))
    return None
