"""When the Hopper forward runs, with which tiles, and why not otherwise."""

import dataclasses
import itertools

import pytest
import torch

from blackwell_sparsek.attention.sm90.config import make_forward_config
from blackwell_sparsek.attention.sm90.tuning import (
    FEW_QUERIES,
    attn_fwd_sm90_config,
    attn_fwd_sm90_passed_over,
    attn_fwd_sm90_raster_group,
    attn_fwd_sm90_unsupported,
)
from blackwell_sparsek.calls.attention import AttnProblem, AttnSpec, tma_takes, tma_takes_strides
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.masks.band import EVERYTHING, Band

# An SM has 228 KiB, of which the system takes 1 KiB per program.
SM_BYTES = 228 * 1024


CAUSAL = Band(None, 0)
NARROW = {"head_dim": 64, "head_dim_v": 64}


def problem(**changes):
    q = torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16)
    base = AttnProblem.of(q, q, q, AttnSpec(0.1, max_q=4096, max_k=4096))
    assert base.tma
    return dataclasses.replace(base, **{"arch": Arch("cuda", 90, 132, 232448, False), **changes})


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"arch": Arch("cuda", 100, 148, 0, False)}, "needs sm_90, this is sm_100"),
        ({"arch": Arch("cpu", 0, 1, 0, True)}, "needs sm_90, this is cpu"),
        ({"dtype": torch.float32}, "torch.float32 has no 16-bit WGMMA"),
        ({"head_dim": 264}, "up to 256 in steps of 8, got 264 and 128"),
        ({"head_dim_v": 20}, "up to 256 in steps of 8, got 128 and 20"),
        ({"varlen": True, "tokens": (9, 0)}, "TMA cannot describe zero keys"),
        ({"varlen": True, "tokens": (2**31 - 2**16, 9)}, "at most 2147418111 tokens in all"),
        ({"varlen": True, "tokens": (2**30, 9), "heads_q": 128}, "at most 2147483647 query tiles"),
        ({"positive": False}, "needs a scale above zero"),
        ({"max_k": 0}, "TMA cannot describe zero keys"),
        ({"mask_block": (32, 64)}, "query blocks of 32 are not a multiple of 64"),
        ({"tma": False}, "addresses and strides that are multiples of 16 bytes"),
        ({"max_k": 2**30}, "at most 1073741823 tokens"),
        ({"batch": 2**20, "max_q": 2**13}, "at most 2147483647 query tiles"),
    ],
)
def test_why_not(changes, reason):
    assert reason in attn_fwd_sm90_unsupported(problem(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16},
        {"head_dim": 8, "head_dim_v": 128},
        {"head_dim": 192, "head_dim_v": 128},
        {"head_dim": 256, "head_dim_v": 256, "mask_block": (64, 64)},
        {"mask_block": (64, 16)},
        {"mask_block": (256, 256)},
        {"max_k": 1, "max_q": 1},
        {"max_k": 2**30 - 1},
        {"varlen": True, "tokens": (1, 1)},
        # far fewer tiles than sequences times tiles of the longest
        {"varlen": True, "tokens": (2**24, 2**24), "batch": 2**16, "max_q": 2**19},
        {"softcap": True, "sinks": True, "banded": True},
    ],
)
def test_what_runs(changes):
    assert attn_fwd_sm90_unsupported(problem(**changes)) is None


def test_few_queries_are_left_to_smaller_tiles():
    assert "31 queries" in attn_fwd_sm90_passed_over(problem(max_q=FEW_QUERIES - 1))
    assert attn_fwd_sm90_passed_over(problem(max_q=FEW_QUERIES)) is None


