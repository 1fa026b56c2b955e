"""What only a GPU can say about each forward kernel: graphs, streams, size, order.

`PYTHONPATH=src python -m pytest -m gpu tests/gpu/test_attention_kernels.py`
"""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention.sm90 import launch as attention_sm90
from blackwell_sparsek.attention.triton import forward as attention_triton
from blackwell_sparsek.calls.attention import AttentionCall, AttnSpec, empty_lse, empty_out
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.testing.attention_cases import AttnCase, check_attention
from blackwell_sparsek.testing.poison import poisoned_empty

pytestmark = pytest.mark.gpu

BRAIN = torch.bfloat16


@pytest.fixture(
    params=[
        pytest.param(attention_triton, id="triton"),
        pytest.param(attention_sm90, id="sm90", marks=pytest.mark.sm90),
    ]
)
def forward(request):
    """The forward function of an implementation."""
    return request.param.forward


def run(forward, q, k, v, spec):
    with poisoned_empty():
        return forward(AttentionCall(q, k, v, spec))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_sizes_of_models(forward, dim, causal):
    """Every SM takes several work tiles; the oracle looks at one head."""
    q, k, v, spec = AttnCase(
        2, BRAIN, batch=2, heads=(32, 8), lengths=((2049, 4100),), head_dims=(dim, dim),
        band=Band(None, 0) if causal else EVERYTHING,
    ).build("cuda")  # fmt: skip
    out, lse = run(forward, q, k, v, spec)
    some, kv = (slice(1, 2), slice(21, 22)), (slice(1, 2), slice(5, 6))
    check_attention(out[some], lse[some], q[some], k[kv], v[kv], spec)
    assert not out.isnan().any() and not lse.isnan().any()


@pytest.mark.parametrize("block_kv", [16, 64, 128])
def test_block_masks_of_models(forward, block_kv):
    keep = torch.rand(1, 2, 16, 2048 // block_kv, device="cuda") < 0.2
    mask = BlockMask.from_dense(keep, (128, block_kv))
    q, k, v, spec = AttnCase(3, BRAIN, heads=(2, 2), lengths=((2048, 2048),)).build("cuda")
    for band in (Band(None, None), Band(None, 0)):
        masked = spec._replace(block_mask=mask, band=band)
        check_attention(*run(forward, q, k, v, masked), q, k, v, masked)


@pytest.mark.parametrize("masked", [False, True])
def test_graphs_replay_with_changed_inputs(forward, masked):
    case = AttnCase(
        4, BRAIN, heads=(4, 2), lengths=((200, 333),), head_dims=(64, 64), band=Band(None, 0),
        mask="elements" if masked else "none", block_size=(64, 64),
    )  # fmt: skip
    q, k, v, spec = case.build("cuda")
    out, lse = empty_out(q, 64), empty_lse(q)

    def step():
        a, b = forward(AttentionCall(q, k, v, spec))
        out.copy_(a), lse.copy_(b)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in (5, 6):
        torch.manual_seed(seed)
        for x in (q, k, v):
            x.normal_()
        out.fill_(torch.nan), lse.fill_(torch.nan)
        graph.replay()
        expected = forward(AttentionCall(q, k, v, spec))
        assert out.equal(expected[0]) and lse.equal(expected[1])
        check_attention(out, lse, q, k, v, spec)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_bits_every_time_under_load(forward, seed):
    case = AttnCase(
        seed, BRAIN, batch=2, heads=(8, 2), lengths=((500, 700),), head_dims=(128, 128),
        band=Band(300, 0), mask="elements" if seed % 2 else "none", block_size=(128, 32),
    )  # fmt: skip
    q, k, v, spec = case.build("cuda")
    first = run(forward, q, k, v, spec)
    other = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(other):
            noise @ noise
        again = forward(AttentionCall(q, k, v, spec))
        assert first[0].equal(again[0]) and first[1].equal(again[1])


def test_streams(forward):
    q, k, v, spec = AttnCase(7, BRAIN, heads=(4, 4), lengths=((512, 512),)).build("cuda")
    expected = run(forward, q, k, v, spec)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = q.clone()  # on a wrong stream the kernel would read this too early
        out = forward(AttentionCall(late, k, v, spec))
    torch.cuda.current_stream().wait_stream(stream)
    assert out[0].equal(expected[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device(forward):
    q, k, v, spec = AttnCase(8, BRAIN, lengths=((100, 100),)).build("cuda:1")
    check_attention(*run(forward, q, k, v, spec), q, k, v, spec)


def test_more_heads_than_grid_y_takes(forward):
    q = torch.randn(70000, 1, 3, 64, device="cuda", dtype=BRAIN)
    k = torch.randn(70000, 1, 5, 64, device="cuda", dtype=BRAIN)
    spec = AttnSpec(0.125, max_q=3, max_k=5)
    check_attention(*run(forward, q, k, k, spec), q, k, k, spec)


def test_more_than_2_31_elements(forward):
    """The last rows against the oracle on the keys they see; 4.3 GB each."""
    tokens = 2**31 // (128 * 8) + 1000
    q, k, v = (torch.randn(1, tokens, 8, 128, device="cuda", dtype=BRAIN) for _ in range(3))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    spec = AttnSpec(128**-0.5, Band(255, 0), max_q=tokens, max_k=tokens)
    out, lse = run(forward, q, k, v, spec)
    rows, keys = slice(tokens - 300, tokens), slice(tokens - 600, tokens)
    last = (q[:, :, rows], k[:, :, keys], v[:, :, keys], spec._replace(max_q=300, max_k=600))
    check_attention(out[:, :, rows], lse[:, :, rows], *last)
    assert not out.isnan().any()


def test_long_windows_need_no_square_memory(forward):
    tokens = 2**19
    q = torch.randn(1, 1, tokens, 64, device="cuda", dtype=BRAIN)
    spec = AttnSpec(0.125, Band(2047, 0), max_q=tokens, max_k=tokens)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = run(forward, q, q, q, spec)
    assert torch.cuda.max_memory_allocated() - before < 2 * q.numel() * 2 + tokens * 8
    assert out.isfinite().all()


def test_unused_slots_are_not_read(forward):
    q, k, v, spec = AttnCase(
        9, BRAIN, batch=2, heads=(4, 2), lengths=((100, 173),), head_dims=(128, 128)
    ).build("cuda")
    caches = [torch.full((2, 2, 512, 128), torch.nan, device="cuda", dtype=BRAIN) for _ in "kv"]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[:, :, :173] = x
    slices = [cache[:, :, :173] for cache in caches]
    check_attention(*run(forward, q, *slices, spec), q, k, v, spec)


def test_rows_that_see_nothing(forward):
    keep = torch.zeros(1, 1, 4, 4, dtype=torch.bool, device="cuda")
    keep[..., 1, 2] = True
    mask = BlockMask.from_dense(keep, (128, 128))
    q, k, v, spec = AttnCase(10, BRAIN, lengths=((512, 512),)).build("cuda")
    out, lse = run(forward, q, k, v, spec._replace(block_mask=mask))
    empty = torch.ones(512, dtype=torch.bool)
    empty[128:256] = False
    assert out[0, 0, empty].eq(0).all() and lse[0, 0, empty].eq(-torch.inf).all()
    assert out[0, 0, 128:256].isfinite().all()
