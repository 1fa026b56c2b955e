"""Two programs of a pair over a latent cache, which share their copies, at any speed of the roles.

`LatentConfig` with PAIRED: each copies half of the columns of a tile to both, and a half of a stage
is released by consumers of both. Their order is that of `device/gluon/latent_pairs.py`. Notes are
written as `sm90_producer._take_turn` does.
"""

import random

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.decode.tuning import LatentConfig

from ..sparse_attention.sm90.test_latent_protocol import (
    COPIERS,
    PARTS,
    STAGES,
    TURNS,
    Barrier,
    Program,
    draw,
    run_roles,
)

CONFIG = LatentConfig(64, None, 64, PAIRED=True)


class Paired(Program):
    """Notes come with the part that completes a tile, whose copies arrive after them."""

    def __init__(self, work, awaited=None):
        super().__init__(work, awaited)
        self.full = [Barrier(COPIERS) for _ in self.full]
        self.empty = [Barrier(2) for _ in self.empty]

    def write_notes(self, step, turn, tile):
        if CONFIG.completes(turn):
            self.notes[step % STAGES] = tile


def pair_of_programs(work, awaited=None):
    programs = [Paired(work, awaited) for _ in range(2)]
    for i, program in enumerate(programs):
        program.shared, program.first_thread = programs, i * (COPIERS // 2)
    return programs


def run(programs, rng):
    roles = []
    for program in programs:
        first = program.first_thread
        roles += [*map(program.copy, range(first, first + COPIERS // 2))]
        roles += [*map(program.consume, range(2))]
    return run_roles(roles, programs, rng)


def test_the_model_copies_in_the_turns_of_the_kernel():
    turns = range(2 * PARTS)
    assert tuple((CONFIG.copied_tile(i), CONFIG.copied_part(i)) for i in turns) == TURNS
    assert CONFIG.STAGES == STAGES and CONFIG.parts == PARTS


@pytest.mark.parametrize("seed", range(100))
def test_every_consumer_adds_the_values_of_each_tile_once(seed):
    rng = random.Random(seed)
    programs = pair_of_programs(draw(rng))
    assert run(programs, rng), "a deadlock"
    for program in programs:
        tiles = program.tiles()
        assert sorted(program.scored) == tiles
        added = {group: sorted(tiles) for group, tiles in program.added.items()}
        assert added == {0: tiles, 1: tiles}


def test_the_model_finds_a_phase_that_was_missed():
    """A part that the other consumers have released may be full again: its phase comes no more."""
    ends = (
        run(pair_of_programs(draw(rng), range(PARTS)), rng)
        for rng in (random.Random(seed) for seed in range(100))
    )
    assert not all(ends)


def test_the_model_finds_a_stage_that_only_one_program_released():
    """With barriers that one arrival completes, a copy overwrites what the other still reads."""
    found = 0
    for seed in range(50):
        rng = random.Random(seed)
        programs = pair_of_programs(draw(rng))
        for program in programs:
            program.empty = [Barrier(1) for _ in program.empty]
        try:
            found += not run(programs, rng)
        except AssertionError:
            found += 1
    assert found
