"""When the Hopper backward runs, with which tiles, and why not otherwise."""

import dataclasses
import itertools

import pytest
import torch

from blackwell_sparsek.attention.sm90 import tuning
from blackwell_sparsek.attention.sm90.config import INFO_DEPTH, make_backward_config
from blackwell_sparsek.attention.sm90.config_split import (
    MOST_OWN_COLUMNS,
    WideSplit,
    make_wide_dkdv_config,
    make_wide_dq_config,
)
from blackwell_sparsek.attention.sm90.tuning import (
    FEW_QUERIES,
    attn_bwd_sm90_config,
    attn_bwd_sm90_front,
    attn_bwd_sm90_head_splits,
    attn_bwd_sm90_is_split,
    attn_bwd_sm90_passed_over,
    attn_bwd_sm90_raster_group,
    attn_bwd_sm90_unsupported,
)
from blackwell_sparsek.calls.attention import AttnProblem, AttnSpec
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.masks.band import EVERYTHING, Band


def problem(**changes):
    q = torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16)
    spec = AttnSpec(0.1, max_q=4096, max_k=4096)
    base = AttnProblem.of(q, q, q, spec, backward=True)
    return dataclasses.replace(base, **{"arch": Arch("cuda", 90, 132, 232448, False), **changes})


PACKED = {"varlen": True, "tokens": (4096, 4096)}
PACKED_WIDE = PACKED | {"head_dim": 192}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"arch": Arch("cuda", 100, 148, 0, False)}, "needs sm_90, this is sm_100"),
        ({"dtype": torch.float32}, "torch.float32 has no 16-bit WGMMA"),
        ({"head_dim": 264}, "up to 256 in steps of 8, got 264 and 128"),
        (PACKED_WIDE | {"mask_block": (128, 128)}, "packed sequences with a mask"),
        (PACKED | {"mask_block": (128, 128)}, "packed sequences with a mask"),
        (PACKED_WIDE | {"tokens": (0, 100)}, "TMA cannot describe zero queries"),
        ({"mask_block": (32, 64)}, "query blocks of 32 are not a multiple of 64"),
        ({"mask_block": (64, 32)}, "needs key blocks of 64, 128 or 256, got 32"),
        ({"tma": False}, "addresses and strides that are multiples of 16 bytes"),
    ],
)
def test_why_not(changes, reason):
    assert reason in attn_bwd_sm90_unsupported(problem(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16},
        {"head_dim": 8, "head_dim_v": 128},
        {"head_dim": 192, "head_dim_v": 128, "deterministic": True},
        PACKED,
        PACKED | {"head_dim": 64, "head_dim_v": 64, "deterministic": True},
        PACKED_WIDE,
        PACKED_WIDE | {"deterministic": True},
        {"head_dim": 256, "head_dim_v": 256, "mask_block": (64, 64)},
        {"mask_block": (256, 256)},
        {"mask_block": (64, 64)},
        {"mask_block": (64, 64), "max_q": 333},
        {"deterministic": True},
        {"deterministic": True, "mask_block": (64, 64), "max_q": 333},
        {"mask_block": (128, 64), "max_q": 333},
        {"mask_block": (64, 128), "max_q": 333},
        {"softcap": True, "sinks": True, "banded": True},
    ],
)
def test_what_runs(changes):
    assert attn_bwd_sm90_unsupported(problem(**changes)) is None


def test_auto_takes_packed_sequences_with_wide_heads():
    assert attn_bwd_sm90_passed_over(problem(**PACKED_WIDE)) is None
    assert "31 queries" in attn_bwd_sm90_passed_over(problem(**PACKED_WIDE, max_q=31))


@pytest.mark.parametrize("changed", [{}, {"deterministic": True}, {"softcap": True}])
@pytest.mark.parametrize("packed", [PACKED, PACKED_WIDE])
def test_auto_takes_all_packed_sequences(packed, changed):
    given = problem(**packed, **changed)
    assert attn_bwd_sm90_unsupported(given) is None
    assert attn_bwd_sm90_passed_over(given) is None


