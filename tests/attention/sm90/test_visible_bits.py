"""Which scores the mask code of Hopper keeps, found by running its PTX for all threads.

The kernel of `visible_bits_probe` has the layouts of the forward, and stores what is left of the
scores of a tile. That has to agree with a mask of elements.
"""

import json
import pathlib
import random
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Triton is not installed")

from blackwell_sparsek import BlockMask
from blackwell_sparsek.core.env import environment_for_compiler
from blackwell_sparsek.device.records import VisitPlan
from blackwell_sparsek.testing.emulator.instructions import compiled
from blackwell_sparsek.testing.emulator.machine import Machine
from blackwell_sparsek.testing.emulator.memory import GlobalMemory
from blackwell_sparsek.testing.emulator.program import Program, parse

from .visible_bits_probe import PROBES, Probe

ROWS = 64
ROOT = pathlib.Path(__file__).parents[3]
OPEN = 2**30
# Far more bytes than an array has: a wrong address meets no other array.
SPACE = 2**44


@pytest.fixture(scope="module")
def machines():
    """The kernel of each probe, from a process in which Triton compiles."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.attention.sm90.visible_bits_probe"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment_for_compiler(),
    )
    assert done.returncode == 0, done.stderr
    return {name: _machine(parse(ptx)) for name, ptx in json.loads(done.stdout).items()}


def _machine(program: Program) -> Machine:
    """The emulator of a kernel, whose parameters and tensors every run binds."""
    empty, none = GlobalMemory([]), [0] * len(program.parameters)
    return Machine(program, none, empty, grid=1, num_warps=4, shared_bytes=0, compile_step=compiled)


class Problem(NamedTuple):
    """What queries see, and the blocks of a row of the mask that need mask code."""

    visible: torch.Tensor
    mask: BlockMask
    row: int
    plan: VisitPlan
    left: int
    right: int
    skipped: int
    """Bit masks in front of the pool that no block has."""

    def masked_keys(self) -> list[int]:
        """Keys of the blocks that need mask code, one after another."""
        plan, width = self.plan, self.mask.block_size[1]
        entries = [
            *range(plan.partial_begin, plan.partial_end),
            *range(plan.edge_begin, plan.full_begin),
            *range(plan.full_end, plan.edge_end),
        ]
        blocks = self.mask.forward.indices[torch.tensor(entries, dtype=torch.int64)].tolist()
        return [block * width + i for block in blocks for i in range(width)]

    def sees(self) -> np.ndarray:
        """Which keys each query sees, and false in a column for keys that do not exist."""
        q_len, kv_len = self.visible.shape
        query, key = np.ogrid[:q_len, :kv_len]
        distance = key - (query + kv_len - q_len)
        seen = self.visible.numpy() & (-self.left <= distance) & (distance <= self.right)
        return np.pad(seen, ((0, 0), (0, 1)))


def _problem(draw: random.Random, block: tuple[int, int], banded: bool, skipped: int) -> Problem:
    block_q, block_kv = block
    q_len = draw.randint(1, 2 * block_q)
    kv_len = draw.randint(3, max(4, 384 // block_kv)) * block_kv - draw.randint(0, block_kv - 1)
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    visible = torch.rand(q_len, kv_len, generator=generator) < draw.choice((0.1, 0.5, 0.9))
    for first in range(0, kv_len, block_kv):
        if draw.random() < 0.4:
            visible[:, first : first + block_kv] = draw.random() < 0.8
    mask = BlockMask.from_element_mask(visible, block)
    indptr, partial_end = mask.forward.indptr.tolist(), mask.forward.partial_end.tolist()
    row = draw.randrange(len(partial_end))
    begin, split, end = indptr[row], partial_end[row], indptr[row + 1]
    partial = sorted(draw.choice((begin, split, draw.randint(begin, split))) for _ in range(2))
    plan = VisitPlan(*partial, *sorted(draw.randint(split, end) for _ in range(4)))
    left, right = (draw.randint(0, kv_len), draw.randint(0, 40)) if banded else (OPEN, OPEN)
    return Problem(visible, mask, row, plan, left, right, skipped)


def _kept(machine: Machine, probe: Probe, problem: Problem, kv_tile: int, first: int) -> np.ndarray:
    """What is left of scores 1, 2, 3 ... of 64 queries of the row from `first` on."""
    scores = np.arange(1, ROWS * probe.config.TILE_N + 1, dtype=np.float32)
    out = np.full_like(scores, np.nan)
    mask = problem.mask
    block_q, tile_m = mask.block_size[0], probe.config.tile_m
    lists = [x.numpy() for x in mask.forward]
    lists[3] = np.where(lists[3] < 0, -1, lists[3] + problem.skipped).astype(np.int32)
    arrays = {SPACE * i: x for i, x in enumerate((out, scores, *lists, mask.bits.numpy()), 1)}
    *pointers, bits = arrays
    # nothing can be read of the bit masks in front of the pool
    words = mask.bits.shape[1] * mask.bits.shape[2]
    arguments = [
        *(*pointers, bits - 4 * words * problem.skipped),
        *(block_q, *problem.plan, kv_tile, *problem.visible.shape, problem.left, problem.right),
        *(problem.row * block_q + first // tile_m * tile_m, first % tile_m),
    ]
    # those that Triton adds: its scratch memory, of which there is none
    arguments += [0] * (len(machine.program.parameters) - len(arguments))
    machine.bind(arguments, GlobalMemory([], arrays))
    machine.run()
    return out.reshape(ROWS, probe.config.TILE_N)


def _expected(probe: Probe, problem: Problem, kv_tile: int, first: int) -> np.ndarray:
    """The same from the mask of elements, of the queries that exist."""
    q_len, kv_len = problem.visible.shape
    start = min(problem.row * problem.mask.block_size[0] + first, q_len)
    keys = probe.config.TILE_N
    masked = problem.masked_keys()[kv_tile * keys :][:keys]
    masked += [kv_len] * (keys - len(masked))
    seen = problem.sees()[start : start + ROWS, np.minimum(masked, kv_len)]
    scores = np.arange(1, ROWS * keys + 1, dtype=np.float32).reshape(ROWS, keys)
    return np.where(seen, scores[: len(seen)], np.float32(probe.other))


@pytest.mark.parametrize("name", PROBES)
def test_scores_that_are_kept(machines, name):
    probe = PROBES[name]
    draw = random.Random(name)
    hidden = shown = 0
    for i in range(8):
        block_q = draw.choice([x for x in (64, 128, 256) if x % probe.config.tile_m == 0])
        # words past 2**31 of them, and past 2**33 bytes
        skipped = 2**26 if i % 2 else 0
        problem = _problem(draw, (block_q, probe.config.BLOCK_KV), i % 4 < 2, skipped)
        for kv_tile in range(-(-len(problem.masked_keys()) // probe.config.TILE_N)):
            first = ROWS * draw.randrange(block_q // ROWS)
            found = _kept(machines[name], probe, problem, kv_tile, first)
            expected = _expected(probe, problem, kv_tile, first)
            np.testing.assert_array_equal(found[: len(expected)], expected)
            hidden += np.count_nonzero(expected == probe.other)
            shown += np.count_nonzero(expected != probe.other)
    assert min(hidden, shown) > 1000
