"""Which problems the portable kernel takes, and its tiles."""

import math
from dataclasses import dataclass

import torch

from ..calls.select_keys import SelectProblem
from ..dispatch.machine import why_not_portable

LARGEST_DIM = 256
LONGEST = 2**30 - 1
# Entries of a list: half as many again are held in registers while the best are found.
MOST_ENTRIES = 4096
# Lists up to this length are short: their buffers are small, so programs may be many.
SHORT_LIST = 128
INTERPRETED_PROGRAMS = 3
# Index heads of a list whose queries do not stay in the L1. Each step reads them from the L2, 512
# KiB for 32 rows of 64 heads of 128 columns; twice the keys in a step halve that.
MANY_HEADS = 16
# Index heads of a list whose scores are stored before entries are chosen: columns of one product.
STORED_HEADS = (16, 32, 64, 128)
# Fewer rows of scores than these do not fill a GPU while entries are chosen.
FEWEST_ROWS = 32
# Keys that one program looks through at a time while it chooses from stored scores.
LONGEST_STEP = 1024
SHORTEST_STEP = 256
# Entries of a buffer whose scores a program of 16 warps holds in registers.
LARGEST_BUFFER = 8192
# Stored scores of a query that its first threshold comes from. Of 4096, 64 are among the best 2048
# of 128k, give or take 8: 4 standard deviations more admit half as many entries again.
SAMPLE = 4096
# Shared memory, in bytes, of GPUs that hold 256 columns of queries in each of two programs.
LARGE_SHARED = 200 * 1024
# The fewest steps of a strip of keys, because each program first reads its queries.
STEPS_OF_STRIP = 16
# Share of the programs' time, in whole waves, that is enough.
FULL_WAVES = 0.95


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class SelectConfig:
    """Tiles of one launch."""

    tile_m: int
    """Queries of a tile."""
    tile_n: int
    """Keys of one step."""
    capacity: int
    """Entries that the buffer of a query holds."""
    programs: int
    num_warps: int
    num_stages: int

    @property
    def tile_c(self) -> int:
        """The capacity as a power of two."""
        return next_power_of_2(self.capacity)


def select_config(problem: SelectProblem) -> SelectConfig:
    """Tiles for a problem."""
    given = problem.options
    short = given.most <= SHORT_LIST
    sms = INTERPRETED_PROGRAMS if problem.arch.interpreted else problem.arch.num_sms
    wide = problem.dtype == torch.float32 or problem.dim > 128
    # products of fp32 run on the CUDA cores, with operands in registers
    rows = 16 if problem.dtype == torch.float32 else 64 if short and not wide else 32
    many = problem.heads // max(given.lists, 1) >= MANY_HEADS
    # fp8 queries are half as large, and converting the keys of 128 spills 192 bytes
    many = many and not short and problem.dtype.itemsize > 1
    tile_n = max(given.granularity, 32 if wide else 128 if many else 64)
    # entries of a step must fit behind a full list
    capacity = given.most + max(tile_n // given.granularity, given.most // 2)
    return SelectConfig(rows, tile_n, capacity, sms * 2 if short else sms, 8, 1 if wide else 2)


@dataclass(frozen=True)
class ChooseConfig:
    """Tiles of choosing from stored scores."""

    tile_n: int
    """Keys of one step."""
    capacity: int
    """Entries that the buffer of a query holds."""
    sample: int
    """Scores that the first threshold comes from."""
    words: int
    """Words of the marks of a query, a bit for each key; 0 where scores are pooled."""
    num_warps: int
    max_registers: int
    """Registers of a thread, so that two programs run on an SM."""

    @property
    def tile_c(self) -> int:
        """The capacity as a power of two."""
        return next_power_of_2(self.capacity)


@dataclass(frozen=True)
class ScoresConfig:
    """Tiles of the launches that store scores of some queries and choose from them."""

    queries: int
    """Queries of a tile of scores."""
    tile_n: int
    """Keys of one step."""
    rows: int
    """Queries whose scores are held at a time."""
    programs: int
    """Programs that run side by side."""
    num_warps: int
    num_stages: int
    choose: ChooseConfig

    def strips(self, tiles: int, kv_len: int) -> int:
        """Into how many strips the keys are cut, so that waves of programs are nearly full."""
        most = max(1, kv_len // (STEPS_OF_STRIP * self.tile_n))

        def filled(strips: int) -> float:
            waves = tiles * strips / self.programs
            return waves / math.ceil(waves)

        enough = (n for n in range(1, most + 1) if filled(n) >= FULL_WAVES)
        return next(enough, None) or max(range(1, most + 1), key=filled)


def scores_config(problem: SelectProblem, kv_heads: int) -> ScoresConfig | None:
    """Tiles for scores that are stored, some queries at a time; None where they cannot be.

    Products of many heads take the widest tensor-core instructions if keys are their rows, but then
    a program has few queries, and choosing between two products would take as long as a product.
    All that is stored takes at most twice the memory of the lists.
    """
    given = problem.options
    heads = problem.heads // given.lists
    # all heads of a list read the same keys
    shared_keys = problem.heads // kv_heads % heads == 0
    if heads not in STORED_HEADS or not shared_keys:
        return None
    if problem.dtype == torch.float32 or problem.dim > 128:
        return None
    columns = 256 if problem.arch.smem_bytes >= LARGE_SHARED else 128
    queries = columns // heads
    step = min(max(next_power_of_2(given.most), SHORTEST_STEP), LONGEST_STEP)
    step = max(step, given.granularity)
    capacity, words = given.most + max(step // given.granularity, given.most), 0
    if given.granularity == 1:
        # pooled scores are few, and have no sample
        capacity = max(given.most + step, min(3 * given.most, LARGEST_BUFFER))
        words = -(-problem.kv_len // 32)
    lists = problem.batch * given.lists * problem.q_len
    room = 2 * lists * given.most * 4
    if problem.dtype.itemsize == 1:
        room -= problem.batch * kv_heads * problem.kv_len * problem.dim * 2
    row = 4 * (scores_stride(problem.kv_len) + words + 2 * capacity - given.most)
    tiles = problem.batch * given.lists * -(-problem.q_len // queries)
    rows = min(room // row // queries, tiles) * queries
    if rows < min(FEWEST_ROWS, tiles * queries):
        return None
    sms = INTERPRETED_PROGRAMS if problem.arch.interpreted else problem.arch.num_sms
    choose = ChooseConfig(step, capacity, SAMPLE, words, 16, 64)
    return ScoresConfig(queries, 64, rows, 2 * sms, 4, 2, choose)


def scores_stride(kv_len: int) -> int:
    """Elements from one row of stored scores to the next: rows begin on 64 bytes."""
    return -(-kv_len // 16) * 16


def why_not(problem: SelectProblem) -> str | None:
    """Why the kernel cannot run this problem, or None when it can."""
    fp8 = problem.dtype == torch.float8_e4m3fn
    dtype = torch.float16 if fp8 else problem.dtype
    if (reason := why_not_portable(problem.arch, dtype)) is not None:
        return reason
    if problem.options.top_p:
        return "does not choose by share: top_p needs all scores at once"
    if problem.options.most > MOST_ENTRIES:
        return f"needs lists of at most {MOST_ENTRIES} entries, got {problem.options.most}"
    if not 1 <= problem.dim <= LARGEST_DIM:
        return f"needs index heads of 1 to {LARGEST_DIM} columns, got {problem.dim}"
    if max(problem.q_len, problem.kv_len) > LONGEST:
        return f"needs at most {LONGEST} queries and keys"
    return None
