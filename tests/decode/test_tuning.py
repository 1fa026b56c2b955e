"""Tiles of the decode kernel: what they may depend on, and what they must fit."""

import dataclasses
import itertools

import pytest
import torch

from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.decode.tuning import DecodeConfig, attn_decode_config
from blackwell_sparsek.testing.decode_cases import DecodeCase

ARCHS = (0, 80, 86, 89, 90, 100, 103, 120)
LIMITS = {80: 166912, 90: 232448, 100: 232448, 103: 232448}


def problem(sm=90, **changes):
    call = DecodeCase(1, heads=(32, 8), head_dims=(128, 128)).build("cpu")
    kind = "cuda" if sm else "cpu"
    changes.setdefault("arch", Arch(kind, sm, 132, 0, sm == 0))
    return dataclasses.replace(call.problem, **changes)


@pytest.mark.parametrize("sm", ARCHS)
def test_lengths_pages_and_options_do_not_change_the_tiles(sm):
    """Nor the order of sums: pages give the bits of a contiguous cache."""
    expected = attn_decode_config(problem(sm), "ieee")
    for changes in (
        {"capacity": 1}, {"capacity": 2**20}, {"banded": True}, {"softcap": True},
        {"sinks": True}, {"page_size": 16}, {"page_size": 256}, {"batch": 64},
    ):  # fmt: skip
        assert attn_decode_config(problem(sm, **changes), "ieee") == expected


@pytest.mark.parametrize("sm", ARCHS[1:])
def test_stages_fit_shared_memory(sm):
    """Stages of K and V; the compiled kernels are checked to the byte elsewhere."""
    dtypes = (torch.float16, torch.float32, torch.float8_e4m3fn)
    for dtype, dim, rows in itertools.product(dtypes, (16, 64, 128, 256), (1, 4, 16, 32, 128)):
        config = attn_decode_config(
            problem(sm, cache_dtype=dtype, head_dim=dim, head_dim_v=dim, q_len=rows), "ieee"
        )
        stages = 2 * config.tile_n * (config.num_stages - 1) * dim * dtype.itemsize
        assert stages + config.tile_m * dim * 4 <= LIMITS.get(sm, 101376), (dtype, dim, config)


@pytest.mark.parametrize("sms", [36, 78, 114, 132, 144])
def test_programs_of_hopper(sms):
    """Two on an SM, a third one for fp8 where softmaxes are many."""
    arch = Arch("cuda", 90, sms, 0, False)
    few, many = (problem(arch=arch, batch=batch) for batch in (1, 64))
    for asked in (few, many, dataclasses.replace(few, cache_dtype=torch.float8_e4m3fn)):
        assert 1 <= attn_decode_config(asked, "ieee").programs <= 2 * sms
    fp8 = dataclasses.replace(many, cache_dtype=torch.float8_e4m3fn)
    assert attn_decode_config(fp8, "ieee").programs == 3 * sms


def test_rows_fit_tiles():
    for q_len, tile_m in ((1, 16), (4, 16), (5, 32), (8, 32), (9, 64), (16, 64), (64, 64)):
        assert attn_decode_config(problem(q_len=q_len), "ieee").tile_m == tile_m


DOWN = DecodeConfig(16, 64, 4, 3, 264)
ACROSS = DecodeConfig(16, 64, 4, 3, 256, across=True)
WORDS = DecodeConfig(16, 64, 4, 3, 256, across=True, words=True)
THREE = DecodeConfig(16, 64, 4, 4, 396, across=True, words=True, registers=168)
PLAIN = DecodeConfig(16, 32, 8, 2, 264)
WIDE = DecodeConfig(64, 64, 8, 3, 264)
DEEP = DecodeConfig(32, 32, 4, 3, 264)
# what is compiled without a GPU, by architecture; in 99 KiB one program fits an SM, not two
PICKED = {
    "bfloat16-d128": {80: DOWN, 89: DOWN, 90: ACROSS, 100: DOWN, 120: DOWN},
    "bfloat16-d128-pages16": {80: DOWN, 90: ACROSS},
    "bfloat16-d128-pages16-int64": {89: DOWN, 90: ACROSS},
    "bfloat16-d128-pages64": {90: ACROSS},
    "bfloat16-d128-pages64-alibi": {89: DOWN, 90: DOWN},
    "bfloat16-d128-pages256": {90: ACROSS},
    "bfloat16-d128-pages64-fp8": {89: DOWN, 90: WORDS, 100: DOWN, 120: DOWN},
    "bfloat16-d128-fp8-batch16": {90: THREE},
    "bfloat16-d128-pages16-fp8-batch16": {90: THREE},
    "float16-d80-pages48-everything": {80: DOWN, 90: ACROSS},
    "float32-d128": {80: PLAIN, 90: PLAIN},
    "bfloat16-d128-rows32": {90: DecodeConfig(32, 64, 4, 3, 264)},
    "bfloat16-d128-rows64": {80: WIDE, 89: WIDE, 90: WIDE},
    "float16-d256-rows64": {89: DEEP, 90: DEEP},
    "bfloat16-d128-odd-k": {90: ACROSS},
    "bfloat16-d128-pages64-odd-k": {90: ACROSS},
    "float16-d80-pages48-everything-odd-k": {90: ACROSS},
    "float32-d64-odd-kv-blocks16": {80: PLAIN, 90: PLAIN},
    "float32-d64-odd-kv-blocks20": {90: PLAIN},
}


def test_the_tiles_that_are_compiled_are_known():
    pytest.importorskip("triton")
    from blackwell_sparsek.testing.cases.decode import DECODE

    picked = {}
    for call, archs in DECODE.items():
        for sm in archs:
            asked = problem(
                sm, dtype=call.dtype, cache_dtype=call.cache or call.dtype,
                head_dim=call.head_dim, head_dim_v=call.head_dim, q_len=call.rows // 4,
                batch=call.batch, alibi=call.alibi,
            )  # fmt: skip
            picked[call.name(sm)] = attn_decode_config(asked, "ieee")
    assert picked == {
        f"attn_decode/{name}-sm_{sm}": dataclasses.replace(
            config, programs=132 if sm in (89, 120) else config.programs
        )
        for name, configs in PICKED.items()
        for sm, config in configs.items()
    }


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tile_m": 8}, "tile_m is 8; expected a power of two from 16 on"),
        ({"tile_n": 48}, "tile_n is 48; expected a power of two from 16 on"),
        ({"programs": 0}, "programs is 0; expected at least 1"),
        ({"precision": "bf16"}, "precision is 'bf16'; expected one of"),
    ],
)
def test_configs_say_what_is_wrong(changes, words):
    right = {"tile_m": 16, "tile_n": 64, "num_warps": 4, "num_stages": 2, "programs": 1}
    DecodeConfig(**right)
    with pytest.raises(ValueError, match=words):
        DecodeConfig(**right | changes)
