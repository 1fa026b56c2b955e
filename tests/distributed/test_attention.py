"""`bsk.distributed.attention` in 2 and 4 processes; each starts once and runs all checks."""

import pytest
import torch.distributed as dist

from . import attention_checks
from .world import run_checks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request, tmp_path_factory):
    return run_checks(attention_checks, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", attention_checks.CHECKS)
def test_ranks_together(name, outcomes):
    assert outcomes[name] == ""
