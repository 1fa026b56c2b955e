"""(problem) -> tiles and order of the Hopper kernels, and the reasons why they cannot run.

In the forward, lengths decide only among three tile heights and whether the tail is split, so that
a model with varying lengths compiles no more than a handful of variants.
"""

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ...core.compat import why_no_gluon
from ...core.sizes import cdiv, dtype_name
from ...core.target import Arch
from ...launch.descriptors import GROUP_ROWS
from ...masks.band import EVERYTHING, Band
from .config import (
    ORDERED_TILES,
    AttnBwdSm90Config,
    AttnFwdSm90Config,
    make_backward_config,
    make_forward_config,
    tile_width,
)
from .config_split import (
    AttnBwdDqSm90Config,
    WideSplit,
    make_dkdv_config,
    make_dq_config,
    make_wide_dkdv_config,
    make_wide_dq_config,
)

if TYPE_CHECKING:
    from ...calls.attention import AttnProblem
    from ...calls.fp8 import Fp8AttnProblem

# Dtypes that 16-bit WGMMA multiplies.
HALVES = ("float16", "bfloat16")
LARGEST_HEAD_DIM = 256
# Positions and band limits are int32 in the kernel, and so is the number of work tiles.
LONGEST = 2**30 - 1
MOST_WORK_TILES = 2**31 - 1
# Tokens of packed sequences are coordinates of a TMA dimension of this size.
MOST_TOKENS = 2**31 - 2**16 - 1
# Below half of a warp group's rows, the portable kernel has tiles that fit better.
FEW_QUERIES = 32
SHORT_KEYS = 512
# Keys from which three consumers pay off, without and with a band. TFLOP/s of D64 causal with one
# and with three: 354 327 at 1k, 429 438 at 2k.
LONG_FULL, LONG_BANDED = 1024, 2048
# KV bytes of a raster group. The L2 of H100 and H200 has 50 MiB, which queries, outputs and the
# next raster group share: 642, 635 and 618 TFLOP/s for 16, 32 and 64 MiB (D128 causal, 4k). With
# three consumers 32 MiB is faster than 16: 438 422, 492 479, 527 521, 559 559 (D64, 2k to 16k).
FORWARD_GROUP_BYTES = 16 * 2**20
THREE_GROUP_BYTES = 32 * 2**20
# Approximate number of queries of a head in flight under a window.
RUNNING_QUERIES = 4096
# Keys from which the tail is split. TFLOP/s of D128 without and with a split tail: 596 571 at 1k,
# 659 654 at 2k, 697 703 at 4k, 724 739 at 16k.
LONG_SPLIT = 4096
# TFLOP/s of a fully occupied H200, by (widest head dim, consumers): with one program on each SM,
# and with two if they fit. A lone warp group stalls during its own softmax.
PACE: dict[tuple[int, int], tuple[float, ...]] = {
    (64, 1): (280.0, 400.0),
    (64, 2): (430.0,),
    (64, 3): (515.0,),
    (128, 1): (330.0, 457.0),
    (128, 2): (640.0,),
}


def attn_fwd_sm90_unsupported(problem: "AttnProblem") -> str | None:
    """Why the Hopper kernel cannot run this problem, or None."""
    if problem.arch.sm != 90:
        return f"needs sm_90, this is {problem.arch}"
    if dtype_name(problem.dtype) not in HALVES:
        return f"{problem.dtype} has no 16-bit WGMMA"
    dims = (problem.head_dim, problem.head_dim_v)
    if max(dims) > LARGEST_HEAD_DIM or any(dim % 8 for dim in dims):
        return (
            f"needs head dimensions up to {LARGEST_HEAD_DIM} in steps of 8, "
            f"got {dims[0]} and {dims[1]}"
        )
    if not problem.positive:
        return "needs a scale above zero"
    if problem.mask_per_kv_head:
        group = problem.heads_q // problem.heads_kv
        made = f"mask[:, [h // {group} for h in range({problem.heads_q})]] makes one"
        return f"needs a mask per query head ({made}), got one per KV head"
    if problem.mask_block is not None:
        block_q, block_kv = problem.mask_block
        if block_q % GROUP_ROWS:
            return f"query blocks of {block_q} are not a multiple of {GROUP_ROWS}"
        if block_kv < 16:
            return f"key blocks of {block_kv} are narrower than a 16-key step of WGMMA"
    if not problem.tma:
        return "TMA needs addresses and strides that are multiples of 16 bytes"
    return attn_fwd_sm90_lengths_unsupported(problem)


