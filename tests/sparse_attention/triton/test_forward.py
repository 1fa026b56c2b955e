"""The forward kernel against the oracle in fp64, interpreted and compiled."""

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.testing import guard, layouts

from .. import problems

CASES = {
    "one query": {"lengths": (1, 40)},
    "more queries than keys": {"lengths": (40, 17)},
    "no keys": {"lengths": (5, 0)},
    "groups of three": {"batch": 2, "heads": (6, 2), "lists": 2, "lengths": (33, 65)},
    "a list per query head": {"heads": (4, 2), "lists": 4, "lengths": (17, 50)},
    "one list for all": {"heads": (4, 4), "lists": 1, "lengths": (17, 50)},
    "blocks of 128": {"granularity": 128, "most": 2, "lengths": (9, 300), "dims": (24, 40)},
    "blocks of 32": {"granularity": 32, "heads": (20, 1), "lengths": (7, 70)},
    "single keys": {"granularity": 1, "most": 40, "lengths": (5, 63), "heads": (3, 1)},
    "entries of four": {"granularity": 4, "most": 5, "lengths": (7, 31), "dims": (16, 24)},
    "not causal": {"causal": False, "lengths": (17, 63)},
    "near keys": {"window": 7, "lengths": (33, 65)},
    "near keys on both sides": {"window": (None, 3), "causal": False, "lengths": (17, 40)},
    "gates": {"gate": True, "lengths": (33, 65), "most": 4},
    "all of it": {
        **{"batch": 2, "heads": (4, 2), "lists": 2, "lengths": (31, 65), "window": (5, 0)},
        **{"sinks": True, "gate": True, "softcap": 2.0, "scale": -0.7},
    },
    "gated single keys": {"granularity": 1, "gate": True, "window": 3, "sinks": True, "most": 7},
}


@pytest.mark.parametrize("case", CASES)
def test_dense(case, device):
    problems.check_forward(problems.dense(**CASES[case], device=device), "triton")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype, device):
    given = {"dtype": dtype, "device": device, "window": 3, "gate": True}
    problems.check_forward(problems.dense(lengths=(33, 65), heads=(4, 2), **given), "triton")


@pytest.mark.parametrize("granularity", [4, 16])
def test_packed(granularity, device):
    given = {"granularity": granularity, "heads": (4, 2), "lists": 2, "device": device}
    problems.check_forward(problems.packed(**given, window=4, gate=True, sinks=True), "triton")


@pytest.mark.parametrize(("size", "q_len", "page_size"), [(16, 1, 16), (4, 3, 7), (64, 2, 9)])
def test_pages(size, q_len, page_size, device):
    given = {"granularity": size, "q_len": q_len, "page_size": page_size, "device": device}
    problems.check_forward(problems.paged(**given, window=4, gate=True), "triton")


@pytest.mark.parametrize("start", range(len(layouts.KINDS)))
def test_every_tensor_with_strides_of_its_own(start, device):
    (q, k, v, chosen), options = problems.dense(
        batch=2, heads=(4, 2), lists=2, lengths=(9, 33), gate=True, device=device
    )
    q, k, v, gate, ids, counts = layouts.different_layouts(
        q, k, v, options["gate"], chosen.ids, chosen.counts, start=start
    )
    # what is listed nowhere may hold anything, and does
    chosen = bsk.KeySelection(ids, counts, granularity=16, kv_len=33)
    problems.check_forward(((q, k, v, chosen), {**options, "gate": gate}), "triton")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("granularity", [1, 16])
def test_reads_nothing_outside(granularity, side, interpreted):
    (q, k, v, chosen), options = problems.dense(granularity=granularity, gate=True, window=3)
    tensors = (q, k, v, options["gate"], chosen.ids, chosen.counts)
    q, k, v, gate, ids, counts = guard.guard_pages(*tensors, side=side)
    chosen = bsk.KeySelection(ids, counts, granularity=granularity, kv_len=33)
    problems.check_forward(((q, k, v, chosen), {**options, "gate": gate}), "triton")


