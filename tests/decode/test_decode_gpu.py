"""What only a GPU can say about decoding: graphs, streams, order, size, launches that repeat.

`PYTHONPATH=src python -m pytest -m gpu tests/gpu/test_decode.py`
"""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.decode import DecodeProblem
from blackwell_sparsek.decode import replay as decode_repeat
from blackwell_sparsek.decode import route
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.testing.decode_cases import DecodeCase, check_decode, draw_decode_case
from blackwell_sparsek.testing.poison import poisoned_empty

pytestmark = pytest.mark.gpu

BRAIN, HALF = torch.bfloat16, torch.float16
LLAMA = DecodeCase(1, BRAIN, heads=(32, 8), head_dims=(128, 128))


IMPLS = ("triton", "sm90")
chosen = "triton"


@pytest.fixture(autouse=True, params=IMPLS)
def implementation(request, monkeypatch):
    """Every test runs with both kernels, as far as they take its calls."""
    monkeypatch.setitem(globals(), "chosen", request.param)


def run(q, k, v, spec):
    why = getattr(route, f"why_not_{chosen}")(DecodeProblem.of(q, k, v, spec))
    if why is not None:
        pytest.skip(why)
    with poisoned_empty():
        return getattr(route, f"run_{chosen}")(q, k, v, spec)


def check(case):
    """Against the oracle on the host: token by token it is faster there."""
    q, k, v, spec = case.build("cuda")
    out, lse = run(q, k, v, spec)
    check_decode(out.cpu(), lse.cpu(), *case.build("cpu"), what=str(case))
    return out, lse


