"""What only a GPU can say about the forward kernel: the real compiler, bf16, graphs, size, order.

`PYTHONPATH=src python -m pytest -m gpu tests/gpu/test_attention_gpu.py`
"""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.formats.attention_spec import AttnSpec, empty_lse, empty_out
from blackwell_sparsek.formats.band import Band
from blackwell_sparsek.formats.block_mask import BlockMask
from blackwell_sparsek.functional.attention import attention
from blackwell_sparsek.functional.varlen import attention_varlen
from blackwell_sparsek.ops import attention_triton
from blackwell_sparsek.testing import layouts
from blackwell_sparsek.testing.attention_cases import AttnCase, check_attention, draw_case
from blackwell_sparsek.testing.poison import poisoned_empty

pytestmark = pytest.mark.gpu

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
# Each structure is compiled once, in some seconds, and then sees many calls.
STRUCTURES = 32
CALLS = 12
# (structure, seed) pairs that ever failed stay here
CORPUS: tuple[tuple[int, int], ...] = ()


def run(q, k, v, spec):
    with poisoned_empty():
        return attention_triton.forward(q, k, v, spec)


def check_random_call(structure, seed):
    case = draw_case(
        seed,
        structure,
        dtypes=(BRAIN, HALF),
        longest=300,
        head_dims=(16, 40, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256),
        block_sizes=(16, 32, 64, 128, 256),
        most_heads=14,
    )
    q, k, v, spec = case.build("cuda")
    q, k, v = layouts.different_layouts(q, k, v, start=structure)
    check_attention(*run(q, k, v, spec), q, k, v, spec, what=f"structure {structure}, {case}")


@pytest.mark.parametrize("structure", range(STRUCTURES))
def test_random_calls(structure):
    for seed in range(structure * CALLS, (structure + 1) * CALLS):
        check_random_call(structure, seed)


@pytest.mark.parametrize("structure, seed", CORPUS)
def test_calls_that_failed(structure, seed):
    check_random_call(structure, seed)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fp32(dim, tf32):
    case = AttnCase(1, FLOAT, heads=(2, 1), lengths=((129, 257),), head_dims=(dim, dim))
    q, k, v, spec = case.build("cuda")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        out, lse = run(q, k, v, spec)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    if tf32:
        exact = run(q, k, v, spec)[0]
        assert (out - exact).abs().max() < 4e-3
    else:
        check_attention(out, lse, q, k, v, spec)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_sizes_of_models(dim, causal):
    """Many tiles in both loops; the oracle looks at one head."""
    q, k, v, spec = AttnCase(
        2, BRAIN, batch=2, heads=(8, 2), lengths=((2049, 4100),), head_dims=(dim, dim),
        band=Band(None, 0) if causal else Band(None, None),
    ).build("cuda")  # fmt: skip
    out, lse = run(q, k, v, spec)
    some = (slice(1, 2), slice(5, 6)), (slice(1, 2), slice(1, 2))
    check_attention(out[some[0]], lse[some[0]], q[some[0]], k[some[1]], v[some[1]], spec)


@pytest.mark.parametrize("block_kv", [16, 64, 128])
def test_block_masks_of_models(block_kv):
    keep = torch.rand(1, 2, 16, 2048 // block_kv, device="cuda") < 0.2
    mask = BlockMask.from_dense(keep, (128, block_kv))
    q, k, v, spec = AttnCase(3, BRAIN, heads=(2, 2), lengths=((2048, 2048),)).build("cuda")
    for band in (Band(None, None), Band(None, 0)):
        masked = spec._replace(block_mask=mask, band=band)
        check_attention(*run(q, k, v, masked), q, k, v, masked)


def test_auto_takes_triton():
    from blackwell_sparsek import explain

    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=BRAIN)
    assert explain(attention, q, q, q).chosen in ("triton", "sm90")
    assert attention(q, q, q, impl="triton").shape == q.shape


@pytest.mark.parametrize("masked", [False, True])
def test_graphs_replay_with_changed_inputs(masked):
    case = AttnCase(
        4, BRAIN, heads=(4, 2), lengths=((200, 333),), head_dims=(64, 64), band=Band(None, 0),
        mask="elements" if masked else "none", block_size=(64, 64),
    )  # fmt: skip
    q, k, v, spec = case.build("cuda")
    out, lse = empty_out(q, 64), empty_lse(q)

    def step():
        a, b = attention_triton.forward(q, k, v, spec)
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
        expected = attention_triton.forward(q, k, v, spec)
        assert out.equal(expected[0]) and lse.equal(expected[1])
        check_attention(out, lse, q, k, v, spec)


