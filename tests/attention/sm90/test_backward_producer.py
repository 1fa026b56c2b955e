"""Ranks of the Hopper backward without a mask: waiting for a rank that no tile has is a deadlock."""

import random

import pytest

from blackwell_sparsek.masks.band import Band, kv_range, q_range


def tiles_of(lo, hi, size):
    return range(lo // size, -(-hi // size)) if lo < hi else range(0)


def draw(seed):
    rng = random.Random(seed)
    sides = [None, 0, 1, 30, 63, 64, 100, 500, rng.randint(0, 900)]
    band = Band(rng.choice(sides), rng.choice(sides))
    lengths = rng.randint(1, 900), rng.choice([rng.randint(1, 900), 128, 640])
    return rng, band, lengths, rng.choice([64, 128])


def rank_of(band, q_block, kv_tile, lengths, block_q, ascending, tile_n=128):
    """What `_rank_without_mask` computes."""
    first, end = kv_range(band, q_block * block_q, (q_block + 1) * block_q, *lengths)
    return (end - 1) // tile_n - kv_tile if ascending else kv_tile - first // tile_n


def visits(band, kv_tile, lengths, block_q, ascending, tile_n=128):
    """Query blocks of a KV tile, from the last to the first as `produce_steps` takes them.

    Or from the first to the last, with KV tiles in the opposite order.
    """
    lo, hi = q_range(band, kv_tile * tile_n, (kv_tile + 1) * tile_n, *lengths)
    return tiles_of(lo, hi, block_q)[:: 1 if ascending else -1]


def kv_tiles_of(lengths, ascending):
    """KV tiles in the order in which they are taken."""
    return list(range(-(-lengths[1] // 128)))[:: -1 if ascending else 1]


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("seed", range(300))
def test_ranks_count_the_kv_tiles_before(seed, ascending):
    """KV tiles meet a query block from its first or last visible key on, without gaps."""
    _, band, lengths, block_q = draw(seed)
    ranks = {}
    for kv_tile in kv_tiles_of(lengths, ascending):
        for q_block in visits(band, kv_tile, lengths, block_q, ascending):
            rank = rank_of(band, q_block, kv_tile, lengths, block_q, ascending)
            ranks.setdefault(q_block, []).append(rank)
    for taken in ranks.values():
        assert taken == list(range(len(taken)))


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_programs_never_wait_for_each_other_in_a_circle(seed, ascending):
    """Any number of programs, which take KV tiles in order and run at any speed."""
    rng, band, lengths, block_q = draw(seed)
    kv_tiles = kv_tiles_of(lengths, ascending)
    sums, running, done = {}, [[] for _ in range(rng.randint(1, 5))], 0
    total = sum(len(visits(band, p, lengths, block_q, ascending)) for p in kv_tiles)
    while done < total:
        moved = False
        for program in rng.sample(running, len(running)):
            while not program and kv_tiles:
                kv_tile = kv_tiles.pop(0)
                blocks = visits(band, kv_tile, lengths, block_q, ascending)
                program += [(kv_tile, q_block) for q_block in blocks]
                moved = True
            for _ in range(rng.randint(1, 3)):
                if not program:
                    break
                kv_tile, q_block = program[0]
                if sums.get(q_block, 0) == rank_of(
                    band, q_block, kv_tile, lengths, block_q, ascending
                ):
                    sums[q_block] = sums.get(q_block, 0) + 1
                    program.pop(0)
                    done, moved = done + 1, True
        assert moved, "all programs wait"
