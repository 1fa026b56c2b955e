"""Two programs that share copies of latent keys and start scores early, at any speed of the roles.

Each copies half of the columns of a tile to both, and a half of a stage is released by consumers of
both (`LatentConfig` with EARLY_SCORES).
"""

import random

import pytest

from ..sparse_attention.sm90.test_latent_protocol import (
    COPIERS,
    Barrier,
    Program,
    draw,
    run_roles,
)


def pair_of_programs(work, awaited=None):
    programs = [Program(work, awaited) for _ in range(2)]
    for i, program in enumerate(programs):
        program.shared, program.first_thread = programs, i * (COPIERS // 2)
        program.empty = [Barrier(2) for _ in program.empty]
    return programs


def run(programs, rng):
    roles = []
    for program in programs:
        first = program.first_thread
        roles += [*map(program.copy, range(first, first + COPIERS // 2))]
        roles += [*map(program.consume, range(2))]
    return run_roles(roles, programs, rng)


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
