"""How many programs a launch has, and how they share its work tiles."""

from typing import NamedTuple

from ...core.sizes import cdiv
from ...launch.descriptors import GROUP_ROWS
from .config import ROW_PADDING, AttnBwdSm90Config, AttnFwdSm90Config

# Work tiles of equal size are scheduled statically for up to this many rounds, in which dynamic
# scheduling would save nothing.
EVEN_ROUNDS = 4


class ForwardSchedule(NamedTuple):
    """The grid of the forward kernel and what depends on it."""

    programs: int
    counters: int
    """Self-resetting: one that hands out work tiles, then one for each part of a split tail."""
    dynamic: int
    """1 if idle programs take the next work tile, 0 if the schedule is static."""
    tail_share: int
    """KV tiles of the split tail that each program takes; 0 if the tail is not split."""

    def parts_shape(self, config: AttnFwdSm90Config) -> tuple[int, int, int]:
        """Shape of the memory for the softmax parts of a split tail, fp32."""
        return (2 * self.programs * config.CONSUMERS, GROUP_ROWS, config.TILE_DV + 2)


def forward_work_tiles(
    config: AttnFwdSm90Config, batch: int, heads: int, q_len: int, tokens: int | None
) -> int:
    """Work tiles without a mask; for packed sequences with `tokens` queries, an upper bound."""
    if tokens is None:
        return batch * heads * cdiv(q_len, config.tile_m)
    return batch * heads + heads * (tokens // config.tile_m)


def forward_schedule(
    config: AttnFwdSm90Config, sms: int, work_tiles: int, keys: int, even: bool
) -> ForwardSchedule:
    """Share `work_tiles`, at least one, among the programs.

    Parameters
    ----------
    keys : of a sequence; of all packed sequences together, whose tail is never split
    even : whether all work tiles have the same number of keys
    """
    programs = min(sms * config.programs_per_sm, work_tiles)
    dynamic = work_tiles > programs * (EVEN_ROUNDS if even else 1)
    counters, share = 1, 0
    if config.SPLIT_TAIL:
        share = config.tail_share(work_tiles, programs, cdiv(keys, config.TILE_N))
        counters += programs * config.CONSUMERS
    return ForwardSchedule(programs, counters, int(dynamic), share)


class BackwardSchedule(NamedTuple):
    """The grid of the backward kernel without a plan, and how programs take KV tiles."""

    programs: int
    counted: bool
    """Whether programs take KV tiles from a counter; if not, each program has one tile."""


def backward_schedule(
    config: AttnBwdSm90Config, sms: int, kv_batch_heads: int, kv_len: int
) -> BackwardSchedule:
    """Share KV tiles among programs; each head split counts as a (batch, KV head) of its own."""
    work_tiles = kv_batch_heads * cdiv(kv_len, config.tile_n)
    programs = min(sms, work_tiles)
    # an ordered backward always takes them from the counter
    return BackwardSchedule(programs, work_tiles > programs or config.ORDERED)


def packed_backward_schedule(
    config: AttnBwdSm90Config, sms: int, sequences: int, kv_heads: int, tokens: int
) -> BackwardSchedule:
    """As `backward_schedule` for packed sequences of `tokens` keys, whose tiles programs count."""
    work_tiles = kv_heads * (tokens // config.tile_n + sequences)
    return BackwardSchedule(min(sms, work_tiles), counted=True)


def packed_rows(tokens: int, sequences: int) -> int:
    """As `padded_rows` for packed sequences, each of which begins at a multiple of ROW_PADDING."""
    return (tokens // ROW_PADDING + sequences) * ROW_PADDING


def padded_rows(tokens: int) -> int:
    """Rows of the workspace (lse, delta, sums) of a head with `tokens` queries, or keys."""
    return cdiv(tokens, ROW_PADDING) * ROW_PADDING
