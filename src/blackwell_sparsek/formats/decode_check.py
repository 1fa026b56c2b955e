"""The numbers in lengths, page tables and block lists; looking at them waits for the device."""

import torch

from ..core.checks import message
from ..core.errors import InvalidInput
from .band import kv_range
from .decode_spec import DecodeSpec, capacity


def check_decode_values(
    op: str, q_len: int, k_cache: torch.Tensor, spec: DecodeSpec, *, duplicates: bool = False
) -> None:
    """Raise `InvalidInput` for the first length, block or page that is out of range.

    Only what a call reads is looked at: pages past the length, before a window, or not listed may
    hold any number. `duplicates` also refuses blocks that are listed twice.
    """
    lengths: list[int] = spec.cache_seqlens.tolist()
    most = capacity(k_cache, spec)
    for b, length in enumerate(lengths):
        if not 0 <= length <= most:
            arg, expected = f"cache_seqlens[{b}]", f"0 to {most}, what the cache holds"
            raise InvalidInput(message(op, arg, "is out of range", expected, length))
    if spec.kv_blocks is not None:
        _check_blocks(op, spec.kv_blocks.tolist(), -(-most // spec.kv_block_size), duplicates)
    if spec.page_table is not None:
        _check_pages(op, q_len, k_cache, spec, lengths)


def _check_blocks(op: str, lists: list[list[list[int]]], blocks: int, duplicates: bool) -> None:
    for b, heads in enumerate(lists):
        for h, entries in enumerate(heads):
            for i, block in enumerate(entries):
                arg = f"kv_blocks[{b}, {h}, {i}]"
                if not -1 <= block < blocks:
                    expected = f"-1 to {blocks - 1}"
                    raise InvalidInput(message(op, arg, "is out of range", expected, block))
                if duplicates and block >= 0 and block in entries[:i]:
                    raise InvalidInput(
                        message(op, arg, "is listed twice", "each block once", block)
                    )


def _check_pages(
    op: str, q_len: int, k_cache: torch.Tensor, spec: DecodeSpec, lengths: list[int]
) -> None:
    assert spec.page_table is not None
    pages, page_size = k_cache.shape[:2]
    table: list[list[int]] = spec.page_table.tolist()
    lists = None if spec.kv_blocks is None else spec.kv_blocks.tolist()
    for b, length in enumerate(lengths):
        lo, hi = kv_range(spec.band, 0, q_len, q_len, length)
        read = range(lo // page_size, -(-hi // page_size))
        listed = read if lists is None else {page for head in lists[b] for page in head}
        for i in read:
            if i in listed and not 0 <= table[b][i] < pages:
                raise InvalidInput(
                    message(
                        op,
                        f"page_table[{b}, {i}]",
                        "is out of range",
                        f"0 to {pages - 1}",
                        table[b][i],
                    )
                )
