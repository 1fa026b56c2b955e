"""What only a GPU can say about decoding: graphs, streams, order, size, launches that repeat.

`PYTHONPATH=src python -m pytest -m gpu tests/decode/test_decode_gpu.py`
"""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.attention import AttnSpec
from blackwell_sparsek.decode import api, sm90_latent, triton, tuning
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.testing.attention_cases import check_attention
from blackwell_sparsek.testing.decode_cases import DecodeCase, check_decode, draw_decode_case
from blackwell_sparsek.testing.layouts import strided_like
from blackwell_sparsek.testing.poison import poisoned_empty

pytestmark = pytest.mark.gpu

BRAIN, HALF = torch.bfloat16, torch.float16
LLAMA = DecodeCase(1, BRAIN, heads=(32, 8), head_dims=(128, 128))


IMPLS = {"triton": triton.decode, "sm90": sm90_latent.decode}
chosen = "triton"


@pytest.fixture(autouse=True, params=IMPLS)
def implementation(request, monkeypatch):
    """Every test runs with both kernels, as far as they take its calls."""
    monkeypatch.setitem(globals(), "chosen", request.param)


def run(call):
    why = getattr(tuning, f"why_not_{chosen}")(call.problem)
    if why is not None:
        pytest.skip(why)
    with poisoned_empty():
        return IMPLS[chosen](call)


def check(case):
    """Against the oracle on the host: token by token it is faster there."""
    call = case.build("cuda")
    out, lse = run(call)
    # the budget of latent caches: a single key has a score of 36 truncated sums and nothing else
    roundings = 576 // 16 if case.latent else 1
    exact = case.build("cpu")
    check_decode(out.cpu(), lse.cpu(), exact, what=str(case), score_roundings=roundings)
    return out, lse


def public(call, **options):
    return bsk.attention_decode(
        call.q, call.k_cache, call.v_cache, cache_seqlens=call.cache_seqlens,
        page_table=call.page_table, kv_blocks=call.kv_blocks,
        kv_block_size=call.kv_block_size or None, window=None, k_scale=call.k_scale,
        v_scale=call.v_scale, return_lse=True,
        **{"impl": chosen, **options},
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_random_calls(seed):
    check(draw_decode_case(seed, dtypes=(HALF, BRAIN, torch.float32), longest=400))


# TMA does not take such rows, so only the portable kernel sees them in the next two tests
@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize("dims", [(128, 128), (72, 64)])
@pytest.mark.parametrize("page_size", [None, 16, 48])
@pytest.mark.parametrize("odd", ["k", "v", "kv"])
def test_rows_that_start_anywhere(odd, page_size, dims):
    """They are not copied asynchronously, and kernels are compiled anew for each combination."""
    case = dataclasses.replace(LLAMA, lengths=(200, 1, 37), page_size=page_size, head_dims=dims)
    call = case.build("cuda")
    names = [f"{letter}_cache" for letter in odd]
    caches = {name: strided_like(getattr(call, name), "row_gap") for name in names}
    out, lse = run(dataclasses.replace(call, **caches))
    check_decode(out.cpu(), lse.cpu(), case.build("cpu"))


@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize("dtype", [BRAIN, torch.float32])
@pytest.mark.parametrize("page_size, block_size", [(16, 16), (None, 16), (None, 20)])
def test_listed_rows_that_start_anywhere(page_size, block_size, dtype):
    """Heads begin at multiples of 16 bytes, tokens do not, and a tile holds several blocks."""
    case = DecodeCase(
        2, dtype, heads=(4, 1), lengths=(200, 1, 37), capacity=208, head_dims=(64, 64),
        page_size=page_size, block_size=block_size,
    )  # fmt: skip
    call = case.build("cuda")
    caches = {name: strided_like(getattr(call, name), "row_gap") for name in ("k_cache", "v_cache")}
    out, lse = run(dataclasses.replace(call, **caches))
    check_decode(out.cpu(), lse.cpu(), case.build("cpu"))


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("fp8", ["none", "head"])
def test_pages_give_the_bits_of_a_contiguous_cache(page_size, fp8):
    case = dataclasses.replace(LLAMA, lengths=(1000, 0, 37, 512), capacity=1024, fp8=fp8)
    contiguous = run(case.build("cuda"))
    paged = run(dataclasses.replace(case, page_size=page_size).build("cuda"))
    assert contiguous[0].equal(paged[0]) and contiguous[1].equal(paged[1])


@pytest.mark.parametrize(
    "page_size, q_len", [(None, 1), (16, 1), (64, 4), (256, 5), (None, 16), (64, 16)]
)
def test_sizes_of_models(page_size, q_len):
    check(dataclasses.replace(LLAMA, lengths=(600, 77), q_len=q_len, page_size=page_size))


@pytest.mark.parametrize("seed", range(12))
def test_random_calls_that_hopper_takes(seed):
    case = draw_decode_case(seed, dtypes=(HALF, BRAIN), longest=400)
    page_size = case.page_size if case.page_size in (16, 32, 64) else None
    block_size = page_size or (seed % 3 * 16 or None)
    check(
        dataclasses.replace(
            case,
            head_dims=((64, 64), (64, 128), (128, 64))[seed % 3],
            page_size=page_size,
            block_size=None if case.block_size is None else block_size,
        )
    )


@pytest.mark.sm90
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lengths": (300,), "sinks": True},
        {"q_len": 3, "page_size": 16, "softcap": 20.0},
        {"q_len": 9, "heads": (8, 2)},
        {"heads": (40, 1), "page_size": 64, "dtype": HALF},
        {"head_dims": (256, 128), "heads": (40, 1), "sinks": True},
        {"head_dims": (64, 256), "page_size": 48, "q_len": 2},
        {"page_size": 64, "block_size": 64, "keep": 0.5, "capacity": 512},
    ],
    ids=str,
)
def test_heads_of_256_channels(changes):
    """40 rows take two tiles of 32 if values have 256 channels, and one of 64 otherwise."""
    wide = DecodeCase(5, BRAIN, heads=(8, 4), lengths=(300, 0, 77), head_dims=(256, 256))
    check(dataclasses.replace(wide, **changes))