@pytest.mark.parametrize(
    "changes, consumers",
    [
        ({}, 2),
        ({"head_dim": 64, "head_dim_v": 64}, 3),
        ({"head_dim": 64, "head_dim_v": 64, "banded": True, "max_k": 2047}, 1),
        ({"banded": True, "max_k": 1024}, 2),
        ({"head_dim": 64, "head_dim_v": 64, "banded": True, "max_k": 2048}, 3),
        ({"head_dim": 64, "head_dim_v": 64, "max_k": 1023}, 2),
        ({"head_dim": 64, "head_dim_v": 64, "max_k": 1024}, 3),
        # as measured, 16k tokens in all: full and causal
        ({**NARROW, "batch": 16, "heads_q": 32, "max_q": 1024, "max_k": 1024}, 3),
        ({**NARROW, "batch": 16, "heads_q": 32, "max_q": 1024, "max_k": 1024, "banded": True}, 1),
        ({**NARROW, "batch": 8, "heads_q": 32, "max_q": 2048, "max_k": 2048, "banded": True}, 3),
        ({**NARROW, "batch": 4, "heads_q": 32, "banded": True}, 3),
        ({"head_dim": 64, "head_dim_v": 128}, 2),
        # a tanh takes the registers of a third consumer
        ({"head_dim": 64, "head_dim_v": 64, "softcap": True}, 2),
        # 64 work tiles of 64 queries occupy twice as many SMs as 32 of 128
        ({"head_dim": 64, "head_dim_v": 64, "heads_q": 8, "max_q": 512}, 1),
        # one round for all: 128 tiles of 128 queries on 132 SMs, unless they are short
        ({"head_dim": 64, "head_dim_v": 64, "heads_q": 32, "max_q": 512, "max_k": 4096}, 2),
        ({"head_dim": 64, "head_dim_v": 64, "heads_q": 32, "max_q": 512, "max_k": 512}, 1),
        ({"head_dim": 64, "head_dim_v": 64, "heads_q": 128, "max_q": 512, "max_k": 512}, 1),
        # tiles of 192 would be two thirds empty
        ({"head_dim": 64, "head_dim_v": 64, "batch": 64, "heads_q": 32, "max_q": 64}, 1),
        ({"heads_q": 4, "max_q": 1024}, 1),
        # lengths of packed sequences are averages: here 64 tokens, and 4096
        ({"varlen": True, "tokens": (4096, 4096), "batch": 64, "heads_q": 32}, 1),
        ({"varlen": True, "tokens": (8192, 8192), "batch": 2}, 2),
        ({**NARROW, "varlen": True, "tokens": (8192, 8192), "batch": 2}, 3),
        ({**NARROW, "varlen": True, "tokens": (65536, 65536), "batch": 64}, 3),
        ({**NARROW, "varlen": True, "tokens": (65536, 65536), "batch": 64, "banded": True}, 2),
        ({"mask_block": (64, 64)}, 1),
        ({"mask_block": (128, 16)}, 2),
        ({"mask_block": (256, 128), "head_dim": 64, "head_dim_v": 64}, 2),
        # wide heads have one height, unless a mask has lower rows
        ({"head_dim": 192}, 2),
        ({"head_dim": 256, "head_dim_v": 256, "heads_q": 4, "max_q": 512}, 2),
        ({"head_dim": 256, "head_dim_v": 256, "mask_block": (64, 64)}, 1),
    ],
)
def test_consumers(changes, consumers):
    assert consumers == attn_fwd_sm90_config(problem(**changes)).CONSUMERS


def test_half_tiles_are_for_bands_of_dense_batches():
    one = {"batch": 16, "heads_q": 32, "max_q": 1024, "max_k": 1024, **NARROW}
    for changes in (one, {}, NARROW):
        assert attn_fwd_sm90_config(problem(**changes, banded=True)).HALF_TILES
        assert not attn_fwd_sm90_config(problem(**changes)).HALF_TILES
    for consumers, dim, options in (
        (1, 64, {"banded": True, "packed": True}),
        (1, 64, {"banded": True, "block_kv": 128}),
        (2, 128, {"banded": True, "packed": True}),
        (2, 128, {"banded": True, "block_kv": 128}),
        # its tiles have 64 keys
        (1, 128, {"banded": True}),
    ):
        assert not make_forward_config(consumers, dim, dim, **options).HALF_TILES


@pytest.mark.parametrize(
    "consumers, dim, options, expected",
    [
        # ping-pong of consumers, work tiles claimed ahead, consumers that skip work tiles
        (3, 64, {}, (True, False, False)),
        (3, 64, {"long": True}, (True, False, True)),
        (3, 64, {"banded": True}, (True, False, True)),
        (3, 64, {"packed": True}, (True, False, True)),
        (2, 128, {}, (False, True, False)),
        (2, 128, {"long": True}, (False, False, False)),
        (2, 64, {"long": True}, (False, True, False)),
        # work tiles of a band differ, and a claim ahead takes one from those that are done
        (2, 128, {"banded": True}, (False, False, False)),
        # but those of one consumer are many and short
        (1, 64, {"banded": True}, (False, True, False)),
        (1, 64, {}, (False, False, False)),
        # no room for a second buffer of queries
        (1, 128, {"banded": True}, (False, False, False)),
        (2, 128, {"block_kv": 128}, (False, False, False)),
    ],
)
def test_what_consumers_and_producers_do(consumers, dim, options, expected):
    config = make_forward_config(consumers, dim, dim, **options)
    assert expected == (config.PING_PONG, config.CLAIM_AHEAD, config.SKIP_ABSENT)


