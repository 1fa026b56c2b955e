"""The order of copies, weights and releases over latent keys, with roles that run at any speed.

A model of `latent_producer._send` and of the consumers, `decode.sm90_latent_tiles`: two stages,
whose halves have barriers of their own, and weights that the consumers hand to both of them. Every
role is a generator that yields while it waits.
"""

import random

import pytest

from .test_protocol import Barrier

STAGES, PARTS, COPIERS = 2, 2, 4


class Program:
    """What the roles share; `work` has the number of tiles of each query.

    `awaited` are the parts of a tile that a consumer without its scores waits for, by default its
    own.
    """

    def __init__(self, work, awaited=None):
        self.work, self.awaited = work, awaited
        # the notes are one more arrival at the first part
        counts = [COPIERS + (part == 0) for _ in range(STAGES) for part in range(PARTS)]
        self.full = [Barrier(count) for count in counts]
        self.empty = [Barrier(1) for _ in counts]
        self.held = [[None] * COPIERS for _ in counts]
        self.notes = [None] * STAGES
        self.given, self.free, self.queries = Barrier(1), Barrier(2), Barrier(2)
        self.weights = None
        self.queries_of = [None, None]
        self.scored, self.added = [], {0: [], 1: []}

    def tiles(self):
        return [(query, tile) for query, tiles in enumerate(self.work) for tile in range(tiles)]

    def copy(self, thread):
        """One of the threads of the producer; the first of them writes the notes."""
        for step, tile in enumerate(self.tiles()):
            stage = step % STAGES
            for part in range(PARTS):
                place = stage * PARTS + part
                while not self.empty[place].passed((step // STAGES & 1) ^ 1):
                    yield
                if part == 0 and thread == 0:
                    self.notes[stage] = tile
                    self.full[place].arrive()
                yield
                self.held[place][thread] = tile
                self.full[place].arrive()

    def wait_full(self, step, parts=range(PARTS)):
        for part in parts:
            while not self.full[step % STAGES * PARTS + part].passed(step // STAGES & 1):
                yield

    def wait_values(self, step, group):
        yield from self.wait_full(step, self.awaited or [group])

    def check(self, step, tile, parts):
        for part in parts:
            held = self.held[step % STAGES * PARTS + part]
            assert held == [tile] * COPIERS, f"{tile}: {held}"

    def score(self, step, tile):
        yield from self.wait_full(step)
        yield
        assert self.queries_of == [tile[0], tile[0]], "queries of another query"
        self.check(step, tile, range(PARTS))
        assert self.notes[step % STAGES] == tile
        self.scored.append(tile)

    def hand_over(self, step, tile):
        while not self.free.passed((step & 1) ^ 1):
            yield
        self.weights = tile
        self.given.arrive()

    def start_values(self, step, tile):
        while not self.given.passed(step & 1):
            yield
        assert self.weights == tile

    def end_values(self, step, tile, group):
        yield
        assert self.weights == tile
        self.check(step, tile, [group])
        self.added[group].append(tile)
        self.free.arrive()
        self.empty[step % STAGES * PARTS + group].arrive()

    def values(self, step, tile, group):
        yield from self.start_values(step, tile)
        yield from self.end_values(step, tile, group)

    def consume(self, group):
        step = 0
        for query, tiles in enumerate(self.work):
            self.queries_of[group] = query
            self.queries.arrive()
            while not self.queries.passed(query & 1):
                yield
            for even in range(0, tiles, 2):
                tile, odd = (query, even), (query, even + 1)
                has_odd = even + 1 < tiles
                if group == 0:
                    yield from self.score(step, tile)
                    yield from self.hand_over(step, tile)
                    yield from self.values(step, tile, group)
                    if has_odd:
                        step += 1
                        yield from self.wait_values(step, group)
                        yield from self.values(step, odd, group)
                else:
                    yield from self.wait_values(step, group)
                    if has_odd:
                        yield from self.score(step + 1, odd)
                        yield from self.values(step, tile, group)
                        step += 1
                        yield from self.hand_over(step, odd)
                        tile = odd
                    yield from self.values(step, tile, group)
                step += 1


def run(program, rng):
    """Whether all roles end, with turns in random order."""
    roles = [*map(program.copy, range(COPIERS)), *map(program.consume, range(2))]
    idle = 0
    while roles and idle < 2000:
        role = rng.choice(roles)
        before = progress(program)
        try:
            next(role)
        except StopIteration:
            roles.remove(role)
        idle = idle + 1 if progress(program) == before else 0
    return not roles


def progress(program):
    bars = (*program.full, *program.empty, program.given, program.free, program.queries)
    return tuple((b.pending, b.phase) for b in bars), len(program.scored)


def draw(rng):
    return [rng.choice([0, 1, 2, 3, 4, 7]) for _ in range(rng.randint(1, 6))]


def test_the_model_finds_a_phase_that_was_missed():
    """A part that the other consumer has released may be full again: its phase comes no more."""
    ends = (
        run(Program(draw(rng), range(PARTS)), rng)
        for rng in (random.Random(seed) for seed in range(100))
    )
    assert not all(ends)


@pytest.mark.parametrize("seed", range(100))
def test_every_consumer_adds_the_values_of_each_tile_once(seed):
    rng = random.Random(seed)
    program = Program(draw(rng))
    assert run(program, rng), "a deadlock"
    tiles = program.tiles()
    assert sorted(program.scored) == tiles
    assert program.added == {0: tiles, 1: tiles}
