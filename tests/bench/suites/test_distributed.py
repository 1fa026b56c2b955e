"""The suite `distributed` joins a group of its own, and leaves no group behind."""

import torch
import torch.distributed as dist

from blackwell_sparsek.bench.run import run_suite
from blackwell_sparsek.bench.suites import SUITES
from blackwell_sparsek.bench.suites import distributed as suite_of_one

CPU = torch.device("cpu")


def run():
    suite = SUITES["distributed"]
    return run_suite(suite, list(suite.cases(True))[:1], CPU, seconds=0.0)


def test_a_group_is_joined_for_the_suite_alone():
    (case,) = run()["cases"]
    assert case["peers"][suite_of_one.ONE_RANK]["backend"] == "gloo"
    assert not dist.is_initialized()


def test_the_callers_group_stays():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_more_ranks_are_refused_with_a_reason(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    (case,) = run()["cases"]
    assert "more than one rank" in str(case["peers"][suite_of_one.ONE_RANK])