def test_three_consumers_have_larger_raster_groups():
    causal = {**NARROW, "batch": 8, "heads_q": 32, "heads_kv": 32, "banded": True}
    for keys, heads in ((1024, 64), (2048, 64), (4096, 32)):
        assert heads == attn_fwd_sm90_raster_group(problem(**causal, max_q=keys, max_k=keys))


@pytest.mark.parametrize(
    "changes, shared",
    [
        ({}, True),
        ({"max_k": 4095}, False),
        ({"banded": True}, False),
        (NARROW, False),
        ({"varlen": True, "tokens": (8192, 8192)}, False),
        ({"mask_block": (128, 128)}, False),
        ({"heads_q": 4, "max_q": 1024}, False),
    ],
)
def test_the_tail_of_long_equal_work_is_split(changes, shared):
    assert shared == attn_fwd_sm90_config(problem(**changes)).SPLIT_TAIL


@pytest.mark.parametrize(
    "work_tiles, programs, kv_tiles, share",
    [
        # 15 rounds and a half
        (2048, 132, 128, 66),
        (5, 3, 14, 10),
        # nothing is left over, nothing comes before it, or there is too little to save
        (264, 132, 128, 0),
        (131, 132, 128, 0),
        (263, 132, 128, 0),
        (200, 132, 3, 0),
    ],
)
def test_shares_of_the_tail(work_tiles, programs, kv_tiles, share):
    split = make_forward_config(2, 128, 128, long=True)
    assert split.tail_share(work_tiles, programs, kv_tiles) == share
    assert make_forward_config(2, 128, 128).tail_share(work_tiles, programs, kv_tiles) == 0


def test_small_problems_start_early():
    assert attn_fwd_sm90_config(problem(**NARROW, heads_q=8, max_q=512, max_k=512)).PDL
    assert not attn_fwd_sm90_config(problem()).PDL
    assert not attn_fwd_sm90_config(problem(mask_block=(64, 64))).PDL


def test_work_tiles_lie_within_query_blocks():
    for block, dim in itertools.product((64, 128, 256), (64, 128, 192, 256)):
        config = attn_fwd_sm90_config(problem(mask_block=(block, 32), head_dim=dim))
        assert block % config.tile_m == 0
        assert config.BLOCK_KV == 32


def test_sequences_and_shares_are_found_with_more_registers():
    for blocks in (None, (128, 128)):
        packed = attn_fwd_sm90_config(problem(varlen=True, tokens=(8192, 8192), mask_block=blocks))
        assert (packed.PRODUCER_REGISTERS, packed.CONSUMER_REGISTERS) == (40, 232)
    assert attn_fwd_sm90_config(problem()).PRODUCER_REGISTERS == 40
    assert attn_fwd_sm90_config(problem(banded=True)).PRODUCER_REGISTERS == 24


DIMS = list(itertools.product((64, 128, 192, 256), repeat=2))
UNITS = (None, 16, 64, 128, 256)
CHOICES = [(c, unit, *dims, False) for c in (1, 2) for unit in UNITS for dims in DIMS]
PACKED = [(*choice[:-1], True) for choice in CHOICES]
THREE = [(3, None, 64, 64, packed) for packed in (False, True)]


@pytest.mark.parametrize(
    "consumers, block_kv, tile_d, tile_dv, packed", [*CHOICES, *PACKED, *THREE]
)
def test_tiles_and_registers_fit_an_sm(consumers, block_kv, tile_d, tile_dv, packed):
    config = make_forward_config(consumers, tile_d, tile_dv, block_kv, packed)
    ring = config.STAGES * config.TILE_N * (tile_d + tile_dv)
    rows = config.tile_m * (config.Q_STAGES * tile_d + config.SLICE_DV)
    assert config.tile_bytes == 2 * (ring + rows)
    # barriers and work numbers take less than 1 KiB
    program = (ring + rows) * 2 + 2048
    assert program * config.programs_per_sm <= SM_BYTES
    # the producer warp occupies a warp group
    threads = 128 * (consumers + 1)
    assert threads * config.MAX_REGISTERS * config.programs_per_sm <= 65536
    if consumers > 1:
        workers = (consumers - 1) * config.CONSUMER_REGISTERS + config.PRODUCER_REGISTERS
        assert 24 <= threads * config.MAX_REGISTERS // 128 - workers <= 256


