"""Plans: every visible key is visited once, and only whole units go without mask code."""

import random

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.device import visits
from blackwell_sparsek.device.records import MaskLists
from blackwell_sparsek.device.visits import keys_of_tile, masked_block, num_tiles, tile_ordinal

SLOTS = 1024


@triton.jit
def _visit_probe(
    masked_ptr,
    full_ptr,
    lists,
    kv_lo,
    kv_hi,
    all_lo,
    all_hi,
    kv_len,
    BLOCK_KV: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Write the visited keys, tile by tile, in the order of the visits."""
    KV_BLOCK: tl.constexpr = TILE_N if BLOCK_KV is None else BLOCK_KV
    offs_n = tl.arange(0, TILE_N)
    if lists is None:
        plan = visits.plan_dense(kv_lo, kv_hi, all_lo, all_hi, TILE_N)
    else:
        offs_scan = tl.arange(0, 4)
        plan = visits.plan_blocks(
            lists, 1, kv_lo, kv_hi, all_lo, all_hi, offs_scan, TILE_N, BLOCK_KV
        )
    count = visits.num_masked_blocks(plan)
    for kv_tile in range(num_tiles(count, TILE_N, KV_BLOCK)):
        ordinal, kv_in_block = tile_ordinal(kv_tile, offs_n, TILE_N, KV_BLOCK)
        entry = masked_block(plan, ordinal)
        kv_pos = keys_of_tile(lists, entry, ordinal, count, kv_in_block, kv_len, TILE_N, KV_BLOCK)
        tl.store(masked_ptr + kv_tile * TILE_N + offs_n, kv_pos)
    count = visits.num_full_blocks(plan)
    for kv_tile in range(num_tiles(count, TILE_N, KV_BLOCK)):
        ordinal, kv_in_block = tile_ordinal(kv_tile, offs_n, TILE_N, KV_BLOCK)
        entry = plan.full_begin + ordinal
        kv_pos = keys_of_tile(lists, entry, ordinal, count, kv_in_block, kv_len, TILE_N, KV_BLOCK)
        tl.store(full_ptr + kv_tile * TILE_N + offs_n, kv_pos)


def visit(device, lists, bounds, kv_len, block_kv, tile_n):
    masked, full = (torch.full((SLOTS,), -1, dtype=torch.int32, device=device) for _ in range(2))
    if lists is not None:
        lists = (torch.tensor(x, dtype=torch.int32, device=device) for x in lists)
        # nothing reads the bits here
        bits = torch.zeros(1, dtype=torch.int32, device=device)
        lists = MaskLists(*lists, bits_id=bits, bits=bits, row_tokens=64)
    _visit_probe[(1,)](masked, full, lists, *bounds, kv_len, BLOCK_KV=block_kv, TILE_N=tile_n)
    return [x[x >= 0].tolist() for x in (masked, full)]


def random_bounds(rng, kv_len):
    kv_lo, kv_hi = sorted(rng.randint(0, kv_len) for _ in range(2))
    all_lo, all_hi = rng.randint(kv_lo, kv_len), rng.randint(0, kv_hi)
    return kv_lo, kv_hi, all_lo, all_hi


@pytest.mark.parametrize("tile_n", [16, 32])
def test_dense_plans(device, tile_n):
    rng = random.Random(tile_n)
    for _ in range(40):
        kv_len = rng.choice([0, 1, 15, 16, 17, 100])
        bounds = kv_lo, kv_hi, all_lo, all_hi = random_bounds(rng, kv_len)
        masked, full = visit(device, None, bounds, kv_len, None, tile_n)
        assert len(set(masked + full)) == len(masked + full), bounds
        assert set(range(kv_lo, kv_hi)) <= set(masked + full), bounds
        assert set(full) <= set(range(all_lo, all_hi)), bounds
        # nothing is visited for nothing, and whatever can go without mask code does
        tiles = {k // tile_n for k in masked + full}
        assert tiles <= {k // tile_n for k in range(kv_lo, kv_hi)}, bounds
        whole = [t for t in tiles if all_lo <= t * tile_n and (t + 1) * tile_n <= all_hi]
        assert {k // tile_n for k in full} == set(whole), bounds


@pytest.mark.parametrize("block_kv, tile_n", [(16, 64), (32, 64), (64, 64), (64, 16), (16, 16)])
def test_list_plans(device, block_kv, tile_n):
    rng = random.Random(block_kv * 7 + tile_n)
    for _ in range(15):
        blocks = rng.randint(0, 12)
        kv_len = max(0, blocks * block_kv - rng.choice([0, 0, 3]))
        bounds = kv_lo, kv_hi, all_lo, all_hi = random_bounds(rng, kv_len)
        kinds = [rng.choice("-pf") for _ in range(blocks)]
        partial = [b for b, kind in enumerate(kinds) if kind == "p"]
        whole = [b for b, kind in enumerate(kinds) if kind == "f"]
        # row 0 and row 2 hold blocks of others
        indices = [3, 4, *partial, *whole, 1]
        split = 2 + len(partial)
        lists = ([0, 2, split + len(whole), len(indices)], [1, split, len(indices)], indices)
        masked, full = visit(device, lists, bounds, kv_len, block_kv, tile_n)

        # lanes without a block hold kv_len, which may also be the first key past the last block
        filler = [k for k in masked if k == kv_len]
        seen = [k for k in masked + full if k < kv_len]
        assert len(set(seen)) == len(seen), (kinds, bounds)
        listed = {k for b in partial + whole for k in range(b * block_kv, (b + 1) * block_kv)}
        visible = {k for k in listed if kv_lo <= k < kv_hi}
        assert visible <= set(seen), (kinds, bounds)
        assert set(seen) <= listed, (kinds, bounds)
        assert set(full) <= {k for k in listed if all_lo <= k < all_hi}, (kinds, bounds)
        assert not {k // block_kv for k in full} & set(partial), (kinds, bounds)
        assert len(filler) < tile_n or block_kv > tile_n, (kinds, bounds)
        # at most what does not fill a tile stays behind in the masked loop
        could = [b for b in whole if all_lo <= b * block_kv and (b + 1) * block_kv <= all_hi]
        could = [b for b in could if kv_lo < (b + 1) * block_kv and b * block_kv < kv_hi]
        pack = max(1, tile_n // block_kv)
        assert len(full) // block_kv == len(could) // pack * pack, (kinds, bounds)
