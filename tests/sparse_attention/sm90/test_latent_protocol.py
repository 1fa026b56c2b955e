"""The order of copies, weights and releases over latent keys, with roles that run at any speed.

A model of `latent_producer._send_keys` and of the consumers, `device/gluon/latent_pairs.py`: two
stages, whose halves have barriers of their own, and weights that each consumer hands to the other
one. Every role is a generator that yields while it waits. `tests/decode/test_latent_pairs.py` runs
two such programs that share their copies.
"""

import random

import pytest

from .test_protocol import Barrier

STAGES, PARTS, COPIERS = 2, 2, 4
TURNS = ((0, 0), (1, 1), (0, 1), (1, 0))


class Program:
    """What the roles share; `work` has the number of tiles of each query.

    `awaited` are the parts of a tile that a consumer without its scores waits for, by default its
    own.
    """

    def __init__(self, work, awaited=None):
        self.work, self.awaited = work, awaited
        # the programs that copies of this one go to, and the first thread of its producer
        self.shared, self.first_thread = [self], 0
        # the notes are one more arrival at the first part
        counts = [COPIERS + (part == 0) for _ in range(STAGES) for part in range(PARTS)]
        self.full = [Barrier(count) for count in counts]
        self.empty = [Barrier(1) for _ in counts]
        self.held = [[None] * COPIERS for _ in counts]
        self.notes = [None] * STAGES
        self.queries, self.sums = Barrier(2), Barrier(2)
        self.even_state, self.odd_state, self.even_weights, self.odd_weights = (
            Barrier(1) for _ in range(4)
        )
        self.even_m = self.odd_m = self.odd_p = None
        self.even_p, self.row_sums = [None] * STAGES, [None, None]
        self.queries_of = [None, None]
        self.scored, self.added = [], {0: [], 1: []}

    def tiles(self):
        return [(query, tile) for query, tiles in enumerate(self.work) for tile in range(tiles)]

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

    def copy(self, thread):
        """One of the threads of the producer; the first of them writes the notes."""
        step = 0
        for query, tiles in enumerate(self.work):
            for even in range(0, tiles, 2):
                for turn, (odd, part) in enumerate(TURNS):
                    if even + odd == tiles:
                        continue
                    now, tile = step + odd, (query, even + odd)
                    place = now % STAGES * PARTS + part
                    yield from wait(self.empty[place], (now // STAGES & 1) ^ 1)
                    if thread == self.first_thread:
                        self.write_notes(now, turn, tile)
                    for program in self.shared:
                        if part == PARTS - 1:
                            # the last columns, where weights were
                            program.even_p[now % STAGES] = None
                        yield
                        program.held[place][thread] = tile
                        program.full[place].arrive()
                step += min(tiles - even, 2)

    def write_notes(self, step, turn, tile):
        if TURNS[turn][1] == 0:
            self.notes[step % STAGES] = tile
            self.full[step % STAGES * PARTS].arrive()

    def score_parts(self, step, tile, parts):
        for part in parts:
            yield from self.wait_full(step, [part])
            self.check(step, tile, [part])
            assert self.queries_of == [tile[0], tile[0]], "queries of another query"

    def even_scores(self, step, tile):
        yield from self.score_parts(step, tile, range(PARTS))
        self.end_scores(step, tile)

    def end_scores(self, step, tile):
        self.check(step, tile, range(PARTS))
        self.scored.append(tile)

    def add(self, step, tile, group):
        """A product: what it reads stays until it is complete."""
        self.check(step, tile, [group])
        yield
        self.check(step, tile, [group])
        self.added[group].append(tile)

    def release(self, step, group):
        for program in self.shared:
            program.empty[step % STAGES * PARTS + group].arrive()

    def give_even(self, step, tile):
        self.even_p[step % STAGES] = tile
        self.even_weights.arrive()

    def first_of_pair(self, step, odds, tile, odd, more):
        assert self.notes[step % STAGES] == tile
        self.even_m = tile
        self.even_state.arrive()
        yield from self.add(step, tile, 0)
        self.release(step, 0)
        yield from wait(self.odd_state, odds & 1)
        assert self.odd_m == odd
        self.give_even(step, tile)
        yield from self.wait_values(step + 1, 0)
        yield from wait(self.odd_weights, odds & 1)
        assert self.odd_p == odd
        if more:
            after = (tile[0], tile[1] + 2)
            yield from self.score_parts(step + 2, after, [0])
        yield from self.add(step + 1, odd, 0)
        assert self.odd_p == odd
        self.release(step + 1, 0)
        if more:
            yield from self.score_parts(step + 2, after, [1])
            self.end_scores(step + 2, after)

    def second_of_pair(self, step, pairs, tile, odd):
        yield from self.score_parts(step + 1, odd, reversed(range(PARTS)))
        self.end_scores(step + 1, odd)
        yield from wait(self.even_state, pairs & 1)
        assert self.even_m == tile
        assert self.notes[(step + 1) % STAGES] == odd
        self.odd_m = odd
        self.odd_state.arrive()
        yield
        self.odd_p = odd
        self.odd_weights.arrive()
        yield from self.wait_values(step, 1)
        yield from wait(self.even_weights, pairs & 1)
        yield from self.add(step + 1, odd, 1)
        self.release(step + 1, 1)
        assert self.even_p[step % STAGES] == tile
        yield from self.add(step, tile, 1)
        assert self.even_p[step % STAGES] == tile
        self.release(step, 1)

    def last_alone(self, step, pairs, tile, group):
        if group == 0:
            assert self.notes[step % STAGES] == tile
            self.even_m = tile
            self.even_state.arrive()
            yield
            self.give_even(step, tile)
        else:
            yield from self.wait_values(step, 1)
            yield from wait(self.even_state, pairs & 1)
            assert self.even_m == tile
            yield from wait(self.even_weights, pairs & 1)
            assert self.even_p[step % STAGES] == tile
        yield from self.add(step, tile, group)
        self.release(step, group)

    def consume(self, group):
        step = pairs = 0
        for query, tiles in enumerate(self.work):
            self.queries_of[group] = query
            self.queries.arrive()
            yield from wait(self.queries, query & 1)
            for even in range(0, tiles, 2):
                tile, odd = (query, even), (query, even + 1)
                if group == 0 and even == 0:
                    yield from self.even_scores(step, tile)
                if even + 1 == tiles:
                    yield from self.last_alone(step, pairs, tile, group)
                    step -= 1
                elif group == 0:
                    more = even + 2 < tiles
                    yield from self.first_of_pair(step, step - pairs, tile, odd, more)
                else:
                    yield from self.second_of_pair(step, pairs, tile, odd)
                step += 2
                pairs += 1
            self.row_sums[group] = query
            self.sums.arrive()
            yield from wait(self.sums, query & 1)
            assert self.row_sums[1 - group] == query


def wait(barrier, phase):
    yield  # whoever waits may look late
    while not barrier.passed(phase):
        yield


def run(program, rng):
    """Whether all roles end, with turns in random order while one role or none stands still."""
    roles = [*map(program.copy, range(COPIERS)), *map(program.consume, range(2))]
    return run_roles(roles, [program], rng)


def run_roles(roles, programs, rng):
    """The same for roles of several programs."""
    idle, still = 0, None
    while roles and idle < 2000:
        if rng.random() < 0.05:
            still = rng.choice([None, *roles])
        role = rng.choice([x for x in roles if x is not still] or roles)
        before = [*map(progress, programs)]
        try:
            next(role)
        except StopIteration:
            roles.remove(role)
        idle = idle + 1 if [*map(progress, programs)] == before else 0
    return not roles


def progress(program):
    bars = [x for x in vars(program).values() if isinstance(x, Barrier)]
    bars += [*program.full, *program.empty]
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
    assert {group: sorted(added) for group, added in program.added.items()} == {0: tiles, 1: tiles}