@pytest.mark.parametrize(
    "dims, keys, stages, slices",
    [
        # scores of 128 keys and outputs of 128 columns fit in the registers of a consumer
        ((192, 128), 128, 2, (64, 64)),
        ((192, 64), 128, 2, (64, 64)),
        ((192, 192), 64, 3, (64, 64)),
        ((256, 256), 64, 2, (128, 128)),
        ((256, 128), 64, 3, (128, 64)),
        ((128, 256), 64, 3, (128, 128)),
        ((128, 128), 128, 2, (128, 128)),
    ],
)
def test_tiles_of_wide_heads(dims, keys, stages, slices):
    config = make_forward_config(2, *dims)
    assert (keys, stages) == (config.TILE_N, config.STAGES)
    assert slices == (config.SLICE_D, config.SLICE_DV)
    assert (config.d_slices * slices[0], config.dv_slices * slices[1]) == dims


@pytest.mark.parametrize("dim, tile", [(8, 64), (64, 64), (72, 128), (136, 192), (200, 256)])
def test_tiles_cover_the_head_dims(dim, tile):
    config = attn_fwd_sm90_config(problem(head_dim=dim, head_dim_v=dim))
    assert (tile, tile) == (config.TILE_D, config.TILE_DV)


def test_queries_are_fetched_ahead_where_there_is_room():
    ahead = [
        (c, d) for c in (1, 2, 3) for d in (64, 128) if make_forward_config(c, d, d).Q_STAGES == 2
    ]
    assert ahead == [(1, 64), (2, 64), (2, 128), (3, 64)]
    assert (
        make_forward_config(2, 64, 64, 128).Q_STAGES
        == make_forward_config(2, 128, 128, 128).Q_STAGES
        == 2
    )
    assert (
        make_forward_config(2, 128, 128, 64).Q_STAGES
        == make_forward_config(1, 128, 128, 64).Q_STAGES
        == 1
    )


def test_scheduler_warps_look_up_rows_of_masks():
    assert all(make_forward_config(c, d, d, 64).SCHEDULER_WARP for c in (1, 2) for d in (64, 128))
    assert not make_forward_config(2, 128, 128, 64, packed=True).SCHEDULER_WARP
    assert not any(make_forward_config(c, 128, 128, banded=True).SCHEDULER_WARP for c in (1, 2))
    # two consumers that have mask code would spill
    in_registers = [c for c in (1, 2) if make_forward_config(c, 128, 128, 64).Q_REGISTERS]
    assert in_registers == [1]
    assert not any(make_forward_config(1, d, d, 64).Q_REGISTERS for d in (64, 192, 256))


@pytest.mark.parametrize(
    "changes, band, raster_group",
    [
        # one KV head at a time
        ({}, EVERYTHING, 1),
        ({"heads_kv": 4}, EVERYTHING, 4),
        ({"mask_block": (128, 128), "banded": True}, CAUSAL, 1),
        # 2 MiB of keys and values per head: 8 heads in 16 MiB
        ({"banded": True}, CAUSAL, 8),
        ({"banded": True, "max_k": 16384}, CAUSAL, 2),
        ({"banded": True, "max_k": 65536}, CAUSAL, 1),
        ({"banded": True, "max_k": 65536, "heads_kv": 4}, CAUSAL, 4),
        ({"banded": True, "max_k": 128}, CAUSAL, 16),
        ({"banded": True, "max_k": 2**29}, CAUSAL, 1),
        # of which a window shows 6143 at a time: 5 heads, or 4 groups of 4
        ({"banded": True, "max_k": 65536}, Band(2047, 0), 4),
        ({"banded": True, "max_k": 65536, "heads_kv": 4}, Band(2047, 0), 16),
        ({"banded": True, "max_k": 65536, "heads_q": 7, "heads_kv": 7}, Band(2047, 0), 4),
        ({"banded": True, "varlen": True, "tokens": (8192, 8192), "batch": 2}, CAUSAL, 32),
        ({"varlen": True, "tokens": (8192, 8192), "batch": 2}, EVERYTHING, 1),
    ],
)
def test_raster_groups(changes, band, raster_group):
    assert attn_fwd_sm90_raster_group(problem(**changes), band) == raster_group