def test_ordered_gradients_of_narrow_packed_heads_with_a_softcap_are_refused():
    dims = {"head_dim": 64, "head_dim_v": 64}
    given = problem(**PACKED, **dims, softcap=True, deterministic=True)
    assert "no deterministic gradients" in attn_bwd_sm90_unsupported(given)
    given = problem(**PACKED, **dims, softcap=True)
    assert attn_bwd_sm90_unsupported(given) is None


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_packed_sequences_have_the_tiles_of_others(dim):
    """No work tiles share the heads of a group."""
    dims = {"head_dim": dim, "head_dim_v": dim, "heads_q": 28, "heads_kv": 4}
    packed = problem(**PACKED, **dims)
    assert attn_bwd_sm90_head_splits(packed, Band(None, 0)) == 1
    assert attn_bwd_sm90_config(packed) == attn_bwd_sm90_config(problem(**dims))


def test_few_queries_are_left_to_smaller_tiles():
    assert "31 queries" in attn_bwd_sm90_passed_over(problem(max_q=FEW_QUERIES - 1))
    assert attn_bwd_sm90_passed_over(problem(max_q=FEW_QUERIES)) is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_narrow_key_blocks_have_two_kernels(deterministic):
    for block, split in ((None, False), ((64, 64), True), ((256, 64), True), ((64, 128), False)):
        masked = problem(mask_block=block, deterministic=deterministic)
        assert attn_bwd_sm90_is_split(masked) == split
        assert attn_bwd_sm90_passed_over(masked) is None
        # one kernel of wide heads has tiles of 64 keys
        wide = dataclasses.replace(masked, head_dim=192)
        assert attn_bwd_sm90_is_split(wide) == (block is None)


@pytest.mark.parametrize(
    "dims, tiles",
    [
        ((64, 64), (64, 64)),
        ((40, 128), (128, 128)),
        ((128, 8), (128, 64)),
        ((136, 40), (192, 64)),
        ((40, 200), (64, 256)),
    ],
)
def test_tiles_cover_the_head_dims(dims, tiles):
    config = attn_bwd_sm90_config(problem(head_dim=dims[0], head_dim_v=dims[1]))
    assert tiles == (config.TILE_D, config.TILE_DV)


@pytest.mark.parametrize(
    "dims, scores",
    [
        ((96, 96), (96, 96)),
        ((72, 128), (96, 128)),
        ((104, 96), (128, 96)),
        # values of 128 columns widen the tile of keys
        ((40, 128), (96, 128)),
        ((64, 64), (64, 64)),
        ((80, 64), (96, 64)),
        ((160, 96), (192, 128)),
    ],
)
@pytest.mark.parametrize("block", [None, (128, 128)])
def test_scores_sum_over_what_is_not_zero(dims, scores, block):
    config = attn_bwd_sm90_config(problem(head_dim=dims[0], head_dim_v=dims[1], mask_block=block))
    assert scores == (config.SCORE_D, config.SCORE_DV)
    # consumers wait until only the products for dp are under way
    slices = 2 if scores[1] == 96 else config.dv_slices
    assert config.dp_products == slices


def test_what_dense_kernels_have_registers_and_barriers_for():
    assert attn_bwd_sm90_config(problem()).DK_REGISTERS
    assert not attn_bwd_sm90_config(problem(mask_block=(128, 128))).DK_REGISTERS
    narrow = {"head_dim": 64, "head_dim_v": 64}
    assert attn_bwd_sm90_config(problem(**narrow)).SPLIT_RING
    assert not attn_bwd_sm90_config(problem(**narrow, mask_block=(64, 128))).SPLIT_RING
    assert not attn_bwd_sm90_config(problem(head_dim=128, head_dim_v=128)).SPLIT_RING


@pytest.mark.parametrize(
    "dims, stages",
    [
        ((256, 256), (1, 1)),
        ((192, 192), (2, 1)),
        ((192, 128), (2, 1)),
        ((256, 128), (1, 2)),
        ((256, 64), (2, 1)),
        ((64, 256), (2, 1)),
    ],
)
@pytest.mark.parametrize("block", [None, (64, 64), (128, 128), (256, 256)])
def test_wide_heads_share_keys(dims, stages, block):
    config = make_backward_config(*dims, block)
    assert config.SHARED_KEYS and config.tile_n == 64 and config.scored_queries == 64
    assert stages == (config.STAGES, config.DOUT_STAGES)
    queries = config.TILE_M * (config.STAGES * dims[0] + config.DOUT_STAGES * dims[1])
    exchanged = 2 * 2 * 64 * 64
    # lse, delta, barriers and descriptions of steps take less than 3 KiB
    assert 2 * (64 * sum(dims) + queries + exchanged) + 3072 <= 227 * 1024
    registers = 4 * config.CONSUMER_REGISTERS + 4 * config.PRODUCER_REGISTERS
    assert 12 * config.MAX_REGISTERS - registers >= 4 * config.CONSUMER_REGISTERS


