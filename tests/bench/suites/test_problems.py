from types import SimpleNamespace

import pytest
import torch

from blackwell_sparsek import attention, attention_decode
from blackwell_sparsek.bench.suites.attention_problem import Attention, _sampled, attend
from blackwell_sparsek.bench.suites.decode import DECODE, Decode
from blackwell_sparsek.bench.suites.gradients import check_gradients, upstream_gradient

CPU = torch.device("cpu")
PROBLEMS = [
    Attention(1, 2, 100, 16, dtype=torch.float32),
    Attention(2, 4, 65, 16, kv_heads=2, dtype=torch.float32, causal=True),
    Attention(1, 2, 100, 24, dtype=torch.float32, causal=True, head_dim_v=16),
    Attention(1, 2, 100, 16, dtype=torch.float32, causal=True, window=7),
    Attention(1, 2, 100, 16, dtype=torch.float32, window=7),
    Attention(1, 2, 128, 16, dtype=torch.float32, block=(32, 16), density=0.3),
]


def _options(inputs):
    p = inputs.problem
    return {"causal": p.causal, "window": p.window, "block_mask": inputs.mask}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.title)
def test_visible_pairs_and_work_are_those_of_the_oracle(problem):
    inputs = problem.build(CPU)
    rows = torch.arange(problem.length)
    seen = torch.stack([inputs.visible(h, rows) for h in range(problem.heads)])
    assert inputs.pairs == problem.batch * seen.sum().item()
    assert inputs.flops == 2 * (problem.head_dim + problem.value_dim) * inputs.pairs
    exact = attention(
        inputs.q.double(),
        inputs.k.double(),
        inputs.v.double(),
        impl="reference",
        **_options(inputs),
    )
    group = problem.heads // (problem.kv_heads or problem.heads)
    for h in range(problem.heads):
        q, k, v = (
            x.double() for x in (inputs.q[0, h], inputs.k[0, h // group], inputs.v[0, h // group])
        )
        torch.testing.assert_close(attend(q, k, v, seen[h]), exact[0, h])


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.title)
def test_right_results_pass_and_wrong_ones_do_not(problem):
    inputs = problem.build(CPU)
    right = attention(inputs.q, inputs.k, inputs.v, **_options(inputs))
    check = inputs.check()
    check(right)
    for wrong in (right.roll(1, 2), right.roll(1, 1), right * 1.001, right[:, :, :-1]):
        with pytest.raises(AssertionError):
            check(wrong)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.title)
def test_right_gradients_pass_and_wrong_ones_do_not(problem):
    inputs = problem.build(CPU)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = attention(*leaves, **_options(inputs))
    right = torch.autograd.grad(out, leaves, upstream_gradient(inputs))
    check = check_gradients(inputs)
    check(right)
    for index, name in enumerate(("dq", "dk", "dv")):
        wrong = list(right)
        wrong[index] = right[index] * 1.001
        with pytest.raises(AssertionError, match=name):
            check(tuple(wrong))


def test_inputs_repeat_and_masks_have_the_density():
    problem = PROBLEMS[-1]
    inputs, again = problem.build(CPU), problem.build(CPU)
    assert torch.equal(inputs.q, again.q) and torch.equal(inputs.keep, again.keep)
    assert (inputs.keep.sum(-1) == round(0.3 * 8)).all()
    assert torch.equal(inputs.mask.to_dense()[0], inputs.keep)


def test_samples_hold_both_ends():
    assert _sampled(5, 9, CPU).tolist() == [0, 1, 2, 3, 4]
    places = _sampled(1000, 9, CPU).tolist()
    assert places[:3] == [0, 1, 2] and places[-3:] == [997, 998, 999]
    assert len(places) == 9


def test_titles_say_what_sets_a_problem_apart():
    assert [p.title for p in PROBLEMS] == [
        "B1 H2 S100 D16 full float32",
        "B2 H4:2 S65 D16 causal float32",
        "B1 H2 S100 D24/16 causal float32",
        "B1 H2 S100 D16 causal window 7 float32",
        "B1 H2 S100 D16 full window 7 float32",
        "B1 H2 S128 D16 blocks 32x16 at 30% float32",
    ]
    assert Attention(1, 16, 131072, 128, causal=True, window=2048).title == (
        "B1 H16 S128k D128 causal window 2048"
    )


