"""The kernel of `select_keys` against the formula, interpreted and compiled.

Inputs are small whole numbers, as in `test_api.py`: choices must agree entry by entry.
"""

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.select_keys import SelectOptions, SelectProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.select_keys import triton as kernels
from blackwell_sparsek.select_keys import tuning
from blackwell_sparsek.select_keys.op import select_dispatch
from blackwell_sparsek.testing import inputs, layouts

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


# Lists of many heads: scores are stored, some queries at a time, and entries chosen from them.

MANY = {"granularity": 1, "top_k": 60, "weights": True, "activation": "relu"}
STORED = {
    "indexer, two sequences": ({"batch": 2}, MANY),
    "two lists": ({"heads": (128, 2)}, {"granularity": 1, "top_k": 60, "lists": 2}),
    "max pool": ({}, MANY | {"granularity": 4, "pool": "max", "force_first": 1, "force_last": 2}),
    "mean pool, all seen": ({}, MANY | {"granularity": 4, "pool": "mean", "causal": False}),
}


@pytest.fixture
def chunks(monkeypatch):
    """(first row, rows) of each launch that chooses from stored scores, however few they are."""
    seen = []
    choose, select = kernels.launch_choose, kernels.launch_select_keys

    def note(ids, counts, call, scores, rows, config):
        seen.append(tuple(rows))
        scores[rows.count :] = torch.nan
        choose(ids, counts, call, scores, rows, config)

    def one_pass(*args):
        seen.append(None)
        select(*args)

    monkeypatch.setattr(kernels, "launch_choose", note)
    monkeypatch.setattr(kernels, "launch_select_keys", one_pass)
    monkeypatch.setattr(tuning, "FEWEST_ROWS", 1)
    monkeypatch.setattr(tuning, "SHORTEST_STEP", 64)
    # tiles of four queries, which large GPUs have, leave no room for the scores of one
    monkeypatch.setattr(tuning, "LARGE_SHARED", 2**31)
    return seen


def many_heads(device, dtype=torch.bfloat16, **sizes):
    """64 index heads; tiles of two queries, the last of them not full."""
    sizes = {"batch": 1, "heads": (64, 1), "lengths": (9, 100)} | sizes
    return on(device, drawn(dtype=dtype, **sizes))


@pytest.mark.parametrize("case", STORED)
def test_choices_from_stored_scores(case, device, chunks):
    sizes, options = STORED[case]
    chosen = check(*many_heads(device, **sizes), options, "triton")
    assert None not in chunks and len(chunks) > 1
    # every query once, those of all lists in order
    ends = [first + rows for first, rows in chunks]
    assert [first for first, _ in chunks] == [0, *ends[:-1]]
    assert ends[-1] == chosen.counts.numel()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16], ids=str)
def test_stored_scores_of_other_dtypes(dtype, device, chunks):
    q, k = many_heads(device, lengths=(14, 100))
    check(q.to(dtype), k.to(dtype), MANY, "triton")
    assert chunks and None not in chunks


def test_stored_scores_of_more_queries_than_keys_and_strides_of_their_own(device, chunks):
    q, k = layouts.different_layouts(*many_heads(device, lengths=(20, 12)))
    check(q, k, MANY, "triton")
    assert chunks and None not in chunks


def test_stored_scores_of_nan_infinity_and_zero(device, chunks):
    q, k = many_heads(device, lengths=(9, 70))
    q, k = q.abs() + 1, torch.zeros_like(k)
    k[0, 0, 3:5], k[0, 0, 7], k[0, 0, 9] = torch.nan, torch.inf, -torch.inf
    weights = torch.ones(q.shape[:3], device=device)
    weights[:, ::2] = -1.0
    options = {"granularity": 1, "weights": weights, "activation": "relu"}
    chosen = bsk.select_keys(q, k, **options, top_k=60, impl="triton")
    assert chunks and None not in chunks
    # inf - inf is NaN as well, ReLU makes 0 of -inf, and zeros of either sign are equal
    assert chosen.ids[0, 0, -1].tolist() == [j for j in range(63) if j not in (3, 4, 7)]


def test_stored_scores_need_room_for_a_few_rows(device, chunks):
    """Otherwise scores are computed and entries chosen in one launch."""
    check(*many_heads(device, lengths=(2, 100)), MANY | {"top_k": 5}, "triton")
    # and where heads read different keys
    check(*many_heads(device, heads=(64, 2), lengths=(3, 40)), MANY, "triton")
    assert chunks == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_an_indexer_of_64_heads(dtype, device):
    """As it is launched: chunks, strips of keys, and lists that fill up more than once."""
    q = inputs.integers(1, 64, 1500, 128, seed=1, bound=1, dtype=torch.bfloat16).to(device)
    k = inputs.integers(1, 1, 20001, 128, seed=2, bound=1, dtype=torch.bfloat16).to(device)
    weights = inputs.integers(1, 64, 1500, seed=3, bound=2).to(device)
    q, k = q.to(dtype), k.to(dtype)
    options = {"weights": weights, "activation": "relu", "granularity": 1, "top_k": 2048}
    torch.cuda.reset_peak_memory_stats()
    ours = bsk.select_keys(q, k, **options, impl="triton")
    # what was asked for: the allocator may hand out a megabyte more than that
    asked = "requested_bytes.all."
    memory = torch.cuda.memory_stats()
    extra = memory[f"{asked}peak"] - memory[f"{asked}current"]
    assert extra <= 2 * ours.ids.nbytes
    assert torch.equal(ours.ids, bsk.select_keys(q, k, **options, impl="triton").ids)
    exact = bsk.select_keys(q, k, **options, impl="eager")
    assert torch.equal(ours.ids, exact.ids) and torch.equal(ours.counts, exact.counts)
