"""The turns of the Hopper backward: a program that waits for a turn nobody takes waits forever."""

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


def turn_of(band, q_unit, kv_tile, lengths, unit, ascending, tile_n=128):
    """What `_turn_of_unit` computes."""
    first, end = kv_range(band, q_unit * unit, (q_unit + 1) * unit, *lengths)
    return (end - 1) // tile_n - kv_tile if ascending else kv_tile - first // tile_n


def visits(band, kv_tile, lengths, unit, ascending, tile_n=128):
    """Units of queries of a piece, from the last to the first as `produce_steps` takes them.

    Or from the first to the last, with pieces in the opposite order.
    """
    lo, hi = q_range(band, kv_tile * tile_n, (kv_tile + 1) * tile_n, *lengths)
    return tiles_of(lo, hi, unit)[:: 1 if ascending else -1]


def pieces_of(lengths, ascending):
    """Tiles of keys in the order in which they are taken."""
    return list(range(-(-lengths[1] // 128)))[:: -1 if ascending else 1]


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("seed", range(300))
def test_turns_count_the_tiles_of_keys_before(seed, ascending):
    """Tiles of keys meet a unit of queries from its first or last visible key on, without gaps."""
    _, band, lengths, unit = draw(seed)
    turns = {}
    for kv_tile in pieces_of(lengths, ascending):
        for q_unit in visits(band, kv_tile, lengths, unit, ascending):
            turn = turn_of(band, q_unit, kv_tile, lengths, unit, ascending)
            turns.setdefault(q_unit, []).append(turn)
    for taken in turns.values():
        assert taken == list(range(len(taken)))


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_programs_never_wait_for_each_other_in_a_circle(seed, ascending):
    """Any number of programs, which take pieces in order and run at any speed."""
    rng, band, lengths, unit = draw(seed)
    pieces = pieces_of(lengths, ascending)
    sums, running, done = {}, [[] for _ in range(rng.randint(1, 5))], 0
    total = sum(len(visits(band, p, lengths, unit, ascending)) for p in pieces)
    while done < total:
        moved = False
        for program in rng.sample(running, len(running)):
            while not program and pieces:
                piece = pieces.pop(0)
                units = visits(band, piece, lengths, unit, ascending)
                program += [(piece, q_unit) for q_unit in units]
                moved = True
            for _ in range(rng.randint(1, 3)):
                if not program:
                    break
                piece, q_unit = program[0]
                if sums.get(q_unit, 0) == turn_of(band, q_unit, piece, lengths, unit, ascending):
                    sums[q_unit] = sums.get(q_unit, 0) + 1
                    program.pop(0)
                    done, moved = done + 1, True
        assert moved, "all programs wait"