@pytest.mark.parametrize("page_size", [0, 16])
def test_decoding_is_checked_against_the_cache_in_order(page_size):
    problem = Decode(3, 50, 4, 2, 16, page_size, torch.float32)
    inputs = problem.build(CPU)
    outs = []
    for b in range(3):
        for h in range(4):
            k, v = (inputs.sequence(x, b, h // 2) for x in (inputs.k, inputs.v))
            assert k.shape == (50, 16)
            seen = torch.ones(1, 50, dtype=torch.bool)
            outs.append(attend(inputs.q[b, h], k, v, seen))
    right = torch.stack(outs).view(3, 4, 1, 16)
    inputs.check(right)
    with pytest.raises(AssertionError, match="sampled"):
        inputs.check(right.roll(1, 1))
    with pytest.raises(AssertionError, match="expected"):
        inputs.check(right[:2])
    assert problem.cache_bytes == 2 * 3 * 2 * 50 * 16 * 4
    if page_size:
        assert sorted(inputs.table.flatten().tolist()) == list(range(12))


@pytest.mark.parametrize("page_size", [0, 16])
def test_several_queries_see_the_cache_up_to_themselves(page_size):
    problem = Decode(2, 50, 4, 2, 16, page_size, torch.float32, queries=3)
    inputs = problem.build(CPU)
    assert inputs.q.shape == (2, 4, 3, 16)
    assert inputs.seen(5).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1] * 5]
    where = {"cache_seqlens": inputs.lengths, "page_table": inputs.table}
    inputs.check(attention_decode(inputs.q, inputs.k, inputs.v, **where))
    with pytest.raises(AssertionError, match="sampled"):
        inputs.check(attention_decode(inputs.q, inputs.k, inputs.v, causal=False, **where))
    one = Decode(2, 50, 4, 2, 16, page_size, torch.float32)
    assert problem.cache_bytes == one.cache_bytes
    # of 3 * 50 pairs, the first query misses two and the second one
    assert problem.flops == one.flops * 147 / 50
    assert problem.title.startswith("B2 Q3 S50 H4:2 D16, ") and problem.describe()["queries"] == 3


def test_peers_for_several_queries_align_their_mask_at_the_end():
    several = Decode(2, 50, 4, 2, 16, 0, torch.float32, queries=3).build(CPU)
    contender = DECODE["sdpa"].prepare(several)
    contender.check(contender.run())
    on_gpu = SimpleNamespace(q=SimpleNamespace(is_cuda=True), blocks=None, table=None)
    one = "measured with one query a sequence"
    for queries, reason in ((1, None), (3, one)):
        on_gpu.problem = Decode(2, 50, 4, 2, 16, 0, torch.float32, queries=queries)
        assert DECODE["sdpa_cudnn"].supports(on_gpu) == reason
        assert DECODE["fa3"].supports(on_gpu) is None
        assert DECODE["sdpa"].supports(on_gpu) == (reason or "measured as cuDNN")
        on_gpu.table = several.lengths
        assert DECODE["flashinfer"].supports(on_gpu) == reason
        on_gpu.table = None


def test_sparse_and_fp8_caches_are_checked_on_what_is_read():
    problem = Decode(2, 120, 4, 2, 16, 16, torch.float32, kept=0.5)
    inputs = problem.build(CPU)
    assert inputs.blocks.shape == (2, 2, 4)
    inputs.blocks[0, 0, 0] = 7  # the last page, which is not full
    out = attention_decode(
        inputs.q,
        inputs.k,
        inputs.v,
        cache_seqlens=inputs.lengths,
        page_table=inputs.table,
        kv_blocks=inputs.blocks,
    )
    inputs.check(out)
    everything = attention_decode(
        inputs.q, inputs.k, inputs.v, cache_seqlens=inputs.lengths, page_table=inputs.table
    )
    with pytest.raises(AssertionError):
        inputs.check(everything)
    whole = Decode(2, 120, 4, 2, 16, 16, torch.float32)
    assert 2 * problem.cache_bytes == whole.cache_bytes and 2 * problem.flops == whole.flops
    fp8 = Decode(2, 120, 4, 2, 16, 0, torch.float32, is_fp8=True)
    assert fp8.build(CPU).k.dtype == torch.float8_e4m3fn
    assert 4 * fp8.cache_bytes == whole.cache_bytes
    assert fp8.title == "B2 S120 H4:2 D16, contiguous, fp8"
    assert problem.title == "B2 S120 H4:2 D16, pages of 16, 50% of them"


def test_what_a_backward_pass_multiplies():
    """Scores, dk and dq have the width of keys, dp and dv that of values."""
    assert Attention(1, 2, 64, 64).backward_work == 2.5
    assert Attention(1, 2, 64, 192, head_dim_v=128).backward_work == (3 * 192 + 2 * 128) / 320
