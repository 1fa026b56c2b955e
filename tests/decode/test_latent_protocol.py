"""Who waits for which half of a tile over a latent cache, with roles that run at any speed.

A model of `sm90_producer._take_turn` and of `multiply_in_turns`, for programs that work alone: two
stages, whose halves have barriers of their own. The producer copies in the turns of `LatentConfig`,
and a copy arrives some time after it was started. Programs in pairs are in `test_latent_pairs.py`.
"""

import random

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.decode.tuning import LatentConfig

from ..sparse_attention.sm90.test_protocol import Barrier

STAGES, PARTS = LatentConfig.STAGES, 2
WHOLE = range(PARTS)


class Program:
    """What the roles share; `work` has the number of tiles of each split.

    `awaited` are the halves that a consumer without the scores of a tile waits for, by default its
    own.
    """

    def __init__(self, work, awaited=None):
        self.work, self.awaited = work, awaited
        self.config = LatentConfig(64, None, 64)
        self.full, self.empty = ([Barrier(1) for _ in range(STAGES * PARTS)] for _ in range(2))
        self.held, self.notes = [None] * (STAGES * PARTS), [None] * STAGES
        self.flying = []
        self.queries = Barrier(2)
        self.given, self.free = Barrier(1), Barrier(2)
        self.weights = None
        self.scored, self.added = [], {0: [], 1: []}

    def produce(self):
        step = 0
        for split, tiles in enumerate(self.work):
            for tile in range(0, tiles, 2):
                for turn in range(2 * PARTS):
                    odd, part = self.config.copied_tile(turn), self.config.copied_part(turn)
                    if tile + odd >= tiles:
                        continue
                    now = step + odd
                    place = now % STAGES * PARTS + part
                    yield from wait(self.empty[place], (now // STAGES & 1) ^ 1)
                    if self.config.completes(turn):
                        self.notes[now % STAGES] = (split, tile + odd)
                    self.held[place] = None
                    self.flying.append((place, (split, tile + odd)))
                step += min(tiles - tile, 2)

    def deliver(self):
        """The copies, in any order."""
        rng = random.Random(len(self.work))
        while True:
            if self.flying:
                place, tile = self.flying.pop(rng.randrange(len(self.flying)))
                self.held[place] = tile
                self.full[place].arrive()
            yield

    def await_parts(self, step, parts):
        for part in parts:
            yield from wait(self.full[step % STAGES * PARTS + part], step // STAGES & 1)

    def await_half(self, step, group):
        yield from self.await_parts(step, self.awaited or [group])

    def check(self, step, tile, parts):
        held = [self.held[step % STAGES * PARTS + part] for part in parts]
        assert held == [tile] * len(held), f"{tile}: {held}"

    def score(self, step, tile):
        yield from self.await_parts(step, WHOLE)
        yield
        self.check(step, tile, WHOLE)
        self.read_notes(step, tile)
        self.scored.append(tile)

    def read_notes(self, step, tile):
        assert self.notes[step % STAGES] == tile, f"{tile}: notes of {self.notes[step % STAGES]}"

    def add(self, step, tile, group):
        self.check(step, tile, [group])
        yield
        self.check(step, tile, [group])
        self.added[group].append(tile)

    def release(self, step, group):
        self.empty[step % STAGES * PARTS + group].arrive()

    def consume(self, group):
        step = 0
        for split, tiles in enumerate(self.work):
            self.queries.arrive()
            yield from wait(self.queries, split & 1)
            for even in range(0, tiles, 2):
                yield from self.in_turns(group, split, even, even + 1 < tiles, step)
                step += 2 if even + 1 < tiles else 1

    def hand_over(self, step, tile):
        yield from wait(self.free, (step & 1) ^ 1)
        self.weights = tile
        self.given.arrive()

    def values(self, step, tile, group):
        yield from wait(self.given, step & 1)
        assert self.weights == tile
        self.read_notes(step, tile)
        yield from self.add(step, tile, group)
        assert self.weights == tile
        self.free.arrive()
        self.release(step, group)

    def in_turns(self, group, split, even, has_odd, step):
        tile, odd = (split, even), (split, even + 1)
        if group == 0:
            yield from self.score(step, tile)
            yield from self.hand_over(step, tile)
            yield from self.values(step, tile, group)
            if has_odd:
                yield from self.await_half(step + 1, group)
                yield from self.values(step + 1, odd, group)
            return
        yield from self.await_half(step, group)
        if has_odd:
            yield from self.score(step + 1, odd)
        yield from self.values(step, tile, group)
        if has_odd:
            yield from self.hand_over(step + 1, odd)
            yield from self.values(step + 1, odd, group)


def wait(barrier, phase):
    yield  # whoever waits may look late
    while not barrier.passed(phase):
        yield


def run(program, rng):
    """Whether all roles end, with turns in random order while one role or none stands still."""
    roles = [program.produce(), program.consume(0), program.consume(1)]
    copies, idle, still = program.deliver(), 0, None
    while roles and idle < 2000:
        if rng.random() < 0.05:
            still = rng.choice([None, *roles])
        role = rng.choice([x for x in (*roles, copies) if x is not still])
        before = progress(program)
        try:
            next(role)
        except StopIteration:
            roles.remove(role)
        idle = idle + 1 if progress(program) == before else 0
    return not roles


def progress(program):
    bars = (*program.full, *program.empty, program.queries, program.given, program.free)
    return tuple((b.pending, b.phase) for b in bars), len(program.scored), len(program.flying)


def draw(rng):
    return [rng.choice([1, 1, 2, 3, 4, 7]) for _ in range(rng.randint(1, 6))]


def test_the_model_finds_a_phase_that_was_missed():
    """A half that the other consumer has released may be full again: its phase comes no more."""
    ends = (
        run(Program(draw(rng), WHOLE), rng) for rng in (random.Random(seed) for seed in range(100))
    )
    assert not all(ends)


@pytest.mark.parametrize("seed", range(60))
def test_every_consumer_adds_the_values_of_each_tile_once(seed):
    rng = random.Random(seed)
    program = Program(draw(rng))
    assert run(program, rng), "a deadlock"
    tiles = [(split, tile) for split, count in enumerate(program.work) for tile in range(count)]
    assert sorted(program.scored) == tiles
    assert {group: sorted(added) for group, added in program.added.items()} == {0: tiles, 1: tiles}
