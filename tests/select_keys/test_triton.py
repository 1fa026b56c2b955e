"""The kernel of `select_keys` against the formula, interpreted and compiled.

Inputs are small whole numbers, as in `test_api.py`: choices must agree entry by entry.
"""

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.select_keys import SelectOptions, SelectProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.select_keys.op import select_dispatch
from blackwell_sparsek.testing import layouts

from .test_api import CASES, check, drawn

BY_NUMBER = [name for name, options in CASES.items() if "top_p" not in options]


def on(device, tensors):
    return [x.to(device) for x in tensors]


@pytest.mark.parametrize("case", BY_NUMBER)
def test_chooses_what_the_formula_chooses(case, device):
    check(*on(device, drawn(batch=1, heads=(2, 1), lengths=(9, 37))), CASES[case], "triton")


@pytest.mark.parametrize("lengths", [(1, 40), (20, 7)], ids=str)
def test_one_query_and_more_queries_than_keys(lengths, device):
    check(*on(device, drawn(lengths=lengths)), CASES["forced"], "triton")


@pytest.mark.parametrize("case", ["indexer", "max pool", "forced"])
def test_buffers_fill_up_more_than_once(case, device):
    q, k = on(device, drawn(batch=1, heads=(2, 1), lengths=(3, 150)))
    # the best come last, so that nothing is passed over
    k = k.sort(2).values
    check(q, k, CASES[case], "triton")


@pytest.mark.parametrize("size", [32, 64, 128])
def test_entries_of_every_size(size, device):
    options = {"granularity": size, "top_k": 3, "pool": "max"}
    check(*on(device, drawn(batch=1, heads=(2, 1), lengths=(2, 300))), options, "triton")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype, device):
    q, k = on(device, drawn(batch=1, dim=24))
    check(q.to(dtype), k.to(dtype), CASES["indexer"], "triton")


def test_equal_scores_go_to_the_lower_entry(device):
    q, k = torch.zeros(1, 1, 4, 8, device=device), torch.zeros(1, 1, 300, 8, device=device)
    chosen = bsk.select_keys(q, k, granularity=1, top_k=3, impl="triton")
    assert (chosen.ids == torch.arange(3, device=device)).all()
    # products of negative numbers and zero are zeros of either sign
    weights = torch.tensor([1.0, -1.0, 1.0, -1.0], device=device).view(1, 1, 4)
    chosen = bsk.select_keys(q, k, weights=weights, granularity=1, top_k=3, impl="triton")
    assert (chosen.ids == torch.arange(3, device=device)).all()


def test_nan_ranks_below_every_number(device):
    q = torch.ones(1, 1, 1, 4, device=device)
    k = torch.full((1, 1, 6, 4), -1e30, device=device)
    k[0, 0, 2:4] = torch.nan
    chosen = bsk.select_keys(q, k, granularity=1, top_k=5, impl="triton")
    assert chosen.ids.flatten().tolist() == [0, 1, 2, 4, 5]


def test_every_tensor_with_strides_of_its_own(device):
    q, k = on(device, drawn())
    q, k = layouts.different_layouts(q, k)
    check(q, k, CASES["max pool"], "triton")


def test_no_keys_and_no_queries(device):
    for lengths in ((3, 0), (0, 5)):
        q, k = on(device, drawn(lengths=lengths))
        chosen = bsk.select_keys(q, k, granularity=1, top_k=2, impl="triton")
        assert chosen.counts.shape == (2, 4, lengths[0]) and not chosen.counts.any()


def test_what_it_does_not_take(device):
    q, k = on(device, drawn())
    with pytest.raises(bsk.Unsupported, match="does not choose by share"):
        bsk.select_keys(q, k, granularity=1, top_p=0.5, impl="triton")
    long = torch.zeros(1, 1, 5000, 8, device=device)
    with pytest.raises(bsk.Unsupported, match="at most 4096 entries, got 5000"):
        bsk.select_keys(long, long, granularity=1, top_k=5000, impl="triton")


H200 = Arch("cuda", 90, 132, 232448, False)
CPU, INTERPRETED = (Arch("cpu", 0, 1, 0, flag) for flag in (False, True))


@pytest.mark.parametrize(
    ("arch", "top_p", "chosen", "reason"),
    [
        (H200, 0.0, "triton", None),
        (H200, 0.5, "eager", "does not choose by share"),
        (CPU, 0.0, "eager", "needs a CUDA GPU"),
        (INTERPRETED, 0.0, "eager", "would be interpreted: only runs when asked for"),
    ],
)
def test_what_auto_takes(arch, top_p, chosen, reason):
    options = SelectOptions(1, 1, 2, top_p)
    decision = select_dispatch.decide(
        "auto", SelectProblem(arch, torch.bfloat16, 1, 4, 9, 30, 64, options)
    )
    assert decision.chosen == chosen
    assert reason is None or reason in decision.reasons["triton"]


@pytest.mark.gpu
def test_auto_takes_the_kernel_on_a_gpu(device):
    q, k = on(device, drawn())
    assert bsk.explain(bsk.select_keys, q, k, granularity=1, top_k=2).chosen == "triton"


@pytest.mark.gpu
def test_long_lists(device):
    q, k = on(
        device, drawn(batch=1, heads=(8, 1), lengths=(70, 9001), dim=64, dtype=torch.bfloat16)
    )
    options = {"granularity": 1, "top_k": 2048, "weights": True, "activation": "relu"}
    first = check(q, k, options, "triton")
    second = check(q, k, options, "triton")
    assert torch.equal(first.ids, second.ids)


@pytest.mark.gpu
def test_many_heads_and_queries(device):
    """Steps of 128 keys, and more than one tile for some of the programs."""
    q, k = on(
        device, drawn(batch=1, heads=(32, 1), lengths=(4300, 2001), dim=64, dtype=torch.bfloat16)
    )
    options = {"granularity": 1, "top_k": 300, "weights": True, "activation": "relu"}
    check(q, k, options, "triton")


@pytest.mark.parametrize(("heads", "lists"), [((6, 3), 2), ((6, 3), 1), ((4, 2), 4), ((6, 1), 2)])
def test_lists_of_heads_that_read_one_or_several_key_heads(heads, lists, device):
    options = {"granularity": 1, "top_k": 5, "lists": lists, "activation": "relu"}
    check(*on(device, drawn(batch=1, heads=heads, lengths=(3, 37))), options, "triton")
