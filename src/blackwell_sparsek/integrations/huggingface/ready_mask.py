"""`BlockSparse` under a mask that the user has made: both must show a key."""

from typing import Any

import torch

from ...attention.sdpa import may_wait
from ...core.errors import Unsupported
from ...masks.band import EVERYTHING, Band
from ...masks.block_mask import BlockMask
from ...masks.segments import every_block
from .block_sparse import BlockSparse
from .visible_keys import OP, VisibleKeys, visible_elements

CAUSAL = Band(None, 0)
WAY_OUT = "leave block_sparse out in this layer (register({layer: None, ...}))"


def sparse_under_ready_mask(
    plan: VisibleKeys, sparse: BlockSparse, query: torch.Tensor, key: torch.Tensor
) -> VisibleKeys:
    """The keys that a ready mask shows, as far as `sparse` shows them too.

    The pattern counts positions, and a mask does not tell those of its queries. They are taken to
    be the last slots of the keys, as with a dynamic cache; masks that contradict this are refused.
    Layers with the same pattern share the result unless it depends on their queries and keys.
    """
    if plan.bias is not None:
        raise Unsupported(
            f"{OP}: block_sparse together with an attention_mask that is a bias with values other "
            f"than 0 and -inf; {WAY_OUT}"
        )
    plan.shared("is causal", lambda: _check_causal(plan, query.device))
    if sparse.top_k is not None and plan.q_length > 1:
        return _intersection(plan, sparse, query, key)
    return plan.shared(("under", sparse), lambda: _intersection(plan, sparse, query, key))


def _check_causal(plan: VisibleKeys, device: torch.device) -> None:
    """Raise unless the mask is one of causal queries at the last keys."""
    sq, sk = plan.q_length, plan.kv_length
    visible = plan.elements
    later = visible.triu(sk - sq + 1).any()
    if not may_wait(device):
        if sq != sk:
            raise Unsupported(
                f"{OP}: block_sparse together with a ready attention_mask for {sq} queries and "
                f"{sk} keys under torch.compile or graph capture, where nothing tells which keys "
                f"the queries are; call it without them, or {WAY_OUT}"
            )
        torch._assert_async(
            ~later,
            f"{OP}: block_sparse together with an attention_mask that shows keys after a query; "
            f"{WAY_OUT}",
        )
        return
    if bool(later):
        raise Unsupported(
            f"{OP}: block_sparse, which is for causal layers, together with an attention_mask that "
            f"shows keys after a query; expected the last of {sq} queries at the last of {sk} keys "
            f"and no key after a query's own; {WAY_OUT}"
        )
    if sq != sk and not bool(visible.diagonal(sk - sq, 2, 3).any()):
        raise Unsupported(
            f"{OP}: block_sparse together with a ready attention_mask in which none of {sq} "
            f"queries sees its own of {sk} keys, as over a static cache, so that nothing tells "
            "which keys the queries are; use a dynamic cache, pass a 2-D attention_mask, or "
            f"{WAY_OUT}"
        )


def _intersection(
    plan: VisibleKeys, sparse: BlockSparse, query: torch.Tensor, key: torch.Tensor
) -> VisibleKeys:
    sq, sk = plan.q_length, plan.kv_length
    sizes: dict[str, Any] = {"batch": plan.batch, "device": plan.device}
    if sparse.is_window:
        band = sparse.band(CAUSAL)
        return VisibleKeys(sq, sk, band=band, block_mask=plan.block_mask, **sizes)
    if sq == 1:
        if not sparse.is_fixed:
            return plan
        end = torch.full((1,), sk, dtype=torch.int32, device=query.device)
        return visible_elements(plan.elements & sparse.keys(end, sk))
    block = (sparse.block_size, sparse.block_size)
    if may_wait(query.device):
        given = plan.shared(
            ("blocks", block), lambda: BlockMask.from_element_mask(plan.elements, block)
        )
        mask = given & sparse.mask(query, key)
    else:
        shown = plan.elements & _expanded(sparse.keep(query, key), sparse.block_size, sq, sk)
        mask = every_block(shown, block)
    return VisibleKeys(sq, sk, band=EVERYTHING, block_mask=mask, **sizes)


def _expanded(keep: torch.Tensor, size: int, sq: int, sk: int) -> torch.Tensor:
    """bool `[B or 1, H or 1, Mb, Nb]` of blocks to elements `[B or 1, H or 1, sq, sk]`."""
    rows = keep.repeat_interleave(size, 2)[:, :, :sq]
    return rows.repeat_interleave(size, 3)[..., :sk]
