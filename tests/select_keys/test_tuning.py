"""Tiles of the kernel that chooses keys."""

import dataclasses

import pytest
import torch

from blackwell_sparsek.calls.select_keys import SelectOptions, SelectProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.select_keys.tuning import scores_config, scores_stride, select_config

HOPPER = Arch("cuda", 90, 132, 232448, False)
INDEXER = SelectProblem(
    HOPPER, torch.bfloat16, 1, 64, 8192, 131072, 128, SelectOptions(1, 1, 2048, activation="relu")
)


@pytest.mark.parametrize(
    ("changed", "tiles"),
    [
        ({}, (32, 128)),
        ({"dtype": torch.float8_e4m3fn}, (32, 64)),
        ({"dtype": torch.float32}, (16, 32)),
        ({"heads": 15}, (32, 64)),
        ({"dim": 192}, (32, 32)),
        ({"options": SelectOptions(1, 1, 128)}, (64, 64)),
        ({"options": SelectOptions(128, 4, 16, pool="max")}, (64, 128)),
    ],
)
def test_tiles(changed, tiles):
    config = select_config(dataclasses.replace(INDEXER, **changed))
    assert (config.tile_m, config.tile_n) == tiles


def test_workspaces_take_at_most_twice_the_lists():
    config, most = select_config(INDEXER), INDEXER.options.most
    rows = min(config.programs, INDEXER.q_len // config.tile_m) * config.tile_m
    assert rows * (2 * config.capacity - most) <= 2 * INDEXER.q_len * most


@pytest.mark.parametrize(
    ("changed", "queries"),
    [
        ({}, 4),
        ({"dtype": torch.float8_e4m3fn}, 4),
        ({"heads": 16}, 16),
        ({"heads": 128}, 2),
        ({"arch": Arch("cuda", 89, 128, 101376, False)}, 2),
        # too few scores fit in twice the memory of the lists
        ({"q_len": 512}, None),
        ({"options": SelectOptions(1, 1, 128, activation="relu")}, None),
        ({"heads": 48}, None),
        ({"heads": 8}, None),
        ({"dim": 192}, None),
        ({"dtype": torch.float32}, None),
    ],
)
def test_tiles_of_stored_scores(changed, queries):
    config = scores_config(dataclasses.replace(INDEXER, **changed), 1)
    assert (config and config.queries) == queries


def test_heads_that_read_different_keys_store_no_scores():
    assert scores_config(INDEXER, 2) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(8192, 131072), (2048, 32768), (9001, 9001)])
def test_stored_scores_take_at_most_twice_the_lists(q_len, kv_len, dtype):
    problem = dataclasses.replace(INDEXER, q_len=q_len, kv_len=kv_len, dtype=dtype)
    config, most = scores_config(problem, 1), problem.options.most
    assert config.rows % config.queries == 0
    choose = config.choose
    words = scores_stride(kv_len) + choose.words + 2 * choose.capacity - most
    assert choose.words * 32 >= kv_len and choose.capacity >= most + choose.tile_n
    copied = kv_len * problem.dim * 2 if dtype.itemsize == 1 else 0
    assert 4 * config.rows * words + copied <= 2 * 4 * q_len * most


@pytest.mark.parametrize("tiles", [1, 45, 61, 64, 140, 300, 2048])
def test_strips_of_keys_fill_waves_of_programs(tiles):
    config = scores_config(INDEXER, 1)
    waves = tiles * config.strips(tiles, INDEXER.kv_len) / config.programs
    # one tile alone has no more strips than there are keys for
    assert waves / -(-waves // 1) >= (0.48 if tiles == 1 else 0.95)
    assert config.strips(tiles, 100) == 1