@pytest.mark.parametrize("page_size, block_size", [(64, 64), (16, 16), (None, 64), (None, 16)])
@pytest.mark.parametrize("keep", [0.3, 1.0])
def test_listed_blocks(page_size, block_size, keep):
    check(
        dataclasses.replace(
            LLAMA, lengths=(1000, 0, 37, 512), capacity=1024, page_size=page_size,
            block_size=block_size, keep=keep,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "scales, page_size, dtype", [("tensor", None, BRAIN), ("head", 64, BRAIN), ("head", 16, HALF)]
)
def test_fp8_caches(scales, page_size, dtype):
    check(
        dataclasses.replace(LLAMA, dtype=dtype, lengths=(300, 77), fp8=scales, page_size=page_size)
    )


@pytest.mark.parametrize("options", [{}, {"page_size": 64, "block_size": 64, "keep": 0.3}])
def test_fp8_with_queries_sinks_and_softcap(options):
    case = dataclasses.replace(LLAMA, lengths=(300, 0, 77), fp8="head", q_len=3)
    check(dataclasses.replace(case, sinks=True, softcap=5.0, band=Band(100, 0), **options))


def test_queries_outside_of_the_range_of_fp16():
    """Keys of an fp8 cache are multiplied as fp16, queries in bf16 reach further."""
    case = dataclasses.replace(LLAMA, lengths=(65,), fp8="tensor")
    for factor in (2.0**40, 2.0**-40):
        call = case.build("cpu")
        call.q[:, 1::2] *= 2.0**-6
        call = dataclasses.replace(call, q=call.q * factor, scale=call.scale / factor)
        out, lse = run(_on_gpu(call))
        check_decode(out.cpu(), lse.cpu(), call)


def _on_gpu(call):
    tensors = {name: x.cuda() for name, x in vars(call).items() if torch.is_tensor(x)}
    return dataclasses.replace(call, **tensors)


@pytest.mark.parametrize("page_size", [None, 64])
def test_long_splits_give_the_same_bits_every_time(page_size):
    case = dataclasses.replace(LLAMA, lengths=(52000, 1, 9000, 3000))
    first = run(case.build("cuda"))
    call = dataclasses.replace(case, page_size=page_size).build("cuda")
    for _ in range(20):
        again = run(call)
        assert first[0].equal(again[0]) and first[1].equal(again[1])


def test_long_and_short_sequences_together():
    """Each has a budget of its own; the oracle of decoding, token by token, would take minutes."""
    lengths = (100, 52000, 7, 0, 9000, 1)
    call = dataclasses.replace(LLAMA, lengths=lengths).build("cuda")
    out, lse = public(call)
    for b, n in enumerate(lengths):
        own, spec = slice(b, b + 1), AttnSpec(call.scale, max_q=1, max_k=n)
        k, v = (x[own, :, :n] for x in (call.k_cache, call.v_cache))
        check_attention(out[own], lse[own], call.q[own], k, v, spec, what=f"length {n}")


@pytest.mark.parametrize("page_size", [None, 64])
def test_graphs_replay_with_changed_lengths_and_tables(page_size):
    case = dataclasses.replace(LLAMA, lengths=(900, 4, 300), capacity=1024, page_size=page_size)
    call = case.build("cuda")
    call.k_cache.nan_to_num_(0.5), call.v_cache.nan_to_num_(0.25)
    public(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = public(call)
    for lengths in ((900, 4, 300), (1, 1024, 0), (512, 512, 512), (0, 0, 0), (1024, 1024, 1024)):
        call.cache_seqlens.copy_(torch.tensor(lengths))
        if page_size is not None:
            order = torch.randperm(call.page_table.numel(), device="cuda")
            call.page_table.copy_(order.view(call.page_table.shape))
        out.fill_(torch.nan), lse.fill_(torch.nan)
        graph.replay()
        expected = run(call)
        assert out.equal(expected[0]) and lse.equal(expected[1])


def test_graphs_of_two_streams_at_once():
    """Captured launches have counters of their own, whatever they are replayed beside."""
    cases = [dataclasses.replace(LLAMA, seed=s, lengths=(3000,)).build("cuda") for s in (1, 2)]
    expected = [run(case)[0] for case in cases]
    for case in cases:
        public(case)
    graphs, outs = [], []
    for case in cases:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append([public(case)[0] for _ in range(5)])
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for made, exact in zip(outs, expected, strict=True):
        assert all(out.equal(exact) for out in made)


def test_streams_at_once():
    cases = [dataclasses.replace(LLAMA, seed=s, lengths=(3000,)).build("cuda") for s in (1, 2)]
    expected = [run(case)[0] for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    outs = []
    for _ in range(50):
        for case, stream, exact in zip(cases, streams, expected, strict=True):
            with torch.cuda.stream(stream):
                outs.append((public(case)[0], exact))
    torch.cuda.synchronize()
    assert all(out.equal(exact) for out, exact in outs)


def test_the_same_bits_every_time_under_load():
    call = dataclasses.replace(LLAMA, lengths=(3000, 17, 900), page_size=64).build("cuda")
    first = run(call)
    other = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(other):
            noise @ noise
        again = run(call)
        assert first[0].equal(again[0]) and first[1].equal(again[1])


MLA = DecodeCase(2, BRAIN, heads=(128, 1), head_dims=(576, 512), latent=True)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize(
    "options",
    [
        {"lengths": (9000,)},
        {"lengths": (5000, 1, 700), "page_size": 64},
        {"lengths": (300, 0, 4000), "head_dims": (64, 64), "sinks": True},
        {"lengths": (130, 9000), "q_len": 2, "dtype": HALF},
        {"lengths": (2000, 64), "fp8": "head", "page_size": 16},
        {"lengths": (800,) * 40},
    ],
    ids=str,
)
def test_many_heads_share_a_cache(heads, options):
    """Parts of so many rows are combined by a launch of their own."""
    case = dataclasses.replace(LLAMA, heads=(heads, 1), **options)
    first = check(case)
    call = case.build("cuda")
    for _ in range(5):
        again = run(call)
        assert first[0].equal(again[0]) and first[1].equal(again[1])


def test_values_of_their_own_are_left_to_the_portable_kernel():
    case = dataclasses.replace(MLA, heads=(16, 1), lengths=(200,), latent=False)
    call = case.build("cuda")
    reason = tuning.why_not_sm90(call.problem)
    assert reason is None or "view of the keys" in reason or "sm_90" in reason
    out, lse = triton.decode(call)
    check_decode(out.cpu(), lse.cpu(), case.build("cpu"))


MQA = dataclasses.replace(LLAMA, heads=(32, 1))


@pytest.mark.parametrize("case", [LLAMA, MLA, MQA], ids=["llama", "mla", "mqa"])
def test_repeated_calls_take_recorded_launches(case):
    case = dataclasses.replace(case, lengths=(300, 20), page_size=64)
    call = case.build("cuda")
    api._RECORDED.clear()
    first = public(call)
    public(call)
    assert [x is not None for x in api._RECORDED.values()] == [True]
    for lengths in ((300, 20), (7, 0)):
        call.cache_seqlens.copy_(torch.tensor(lengths))
        call.q.normal_()
        again, exact = public(call), run(call)
        assert again[0].equal(exact[0]) and again[1].equal(exact[1])
    assert len(api._RECORDED) == 1 and not first[0].isnan().any()


@pytest.mark.parametrize("page_size", [None, 16])
def test_out_of_range_numbers_are_nan_and_not_read(page_size):
    case = dataclasses.replace(LLAMA, lengths=(300, 200, 100), page_size=page_size)
    call, exact = case.build("cuda"), case.build("cpu")
    if page_size is None:
        call.cache_seqlens[1] = 2**30
    else:
        call.page_table[1, 3] = 2**30
    out, lse = run(call)
    torch.cuda.synchronize()
    assert out[1].isnan().all() and lse[1].isnan().all()
    others = [0, 2]
    per_sequence = ("q", "cache_seqlens") + (
        ("k_cache", "v_cache") if page_size is None else ("page_table",)
    )
    part = {name: getattr(exact, name)[others] for name in per_sequence}
    check_decode(out[others].cpu(), lse[others].cpu(), dataclasses.replace(exact, **part))


def test_nothing_waits_for_the_device():
    call = dataclasses.replace(LLAMA, lengths=(300, 20), page_size=64).build("cuda")
    public(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        public(call)
        bsk.attention_decode(
            call.q, call.k_cache, call.v_cache, cache_seqlens=call.cache_seqlens,
            page_table=call.page_table, window=64, impl=chosen,
        )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_than_2_31_elements():
    """Pages past 2^31 elements into the cache; 4.3 GB each."""
    pages = 2**31 // (64 * 8 * 128) + 8
    k, v = (torch.empty(pages, 64, 8, 128, device="cuda", dtype=BRAIN) for _ in range(2))
    used = torch.tensor([[pages - 1, 0, pages - 3]], dtype=torch.int32, device="cuda")
    for cache in (k, v):
        cache[used[0].long()] = torch.randn(3, 64, 8, 128, device="cuda", dtype=BRAIN)
    q = torch.randn(1, 32, 1, 128, device="cuda", dtype=BRAIN)
    lengths = torch.tensor([180], dtype=torch.int32, device="cuda")
    out = bsk.attention_decode(q, k, v, cache_seqlens=lengths, page_table=used, impl=chosen)
    near = torch.arange(3, dtype=torch.int32, device="cuda")[None]
    small = (x[used[0].long()].contiguous() for x in (k, v))
    exact = bsk.attention_decode(q, *small, cache_seqlens=lengths, page_table=near, impl=chosen)
    assert out.equal(exact)


def test_windows_read_what_they_show():
    call = dataclasses.replace(LLAMA, lengths=(3000, 100), band=Band(255, 0)).build("cuda")
    exact = run(call)
    call.k_cache[0, :, : 3000 - 256], call.v_cache[0, :, : 3000 - 256] = torch.nan, torch.nan
    assert run(call)[0].equal(exact[0])


def test_an_output_that_is_given():
    """Also by recorded launches, and each time into the tensor of that call."""
    call = LLAMA.build("cuda")
    why = getattr(tuning, f"why_not_{chosen}")(call.problem)
    if why is not None:
        pytest.skip(why)
    expected, expected_lse = public(call)
    for _ in range(4):
        out = torch.full_like(expected, torch.nan)
        got, lse = public(call, out=out)
        assert got is out and out.equal(expected) and lse.equal(expected_lse)
