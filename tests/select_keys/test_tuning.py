"""Tiles of the kernel that chooses keys."""

import dataclasses

import pytest
import torch

from blackwell_sparsek.calls.select_keys import SelectOptions, SelectProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.select_keys.tuning import select_config

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
