"""The turns of the Hopper backward: a program that waits for a turn nobody takes waits forever."""

import random

import pytest

from blackwell_sparsek.formats.band import Band, kv_range, q_range


def tiles_of(lo, hi, size):
    return set(range(lo // size, -(-hi // size))) if lo < hi else set()


@pytest.mark.parametrize("seed", range(300))
def test_ranks_count_the_tiles_of_keys_before(seed):
    """Tiles of keys meet a query tile from its last visible key down, without gaps."""
    rng = random.Random(seed)
    sides = [None, 0, 1, 30, 63, 64, 100, 500, rng.randint(0, 900)]
    band = Band(rng.choice(sides), rng.choice(sides))
    sq, sk = rng.randint(1, 900), rng.choice([rng.randint(1, 900), 128, 640])
    tile_m, tile_n = rng.choice([64, 128]), 128
    visitors = {}
    for kv_tile in range(-(-sk // tile_n)):
        lo, hi = q_range(band, kv_tile * tile_n, (kv_tile + 1) * tile_n, sq, sk)
        for q_tile in tiles_of(lo, hi, tile_m):
            visitors.setdefault(q_tile, []).append(kv_tile)
    for q_tile, kv_tiles in visitors.items():
        _, kv_hi = kv_range(band, q_tile * tile_m, (q_tile + 1) * tile_m, sq, sk)
        ranks = [(kv_hi - 1) // tile_n - kv_tile for kv_tile in kv_tiles]
        assert sorted(ranks) == list(range(len(ranks)))
