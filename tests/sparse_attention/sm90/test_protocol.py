"""The order of copies, notes and releases of the Hopper kernels, with roles that run at any speed.

A model of `_send` and `_consume`: rings of K and V with a full and an empty barrier for each stage.
Every role is a generator that yields while it waits; a schedule in which all of them wait is a
deadlock.
"""

import random

import pytest

CONSUMERS = 2


class Barrier:
    """An mbarrier: a phase completes with `arrivals` arrivals."""

    def __init__(self, arrivals):
        self.arrivals, self.pending, self.phase = arrivals, arrivals, 0

    def arrive(self):
        self.pending -= 1
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0:
            self.pending, self.phase = self.arrivals, self.phase ^ 1

    def passed(self, phase):
        """Whether the phase of this parity is complete, as `mbarrier.try_wait.parity` says."""
        return self.phase != phase


class Ring:
    def __init__(self, stages):
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(CONSUMERS) for _ in range(stages)]
        self.held = [None] * stages


class Program:
    """What the roles share; `work` is a list of work tiles, each a list of sets of consumers."""

    def __init__(self, work, stages):
        self.work, self.stages = work, stages
        self.k, self.v = Ring(stages), Ring(stages)
        self.notes = [None] * stages
        self.attended = {group: [] for group in range(CONSUMERS)}

    def place(self, step):
        return step % self.stages, step // self.stages & 1

    def produce(self):
        step = 0
        for number, tiles in enumerate(self.work):
            for i, users in enumerate(tiles):
                stage, phase = self.place(step)
                for ring in (self.k, self.v):
                    while not ring.empty[stage].passed(phase ^ 1):
                        yield
                    if ring is self.k:
                        self.notes[stage] = (users, i == len(tiles) - 1)
                    ring.held[stage] = (number, i)
                    ring.full[stage].arrive()
                    yield
                step += 1

    def wait(self, ring, step):
        stage, phase = self.place(step)
        while not ring.full[stage].passed(phase):
            yield

    def note(self, step, there, group):
        """(used, last, there), as `_note_at`."""
        if not there:
            return False, False, False
        yield from self.wait(self.k, step)
        users, last = self.notes[self.place(step)[0]]
        return group in users, last, True

    def next_used(self, step, note, group):
        used, last, there = note
        while there and not used:
            stage, _ = self.place(step)
            self.k.empty[stage].arrive()
            yield from self.wait(self.v, step)
            self.v.empty[stage].arrive()
            step += 1
            used, last, there = yield from self.note(step, not last, group)
        return step, (used, last, there)

    def values(self, step, group):
        yield from self.wait(self.v, step)
        stage, _ = self.place(step)
        self.attended[group].append(self.v.held[stage])
        self.v.empty[stage].arrive()

    def consume(self, group, hold=False):
        """`hold`: keep the last product of a run back while KV tiles of other consumers pass."""
        step = 0
        for _ in self.work:
            note = yield from self.note(step, True, group)
            step, note = yield from self.next_used(step, note, group)
            held = None
            while note[0]:
                stage, _ = self.place(step)
                key = self.k.held[stage]
                if held is not None:
                    yield from self.values(held, group)
                assert self.k.held[stage] == key, "keys were overwritten before they were read"
                self.k.empty[stage].arrive()
                held = step
                step += 1
                note = yield from self.note(step, not note[1], group)
                if not note[0]:
                    if not hold:
                        yield from self.values(held, group)
                        held = None
                    step, note = yield from self.next_used(step, note, group)
            if held is not None:
                yield from self.values(held, group)


class DqProgram(Program):
    """As `dq.py`: values are freed with their scores, keys with the product of the next step."""

    def consume(self, group, hold=False):
        step = 0
        for _ in self.work:
            note = yield from self.note(step, True, group)
            step, note = yield from self.next_used(step, note, group)
            held = None
            while note[0]:
                keys = self.k.held[self.place(step)[0]]
                yield from self.values(step, group)
                if held is not None:
                    self.free_keys(*held)
                held = step, keys
                step += 1
                note = yield from self.note(step, not note[1], group)
                if not note[0]:
                    if not hold:
                        self.free_keys(*held)
                        held = None
                    step, note = yield from self.next_used(step, note, group)
            if held is not None:
                self.free_keys(*held)

    def free_keys(self, step, keys):
        stage, _ = self.place(step)
        assert self.k.held[stage] == keys, "keys were overwritten before they were read"
        self.k.empty[stage].arrive()


def run(program, rng, *, hold=False):
    """Whether all roles end, with turns in random order."""
    roles = [program.produce(), *(program.consume(g, hold) for g in range(CONSUMERS))]
    idle = 0
    while roles:
        role = rng.choice(roles)
        before = state(program)
        try:
            next(role)
        except StopIteration:
            roles.remove(role)
            idle = 0
            continue
        idle = idle + 1 if state(program) == before else 0
        if idle > 200:
            return False
    return True


def state(program):
    bars = (b for ring in (program.k, program.v) for b in (*ring.full, *ring.empty))
    attended = tuple(len(x) for x in program.attended.values())
    return tuple((b.pending, b.phase) for b in bars), attended


def draw(rng):
    """Work tiles of KV tiles that both, one or no consumer needs."""
    kinds = rng.choice([[(0, 1)], [(0,), (1,)], [(), (0,), (1,), (0, 1)], [(0,), ()], [()]])
    return [
        [set(rng.choice(kinds)) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 4))
    ]


@pytest.mark.parametrize(
    ("kind", "stages"),
    [*((Program, n) for n in (1, 2, 3, 4)), *((DqProgram, n) for n in (2, 3, 4))],
)
@pytest.mark.parametrize("seed", range(40))
def test_every_consumer_attends_to_its_tiles_in_order(seed, kind, stages):
    rng = random.Random(seed)
    program = kind(draw(rng), stages)
    assert run(program, rng), "a deadlock"
    for group in range(CONSUMERS):
        expected = [
            (number, i)
            for number, tiles in enumerate(program.work)
            for i, users in enumerate(tiles)
            if group in users
        ]
        assert program.attended[group] == expected


def test_the_model_finds_a_deadlock():
    """A product that is held back while other tiles pass keeps the stage that they need."""
    work = [[{0, 1}, {1}, {1}, {1}, {0, 1}]]
    for kind in (Program, DqProgram):
        assert run(kind(work, 2), random.Random(0))
        assert not run(kind(work, 2), random.Random(0), hold=True)


def test_dq_needs_two_stages():
    """The keys of a tile are held until those of the next have come."""
    assert not run(DqProgram([[{0}, {0}]], 1), random.Random(0))