@pytest.mark.parametrize("granularity", [1, 16])
@pytest.mark.parametrize("wrong", [-7, 1000])
def test_an_index_out_of_range_makes_its_query_nan(granularity, wrong, device):
    (q, k, v, chosen), _ = problems.dense(granularity=granularity, lengths=(17, 64), device=device)
    indices = torch.where(chosen.listed(), chosen.ids, -1)
    indices[0, 0, 5, 0] = wrong
    bad = bsk.KeySelection.from_indices(indices, granularity=granularity, kv_len=64, check=False)
    out, lse = bsk.sparse_attention(q, k, v, bad, return_lse=True, impl="triton")
    right = bsk.sparse_attention(q, k, v, chosen, impl="triton")
    rows = torch.arange(17, device=device) == 5
    assert out[:, :, rows].isnan().all() and lse[:, :, rows].isnan().all()
    assert torch.equal(out[:, :, ~rows], right[:, :, ~rows])


def test_a_page_or_length_out_of_range_makes_its_sequence_nan(device):
    arguments, options = problems.paged(k_lens=(30, 20, 20), device=device)
    options["page_table"][0, 1] = -3
    options["cache_seqlens"][1] = 10**5
    out = bsk.sparse_attention(*arguments, **options, causal=True, window=40, impl="triton")
    assert out.isnan().flatten(1).all(1).tolist() == [True, True, False]


def test_wrong_counts_make_their_query_nan(device):
    (q, k, v, chosen), _ = problems.dense(device=device)
    counts = chosen.counts.clone()
    counts[0, 0, 3], counts[0, 0, 4] = 99, -1
    bad = bsk.KeySelection._from_tensors(chosen.ids, counts, 16, 33)
    out = bsk.sparse_attention(q, k, v, bad, impl="triton")
    assert out.isnan().all(-1)[0, 0].nonzero().flatten().tolist() == [3, 4]


LATENT = {
    "latent attention": {"heads": (8, 1), "dims": (576, 512), "granularity": 1, "most": 40},
    "latent blocks": {"heads": (3, 1), "dims": (576, 512), "lengths": (3, 40)},
    "other wide heads": {"heads": (2, 1), "dims": (320, 264), "granularity": 4, "most": 9},
    "wide heads of a power of two": {"heads": (2, 1), "dims": (512, 20), "lengths": (3, 40)},
}


@pytest.mark.parametrize("case", LATENT)
def test_heads_wider_than_256(case, device):
    given = {"lengths": (2, 60), "window": 3, "sinks": True, "scale": -0.05, **LATENT[case]}
    problems.check_forward(
        problems.dense(**given, dtype=torch.bfloat16, gate=True, device=device), "triton"
    )


def test_pages_of_latent_keys(device):
    given = {"heads": (8, 1), "lists": 1, "dims": (576, 512), "granularity": 1, "most": 20}
    problem = problems.paged(**given, dtype=torch.float16, k_lens=(20, 37), device=device)
    problems.check_forward(problem, "triton")


@pytest.mark.parametrize(
    ("dims", "dtype", "reason"),
    [
        ((577, 512), torch.float16, "1 to 256, or 576 and 512 in 16 bits, got 577 and 512"),
        ((576, 513), torch.float16, "1 to 256, or 576 and 512 in 16 bits, got 576 and 513"),
        ((576, 512), torch.float32, "needs 16-bit tensors for head dimensions above 256"),
    ],
)
def test_heads_that_are_too_wide(dims, dtype, reason, device):
    arguments, options = problems.dense(dims=dims, dtype=dtype, lengths=(1, 16), device=device)
    with pytest.raises(bsk.Unsupported, match=reason):
        bsk.sparse_attention(*arguments, **options, impl="triton")


def test_latent_attention_has_no_gradients(device):
    (q, k, v, chosen), options = problems.dense(
        dims=(576, 512), dtype=torch.float16, lengths=(1, 16), device=device
    )
    out = bsk.sparse_attention(q.requires_grad_(), k, v, chosen, **options, impl="triton")
    with pytest.raises(bsk.Unsupported, match="has no gradients for head dimensions above 256"):
        out.sum().backward()