def attn_fwd_sm90_lengths_unsupported(problem: "AttnProblem") -> str | None:
    """The part of `attn_fwd_sm90_unsupported` that depends on lengths."""
    if problem.max_k == 0 or (problem.tokens is not None and problem.tokens[1] == 0):
        return "TMA cannot describe zero keys"
    # with ALiBi, positions are in fp32
    longest = 2**24 if problem.alibi else LONGEST
    if max(problem.max_q, problem.max_k) > longest:
        return f"needs sequences of at most {longest} tokens"
    if problem.tokens is not None and max(problem.tokens) > MOST_TOKENS:
        return f"needs at most {MOST_TOKENS} tokens in all"
    # an order of mask rows may round up to whole blocks of 256 queries
    tiles = problem.batch * (cdiv(problem.max_q, GROUP_ROWS) + 3)
    if problem.tokens is not None:
        tiles = problem.tokens[0] // GROUP_ROWS + problem.batch
    if tiles * problem.heads_q > MOST_WORK_TILES:
        return f"needs at most {MOST_WORK_TILES} query tiles over batch and heads"
    return None


def attn_fwd_sm90_passed_over(problem: "AttnProblem") -> str | None:
    """Why `auto` should not take the kernel where it could run, or None."""
    if problem.max_q < FEW_QUERIES:
        return f"{problem.max_q} queries fill too little of a tile of {GROUP_ROWS}"
    return None


@lru_cache(maxsize=1024)
def attn_fwd_sm90_config(problem: "AttnProblem") -> AttnFwdSm90Config:
    """Tiles of a problem that `attn_fwd_sm90_unsupported` accepts."""
    return new_attn_fwd_sm90_config(problem)


