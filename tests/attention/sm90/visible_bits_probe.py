"""A Gluon kernel around the mask code of the Hopper forward; only ever compiled.

`python -m tests.attention.sm90.visible_bits_probe` prints its PTX for each configuration.
"""

import json
from collections.abc import Iterator
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blackwell_sparsek.attention.sm90.config import (
    AttnFwdSm90Config,
    make_forward_config,
    make_fp8_config,
)
from blackwell_sparsek.attention.sm90.config_split import AttnBwdDqSm90Config, make_dq_config
from blackwell_sparsek.attention.sm90.forward_producer import Visit
from blackwell_sparsek.attention.sm90.forward_scores import TileBounds, visible_bits
from blackwell_sparsek.device.gluon.row_parts import MINUS_INFINITY, ZERO, keep_bits
from blackwell_sparsek.device.masks import position, row_bounds
from blackwell_sparsek.device.records import MaskLists, VisitPlan
from blackwell_sparsek.device.visits import num_masked_blocks
from blackwell_sparsek.launch.signature import Signature
from blackwell_sparsek.masks.check import BLOCK_SIZES

NUMBERS = ("kv_tile", "q_len", "kv_len", "left", "right", "q_start", "first_row")


@gluon.jit(do_not_specialize=list(NUMBERS))
def _visible_bits_kernel(
    out_ptr, x_ptr, lists, plan, kv_tile, q_len, kv_len, left, right, q_start, first_row,
    KEYS: gl.constexpr, OTHER: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Scores x [64, KEYS] of the keys of a masked tile."""
    layout: gl.constexpr = CFG.accumulator_layout(KEYS)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, layout))
    q_index = q_start + first_row + rows
    first, last = row_bounds(position(q_index, q_len, kv_len), kv_len, left, right)
    visit = Visit(lists, plan, num_masked_blocks(plan), kv_len)
    bounds = TileBounds(first, last, 0, 0)
    bits = visible_bits(visit, kv_tile, q_index, q_start, bounds, CFG)
    at = rows[:, None] * KEYS + columns[None, :]
    gl.store(out_ptr + at, keep_bits(gl.load(x_ptr + at), bits, OTHER))


class Probe(NamedTuple):
    """A configuration, and what hidden scores become."""

    config: AttnFwdSm90Config | AttnBwdDqSm90Config
    other: float = -float("inf")

    def ptx(self) -> str:
        """The PTX of the kernel."""
        values = {
            "out_ptr": "*fp32",
            "x_ptr": "*fp32",
            "lists": MaskLists(*("*i32",) * 5, 128),
            "plan": VisitPlan(*(2,) * 6),
            **dict.fromkeys(NUMBERS, 2),
            "KEYS": self.config.TILE_N,
            "OTHER": (ZERO if self.other == 0.0 else MINUS_INFINITY).value,
            "CFG": self.config,
        }
        signature = Signature(_visible_bits_kernel, list(values.values()))
        return signature.compiled(90, {"num_warps": 4}).asm["ptx"]


def _probes() -> Iterator[tuple[str, Probe]]:
    for block_kv in BLOCK_SIZES:
        for consumers in (1, 2):
            config = make_forward_config(consumers, 128, 128, block_kv)
            name = f"forward-tiles{config.TILE_N}-blocks{block_kv}"
            yield name, Probe(config)
    for block_kv in (64, 128, 256):
        config = make_fp8_config(2, 128, 128, block_kv, k_blocks=True)
        yield f"fp8-tiles{config.TILE_N}-blocks{block_kv}", Probe(config)
    for block_kv in (64, 128):
        yield f"backward-blocks{block_kv}", Probe(make_dq_config(128, 128, block_kv), 0.0)


PROBES = dict(_probes())

if __name__ == "__main__":
    print(json.dumps({name: probe.ptx() for name, probe in PROBES.items()}))
