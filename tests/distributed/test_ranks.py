"""Checks in 2 and 4 processes, which start once and run all of them."""

import pytest
import torch.distributed as dist

from . import all_checks
from .world import run_checks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request, tmp_path_factory):
    return run_checks(all_checks, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", all_checks.CHECKS)
def test_ranks_together(name, outcomes):
    assert outcomes[name] == ""
