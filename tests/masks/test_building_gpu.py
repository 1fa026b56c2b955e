"""Masks built on the GPU at the sizes they are for: equal to the CPU's, without waiting for it."""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek import BlockMask, masks
from blackwell_sparsek.calls.attention import AttnGradients, AttnSpec
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.masks.order import longest_columns_first, longest_first
from blackwell_sparsek.masks.topk import kept_blocks
from blackwell_sparsek.testing.attention_cases import oracle
from blackwell_sparsek.testing.attention_gradients import check_gradients
from blackwell_sparsek.testing.tolerance import assert_within_budget

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kept(heads, mb, nb, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(1, heads, mb, nb, generator=generator) < density
    keep[0, :, 0] = False
    keep[0, 0, -1] = True
    return keep


def assert_same(mask, expected):
    lists = zip(
        (*mask.forward, *mask.transposed, mask.bits),
        (*expected.forward, *expected.transposed, expected.bits),
        strict=True,
    )
    assert all(torch.equal(a.cpu(), b) for a, b in lists)


@pytest.mark.parametrize(("heads", "mb", "nb"), [(16, 128, 128), (8, 512, 1024), (3, 1, 5000)])
def test_kept_blocks(heads, mb, nb):
    for seed in range(3):
        keep = kept(heads, mb, nb, (0.22, 0.05, 1.0)[seed], seed)
        expected = BlockMask.from_dense(keep, (128, 16))
        on_gpu = keep.cuda()
        with no_waiting():
            mask = BlockMask.from_dense(on_gpu, (128, 16))
            _ = mask._listed_transposed
        assert_same(mask, expected)


def test_lists_on_several_streams_at_once():
    """Each has scratch memory of its own, whatever the others do."""
    keeps = [kept(8, 512, 512, 0.1 * seed, seed).cuda() for seed in range(1, 4)]
    expected = [BlockMask.from_dense(keep.cpu(), 128) for keep in keeps]
    q = torch.randn(1, 16, 4096, 64, device="cuda", dtype=torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in keeps]
    torch.cuda.synchronize()
    made = [None] * len(keeps)
    for _ in range(20):
        bsk.attention(q, q, q)
        for i, (stream, keep) in enumerate(zip(streams, keeps, strict=True)):
            with torch.cuda.stream(stream):
                made[i] = BlockMask.from_dense(keep, 128)
    torch.cuda.synchronize()
    for mask, other in zip(made, expected, strict=True):
        assert_same(mask, other)


def test_views_of_kept_blocks():
    wide = kept(4, 65, 130, 0.3).cuda()
    for keep in (wide[..., 1:], wide.transpose(2, 3), wide[:, :1].expand(2, 3, 65, 130)):
        assert_same(BlockMask.from_dense(keep, 16), BlockMask.from_dense(keep.cpu(), 16))


@pytest.mark.parametrize(
    ("lengths", "window", "block"),
    [(131072, 2048, 128), (131072, 2048, 64), ((5000, 70001), (300, 77), (128, 16)), (1, 1, 256)],
)
def test_windows(lengths, window, block):
    expected = masks.sliding_window(lengths, window, block, causal=True)
    masks.sliding_window(lengths, window, block, causal=True, device="cuda")
    for _ in range(2):
        with no_waiting():
            mask = masks.sliding_window(lengths, window, block, causal=True, device="cuda")
            _ = mask._listed_transposed
        assert_same(mask, expected)


def test_kept_blocks_with_a_bound():
    keep = kept(16, 128, 128, 0.2)
    keep[:, 0] = False
    on_gpu = keep.cuda()
    expected = kept_blocks(keep, 40, (128, 128), (16384, 16384))
    for _ in range(2):
        with no_waiting():
            mask = kept_blocks(on_gpu, 40, (128, 128), (16384, 16384))
        assert_same(mask, expected)


def test_causal():
    assert_same(masks.causal((4000, 5000), 64, device="cuda"), masks.causal((4000, 5000), 64))


@pytest.mark.parametrize("band", [EVERYTHING, Band(None, 0), Band(3000, 100)])
@pytest.mark.parametrize("heads", [8, 48])
def test_orders(band, heads):
    keep = kept(heads, 128, 128, 0.2) & (torch.rand(1, heads, 128, 1) ** 3 > 0.2)
    expected = BlockMask.from_dense(keep, 128)
    mask = BlockMask.from_dense(keep.cuda(), 128)
    rows = (1, heads, band, 4)
    for _ in range(2):
        assert torch.equal(longest_first(mask, *rows).cpu(), longest_first(expected, *rows))
    columns = (1, heads // 2, 2, band, 2, 64)
    made = longest_columns_first(mask, *columns)
    assert torch.equal(made.cpu(), longest_columns_first(expected, *columns))


def check_attention_parts(mask, deterministic, exact_mask):
    """Output and gradients against the oracle, which reads `exact_mask`."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    q, k, v, dout = (
        torch.randn(1, 4, 1024, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = bsk.attention(q, k, v, block_mask=mask, deterministic=deterministic)
    made = AttnGradients(*torch.autograd.grad(out, leaves, dout), None)
    spec = AttnSpec(64**-0.5, block_mask=exact_mask, max_q=1024, max_k=1024)
    exact, _ = oracle(q.double(), k.double(), v.double(), spec)
    plain, _ = oracle(q, k, v, spec, precision=q.dtype)
    assert_within_budget(out, exact, plain)
    check_gradients(made, dout, None, q, k, v, spec)


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_takes_lists_with_spare_entries(deterministic):
    keep = kept(4, 8, 8, 0.4)
    exact = BlockMask.from_dense(keep, 128).to("cuda")
    mask = BlockMask.from_dense(keep.cuda(), 128)
    assert mask._listed.indices.numel() == keep.numel()
    for _ in range(2):
        check_attention_parts(mask, deterministic, exact)
    assert mask.nnz_blocks == exact.nnz_blocks
    check_attention_parts(mask, deterministic, exact)


def test_mask_and_attention_do_not_wait():
    keep = kept(4, 8, 8, 0.4).cuda()
    q = torch.randn(1, 4, 1024, 64, device="cuda", dtype=torch.bfloat16)
    bsk.attention(q, q, q, block_mask=BlockMask.from_dense(keep, 128))
    with no_waiting():
        out = bsk.attention(q, q, q, block_mask=BlockMask.from_dense(keep, 128))
    exact = BlockMask.from_dense(keep.cpu(), 128).to("cuda")
    assert torch.equal(out, bsk.attention(q, q, q, block_mask=exact))


def test_a_graph_builds_the_mask_of_each_replay():
    keep = kept(4, 8, 8, 0.4).cuda()
    q = torch.randn(1, 4, 1024, 64, device="cuda", dtype=torch.bfloat16)

    def run():
        return bsk.attention(q, q, q, block_mask=BlockMask.from_dense(keep, 128))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in (3, 4):
        keep.copy_(kept(4, 8, 8, 0.3, seed))
        graph.replay()
        exact = BlockMask.from_dense(keep.cpu(), 128).to("cuda")
        assert torch.equal(out, bsk.attention(q, q, q, block_mask=exact))
