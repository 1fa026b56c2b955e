"""Checks in 2 and 4 processes, which start once and run all of them.

One test for all checks of a start: tests of their own might run in different workers, and each of
those would start the processes again.
"""

import pytest
import torch.distributed as dist

from . import all_checks
from .world import run_checks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_together(world_size, tmp_path):
    outcomes = run_checks(all_checks, world_size, tmp_path)
    assert set(outcomes) == set(all_checks.CHECKS)
    problems = [f"{name}\n{problem}" for name, problem in outcomes.items() if problem]
    # after the first that fails, the others are not reached
    assert not problems, problems[0]
