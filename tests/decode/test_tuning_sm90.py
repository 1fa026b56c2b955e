"""When the Hopper decode kernel runs, with which tiles, and why not otherwise."""

import dataclasses
import itertools

import pytest
import torch

from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.decode.tuning import attn_decode_sm90_launch, attn_decode_sm90_unsupported
from blackwell_sparsek.testing.decode_cases import DecodeCase

# An SM has 228 KiB, of which the system takes 1 KiB per program.
SM_BYTES = 228 * 1024
H200 = Arch("cuda", 90, 132, 232448, False)


def problem(**changes):
    case = DecodeCase(1, torch.bfloat16, heads=(32, 8), head_dims=(128, 128))
    base = case.build("cpu").problem
    assert base.tma
    return dataclasses.replace(base, **{"arch": H200, **changes})


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"arch": Arch("cuda", 100, 148, 0, False)}, "needs sm_90, this is sm_100"),
        ({"arch": Arch("cpu", 0, 1, 0, True)}, "needs sm_90, this is cpu"),
        ({"dtype": torch.float32}, "torch.float32 has no 16-bit WGMMA"),
        (
            {"cache_dtype": torch.float16},
            "needs a cache of torch.bfloat16 or torch.float8_e4m3fn, got torch.float16",
        ),
        (
            {"cache_dtype": torch.float8_e4m3fn, "head_dim_v": 64},
            "needs head dimensions of 128 for a float8 cache, got 128 and 64",
        ),
        (
            {"cache_dtype": torch.float8_e4m3fn, "q_len": 5},
            "takes at most 16 rows of a float8 cache, got 20",
        ),
        (
            {"head_dim": 96},
            "needs head dimensions of 64, 128 or 256, or 576 and 512, got 96 and 128",
        ),
        (
            {"head_dim_v": 192},
            "needs head dimensions of 64, 128 or 256, or 576 and 512, got 128 and 192",
        ),
        ({"page_size": 17}, "pages of 17 are not a multiple of 16"),
        ({"page_size": 64, "block_size": 8}, "listed blocks of 8 are not a multiple of 16"),
        ({"tma": False}, "addresses and strides that are multiples of 16 bytes"),
        ({"capacity": 2**30}, "at most 1073741823 tokens a sequence"),
        ({"capacity": 2**29, "batch": 2**8}, "at most 2147483647 tiles"),
    ],
)
def test_why_not(changes, reason):
    assert reason in attn_decode_sm90_unsupported(problem(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16, "cache_dtype": torch.float16},
        {"head_dim": 64, "head_dim_v": 128},
        {"head_dim": 256, "head_dim_v": 256},
        {"head_dim": 128, "head_dim_v": 256},
        {"page_size": 16},
        {"page_size": 48, "block_size": 48},
        {"block_size": 80},
        {"q_len": 16},
        {"cache_dtype": torch.float8_e4m3fn, "q_len": 4, "page_size": 16, "block_size": 16},
        {"capacity": 2**30 - 1, "banded": True, "softcap": True, "sinks": True},
    ],
)
def test_what_runs(changes):
    assert attn_decode_sm90_unsupported(problem(**changes)) is None


def test_caches_that_tma_cannot_copy():
    call = DecodeCase(2, torch.bfloat16, head_dims=(64, 64), capacity=64).build("cpu")
    k = call.k_cache
    takes = lambda k: dataclasses.replace(call, k_cache=k).problem.tma  # noqa: E731
    assert takes(k)
    assert not takes(k[:, :, :0])
    wide = torch.empty(*k.shape[:3], 66, dtype=k.dtype)
    assert not takes(wide[..., :64])
    assert not takes(torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view_as(k))


def test_lengths_pages_and_options_do_not_change_the_tiles():
    """Nor the order of sums: pages give the bits of a contiguous cache."""
    expected = attn_decode_sm90_launch(problem())
    for changes in (
        {"capacity": 1}, {"capacity": 2**20}, {"banded": True}, {"softcap": True},
        {"sinks": True}, {"page_size": 16}, {"page_size": 256}, {"batch": 64},
        {"batch": 1},
    ):  # fmt: skip
        launch = attn_decode_sm90_launch(problem(**changes))
        assert launch.programs == expected.programs
        assert launch.config.ROWS == expected.config.ROWS
        assert launch.config.TILE_N == expected.config.TILE_N


