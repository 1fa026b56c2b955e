"""Who waits for which half of a tile over a latent cache, with roles that run at any speed.

A model of `sm90_producer._take_turn` and of both orders of `sm90_latent_tiles`: two stages, whose
halves have barriers of their own. The producer copies in the turns of `LatentConfig`, and a copy
arrives some time after it was started. PAIRED is modelled by one program: what its partner adds,
more arrivals at the same barriers, only keeps halves from being filled again.
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

    def __init__(self, work, paired, awaited=None):
        self.work, self.awaited = work, awaited
        self.config = LatentConfig(64, None, 64, PAIRED=paired)
        self.full, self.empty = ([Barrier(1) for _ in range(STAGES * PARTS)] for _ in range(2))
        self.held, self.notes = [None] * (STAGES * PARTS), [None] * STAGES
        self.flying = []
        self.queries = Barrier(2)
        self.given, self.free = Barrier(1), Barrier(2)
        self.even_state, self.odd_weights, self.even_weights = (Barrier(1) for _ in range(3))
        self.weights = {}
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
        step = pairs = 0
        for split, tiles in enumerate(self.work):
            self.queries.arrive()
            yield from wait(self.queries, split & 1)
            own = self.own_first if self.config.PAIRED else self.in_turns
            for even in range(0, tiles, 2):
                yield from own(group, split, even, even + 1 < tiles, step, pairs)
                step += 2 if even + 1 < tiles else 1
                pairs += 1

    # `multiply_in_turns`

    def hand_over(self, step, tile):
        yield from wait(self.free, (step & 1) ^ 1)
        self.weights["turn"] = tile
        self.given.arrive()

    def values(self, step, tile, group):
        yield from wait(self.given, step & 1)
        assert self.weights["turn"] == tile
        self.read_notes(step, tile)
        yield from self.add(step, tile, group)
        assert self.weights["turn"] == tile
        self.free.arrive()
        self.release(step, group)

    def in_turns(self, group, split, even, has_odd, step, pairs):
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

    # `multiply_own_first`

    def own_first(self, group, split, even, has_odd, step, pairs):
        tile, odd = (split, even), (split, even + 1)
        if not has_odd:
            yield from self.last_alone(group, tile, step, pairs)
        elif group == 0:
            yield from self.score(step, tile)
            self.even_state.arrive()
            yield from wait(self.odd_weights, (step - pairs) & 1)
            self.weights["even"] = tile
            self.even_weights.arrive()
            yield from self.add(step, tile, group)
            self.release(step, group)
            yield from self.await_half(step + 1, group)
            self.read_notes(step + 1, odd)
            assert self.weights["odd"] == odd
            yield from self.add(step + 1, odd, group)
            assert self.weights["odd"] == odd
            self.release(step + 1, group)
        else:
            yield from self.score(step + 1, odd)
            yield from wait(self.even_state, pairs & 1)
            self.weights["odd"] = odd
            self.odd_weights.arrive()
            yield from self.await_half(step, group)
            yield from wait(self.even_weights, pairs & 1)
            assert self.weights["even"] == tile
            yield from self.add(step + 1, odd, group)
            self.release(step + 1, group)
            yield from self.add(step, tile, group)
            assert self.weights["even"] == tile
            self.release(step, group)

    def last_alone(self, group, tile, step, pairs):
        if group == 0:
            yield from self.score(step, tile)
            self.even_state.arrive()
            self.weights["even"] = tile
            self.even_weights.arrive()
        else:
            yield from self.await_half(step, group)
            yield from wait(self.even_state, pairs & 1)
            yield from wait(self.even_weights, pairs & 1)
            assert self.weights["even"] == tile
            self.read_notes(step, tile)
        yield from self.add(step, tile, group)
        self.release(step, group)


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
    bars += (program.even_state, program.odd_weights, program.even_weights)
    return tuple((b.pending, b.phase) for b in bars), len(program.scored), len(program.flying)


def draw(rng):
    return [rng.choice([1, 1, 2, 3, 4, 7]) for _ in range(rng.randint(1, 6))]


@pytest.mark.parametrize("paired", [False, True])
def test_the_model_finds_a_phase_that_was_missed(paired):
    """A half that the other consumer has released may be full again: its phase comes no more."""
    ends = (
        run(Program(draw(rng), paired, WHOLE), rng)
        for rng in (random.Random(seed) for seed in range(100))
    )
    assert not all(ends)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_every_consumer_adds_the_values_of_each_tile_once(paired, seed):
    rng = random.Random(seed)
    program = Program(draw(rng), paired)
    assert run(program, rng), "a deadlock"
    tiles = [(split, tile) for split, count in enumerate(program.work) for tile in range(count)]
    assert sorted(program.scored) == tiles
    assert {group: sorted(added) for group, added in program.added.items()} == {0: tiles, 1: tiles}