def call(q, k, v, spec, **options):
    return bsk.attention_decode(
        q, k, v, cache_seqlens=spec.cache_seqlens, page_table=spec.page_table,
        kv_blocks=spec.kv_blocks, kv_block_size=spec.kv_block_size or None, window=None,
        k_scale=spec.k_scale, v_scale=spec.v_scale, return_lse=True,
        **{"impl": chosen, **options},
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_random_calls(seed):
    check(draw_decode_case(seed, dtypes=(HALF, BRAIN, torch.float32), longest=400))


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("fp8", ["none", "head"])
def test_pages_give_the_bits_of_a_contiguous_cache(page_size, fp8):
    case = dataclasses.replace(LLAMA, lengths=(1000, 0, 37, 512), capacity=1024, fp8=fp8)
    contiguous = run(*case.build("cuda"))
    paged = run(*dataclasses.replace(case, page_size=page_size).build("cuda"))
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
        q, k, v, spec = case.build("cpu")
        spec = spec._replace(scale=spec.scale / factor)
        q[:, 1::2] *= 2.0**-6
        out, lse = run(*(x.cuda() for x in (q * factor, k, v)), _on_gpu(spec))
        check_decode(out.cpu(), lse.cpu(), q * factor, k, v, spec)


def _on_gpu(spec):
    return spec._replace(**{n: x.cuda() for n, x in spec._asdict().items() if torch.is_tensor(x)})


@pytest.mark.parametrize("page_size", [None, 64])
def test_long_stretches_give_the_same_bits_every_time(page_size):
    """As long as stretches whose last tiles are dealt out to whoever is done."""
    case = dataclasses.replace(LLAMA, lengths=(52000, 1, 9000, 3000))
    first = run(*case.build("cuda"))
    args = dataclasses.replace(case, page_size=page_size).build("cuda")
    for _ in range(20):
        again = run(*args)
        assert first[0].equal(again[0]) and first[1].equal(again[1])


def test_long_and_short_sequences_together():
    """Against eager, which reads what it needs: the oracle would take minutes."""
    lengths = (100, 52000, 7, 0, 9000, 1)
    q, k, v, spec = dataclasses.replace(LLAMA, lengths=lengths).build("cuda")
    out, lse = call(q, k, v, spec)
    exact, exact_lse = call(q, k, v, spec, impl="eager")
    torch.testing.assert_close(out, exact, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("page_size", [None, 64])
def test_graphs_replay_with_changed_lengths_and_tables(page_size):
    case = dataclasses.replace(LLAMA, lengths=(900, 4, 300), capacity=1024, page_size=page_size)
    q, k, v, spec = case.build("cuda")
    k.nan_to_num_(0.5), v.nan_to_num_(0.25)
    call(q, k, v, spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(q, k, v, spec)
    for lengths in ((900, 4, 300), (1, 1024, 0), (512, 512, 512), (0, 0, 0), (1024, 1024, 1024)):
        spec.cache_seqlens.copy_(torch.tensor(lengths))
        if page_size is not None:
            order = torch.randperm(spec.page_table.numel(), device="cuda")
            spec.page_table.copy_(order.view(spec.page_table.shape))
        out.fill_(torch.nan), lse.fill_(torch.nan)
        graph.replay()
        expected = run(q, k, v, spec)
        assert out.equal(expected[0]) and lse.equal(expected[1])


def test_graphs_of_two_streams_at_once():
    """Captured launches have counters of their own, whatever they are replayed beside."""
    cases = [dataclasses.replace(LLAMA, seed=s, lengths=(3000,)).build("cuda") for s in (1, 2)]
    expected = [run(*case)[0] for case in cases]
    for case in cases:
        call(*case)
    graphs, outs = [], []
    for case in cases:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append([call(*case)[0] for _ in range(5)])
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
    expected = [run(*case)[0] for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    outs = []
    for _ in range(50):
        for case, stream, exact in zip(cases, streams, expected, strict=True):
            with torch.cuda.stream(stream):
                outs.append((call(*case)[0], exact))
    torch.cuda.synchronize()
    assert all(out.equal(exact) for out, exact in outs)


def test_the_same_bits_every_time_under_load():
    q, k, v, spec = dataclasses.replace(LLAMA, lengths=(3000, 17, 900), page_size=64).build("cuda")
    first = run(q, k, v, spec)
    other = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(other):
            noise @ noise
        again = run(q, k, v, spec)
        assert first[0].equal(again[0]) and first[1].equal(again[1])


def test_repeated_calls_take_recorded_launches():
    case = dataclasses.replace(LLAMA, lengths=(300, 20), page_size=64)
    q, k, v, spec = case.build("cuda")
    decode_repeat._KNOWN.clear()
    first = call(q, k, v, spec)
    assert [x is not None for x in decode_repeat._KNOWN.values()] == [True]
    for lengths in ((300, 20), (7, 0)):
        spec.cache_seqlens.copy_(torch.tensor(lengths))
        q.normal_()
        again, exact = call(q, k, v, spec), run(q, k, v, spec)
        assert again[0].equal(exact[0]) and again[1].equal(exact[1])
    assert len(decode_repeat._KNOWN) == 1 and not first[0].isnan().any()


@pytest.mark.parametrize("page_size", [None, 16])
def test_out_of_range_numbers_are_nan_and_not_read(page_size):
    case = dataclasses.replace(LLAMA, lengths=(300, 200, 100), page_size=page_size)
    q, k, v, spec = case.build("cuda")
    fine = run(q, k, v, spec)
    if page_size is None:
        spec.cache_seqlens[1] = 2**30
    else:
        spec.page_table[1, 3] = 2**30
    out, lse = run(q, k, v, spec)
    torch.cuda.synchronize()
    assert out[1].isnan().all() and lse[1].isnan().all()
    torch.testing.assert_close(out[[0, 2]], fine[0][[0, 2]], rtol=2e-2, atol=2e-3)


def test_nothing_waits_for_the_device():
    q, k, v, spec = dataclasses.replace(LLAMA, lengths=(300, 20), page_size=64).build("cuda")
    call(q, k, v, spec)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(q, k, v, spec)
        bsk.attention_decode(
            q, k, v, cache_seqlens=spec.cache_seqlens, page_table=spec.page_table, window=64,
            impl=chosen,
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
    q, k, v, spec = dataclasses.replace(LLAMA, lengths=(3000, 100), band=Band(255, 0)).build("cuda")
    exact = run(q, k, v, spec)
    k[0, :, : 3000 - 256], v[0, :, : 3000 - 256] = torch.nan, torch.nan
    assert run(q, k, v, spec)[0].equal(exact[0])
