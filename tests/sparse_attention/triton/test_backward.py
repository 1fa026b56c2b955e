"""The backward kernels against the oracle in fp64, interpreted and compiled."""

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.testing import layouts

from .. import problems

CASES = {
    "one query": {"lengths": (1, 40)},
    "more queries than keys": {"lengths": (33, 17)},
    "no keys": {"lengths": (5, 0)},
    "all keys in one block": {"lengths": (7, 11)},
    "groups of three": {"batch": 2, "heads": (6, 2), "lists": 2, "lengths": (17, 50)},
    "a list per query head": {"heads": (4, 2), "lists": 4, "lengths": (17, 50)},
    "one list for all": {"heads": (2, 2), "lists": 1, "lengths": (17, 50), "gate": True},
    "blocks of 128": {"granularity": 128, "most": 2, "lengths": (9, 200), "dims": (24, 40)},
    "blocks of 32": {"granularity": 32, "heads": (20, 1), "lengths": (7, 70), "gate": True},
    "single keys": {"granularity": 1, "most": 20, "lengths": (5, 31), "heads": (3, 1)},
    "entries of four": {"granularity": 4, "most": 9, "lengths": (7, 37), "gate": True},
    "near keys": {"window": 7, "lengths": (17, 40)},
    "near keys on both sides": {"window": (None, 3), "causal": False, "lengths": (17, 33)},
    "all of it": {
        **{"batch": 2, "heads": (4, 2), "lists": 2, "lengths": (17, 33), "window": (5, 0)},
        **{"sinks": True, "gate": True, "softcap": 2.0, "scale": -0.7},
    },
    "gated single keys": {"granularity": 1, "gate": True, "window": 3, "sinks": True, "most": 7},
}


@pytest.mark.parametrize("case", CASES)
def test_dense(case, device):
    problems.check_gradients(problems.dense(**CASES[case], device=device), "triton")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype, device):
    given = {"dtype": dtype, "device": device, "window": 3, "gate": True}
    problems.check_gradients(problems.dense(lengths=(17, 40), heads=(4, 2), **given), "triton")


@pytest.mark.parametrize("granularity", [4, 16])
def test_packed(granularity, device):
    given = {"granularity": granularity, "heads": (4, 2), "lists": 2, "device": device}
    problems.check_gradients(problems.packed(**given, window=4, gate=True, sinks=True), "triton")


@pytest.mark.parametrize("start", range(0, len(layouts.KINDS), 2))
def test_every_tensor_with_strides_of_its_own(start, device):
    (q, k, v, chosen), options = problems.dense(
        batch=2, heads=(4, 2), lists=2, lengths=(9, 33), gate=True, device=device
    )
    q, k, v, gate, ids, counts = layouts.different_layouts(
        q, k, v, options["gate"], chosen.ids, chosen.counts, start=start
    )
    chosen = bsk.KeySelection(ids, counts, granularity=16, kv_len=33)
    problems.check_gradients(((q, k, v, chosen), {**options, "gate": gate}), "triton")


def test_two_runs_give_the_same_bits(device):
    problem = problems.dense(heads=(4, 2), lists=2, gate=True, window=5, device=device)
    first, second = (problems.check_gradients(problem, "triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "gate", "sinks"])
def test_one_gradient_alone(wanted, device):
    (q, k, v, chosen), options = problems.dense(gate=True, sinks=True, device=device)
    tensors = {"q": q, "k": k, "v": v, "gate": options["gate"], "sinks": options["sinks"]}

    def gradient(names):
        own = {name: x.clone().requires_grad_(name in names) for name, x in tensors.items()}
        q, k, v, gate, sinks = own.values()
        out = bsk.sparse_attention(q, k, v, chosen, gate=gate, sinks=sinks, impl="triton")
        return torch.autograd.grad(out.square().sum(), own[wanted])[0]

    assert torch.equal(gradient([wanted]), gradient(list(tensors)))
