"""Formulas for `torch.utils.flop_counter.FlopCounterMode`: attention and block-sparse products.

A multiplication and an addition count as two operations, as in torch: attention has 2 (D + Dv) for
each pair of a query and a key in its forward pass and 2 (3 D + 2 Dv) in its backward pass, and a
block-sparse product counts its stored blocks. The scores that choose keys have 2 D for each index
head and visible key, those that choose pages 4 D for each query and page. Unlike torch, these
formulas count only the pairs that remain after causal masks, windows, lengths, lists of keys and
block masks; the bits of partial blocks and gates make no difference. Reading lengths and lists
waits for the device. Those of fake and meta tensors cannot be read, and count as the maximum
lengths and as a full mask.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..core.after_torch import after_import

Arguments = dict[str, Any]


def _attention_flops(given: Arguments) -> int:
    return 2 * _attention_pairs(given) * (given["q"].shape[-1] + given["v"].shape[-1])


def _backward_flops(given: Arguments) -> int:
    return 2 * _attention_pairs(given) * (3 * given["q"].shape[-1] + 2 * given["v"].shape[-1])


def _attention_pairs(given: Arguments) -> int:
    """Pairs of a query and a key of all heads, dense or packed."""
    q, k = given["q"], given["k"]
    band = given["band"] if "band" in given else (given["left"], given["right"])
    cu_q, cu_k = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    q_lens = _lengths(cu_q, batch, given.get("max_q", q.shape[-2]))
    kv_lens = _lengths(cu_k, batch, given.get("max_k", k.shape[-2]))
    shift = kv_lens - q_lens
    if not given["mask"] or not all(map(_is_readable, given["mask"])):
        return _sum(_pairs(band, shift, 0, q_lens, 0, kv_lens)) * q.shape[1]
    masks, heads, sq, _, bq, bk = given["mask_shape"]
    indptr, _, indices, *_ = (x.cpu().long() for x in given["mask"])
    row_blocks = -(-sq // bq)
    rows = torch.arange(indptr.shape[0] - 1).repeat_interleave(indptr.diff())
    owner = rows // max(row_blocks * heads, 1)
    first_row = rows % max(row_blocks, 1) * bq
    # lists may have unused entries at the end
    first_key = indices[: rows.shape[0]] * bk
    total = 0
    for b in range(batch):
        own = owner == (b if masks > 1 else 0)
        r0, c0 = first_row[own], first_key[own]
        r1, c1 = (r0 + bq).clamp(max=int(q_lens[b])), (c0 + bk).clamp(max=int(kv_lens[b]))
        total += _sum(_pairs(band, shift[b], r0, r1, c0, c1))
    return total * q.shape[1] // max(heads, 1)


def _cached_flops(given: Arguments) -> int:
    """Attention over a cache: `attn_decode` with [B, Hq, Sq, D], `attn_ragged` with [Tq, Hq, D]."""
    q, table = given["q"], given["page_table"]
    k, v = (given[x if x in given else f"{x}_cache"] for x in ("k", "v"))
    cu_q, cu_k = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    lengths = given.get("cache_seqlens", given.get("seqlens_k"))
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    q_lens = _lengths(cu_q, batch, given.get("max_q", q.shape[-2]), given.get("seqused_q"))
    most = k.shape[0] if cu_k is not None else k.shape[2]
    most = most if table is None else table.shape[1] * k.shape[1]
    kv_lens = _lengths(cu_k, batch, most, lengths)
    band = given["band"] if "band" in given else (given["left"], given["right"])
    # [B, Hkv, listed blocks, chunks], all but the first of size 1 where there are none
    q_lens, kv_lens = (x.view(-1, 1, 1, 1) for x in (q_lens, kv_lens))
    shift = torch.zeros_like(kv_lens) if given.get("top_left") else kv_lens - q_lens
    r0, r1, c0, c1 = torch.zeros_like(q_lens), q_lens, torch.zeros_like(kv_lens), kv_lens
    blocks, size = given["kv_blocks"], given["kv_block_size"]
    heads = q.shape[1]
    if blocks is not None and _is_readable(blocks):
        heads //= max(blocks.shape[1], 1)
        listed = blocks.cpu().long()[..., None]
        c0 = listed * size
        c1 = torch.where(listed < 0, c0, torch.minimum(c0 + size, kv_lens))
    chunk = given.get("chunk", 0)
    if chunk:
        ends = torch.arange(0, max(_most(kv_lens), _most(q_lens)) + chunk, chunk)
        r0, r1 = (ends - shift).clamp(min=0), torch.minimum(ends + chunk - shift, q_lens)
        c0, c1 = torch.maximum(c0, ends), torch.minimum(c1, ends + chunk)
    first = given.get("first_key")
    if first is not None and _is_readable(first):
        c0 = torch.maximum(c0, first.cpu().long().view(-1, 1, 1, 1))
    pairs = _sum(_pairs(band, shift, r0, r1, c0, c1))
    return 2 * pairs * heads * (q.shape[-1] + v.shape[-1])


def _sparse_flops(given: Arguments) -> int:
    return 2 * _sparse_pairs(given) * (given["q"].shape[-1] + given["v"].shape[-1])


def _sparse_backward_flops(given: Arguments) -> int:
    return 2 * _sparse_pairs(given) * (3 * given["q"].shape[-1] + 2 * given["v"].shape[-1])


def _sparse_pairs(given: Arguments) -> int:
    """Pairs of a query and a key that it chose or that is near, each once; of all heads."""
    q, ids, counts = given["q"], given["ids"], given["counts"]
    granularity, _, max_q, max_k = given["sizes"]
    cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    q_lens, kv_lens = (
        _lengths(cu_q, batch, max_q),
        _lengths(cu_k, batch, max_k, given["cache_seqlens"]),
    )
    # [B, 1, Tq], or one row of packed tokens
    owner = torch.arange(batch).repeat_interleave(q_lens)
    starts = (q_lens.cumsum(0) - q_lens)[owner]
    position = torch.arange(owner.shape[0]) - starts + (kv_lens - q_lens)[owner]
    rows = (1, 1, -1) if cu_q is not None else (batch, 1, max_q)
    position, kv_len = position.view(rows), kv_lens[owner].view(rows)
    end = (position + given["limit"] + 1).clamp(min=0).minimum(kv_len)
    near_first = near_end = torch.zeros_like(end)
    if given["local"]:
        left, right = given["local"]
        near_end = (position + right + 1).clamp(min=0).minimum(end)
        near_first = (position - left).clamp(min=0).minimum(near_end)
    near = near_end - near_first
    if not (_is_readable(ids) and _is_readable(counts)):
        chosen = (ids.shape[3] * granularity + near).minimum(end)
        return _sum(chosen.expand(-1, ids.shape[1], -1)) * q.shape[1] // max(ids.shape[1], 1)
    first = ids.cpu().long()[:, :, : end.shape[2]] * granularity
    listed = torch.arange(ids.shape[3]) < counts.cpu()[:, :, : end.shape[2], None]
    last = (first + granularity).minimum(end.unsqueeze(-1))
    both = last.minimum(near_end.unsqueeze(-1)) - first.maximum(near_first.unsqueeze(-1))
    own = (last - first).clamp(min=0) - both.clamp(min=0)
    pairs = _sum(own * listed) + _sum(near.expand(-1, ids.shape[1], -1))
    return pairs * q.shape[1] // max(ids.shape[1], 1)


def _select_flops(given: Arguments) -> int:
    """Scores of every visible key; which entries are chosen makes no difference."""
    q, sk = given["q_index"], given["k_index"].shape[2]
    batch, heads, sq, dim = q.shape
    band = (sk + sq, 0 if given["causal"] else sk + sq)
    return 2 * dim * batch * heads * _sum(_pairs(band, sk - sq, 0, sq, 0, sk))


def _topk_flops(given: Arguments) -> int:
    """Products of the queries with the smallest and the largest keys of each page in use."""
    q, low, table, size = given["q"], given["low"], given["page_table"], given["page_size"]
    columns = low.shape[1] if table is None else table.shape[1]
    lengths = _lengths(None, q.shape[0], columns * size, given["cache_seqlens"])
    pages = (-(-lengths.clamp(min=0) // size)).clamp(max=columns)
    return 4 * q.shape[-1] * q.shape[1] * q.shape[2] * _sum(pages)


def _pairs(band: Any, shift: Any, r0: Any, r1: Any, c0: Any, c1: Any) -> torch.Tensor:
    """Pairs of rows r0 .. r1 and columns c0 .. c1 with `-left <= column - row - shift <= right`."""
    r0, r1, c0, c1 = (torch.as_tensor(x) for x in (r0, r1, c0, c1))
    width, r1 = (c1 - c0).clamp(min=0), torch.maximum(r0, r1)

    def up_to(right: int) -> torch.Tensor:
        def of_rows_before(end: torch.Tensor) -> torch.Tensor:
            # row r has clamp(r + shift + right + 1 - c0, 0, width) of these: a ramp, then a plateau
            last = (end + shift + right - c0).clamp(min=0)
            ramp = torch.minimum(last, width)
            return ramp * (ramp + 1) // 2 + (last - ramp) * width

        return of_rows_before(r1) - of_rows_before(r0)

    left, right = band
    return up_to(right) - up_to(-left - 1)


def _lengths(
    offsets: torch.Tensor | None, batch: int, most: int, used: torch.Tensor | None = None
) -> torch.Tensor:
    """Lengths of all sequences: those in use, those between offsets, or `most` for each."""
    if used is not None and _is_readable(used):
        return used.cpu().long()
    if used is None and offsets is not None and _is_readable(offsets):
        return offsets.cpu().long().diff()
    return torch.full((batch,), int(most))


def _is_readable(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta


def _sum(x: torch.Tensor) -> int:
    return int(x.sum())


def _most(x: torch.Tensor) -> int:
    return int(x.max()) if x.numel() else 0


def _product_flops(given: Arguments) -> int:
    dense = given["dense"]
    inner = dense.shape[-1 if given["dense_left"] or dense.dim() == 1 else -2]
    return 2 * given["values"].numel() * (dense.numel() // max(inner, 1))


def _sampled_flops(given: Arguments) -> int:
    height, width = given["block_shape"]
    a = given["a"]
    products = a.numel() // max(a.shape[-2], 1)
    return 2 * given["pattern"][1].shape[0] * height * width * products


def _pair_flops(given: Arguments) -> int:
    first, second = given["first"], given["second"]
    height, inner = first.shape[1:][:: -1 if given["first_transposed"] else 1]
    width = second.shape[1 if given["second_transposed"] else 2]
    return 2 * given["pairs"][0].shape[0] * height * inner * width


FORMULAS: dict[str, Callable[[Arguments], int]] = {
    **dict.fromkeys(
        ("attn_fwd", "attn_fwd_into", "attn_fwd_fp8", "fp8_attention", "gated_attn_fwd"),
        _attention_flops,
    ),
    **dict.fromkeys(("attn_bwd", "gated_attn_bwd"), _backward_flops),
    **dict.fromkeys(("attn_decode", "attn_decode_into", "attn_ragged"), _cached_flops),
    **dict.fromkeys(("sparse_attn_fwd", "sparse_attn_fwd_into"), _sparse_flops),
    "sparse_attn_bwd": _sparse_backward_flops,
    "select_keys": _select_flops,
    "topk_pages": _topk_flops,
    **dict.fromkeys(("bsr_matmul", "bsr_matmul_fp8"), _product_flops),
    "bsr_sddmm": _sampled_flops,
    "bsr_pair_products": _pair_flops,
}


def _register() -> None:
    register = sys.modules["torch.utils.flop_counter"].register_flop_formula
    for name, formula in FORMULAS.items():
        register(getattr(torch.ops.bsk, name), get_raw=True)(_of_operator(name, formula))


def _of_operator(name: str, formula: Callable[[Arguments], int]) -> Callable[..., int]:
    """`formula` as torch calls it: with the arguments of the operator, and its result."""
    fields = [x.name for x in getattr(torch.ops.bsk, name).default._schema.arguments]

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        # tensors made in here have data on the host, also under a mode for fake tensors
        with _disable_current_modes(), torch.device("cpu"):
            return formula({**dict(zip(fields, args, strict=False)), **kwargs})

    return flops


@functools.cache
def register_flops() -> None:
    """Register the formulas, once, after the operators; torch's module for them imports Triton."""
    after_import("torch.utils.flop_counter", _register)