def test_packed_graph_replays_with_other_lengths():
    q = torch.randn(256, 2, 64, device="cuda", dtype=BRAIN)
    cu = torch.tensor([0, 100, 256], device="cuda", dtype=torch.int32)

    def call():
        return attention_varlen(
            q, q, q, cu, cu, max_seqlen_q=256, max_seqlen_k=256, causal=True, impl="triton"
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for ends in ([0, 7, 256], [0, 0, 256], [0, 256, 256]):
        cu.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        assert out.equal(call())


@pytest.mark.parametrize("seed", range(4))
def test_the_same_bits_every_time_under_load(seed):
    case = AttnCase(
        seed, BRAIN, batch=2, heads=(8, 2), lengths=((500, 700),), head_dims=(128, 128),
        band=Band(300, 0), mask="elements" if seed % 2 else "none", block_size=(128, 32),
    )  # fmt: skip
    q, k, v, spec = case.build("cuda")
    first = run(q, k, v, spec)
    other = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(other):
            noise @ noise
        again = attention_triton.forward(q, k, v, spec)
        assert first[0].equal(again[0]) and first[1].equal(again[1])


def test_streams():
    q, k, v, spec = AttnCase(7, BRAIN, heads=(4, 4), lengths=((512, 512),)).build("cuda")
    expected = run(q, k, v, spec)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = q.clone()  # on a wrong stream the kernel would read this too early
        out = attention_triton.forward(late, k, v, spec)
    torch.cuda.current_stream().wait_stream(stream)
    assert out[0].equal(expected[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device():
    q, k, v, spec = AttnCase(8, BRAIN, lengths=((100, 100),)).build("cuda:1")
    check_attention(*run(q, k, v, spec), q, k, v, spec)


def test_more_planes_than_grid_y_takes():
    q = torch.randn(70000, 1, 3, 64, device="cuda", dtype=BRAIN)
    k = torch.randn(70000, 1, 5, 64, device="cuda", dtype=BRAIN)
    spec = AttnSpec(0.125, max_q=3, max_k=5)
    check_attention(*run(q, k, k, spec), q, k, k, spec)


def test_more_than_2_31_elements():
    """The last rows against the oracle on the keys they see; 4.3 GB each."""
    tokens = 2**31 // (128 * 8) + 1000
    q, k, v = (torch.randn(1, tokens, 8, 128, device="cuda", dtype=BRAIN) for _ in range(3))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    spec = AttnSpec(128**-0.5, Band(255, 0), max_q=tokens, max_k=tokens)
    out, lse = run(q, k, v, spec)
    rows, keys = slice(tokens - 300, tokens), slice(tokens - 600, tokens)
    last = (q[:, :, rows], k[:, :, keys], v[:, :, keys], spec._replace(max_q=300, max_k=600))
    check_attention(out[:, :, rows], lse[:, :, rows], *last)
    assert not out.isnan().any()


def test_long_windows_need_no_square_memory():
    tokens = 2**19
    q = torch.randn(1, 1, tokens, 64, device="cuda", dtype=BRAIN)
    spec = AttnSpec(0.125, Band(2047, 0), max_q=tokens, max_k=tokens)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = run(q, q, q, spec)
    assert torch.cuda.max_memory_allocated() - before < 2 * q.numel() * 2 + tokens * 8
    assert out.isfinite().all()


def test_unused_slots_are_not_read():
    q, k, v, spec = AttnCase(
        9, BRAIN, batch=2, heads=(4, 2), lengths=((100, 173),), head_dims=(128, 128)
    ).build("cuda")
    caches = [torch.full((2, 2, 512, 128), torch.nan, device="cuda", dtype=BRAIN) for _ in "kv"]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[:, :, :173] = x
    slices = [cache[:, :, :173] for cache in caches]
    check_attention(*run(q, *slices, spec), q, k, v, spec)


def test_runtime_data_compiles_nothing():
    from blackwell_sparsek.kernels.attention.fwd import _attn_fwd_kernel

    def compiled():
        return sum(len(entry[0]) for entry in _attn_fwd_kernel.device_caches.values())

    def call(sq, sk, **options):
        q = torch.randn(2, 4, sq, 64, device="cuda", dtype=BRAIN)
        k = torch.randn(2, 2, sk, 64, device="cuda", dtype=BRAIN)
        attention(q, k, k, impl="triton", **options)

    call(64, 64, causal=True)
    before = compiled()
    for length in (1, 15, 16, 17, 333, 1000):
        call(length, length, causal=True)
        call(length, 1 + length // 2, window=length)
        call(1, length, scale=float(length))
    assert compiled() == before


def test_rows_that_see_nothing():
    keep = torch.zeros(1, 1, 4, 4, dtype=torch.bool, device="cuda")
    keep[..., 1, 2] = True
    mask = BlockMask.from_dense(keep, (128, 128))
    q, k, v, spec = AttnCase(10, BRAIN, lengths=((512, 512),)).build("cuda")
    out, lse = run(q, k, v, spec._replace(block_mask=mask))
    empty = torch.ones(512, dtype=torch.bool)
    empty[128:256] = False
    assert out[0, 0, empty].eq(0).all() and lse[0, 0, empty].eq(-torch.inf).all()
    assert out[0, 0, 128:256].isfinite().all()
