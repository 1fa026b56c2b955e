"""Which problems the portable kernel takes, and its tiles."""

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
        return 1 << (self.capacity - 1).bit_length()


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