def new_attn_fwd_sm90_config(problem: "AttnProblem") -> AttnFwdSm90Config:
    """As `attn_fwd_sm90_config`, without the cache: for lengths that may never come again."""
    tile_d, tile_dv = tile_width(problem.head_dim), tile_width(problem.head_dim_v)
    block_q, block_kv = problem.mask_block or (None, None)
    if block_q is not None:
        # a work tile stays within one row of the mask, so rows of 64 take one consumer
        consumers = min(block_q // GROUP_ROWS, 2)
        config = make_forward_config(consumers, tile_d, tile_dv, block_kv, problem.varlen)
        return with_added_scores(config, problem)
    # wide heads leave a single consumer one stage of keys: only masks with rows of 64 take it
    fewest = 2 if max(tile_d, tile_dv) > 128 else 1
    config = make_forward_config(
        fastest_consumers(problem, max(tile_d, tile_dv), fewest),
        tile_d,
        tile_dv,
        packed=problem.varlen,
        banded=problem.banded,
        long=problem.max_k >= LONG_SPLIT,
    )
    return with_added_scores(config, problem)


def fastest_consumers(problem: "AttnProblem", dim: int, fewest: int) -> int:
    """How many consumers share the KV tiles of a problem without a mask, in tiles `dim` wide."""
    # Registers suffice for three consumers only if accumulators are 64 wide and there is neither a
    # tanh nor ALiBi or a bias.
    # TFLOP/s of D64 with one (in half tiles), two and three consumers: full 410 420 435 at 1k
    # tokens; causal 321 310 264, 385 366 365, - 407 420, - 435 490 at 1k, 2k, 4k and 16k.
    long_enough = _keys(problem) >= (LONG_BANDED if problem.banded else LONG_FULL)
    three = dim == 64 and not (problem.softcap or problem.alibi or problem.bias) and long_enough
    most = 3 if three else 2
    if most == fewest:
        return fewest
    return min(range(most, fewest - 1, -1), key=lambda count: _time(problem, dim, count))


def with_added_scores(config: AttnFwdSm90Config, problem: "AttnProblem") -> AttnFwdSm90Config:
    """The configuration for a problem that may have ALiBi or a bias."""
    if not (problem.alibi or problem.bias):
        return config
    # half tiles add nothing
    config = replace(config, HALF_TILES=False)
    # the addresses of a bias take the registers of a split tail, or of queries
    return replace(config, SPLIT_TAIL=False, Q_REGISTERS=False) if problem.bias else config


# Lengths decide on configurations, schedules and raster groups only through these: how many tiles
# of 64 they fill, whether the last one is full (limits are multiples of 64, compared with "at
# least" or "at most"), and FEW_QUERIES. Packed sequences are taken to fill half of their last tile.
Tiling = tuple[int | bool, ...]


def tiling_of(batch: int, max_q: int, max_k: int, tokens: tuple[int, int] | None = None) -> Tiling:
    """The properties of the lengths of a call that its launch depends on.

    Calls whose tilings are equal share a plan.
    """
    few, full_k = max_q < FEW_QUERIES, max_k % GROUP_ROWS == 0
    if tokens is None:
        return batch, -(-max_q // GROUP_ROWS), max_k // GROUP_ROWS, full_k, few
    all_q, all_k = tokens
    half, keys = GROUP_ROWS // 2, cdiv(all_k, max(batch, 1))
    return (
        *(batch, all_q // half, all_q % half == 0, few),
        *(keys // GROUP_ROWS, keys % GROUP_ROWS == 0, max_k // GROUP_ROWS, full_k),
    )


def _whole_tiles(tokens: int) -> int:
    return cdiv(tokens, GROUP_ROWS) * GROUP_ROWS


def _keys(problem: "AttnProblem") -> int:
    """Keys of a sequence; their average if sequences are packed."""
    if problem.tokens is None:
        return problem.max_k
    return cdiv(problem.tokens[1], max(problem.batch, 1))


def _work_tiles(problem: "AttnProblem", rows: int) -> int:
    """Work tiles of `rows` queries; assumes that packed sequences fill half of their last tile."""
    if problem.tokens is None:
        return problem.batch * problem.heads_q * cdiv(problem.max_q, rows)
    half_filled = cdiv(problem.tokens[0] + problem.batch * rows // 2, rows)
    return problem.heads_q * max(half_filled, problem.batch)


def _time(problem: "AttnProblem", dim: int, consumers: int) -> float:
    """Relative time without a mask: rounds of work tiles on all SMs, each at its measured pace.

    Tall tiles run faster, but in small problems they leave SMs idle, and rows past the last query
    cost as much as others.
    """
    rows = consumers * GROUP_ROWS
    work_tiles = _work_tiles(problem, rows)
    sms = problem.arch.num_sms
    pace = PACE[dim, consumers]
    beside = min(len(pace), max(1, cdiv(work_tiles, sms)))
    rounds = cdiv(work_tiles, sms * beside) * beside
    return rounds * rows / (pace[beside - 1] * _lead(problem, dim, consumers))


def _lead(problem: "AttnProblem", dim: int, consumers: int) -> float:
    """The speedup of one consumer over its `PACE`."""
    if consumers > 1:
        return 1.0
    # two programs on an SM overlap the prologues and epilogues of their work tiles, a large part of
    # short ones: 8.9 us against 10.1 for 32 heads of 512 tokens
    if _keys(problem) <= SHORT_KEYS:
        return 1.18
    # due to half tiles, see `attn_fwd_sm90_config`
    halved = dim == 64 and problem.banded and not problem.varlen
    return 1.12 if halved and _keys(problem) < LONG_BANDED else 1.0


def attn_fwd_sm90_raster_group(
    problem: "AttnProblem", band: Band = EVERYTHING, config: AttnFwdSm90Config | None = None
) -> int:
    """(batch, head) pairs of a raster group: whole groups of heads that share keys.

    `config` is that of the problem, if it is at hand.

    If work tiles are equal, or follow the order of a mask, those of one KV head run together: SMs
    that read the same keys at the same time are faster than SMs whose keys are merely in L2. Under
    a band the longest work tiles come first, from as many heads as fit in L2.
    """
    group = problem.heads_q // problem.heads_kv
    batch_heads = max(problem.batch * problem.heads_q, 1)
    if not problem.banded or problem.mask_block is not None:
        return min(group, batch_heads)
    if problem.varlen:
        # no limit here: the kernel, which knows the lengths, limits the group
        return batch_heads
    tokens = _whole_tiles(problem.max_k)
    if band.left is not None and band.right is not None:
        tokens = min(tokens, band.left + band.right + RUNNING_QUERIES)
    kv_bytes = tokens * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    config = attn_fwd_sm90_config(problem) if config is None else config
    room = THREE_GROUP_BYTES if config.CONSUMERS == 3 else FORWARD_GROUP_BYTES
    heads = max(room // max(kv_bytes, 1), 1)
    if band.left is not None and band.right is not None:
        # equal raster groups: the short tiles at the end of each fill the gaps before the next one
        heads = cdiv(batch_heads // group, cdiv(batch_heads // group, heads))
    return min(heads * group, batch_heads)


# The backward: tiles, raster groups, and the reasons why it cannot run.

# Key blocks that consist of whole tiles of 64 or 128 keys.
KEY_BLOCKS = (64, 128, 256)
# Bytes of L2 (H100 and H200) for the heads of a raster group: queries, output gradients, and the dq
# sums if there are any.
BACKWARD_GROUP_BYTES = 16 * 2**20
# Under a band, whose work tiles are uneven: the smallest raster group, the KV tiles that it should
# have for each SM, and how many times more bytes it may take to have them.
UNEVEN, UNEVEN_TILES, UNEVEN_BYTES = 2, 2, 4
# Raster group with one query head for each KV head, if KV tiles are many and dq is accumulated in
# order.
LONG_GROUP = 8
# How many times more bytes a raster group takes if dq is accumulated in order, and if the order is
# planned as well.
ORDERED, PLANNED = 3, 2
# What a work tile takes beside its products, in steps of 64 queries at D128 (2.1 us): 5 us, and
# more where dk and dv go through 16 KB of shared memory to fp32 sums. Rounding takes a launch.
WORK_TILE_STEPS, SHARED_TILE_STEPS, ROUNDING_STEPS = 2.4, 4.0, 3.0
# What a step takes longer for each further head that a work tile visits together with the first,
# in ordered accumulation under a causal band. Microseconds of a step of 1, 2, 4 and 8 heads: 2.27,
# 2.36, 2.46, 2.67.
OF_FURTHER_HEAD = 0.025
# Share of the time without a split at which one begins. The estimate is within a tenth of the
# simulated schedule (`tests/attention/sm90/test_backward_schedule.py`).
WORTH_SPLITTING = 0.95


def attn_bwd_sm90_unsupported(problem: "AttnProblem") -> str | None:
    """Why the Hopper kernel cannot run this problem, or None."""
    if (reason := attn_fwd_sm90_unsupported(problem)) is not None:
        return reason
    if problem.alibi or problem.bias:
        return "has no gradients of scores with alibi_slopes or a bias"
    if problem.varlen and (reason := _packed_gradients_unsupported(problem)) is not None:
        return reason
    if problem.mask_block is not None and problem.mask_block[1] not in KEY_BLOCKS:
        return f"needs key blocks of 64, 128 or 256, got {problem.mask_block[1]}"
    return None


def _packed_gradients_unsupported(problem: "AttnProblem") -> str | None:
    """Why the Hopper backward cannot run these packed sequences, or None."""
    if problem.mask_block is not None:
        return "packed sequences with a mask are not written yet"
    if problem.tokens is not None and problem.tokens[0] == 0:
        return "TMA cannot describe zero queries"
    # 16 bytes of shared memory too many
    if (
        problem.deterministic
        and problem.softcap
        and max(problem.head_dim, problem.head_dim_v) <= 64
    ):
        return "packed sequences of narrow heads with a softcap have no deterministic gradients"
    return None


def attn_bwd_sm90_passed_over(problem: "AttnProblem") -> str | None:
    """Why `auto` should not take the kernel where it could run, or None."""
    if problem.max_q < FEW_QUERIES:
        return f"{problem.max_q} queries fill too little of a tile"
    return None


def attn_bwd_sm90_is_split(problem: "AttnProblem") -> bool:
    """Whether to split the backward into a kernel for dk/dv and one for dq.

    Two kernels compute seven products instead of five, but need no dq sums in memory, of which a
    tile of 64 keys needs as many as one of 128. Time of one kernel over that of two, D128: 22 % of
    16k tokens 1.10, 5 % of 64k tokens 1.17; D64: 1.06, 1.08, with the two timed separately. With
    ordered accumulation, one kernel takes 1.44 and 1.30 times as long as without. Under a mask,
    heads above 128 have one kernel, whose tiles have 64 keys whatever the mask.
    """
    if _is_wide(problem):
        # capped scores beside dq of 256 columns: 2272 bytes of spills
        spills = problem.softcap and problem.head_dim > 192
        dense = problem.mask_block is None and not problem.varlen
        return WIDE_SPLIT is not None and dense and not spills
    return problem.mask_block is not None and problem.mask_block[1] == 64


def attn_bwd_sm90_config(problem: "AttnProblem", head_splits: int = 1) -> AttnBwdSm90Config:
    """Tiles of a problem that `attn_bwd_sm90_unsupported` accepts."""
    # with wide values, there are no registers for the tall tiles of narrow keys
    widest = max(problem.head_dim, problem.head_dim_v)
    tile_d = 128 if 64 < widest <= 128 else tile_width(problem.head_dim)
    tile_dv = tile_width(problem.head_dim_v)
    masked, ordered = problem.mask_block, problem.deterministic
    dims = problem.head_dim, problem.head_dim_v
    split = head_splits > 1
    return make_backward_config(tile_d, tile_dv, masked, ordered, split, dims)


def attn_bwd_sm90_head_splits(problem: "AttnProblem", band: Band) -> int:
    """Work tiles that share the query heads of a KV tile; 1 if one has them all.

    A work tile with all query heads of a KV head is long, and with few KV heads and short sequences
    they are too few for all SMs. Causal, D128, microseconds with a whole group and with shares: 28
    heads on 4 486 and 191 at 2k tokens, 948 and 572 at 4k, 2177 and 2148 at 8k; 64 on 8 at 4k 1705
    and 1217. In order, each share has fp32 sums of dk and dv of its own: long sequences, which have
    work for all SMs, do without that memory.
    """
    group_size = problem.heads_q // problem.heads_kv
    if group_size == 1 or problem.mask_block is not None or problem.varlen or _is_wide(problem):
        return 1
    work_tiles = problem.batch * problem.heads_kv * cdiv(problem.max_k, _keys_of_tile(problem))
    if problem.deterministic and work_tiles > UNEVEN_TILES * problem.arch.num_sms:
        return 1
    shares = (n for n in range(1, group_size + 1) if group_size % n == 0)
    steps = {n: _steps(problem, band, n) for n in shares}
    best = min(steps, key=steps.__getitem__)
    return best if steps[best] <= WORTH_SPLITTING * steps[1] else 1


def _steps(problem: "AttnProblem", band: Band, head_splits: int) -> float:
    """Steps of 64 queries of the busiest program, up to head dims of 128.

    Under a band with one side, the longest work tiles come first, so that programs end together
    unless one work tile is longer than that; otherwise all are equal. The same holds within a
    raster group. Groups that leave SMs idle run several at a time, and the longest work tile of the
    last one begins that much later.
    """
    sms, heads = problem.arch.num_sms, problem.heads_q // problem.heads_kv // head_splits
    tile_n, queries = _keys_of_tile(problem), problem.max_q
    if band.left is not None and band.right is not None:
        queries = min(queries, max(band.left + band.right, 0) + tile_n)
    longest = heads * cdiv(queries, GROUP_ROWS)
    kv_tiles = cdiv(problem.max_k, tile_n)
    batch_heads = problem.batch * problem.heads_kv * head_splits
    work_tiles = batch_heads * kv_tiles
    of_tile = WORK_TILE_STEPS if head_splits == 1 else SHARED_TILE_STEPS
    rounding = 0.0 if head_splits == 1 else ROUNDING_STEPS
    if (band.left is None) == (band.right is None):
        return cdiv(work_tiles, sms) * (longest + of_tile) + rounding
    mean = longest * (kv_tiles + 1) / (2 * max(kv_tiles, 1))
    everywhere = work_tiles * (mean + of_tile) / sms
    if problem.deterministic and band.left is None:
        # the kernel visits the heads of a work tile together
        everywhere *= 1 + OF_FURTHER_HEAD * (heads - 1)
    late = 0.0
    if work_tiles > sms:
        raster_group = attn_bwd_sm90_raster_group(problem, head_splits)
        earlier = (batch_heads // raster_group - 1) * raster_group
        late = longest * max(1 - (batch_heads - earlier) * kv_tiles / sms, 0.0)
    return max(longest + of_tile, everywhere + late) + rounding


def attn_bwd_sm90_raster_group(problem: "AttnProblem", head_splits: int = 1) -> int:
    """Raster group: (batch, KV head) whose queries, gradients and dq sums stay in L2 together.

    A share of the query heads of a KV head counts as a KV head of its own. Groups are larger if a
    band makes work tiles uneven: more tiles fill the SMs while the longest ones end. Microseconds
    with a causal band, by the MiB and KV tiles of a KV head:
      groups of 1, 2, 4, 8: 16 MiB, 32 tiles 900, 830, 601, 626; 32 MiB, 64 tiles 2605, 2185, 2220,
        2255; 64 MiB, 128 tiles 9800, 9580, 9350, 9590; 8 MiB, 64 tiles 1200, 1133, 1098, 1096
      groups of 4, 8, 16: 4 MiB, 32 tiles 1230, 1208, 1201
    With ordered accumulation and a causal band, KV heads with several query heads need as many work
    tiles, however many bytes they take (the first three cases, groups of 2, 4 and 8: 906, 729, 667;
    2545, 2376, 2423; 9228, 10343, 9941). Those with one query head need small groups: each KV tile
    begins at its own first query, and the larger the group, the further the tiles drift from each
    other (16 MiB, 128 tiles, groups of 1, 2, 4 and 8: 4774, 4705, 5323, 7266). If KV tiles are so
    many that all begin at the last query, larger groups win again (64 MiB, 512 tiles, groups of 2
    and 4: 19998, 18632). Ordered groups without a band are larger, because only tiles of one
    (batch, head) wait for each other. Under a mask, the query heads of a KV head are read one after
    the other (TFLOP/s with 16 MiB a head: one query head, groups of 2 and 3 520, 504; four query
    heads, groups of 1 and 2 467, 523).
    """
    group_size = problem.heads_q // problem.heads_kv // head_splits
    masked, ordered = problem.mask_block is not None, problem.deterministic

    def within(times: int, heads: int = group_size) -> int:
        head_bytes = _row_bytes(problem) * _whole_tiles(problem.max_q) * heads
        return times * BACKWARD_GROUP_BYTES // max(head_bytes, 1)

    tiles = cdiv(max(problem.max_k, 1), _keys_of_tile(problem))
    filling = max(round(UNEVEN_TILES * problem.arch.num_sms / tiles), UNEVEN)
    if masked:
        group = within(PLANNED, heads=1) if ordered else within(1)
    elif not problem.banded:
        group = within(ORDERED if ordered else 1)
    elif not ordered:
        group = max(within(1), min(filling, within(UNEVEN_BYTES)), UNEVEN)
    elif group_size > 1:
        group = filling
    else:
        long = tiles > ORDERED_TILES * problem.arch.num_sms
        group = LONG_GROUP if long else within(1)
    return max(min(group, problem.batch * problem.heads_kv * head_splits), 1)


def attn_bwd_sm90_front(problem: "AttnProblem", raster_group: int) -> int:
    """Parts of the queries that all KV tiles traverse together, if their order is planned.

    TFLOP/s in order with 1 and 4 parts, blocks of 128: 22 % of 16k tokens, two heads of 16 MiB at a
    time 520, 483; 5 % of 64k tokens, 64 MiB a head 453, 498.
    """
    running_bytes = raster_group * _row_bytes(problem) * problem.max_q
    return 1 if running_bytes <= PLANNED * BACKWARD_GROUP_BYTES else 4


def _is_wide(problem: "AttnProblem") -> bool:
    """Whether the kernel for heads above 128 computes the gradients."""
    return max(problem.head_dim, problem.head_dim_v) > 128


def _keys_of_tile(problem: "AttnProblem") -> int:
    """`tile_n` of the configuration, which takes longer to find."""
    return GROUP_ROWS if _is_wide(problem) else 2 * GROUP_ROWS


def _row_bytes(problem: "AttnProblem") -> int:
    """Bytes of a query, its output gradient and its dq sum."""
    return (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + problem.head_dim * 4


# The split backward.

# How the backward of heads above 128 without a mask is split; None leaves it to one kernel. TFLOP/s
# for 8k causal tokens with one kernel, split, split with narrow tiles of queries: D256 16:8 heads
# 374, 469, and no narrow tiles; D192/128 16 heads 366, 405, 408; 128 heads 373, 414, 419.
WIDE_SPLIT: WideSplit | None = WideSplit(NARROW_TILES=True)


def attn_bwd_wide_dkdv_config(problem: "AttnProblem") -> AttnBwdSm90Config:
    """Tiles of the split dk/dv kernel for wide heads."""
    tiles = tile_width(problem.head_dim), tile_width(problem.head_dim_v)
    return make_wide_dkdv_config(*tiles, WIDE_SPLIT or WideSplit())


def attn_bwd_wide_dq_config(problem: "AttnProblem") -> AttnBwdDqSm90Config:
    """Tiles of the split dq kernel for wide heads."""
    return make_wide_dq_config(tile_width(problem.head_dim), tile_width(problem.head_dim_v))


def attn_bwd_wide_dkdv_raster_group(problem: "AttnProblem") -> int:
    """Raster group of the dk/dv kernel for wide heads, which has no order to keep."""
    return attn_bwd_sm90_raster_group(replace(problem, deterministic=False))


@lru_cache(maxsize=1024)
def attn_bwd_dkdv_config(problem: "AttnProblem") -> AttnBwdSm90Config:
    """Tiles of the split dk/dv kernel."""
    assert problem.mask_block is not None
    return make_dkdv_config(*_tiles(problem), problem.mask_block)


@lru_cache(maxsize=1024)
def attn_bwd_dq_config(problem: "AttnProblem") -> AttnBwdDqSm90Config:
    """Tiles of the split dq kernel."""
    assert problem.mask_block is not None
    return make_dq_config(*_tiles(problem), problem.mask_block[1])


def _tiles(problem: "AttnProblem") -> tuple[int, int]:
    return 64 if problem.head_dim <= 64 else 128, 64 if problem.head_dim_v <= 64 else 128


def attn_bwd_dkdv_raster_group(problem: "AttnProblem") -> int:
    """Raster group: (batch, KV head) whose queries and output gradients stay in L2 together."""
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    group_size = problem.heads_q // problem.heads_kv
    group = BACKWARD_GROUP_BYTES // max(row_bytes * problem.max_q * group_size, 1)
    return min(max(group, 1), max(problem.batch * problem.heads_kv, 1))


# Reasons why the kernels cannot run a problem on this machine, under torch.


def _why_not_here(arch: Arch) -> str | None:
    # imported late: programs without torch read the tiles above
    from ...dispatch.machine import why_no_kernels

    return why_no_kernels(arch)


def why_not_forward(problem: "AttnProblem") -> str | None:
    """Why the forward kernel cannot run this problem, or None when it can."""
    return _why_not_here(problem.arch) or attn_fwd_sm90_unsupported(problem) or why_no_gluon()


def attn_fwd_fp8_sm90_unsupported(problem: "Fp8AttnProblem") -> str | None:
    """Why the Hopper kernel for fp8 cannot run this problem, or None."""
    if problem.arch.sm != 90:
        return f"needs sm_90, this is {problem.arch}"
    if problem.varlen:
        return "packed sequences: TMA cannot stop at the end of one where keys are columns"
    if dtype_name(problem.out_dtype) not in HALVES:
        return f"writes float16 and bfloat16, not {problem.out_dtype}"
    dims = (problem.head_dim, problem.head_dim_v)
    if max(dims) > LARGEST_HEAD_DIM or any(dim % 16 for dim in dims):
        return (
            f"needs head dimensions up to {LARGEST_HEAD_DIM} in steps of 16, "
            f"got {dims[0]} and {dims[1]}"
        )
    if not problem.turned_values:
        return "needs v contiguous along its tokens (bsk.fp8.quantize(v, transposed=True))"
    if not problem.positive:
        return "needs a scale above zero"
    if problem.mask_block is not None and any(size % GROUP_ROWS for size in problem.mask_block):
        return f"mask blocks of {problem.mask_block} are not multiples of {GROUP_ROWS}"
    if not problem.tma:
        return "TMA needs addresses and strides that are multiples of 16 bytes"
    return attn_fwd_sm90_lengths_unsupported(problem)


def why_not_fp8(problem: "Fp8AttnProblem") -> str | None:
    """Why the forward kernel for fp8 cannot run this problem, or None when it can."""
    return _why_not_here(problem.arch) or attn_fwd_fp8_sm90_unsupported(problem) or why_no_gluon()


def why_not_backward(problem: "AttnProblem") -> str | None:
    """Why the backward kernels cannot run this problem, or None when they can."""
    return _why_not_here(problem.arch) or attn_bwd_sm90_unsupported(problem) or why_no_gluon()
