"""Compile cases of the kernels that build block masks, their lists and their row orders."""

from collections.abc import Iterator
from typing import Any

import torch

from ...masks.band import Band
from ...masks.device_build import band_lists
from ...masks.list_kernels import (
    _count_kept_kernel,
    _list_kept_kernel,
    launch_bounded_lists,
    launch_kept_lists,
    launch_spread,
)
from ...masks.order_kernels import (
    OrderSizes,
    _order_keys_kernel,
    _row_order_kernel,
    _visits_kernel,
    launch_row_order,
)
from ..captured_launches import launched_case, meta
from ..compile_cases import CompileCase, compile_cases

# Numbers of blocks and of list entries; no kernel is specialised on either.
_BATCH, _HEADS, _BLOCKS = 2, 3, 131
_ROWS = _BATCH * _HEADS * _BLOCKS
_ENTRIES = 1027


def _int32(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def _lists() -> list[torch.Tensor]:
    """Row pointers, ends of partial blocks, block columns, bit masks."""
    return [_int32(_ROWS + 1), _int32(_ROWS), _int32(_ENTRIES), _int32(_ENTRIES)]


def _map(dtype: torch.dtype) -> torch.Tensor:
    """A value for each block."""
    return meta(_BATCH, _HEADS, _BLOCKS, _BLOCKS, dtype=dtype)


@compile_cases
def list_cases() -> Iterator[CompileCase]:
    """Lists from a value per block, and values from lists."""
    for dtype in (torch.bool, torch.int8, torch.int32):
        name = str(dtype).split(".")[-1]
        kept = (*_lists(), _map(dtype))
        for kernel, kind in ((_count_kept_kernel, "count"), (_list_kept_kernel, "list")):
            yield launched_case(f"{kind}_kept/{name}", launch_kept_lists, *kept, kernel=kernel)
    bounded = (*_lists(), _map(torch.bool), 41)
    yield launched_case("bounded_lists/bool", launch_bounded_lists, *bounded)
    indptr, _, indices, bits_id = _lists()
    for dtype in (torch.int8, torch.int32):
        name = str(dtype).split(".")[-1]
        yield launched_case(f"spread/{name}", launch_spread, _map(dtype), indptr, indices, bits_id)


@compile_cases
def band_cases() -> Iterator[CompileCase]:
    """Lists and bit masks of a band."""
    for block in ((128, 128), (64, 16), (256, 256)):
        yield launched_case(
            f"band_lists/{block[0]}x{block[1]}",
            band_lists,
            *(Band(1000, 0), (4099, 4099), block, torch.device("meta")),
        )


def _row_order(columns: bool, in_band: bool) -> tuple[Any, ...]:
    """Arguments of `launch_row_order`; `in_band` counts the blocks within a band."""
    batch_heads = _BATCH * _HEADS
    sizes = OrderSizes(
        batch_heads=batch_heads,
        heads=_HEADS,
        rows=_BLOCKS,
        step_b=_HEADS * _BLOCKS,
        step_h=_BLOCKS,
        per_list=1,
        group=1,
        group_step=0,
        raster_group=2,
        most=_BLOCKS,
    )
    lengths, block = (_BLOCKS * 128, _BLOCKS * 128), (128, 128)
    lists = (_int32(_ROWS + 1), _int32(_ENTRIES))
    band = (1000, 0) if in_band else None
    return (_int32(_ROWS), *lists, sizes, lengths, block, band, columns)


@compile_cases
def order_cases() -> Iterator[CompileCase]:
    """Orders in which rows or columns are processed."""
    rows_in_band = _row_order(columns=False, in_band=True)
    yield launched_case(
        "row_visits/128x128", launch_row_order, *rows_in_band, kernel=_visits_kernel
    )
    for columns in (False, True):
        name = "columns" if columns else "rows"
        for in_band in (False, True):
            yield launched_case(
                f"order_keys/{name}-{'visits' if in_band else 'pointers'}",
                launch_row_order,
                *_row_order(columns, in_band),
                kernel=_order_keys_kernel,
            )
        order = _row_order(columns, in_band=False)
        yield launched_case(f"row_order/{name}", launch_row_order, *order, kernel=_row_order_kernel)