@pytest.mark.parametrize("dims", [(256, 256), (192, 192), (192, 128), (256, 64), (64, 256)])
def test_two_kernels_of_wide_heads_fit(dims):
    config = make_wide_dkdv_config(*dims, WideSplit())
    assert config.tile_n == config.TILE_M == config.scored_queries == 64
    assert config.STAGES == config.DOUT_STAGES and config.STAGES >= 2 and config.DS_STAGES == 2
    # lse, delta, barriers and descriptions of steps take less than 3 KiB
    weights = 2 * 4 * 64 * 64
    assert (config.STAGES + 1) * 2 * 64 * sum(dims) + weights + 3072 <= 227 * 1024
    narrow = make_wide_dkdv_config(*dims, WideSplit(NARROW_TILES=True))
    own_keys = sum(dims) <= MOST_OWN_COLUMNS
    assert (narrow.TILE_M, narrow.tile_n) == ((32, 128) if own_keys else (64, 64))
    assert own_keys != (narrow == config) and narrow.STAGES + 2 < INFO_DEPTH
    config = make_wide_dq_config(*dims)
    assert config.tile_m == 128 and config.K_STAGES >= 2 and config.V_STAGES >= 1
    keys = 64 * (config.K_STAGES * dims[0] + config.V_STAGES * dims[1])
    assert 2 * (128 * sum(dims) + keys) + 1024 <= 227 * 1024


def test_wide_heads_are_split_without_a_mask(monkeypatch):
    wide = problem(head_dim=256, head_dim_v=256)
    monkeypatch.setattr(tuning, "WIDE_SPLIT", None)
    assert not attn_bwd_sm90_is_split(wide)
    monkeypatch.undo()
    assert attn_bwd_sm90_is_split(wide)
    assert attn_bwd_sm90_is_split(dataclasses.replace(wide, deterministic=True))
    assert not attn_bwd_sm90_is_split(dataclasses.replace(wide, mask_block=(64, 64)))
    assert not attn_bwd_sm90_is_split(dataclasses.replace(wide, softcap=True))
    assert not attn_bwd_sm90_is_split(problem(**PACKED_WIDE))
    assert not attn_bwd_sm90_is_split(problem())


def test_only_what_was_asked_for_is_in_order():
    assert not attn_bwd_sm90_config(problem()).ORDERED
    config = attn_bwd_sm90_config(problem(deterministic=True))
    assert config.ORDERED and config.visits_per_head == 2


def test_what_describes_steps_outlives_them():
    """The producer is at most the ring ahead, the writer at most two steps behind."""
    blocks = (None, (64, 128), (256, 256))
    for dims, block in itertools.product(((64, 64), (128, 64), (128, 128), (256, 64)), blocks):
        assert make_backward_config(*dims, block).STAGES + 2 < INFO_DEPTH


@pytest.mark.parametrize(
    "tokens, changes, raster_group",
    [
        # queries, gradients and sums of a head take 4 MiB at 4096 tokens
        (4096, {}, 4),
        (16384, {}, 1),
        (65536, {}, 1),
        (4096, {"heads_kv": 4}, 1),
        (16, {"heads_q": 2, "heads_kv": 2}, 2),
        (16384, {"deterministic": True}, 3),
        (65536, {"deterministic": True}, 1),
        # two KV tiles for each SM, of up to 64 MiB, two heads
        (2048, {"banded": True}, 16),
        (4096, {"banded": True}, 8),
        (16384, {"banded": True}, 2),
        (65536, {"banded": True}, 2),
        (4096, {"banded": True, "heads_kv": 4}, 4),
        (8192, {"banded": True, "heads_kv": 4}, 2),
        (4096, {"banded": True, "heads_kv": 1}, 1),
        # in order
        (8192, {"banded": True, "deterministic": True}, 2),
        (16384, {"banded": True, "deterministic": True}, 1),
        (32768, {"banded": True, "deterministic": True}, 1),
        (65536, {"banded": True, "deterministic": True}, 8),
        (4096, {"banded": True, "deterministic": True, "heads_q": 64, "heads_kv": 16}, 8),
        (8192, {"banded": True, "deterministic": True, "heads_kv": 4}, 4),
        (32768, {"banded": True, "deterministic": True, "heads_kv": 4}, 2),
    ],
)
def test_raster_groups(tokens, changes, raster_group):
    assert (
        attn_bwd_sm90_raster_group(problem(max_q=tokens, max_k=tokens, **changes)) == raster_group
    )


