"""The order of copies and releases over small entries, with roles that run at any speed.

A model of `gathered_producer._send` and `gathered._consume`, as in `test_protocol.py`: each thread
of the producer arrives for its own copies, and consumers wait for the tiles of each other.
"""

import random

import pytest

from .test_protocol import Barrier

CONSUMERS, COPIERS = 2, 3


def owners_of(common, first, second):
    """Whose the KV tiles of a work tile are, in their order: `unions.owner_of`."""
    turns = min(first, second)
    rest = [{0}] * (first - turns) + [{1}] * (second - turns)
    return [{0, 1}] * common + [{0}, {1}] * turns + rest


class Program:
    """What the roles share; `work` has the owners of the KV tiles of each work tile."""

    def __init__(self, work, stages, waits=True):
        self.tiles = [(n, i) for n, owners in enumerate(work) for i in range(len(owners))]
        self.work, self.stages, self.waits = work, stages, waits
        # the words of keys are one more arrival
        self.full = {
            "k": [Barrier(COPIERS + 1) for _ in range(stages)],
            "v": [Barrier(COPIERS) for _ in range(stages)],
        }
        self.empty = {name: [Barrier(CONSUMERS) for _ in range(stages)] for name in "kv"}
        self.held = {name: [[None] * COPIERS for _ in range(stages)] for name in "kv"}
        self.words = [None] * stages
        self.attended = {group: [] for group in range(CONSUMERS)}

    def copy(self, thread):
        for step, tile in enumerate(self.tiles):
            stage, phase = step % self.stages, step // self.stages & 1
            for name in "kv":
                while not self.empty[name][stage].passed(phase ^ 1):
                    yield
                if name == "k" and thread == 0:
                    self.words[stage] = tile
                    self.full[name][stage].arrive()
                yield
                self.held[name][stage][thread] = tile
                self.full[name][stage].arrive()

    def wait(self, name, step):
        while not self.full[name][step % self.stages].passed(step // self.stages & 1):
            yield

    def check(self, name, step):
        held = self.held[name][step % self.stages]
        assert held == [self.tiles[step]] * COPIERS, f"{self.tiles[step]}: {held}"

    def free(self, name, step):
        self.empty[name][step % self.stages].arrive()

    def values(self, step, group):
        yield from self.wait("v", step)
        yield
        self.check("v", step)
        self.attended[group].append(self.tiles[step])
        self.free("v", step)

    def pass_over(self, begin, number, owners, group):
        while number < len(owners) and group not in owners[number]:
            for name in "kv":
                if self.waits:
                    yield from self.wait(name, begin + number)
                self.free(name, begin + number)
            number += 1
        return number

    def consume(self, group):
        begin = 0
        for owners in self.work:
            number = yield from self.pass_over(begin, 0, owners, group)
            while number < len(owners):
                held = None
                while number < len(owners) and group in owners[number]:
                    step = begin + number
                    yield from self.wait("k", step)
                    yield
                    self.check("k", step)
                    assert self.words[step % self.stages] == self.tiles[step]
                    if held is not None:
                        yield from self.wait("v", held)
                    self.free("k", step)
                    if held is not None:
                        yield from self.values(held, group)
                    held, number = step, number + 1
                yield from self.values(held, group)
                number = yield from self.pass_over(begin, number, owners, group)
            begin += len(owners)


def run(program, rng):
    """Whether all roles end, with turns in random order."""
    roles = [*map(program.copy, range(COPIERS)), *map(program.consume, range(CONSUMERS))]
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
    bars = (b for which in (program.full, program.empty) for name in "kv" for b in which[name])
    return [(b.pending, b.phase) for b in bars], [len(x) for x in program.attended.values()]


def draw(rng):
    counts = [0, 1, 2, 3, 5]
    return [owners_of(*(rng.choice(counts) for _ in range(3))) for _ in range(rng.randint(1, 4))]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(40))
def test_every_consumer_attends_to_its_tiles_in_order(seed, stages):
    rng = random.Random(seed)
    program = Program(draw(rng), stages)
    assert run(program, rng), "a deadlock"
    for group in range(CONSUMERS):
        expected = [(n, i) for n, i in program.tiles if group in program.work[n][i]]
        assert program.attended[group] == expected


def test_the_model_finds_tiles_that_are_freed_too_early():
    """Without a wait, the releases of one consumer would count for the other."""

    def fails(seed):
        rng = random.Random(seed)
        try:
            return not run(Program(draw(rng), 2, waits=False), rng)
        except AssertionError:
            return True

    assert any(fails(seed) for seed in range(40))
