"""Compile cases of the kernels that build block masks."""

from collections.abc import Iterator
from typing import Any

import torch

from ..core.compile_cases import CompileCase, compile_cases
from . import list_kernels, order_kernels

_LISTS = ("indptr_ptr", "partial_end_ptr", "indices_ptr", "bits_id_ptr")


def _int32(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, torch.int32)


@compile_cases
def _cases() -> Iterator[CompileCase]:
    steps = {"step_b": 262147, "step_h": 16387, "step_r": 131, "step_c": 3}
    sizes = {**steps, "heads": 3, "mb": 131, "nb": 131, "rows": 2049, "chunk": 9}
    tiles = {"TILE_ROWS": list_kernels.TILE_ROWS, "TILE_COLS": list_kernels.TILE_COLS}
    for dtype in (torch.bool, torch.int8, torch.int32):
        name = str(dtype).split(".")[-1]
        values = {"map_ptr": dtype, **sizes, **tiles}
        yield CompileCase(
            f"count_kept/{name}",
            list_kernels._count_kept_kernel,
            {**_int32("totals_ptr"), **values},
        )
        yield CompileCase(
            f"list_kept/{name}",
            list_kernels._list_kept_kernel,
            {
                **_int32(*_LISTS, "totals_ptr"),
                **values,
                "MAX_PROGRAMS": list_kernels.MAX_PROGRAMS,
            },
        )
    without_chunk = {name: size for name, size in sizes.items() if name != "chunk"}
    yield CompileCase(
        "bounded_lists/bool",
        list_kernels._bounded_lists_kernel,
        {**_int32(*_LISTS), "keep_ptr": torch.bool, **without_chunk, "most": 41, **tiles},
    )
    for dtype in (torch.int8, torch.int32):
        yield CompileCase(
            f"spread/{str(dtype).split('.')[-1]}",
            list_kernels._spread_kernel,
            {
                "map_ptr": dtype,
                **_int32("indptr_ptr", "indices_ptr", "bits_id_ptr"),
                **{"rows": 2049, "mb": 131, "nb": 131},
                "TILE_ROWS": list_kernels.TILE_ROWS,
                "TILE_ENTRIES": list_kernels.TILE_ENTRIES,
            },
        )
    for block in ((128, 128), (64, 16), (256, 256)):
        yield CompileCase(
            f"band_lists/{block[0]}x{block[1]}",
            list_kernels._band_lists_kernel,
            {
                **_int32(*_LISTS, "pool_ptr"),
                **dict.fromkeys(list_kernels.BandSizes._fields, 1027),
                "BLOCK_Q": block[0],
                "BLOCK_KV": block[1],
                "TILE_ROWS": list_kernels.TILE_ROWS,
                "TILE_ENTRIES": list_kernels.TILE_ENTRIES,
                "TILE_BEFORE": list_kernels.TILE_BEFORE,
            },
        )
    yield CompileCase(
        "row_visits/128x128",
        order_kernels._visits_kernel,
        {
            **_int32("visits_ptr", "indptr_ptr", "indices_ptr"),
            **dict.fromkeys(("rows", "mb", "sq", "sk", "left", "right"), 1027),
            "BLOCK_Q": 128,
            "BLOCK_KV": 128,
            "TILE_LISTS": order_kernels.TILE_LISTS,
            "TILE_ENTRIES": order_kernels.TILE_ENTRIES,
        },
    )
    for from_pointers, columns in ((True, False), (True, True), (False, False), (False, True)):
        name = f"{'columns' if columns else 'rows'}-{'pointers' if from_pointers else 'visits'}"
        yield CompileCase(
            f"order_keys/{name}",
            order_kernels._order_keys_kernel,
            {
                **_int32("keys_ptr", "visits_ptr"),
                **dict.fromkeys(order_kernels.OrderSizes._fields, 1027),
                "FROM_POINTERS": from_pointers,
                "COLUMNS": columns,
                "TILE_VISITS": order_kernels.TILE_VISITS,
            },
        )
    for columns in (False, True):
        yield CompileCase(
            f"row_order/{'columns' if columns else 'rows'}",
            order_kernels._row_order_kernel,
            {
                **_int32("order_ptr", "keys_ptr"),
                "batch_heads": 1027,
                "rows": 1027,
                "COLUMNS": columns,
                "TILE_ROWS": order_kernels.TILE_ROWS,
                "TILE_OTHERS": order_kernels.TILE_OTHERS,
            },
        )