@pytest.mark.parametrize(
    "tokens, raster_group, parts", [(4096, 4, 1), (16384, 2, 1), (65536, 1, 4)]
)
def test_raster_groups_of_planned_ranks(tokens, raster_group, parts):
    planned = problem(max_q=tokens, deterministic=True, mask_block=(128, 128), heads_kv=4)
    assert attn_bwd_sm90_raster_group(planned) == raster_group
    assert attn_bwd_sm90_front(planned, raster_group) == parts


CAUSAL = Band(None, 0)


@pytest.mark.parametrize(
    "heads, tokens, band, splits, ordered_splits",
    [
        # 64 work tiles as long as 7 heads, 128 of them, and 256
        ((28, 4), 2048, CAUSAL, 7, 7),
        ((28, 4), 4096, CAUSAL, 7, 7),
        # in order, seven heads at a time take longer
        ((28, 4), 8192, CAUSAL, 1, 7),
        ((28, 4), 2048, EVERYTHING, 7, 7),
        # 128 equal work tiles for 132 programs
        ((28, 4), 4096, EVERYTHING, 1, 1),
        # windows make work tiles short and equal
        ((28, 4), 4096, Band(511, 0), 1, 1),
        # shares of more than one head
        ((32, 8), 2048, CAUSAL, 2, 2),
        ((32, 8), 4096, CAUSAL, 1, 1),
        ((32, 1), 2048, CAUSAL, 16, 16),
        # two KV heads at a time fill half of the SMs; in order, all eight run together
        ((64, 8), 4096, CAUSAL, 2, 4),
        # in order, 512 work tiles are enough, and sums of shares are large
        ((128, 16), 4096, CAUSAL, 2, 1),
        ((64, 8), 32768, CAUSAL, 1, 1),
        ((16, 16), 512, CAUSAL, 1, 1),
        ((32, 1), 512, EVERYTHING, 32, 32),
    ],
)
def test_heads_are_shared_where_work_tiles_are_few(heads, tokens, band, splits, ordered_splits):
    changes = {"heads_q": heads[0], "heads_kv": heads[1], "banded": band != EVERYTHING}
    for ordered, expected in ((False, splits), (True, ordered_splits)):
        asked = problem(max_q=tokens, max_k=tokens, deterministic=ordered, **changes)
        assert attn_bwd_sm90_head_splits(asked, band) == expected
        config = attn_bwd_sm90_config(asked, expected)
        assert (expected > 1) == config.SPLIT_HEADS and ordered == config.ORDERED


@pytest.mark.parametrize(
    "changes", [{"mask_block": (128, 128)}, {"head_dim": 192}, {"head_dim_v": 256}]
)
def test_masks_and_wide_heads_are_not_shared(changes):
    few = problem(heads_q=32, heads_kv=1, max_q=512, max_k=512, **changes)
    assert attn_bwd_sm90_head_splits(few, EVERYTHING) == 1


@pytest.mark.parametrize("deterministic, raster_group", [(False, 16), (True, 8)])
def test_raster_groups_of_shares(deterministic, raster_group):
    """Two key tiles for each SM; in order, what fits in 16 MiB, as heads of their own would."""
    shape = {"heads_q": 28, "heads_kv": 4, "banded": True, "deterministic": deterministic}
    asked = problem(max_q=2048, max_k=2048, **shape)
    assert attn_bwd_sm90_raster_group(asked, 7) == raster_group
    alone = dataclasses.replace(asked, heads_kv=28)
    assert attn_bwd_sm90_raster_group(alone) == raster_group
    assert attn_bwd_sm90_raster_group(asked) == 4
