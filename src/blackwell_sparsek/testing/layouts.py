"""The same values with other strides; the memory between them holds NaN.

A kernel that mixes up the strides of two arguments still gives the right result when these are
equal, so tests give every tensor a different layout.
"""

import torch

from .poison import poison_

# Layouts that the operators accept: the last dimension is contiguous.
KINDS = ("contiguous", "row_gap", "outer_gap", "swapped", "offset")


def strided_like(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Copy the values of `x` into another layout.

    Parameters
    ----------
    x : any shape and dtype
    kind : one of

        - `contiguous`: rows packed, without gaps;
        - `row_gap`: three unused elements after each row of the last dimension, so that rows
          are not aligned to 16 bytes;
        - `outer_gap`: one unused index at the end of every dimension but the last;
        - `swapped`: the two dimensions before the last lie in the other order, [B, S, H, D]
          in memory for [B, H, S, D]; for a matrix, as `row_gap`;
        - `offset`: packed, but starting one element into the storage;
        - `last_gap`: stride 2 in the last dimension, which operators must refuse.

    Returns
    -------
    Tensor
        Equal to `x`, without gradient history; every element of its storage that is not part of
        it is poisoned.

    Examples
    --------
    >>> import torch
    >>> strided_like(torch.zeros(2, 4), "row_gap").stride()
    (7, 1)
    """
    order = list(range(x.dim()))
    if kind == "swapped" and x.dim() >= 3:
        *outer, heads, tokens, last = order
        order = [*outer, tokens, heads, last]
    row_gap = 3 if kind == "row_gap" or (kind == "swapped" and x.dim() < 3) else 0
    outer_gap = 1 if kind == "outer_gap" else 0
    offset = 1 if kind == "offset" else 0
    step = 2 if kind == "last_gap" else 1
    if kind not in (*KINDS, "last_gap"):
        raise ValueError(f"layout kind is {kind!r}; expected one of {(*KINDS, 'last_gap')}")

    strides = [0] * x.dim()
    reach = step
    for dim in reversed(order):
        strides[dim] = reach
        reach *= max(x.shape[dim], 1) + (outer_gap if dim != order[-1] else 0)
        if dim == order[-1]:
            reach += row_gap
    storage = poison_(torch.empty(offset + max(reach, 1), dtype=x.dtype, device=x.device))
    view = storage.as_strided(x.shape, strides, offset)
    with torch.no_grad():
        view.copy_(x)
    return view.requires_grad_(x.requires_grad)


def different_layouts(*tensors: torch.Tensor, start: int = 0) -> list[torch.Tensor]:
    """Give each tensor another layout: tensor i takes kind (start + i) of `KINDS`, cyclically."""
    return [strided_like(x, KINDS[(start + i) % len(KINDS)]) for i, x in enumerate(tensors)]


def assert_gaps_untouched(x: torch.Tensor, what: str = "output") -> None:
    """Fail if anything wrote between the elements of `x`, a tensor made by `strided_like`."""
    count = x.untyped_storage().nbytes() // x.element_size()
    whole = x.detach().as_strided((count,), (1,), 0)
    gap = torch.ones(count, dtype=torch.bool, device=x.device)
    gap.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
    expected = poison_(torch.empty_like(whole))
    written = gap & (whole != expected) & ~(whole.isnan() & expected.isnan())
    if written.any():
        at = int(written.int().argmax())
        raise AssertionError(
            f"{what}: {int(written.sum())} elements outside of the tensor were written, the first "
            f"at storage offset {at}: {whole[at].item()}"
        )
