"""The suite `jax`: its loops, and what it says where it cannot run."""

import pytest
import torch

from blackwell_sparsek.bench.run import run_suite
from blackwell_sparsek.bench.suites import SUITES, jax_attention

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")


def calls(name):
    (case,) = (case for case in SUITES["jax"].cases(True) if case.name == name)
    return case.build(torch.device("cpu"))


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_every_peer_of_jax_says_why():
    suite = SUITES["jax"]
    assert suite.gpu_only
    document = run_suite(suite, list(suite.cases(True))[:1], torch.device("cpu"), seconds=0.0)
    (case,) = document["cases"]
    for name in (jax_attention.DPA, jax_attention.DPA_CUDNN):
        assert "JAX sees no GPU" in str(case["peers"][name])
    reason = str(case["peers"][jax_attention.OURS_JAX])
    assert "jax-triton is not installed" in reason or "JAX sees no GPU" in reason


@pytest.mark.parametrize("name", ["4k, 22 % of the blocks, in a loop", "4k, causal, one call"])
def test_the_loop_of_jax_is_checked_against_fp64(name):
    """What runs on any backend: the mask, layouts and causal are those of the problem."""
    contender = jax_attention._dot_product_attention(calls(name), "xla")
    assert contender.run() > 0
    contender.check(0.0)
    if name == "4k, causal, one call":
        wrong = jax_attention._contender(calls(name), lambda count: calls(name).inputs.q)
        with pytest.raises(AssertionError):
            wrong.check(0.0)