def test_one_sequence_starts_early_and_many_fp8_heads_take_long_tiles():
    assert attn_decode_sm90_launch(problem(batch=1)).config.SINGLE
    assert not attn_decode_sm90_launch(problem(batch=2)).config.SINGLE
    for batch, tile_n in ((1, 64), (4, 64), (5, 128)):
        launch = attn_decode_sm90_launch(problem(batch=batch, cache_dtype=torch.float8_e4m3fn))
        assert launch.config.WORDS and tile_n == launch.config.TILE_N
        assert launch.programs == 2 * H200.num_sms


def test_programs_fit_an_sm():
    """The compiled kernels are checked to the byte elsewhere."""
    dims = (64, 128, 256)
    for dim, dim_v, q_len in itertools.product(dims, dims, (1, 2, 3, 5, 16, 64)):
        changes = {"head_dim": dim, "head_dim_v": dim_v, "q_len": q_len}
        config, programs = attn_decode_sm90_launch(problem(**changes))
        rows = min(4 * q_len, 32 if dim_v == 256 else 64)
        assert rows <= config.ROWS < 2 * max(rows, 8)
        ring = config.STAGES * config.TILE_N * (dim + dim_v) * 2
        own = ring + config.ROWS * (dim + config.TILE_N) * 2
        assert (own + 2048) * programs // 132 <= SM_BYTES
        # threads of four warps of the consumer, four of the producer
        assert config.MAX_REGISTERS * 256 * programs // 132 <= 65536


@pytest.mark.parametrize(
    "page_size, block_kv, copies",
    [(None, None, 1), (16, None, 4), (48, None, 4), (96, None, 2), (256, None, 1), (None, 32, 2),
     (256, 16, 4), (64, 64, 1)],
)  # fmt: skip
def test_copies_stay_within_pages_and_blocks(page_size, block_kv, copies):
    config = attn_decode_sm90_launch(problem(page_size=page_size, block_size=block_kv)).config
    assert config.copies == copies and config.TILE_N == 64
    for size in (page_size, block_kv):
        assert size is None or size % config.copy_keys == 0


def test_compile_cases_are_what_is_launched():
    pytest.importorskip("triton")
    from blackwell_sparsek.testing.cases.decode import DECODE_SM90

    for call in DECODE_SM90:
        config = call.config
        # few softmaxes have many parts
        kv_heads = 8 if config.SINGLE and not config.COMBINED else 1
        batch = 17 if config.WORDS and config.TILE_N == 64 else 140
        launch = attn_decode_sm90_launch(
            problem(
                head_dim=config.TILE_D, head_dim_v=config.TILE_DV, page_size=config.PAGE_SIZE,
                block_size=config.BLOCK_KV, heads_q=config.ROWS * kv_heads, heads_kv=kv_heads,
                cache_dtype=torch.float8_e4m3fn if config.WORDS else torch.bfloat16,
                batch=1 if config.SINGLE else batch,
            )
        )  # fmt: skip
        assert launch.config == config, call.name


def test_parts_of_many_rows_are_combined_by_a_launch_of_their_own():
    def combined(**changes):
        return attn_decode_sm90_launch(problem(**changes)).config.COMBINED

    assert combined(batch=1, heads_q=32, heads_kv=1) and combined(batch=32, heads_q=32, heads_kv=1)
    # nothing to combine, or quickly combined
    assert not combined(batch=200, heads_q=32, heads_kv=1)
    assert not combined(batch=1, heads_q=32, heads_kv=8)


@pytest.mark.parametrize("changes", [{"batch": 0}, {"batch": 0, "heads_q": 0}, {"q_len": 0}])
def test_a_call_without_queries_has_a_launch(changes):
    """Nothing is launched then, but the choice of a kernel asks for its configuration."""
    config, programs = attn_decode_sm90_launch(problem(**changes))
    assert programs == problem().arch.num_sms and not config.COMBINED