def views():
    def make(*shape):
        return torch.empty(shape, dtype=torch.float16)

    plain = make(2, 4, 32, 64)
    yield "contiguous", plain, True
    yield "heads inner", make(2, 32, 4, 64).transpose(1, 2), True
    yield "slice of a wider row", make(2, 4, 32, 72)[..., :64], True
    yield "row of 68 elements", make(2, 4, 32, 68)[..., :64], False
    yield "address off by 8", make(2, 4, 32, 72)[..., 4:68], False
    yield "size 1 with an odd stride", plain[:1, :1].as_strided((1, 1, 32, 64), (3, 5, 64, 1)), True
    yield "every second element", make(2, 4, 32, 128)[..., ::2], False
    yield "expanded", plain[:1].expand(2, -1, -1, -1), False


@pytest.mark.parametrize(
    "name, x, takes", list(views()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_what_tma_takes(name, x, takes):
    spec = AttnSpec(0.1, max_q=32, max_k=32)
    good = torch.empty(x.shape, dtype=torch.float16)
    for tensors in ((x, good, good), (good, x, good), (good, good, x)):
        assert AttnProblem.of(*tensors, spec).tma is takes, name


@pytest.mark.parametrize("step", [8, 16])
@pytest.mark.parametrize("bad", [(4, 1), (64, 8), (0, 1), (2**30, 1)], ids=str)
def test_what_tma_takes_by_strides_alone(bad, step):
    """A stride that `step` does not divide, of 0, or that is too large, in any of the tensors."""
    good = (64 * step, step, 1)
    assert tma_takes_strides(good, (2**29, 3 * step, 1), (1,), step=step)
    for strides in ((good, bad), (bad, good), (good, (*bad[:-1], good[0], bad[-1]))):
        assert not tma_takes_strides(*strides, step=step)
    assert tma_takes_strides((24, 8, 1)) and not tma_takes_strides((24, 8, 1), step=16)


@pytest.mark.parametrize(
    "scale, softcap, positive",
    [(0.1, 0.0, True), (0.0, 0.0, False), (-0.1, 0.0, False), (-0.1, 5.0, True)],
)
def test_the_sign_of_scores(scale, softcap, positive):
    q = torch.empty(1, 1, 8, 8, dtype=torch.float16)
    spec = AttnSpec(scale, softcap=softcap, max_q=8, max_k=8)
    assert AttnProblem.of(q, q, q, spec).positive is positive


@pytest.mark.parametrize(
    "name, x, takes",
    [
        ("contiguous", torch.empty(32, 4, 64, dtype=torch.float16), True),
        ("fused", torch.empty(32, 12, 64, dtype=torch.float16)[:, 4:8], True),
        ("heads outer", torch.empty(4, 32, 64, dtype=torch.float16).transpose(0, 1), True),
        ("row of 68", torch.empty(32, 4, 68, dtype=torch.float16)[..., :64], False),
        ("no token", torch.empty(0, 4, 64, dtype=torch.float16), False),
        ("same token", torch.empty(1, 4, 64, dtype=torch.float16).expand(32, -1, -1), False),
        (
            "tokens 16 GiB apart",
            torch.empty(2, 4, 64, dtype=torch.float16, device="meta").as_strided(
                (2, 4, 64), (2**33, 64, 1)
            ),
            False,
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_tma_takes_of_packed_sequences(name, x, takes):
    assert tma_takes(x) is takes


def test_tokens_of_packed_sequences():
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    q, k = torch.empty(8, 4, 64), torch.empty(8, 2, 64)
    spec = AttnSpec(0.1, max_q=5, max_k=6, cu_seqlens_q=cu, cu_seqlens_k=cu)
    packed = AttnProblem.of(q, k, k, spec)
    assert (packed.batch, packed.tokens, packed.max_k) == (2, (8, 8), 6)
    assert AttnProblem.of(q[None], k[None], k[None], AttnSpec(0.1)).tokens is None
