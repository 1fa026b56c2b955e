"""What only a GPU can say about gradients of attention: the real compiler, graphs, order, size.

`PYTHONPATH=src python -m pytest -m gpu tests/gpu/test_attention_backward.py`; `BSK_RANDOM_CALLS=36`
before it makes 504 random calls, forward and backward.
"""

import os

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.attention.api import attention, attention_packed
from blackwell_sparsek.attention.op import backward_dispatch
from blackwell_sparsek.attention.triton import backward as attention_bwd_triton
from blackwell_sparsek.attention.triton import forward as attention_triton
from blackwell_sparsek.calls.attention import (
    AttentionCall,
    AttnGradients,
    AttnProblem,
    AttnSpec,
    BackwardCall,
)
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.testing import layouts
from blackwell_sparsek.testing.attention_cases import AttnCase, check_attention, draw_case
from blackwell_sparsek.testing.attention_gradients import (
    check_gradients,
    oracle_gradients,
    recomputed_gradients,
    upstream,
)
from blackwell_sparsek.testing.poison import nan_like, poisoned_empty
from blackwell_sparsek.testing.tolerance import assert_within_budget

from ..test_api_gpu import cut_to_tf32

pytestmark = pytest.mark.gpu

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
# Each structure is compiled once, in some seconds, and then sees several calls.
STRUCTURES = 14
CALLS = int(os.environ.get("BSK_RANDOM_CALLS", "4"))
# (structure, seed) pairs that ever failed stay here
CORPUS = ((8, 34),)


def run(q, k, v, spec, seed=0, wanted=(True, True, True)):
    """Forward and backward on the portable kernels; (out, lse, dout, dlse, gradients)."""
    with poisoned_empty():
        call = AttentionCall(q, k, v, spec, deterministic=True)
        out, lse = attention_triton.forward(call)
        dout, dlse = upstream(out, lse, seed)
        dsinks = None if spec.sinks is None else nan_like(spec.sinks)
        given = (nan_like(x) if need else None for x, need in zip((q, k, v), wanted, strict=True))
        gradients = AttnGradients(*given, dsinks)
        attention_bwd_triton.backward(BackwardCall(call, dout, dlse, out, lse, gradients))
    return out, lse, dout, dlse, gradients


def check(q, k, v, spec, seed=0, what=""):
    out, lse, dout, dlse, gradients = run(q, k, v, spec, seed)
    check_attention(out, lse, q, k, v, spec, what=what)
    check_gradients(gradients, dout, dlse, q, k, v, spec, what=what)
    return gradients


def check_random_call(structure, seed):
    case = draw_case(
        seed,
        structure,
        dtypes=(BRAIN, HALF),
        longest=300,
        head_dims=(16, 40, 64, 72, 80, 96, 128, 128, 160, 192, 256),
        block_sizes=(16, 32, 64, 128, 256),
        most_heads=14,
    )
    q, k, v, spec = case.build("cuda")
    q, k, v = layouts.different_layouts(q, k, v, start=structure)
    check(q, k, v, spec, seed, f"structure {structure}, {case}")


@pytest.mark.parametrize("structure", range(STRUCTURES))
def test_random_calls(structure):
    for seed in range(structure * CALLS, (structure + 1) * CALLS):
        check_random_call(structure, seed)


@pytest.mark.parametrize("structure, seed", CORPUS)
def test_calls_that_failed(structure, seed):
    check_random_call(structure, seed)


@triton.jit
def _transposed_product_probe(
    out_ptr, direct_ptr, a_ptr, b_ptr, c_ptr, steps, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """sum over steps of (a b^T)^T c, as a transposed product and as the product b a^T."""
    rows_m, rows_n, columns = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    b = tl.load(b_ptr + rows_n[:, None] * D + columns[None, :])
    turned = tl.zeros([N, D], tl.float32)
    direct = tl.zeros([N, D], tl.float32)
    for step in range(steps):
        at = (step * M + rows_m)[:, None] * D + columns[None, :]
        a, c = tl.load(a_ptr + at), tl.load(c_ptr + at)
        x = tl.dot(a, tl.trans(b), input_precision="ieee")
        turned = tl.dot(tl.trans(x).to(c.dtype), c, turned, input_precision="ieee")
        y = tl.dot(b, tl.trans(a), input_precision="ieee")
        direct = tl.dot(y.to(c.dtype), c, direct, input_precision="ieee")
    at = rows_n[:, None] * D + columns[None, :]
    tl.store(out_ptr + at, turned)
    tl.store(direct_ptr + at, direct)


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("rows, keys, dim", [(64, 64, 64), (64, 128, 128), (128, 64, 128)])
def test_products_of_products(rows, keys, dim, warps):
    """The order that the kernels use must be right; whether the other one is, is a note.

    Transposing a product before it is multiplied has given wrong gradients on Hopper.
    """
    steps = 5
    a, c = (torch.randint(-2, 3, (steps * rows, dim), device="cuda").to(BRAIN) for _ in "ac")
    b = torch.randint(-1, 2, (keys, dim), device="cuda").to(BRAIN)
    turned, direct = (torch.full((keys, dim), torch.nan, device="cuda") for _ in range(2))
    _transposed_product_probe[(1,)](
        turned, direct, a, b, c, steps, M=rows, N=keys, D=dim, num_warps=warps
    )
    x = (a.double() @ b.double().mT).to(BRAIN).double()
    exact = (x.mT @ c.double()).float()
    assert direct.equal(exact)
    if not turned.equal(exact):
        pytest.xfail("tl.dot(tl.trans(x), y) is miscompiled here; no kernel uses it")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_sizes_of_models(dim, causal):
    """Every SM takes several tiles; the oracle looks at the heads of one KV head."""
    q, k, v, spec = AttnCase(
        2, BRAIN, batch=2, heads=(8, 2), lengths=((1025, 2050),), head_dims=(dim, dim),
        band=Band(None, 0) if causal else Band(None, None),
    ).build("cuda")  # fmt: skip
    _, _, dout, dlse, gradients = run(q, k, v, spec)
    some, kv = (slice(1, 2), slice(4, 8)), (slice(1, 2), slice(1, 2))
    dq, dk, dv, _ = gradients
    check_gradients(
        AttnGradients(dq[some], dk[kv], dv[kv], None), dout[some], dlse[some], q[some], k[kv],
        v[kv], spec,
    )  # fmt: skip
    assert not any(x.isnan().any() for x in (dq, dk, dv))


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 16), (16, 128)])
@pytest.mark.parametrize("partial", [False, True])
def test_block_masks_of_models(block, partial):
    keep = torch.rand(1, 2, 1024 // block[0], 1024 // block[1], device="cuda") < 0.2
    mask = BlockMask.from_dense(keep, block)
    if partial:
        visible = mask.to_element_mask() & (torch.rand(1024, 1024, device="cuda") < 0.7)
        mask = BlockMask.from_element_mask(visible, block)
    case = AttnCase(3, BRAIN, heads=(2, 1), lengths=((1024, 1024),), head_dims=(128, 128))
    q, k, v, spec = case.build("cuda")
    for band in (Band(None, None), Band(None, 0)):
        check(q, k, v, spec._replace(block_mask=mask, band=band))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("tf32", [False, True])
def test_fp32(dim, tf32):
    case = AttnCase(1, FLOAT, heads=(2, 1), lengths=((129, 257),), head_dims=(dim, dim))
    q, k, v, spec = case.build("cuda")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        out, lse, dout, dlse, gradients = run(q, k, v, spec)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    if not tf32:
        check_attention(out, lse, q, k, v, spec)
        check_gradients(gradients, dout, dlse, q, k, v, spec)
        return
    exact = oracle_gradients(dout, dlse, q, k, v, spec)
    cut, *others = (cut_to_tf32(x) for x in (dout, q, k, v))
    plain = recomputed_gradients(cut, dlse, *others, spec)
    for got, want, low in zip(gradients[:3], exact[:3], plain[:3], strict=True):
        assert_within_budget(got, want, low)


def leaves(*shapes, dtype=BRAIN, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]


def test_auto_takes_the_kernels():
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=BRAIN)
    problem = AttnProblem.of(q, q, q, AttnSpec(0.1, max_q=64, max_k=64), backward=True)
    assert backward_dispatch.decide("auto", problem).chosen in ("triton", "sm90")


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_any_subset_of_inputs(wanted):
    shapes = (1, 4, 130, 64), (1, 2, 150, 64), (1, 2, 150, 64)
    inputs = leaves(*shapes)
    out = attention(*inputs, causal=True, impl="triton")
    expected = torch.autograd.grad(out.square().sum(), inputs)
    for i, x in enumerate(inputs):
        x.requires_grad_(i in wanted)
    attention(*inputs, causal=True, impl="triton").square().sum().backward()
    for i, x in enumerate(inputs):
        assert (x.grad is not None) == (i in wanted)
        assert i not in wanted or x.grad.equal(expected[i])


def test_outputs_used_twice_and_expanded_gradients():
    q, k, v = leaves((1, 4, 130, 64), (1, 2, 150, 64), (1, 2, 150, 64))
    out, lse = attention(q, k, v, window=40, return_lse=True, impl="triton")
    (out.sum() + (out * 2).sum() + lse.sum()).backward()
    got = [x.grad.clone() for x in (q, k, v)]
    out, lse = attention(q, k, v, window=40, return_lse=True, impl="triton")
    ones = torch.ones_like(out) * 3
    expected = torch.autograd.grad((out, lse), (q, k, v), (ones, torch.ones_like(lse)))
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


def test_compile_fullgraph():
    q, k, v = leaves((1, 4, 192, 64), (1, 2, 192, 64), (1, 2, 192, 64))
    mask = BlockMask.from_dense(torch.rand(3, 3, device="cuda") < 0.7, 64)

    def model(q, k, v):
        return attention(q * 2, k, v, causal=True, block_mask=mask).transpose(1, 2).flatten(2)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v))
    # bf16 holds the gradient of the squares, and half of that of q, exactly
    made = AttnGradients(got[0] / 2, got[1], got[2], None)
    dout = 2 * attention(q * 2, k, v, causal=True, block_mask=mask).detach()
    spec = AttnSpec(0.125, Band(None, 0), mask, max_q=192, max_k=192)
    check_gradients(made, dout, None, q * 2, k, v, spec)


def test_activation_checkpointing():
    q, k, v = leaves((1, 4, 130, 64), (1, 2, 130, 64), (1, 2, 130, 64))

    def block(q, k, v):
        return attention(q, k, v, causal=True, impl="triton").square()

    expected = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    again = checkpoint(block, q, k, v, use_reentrant=False)
    got = torch.autograd.grad(again.sum(), (q, k, v))
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


def test_autocast():
    q, k, v = leaves((1, 4, 130, 64), (1, 2, 130, 64), (1, 2, 130, 64), dtype=FLOAT)
    with torch.autocast("cuda", BRAIN):
        out = attention(q, k, v, causal=True, impl="triton")
        loss = out.float().square().sum()
    got = torch.autograd.grad(loss, (q, k, v))
    assert out.dtype == BRAIN and all(g.dtype == FLOAT for g in got)
    cast = [x.detach().to(BRAIN).requires_grad_() for x in (q, k, v)]
    out = attention(*cast, causal=True, impl="triton")
    expected = torch.autograd.grad(out.float().square().sum(), cast)
    assert all(a.equal(b.float()) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_graph_of_a_training_step(masked):
    torch.manual_seed(0)
    project = torch.nn.Linear(64, 3 * 64, device="cuda", dtype=BRAIN)
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    parameters = [*project.parameters(), sinks]
    x = torch.randn(2, 100, 64, device="cuda", dtype=BRAIN)
    mask = BlockMask.from_dense(torch.rand(2, 2, device="cuda") < 0.8, 64, 100) if masked else None

    def step():
        heads = project(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        out = attention(*heads, causal=True, block_mask=mask, sinks=sinks, impl="triton")
        out.float().square().mean().backward()

    def eager():
        for parameter in parameters:
            parameter.grad = None
        step()
        return [parameter.grad.clone() for parameter in parameters]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        eager()
    torch.cuda.current_stream().wait_stream(side)
    for parameter in parameters:
        parameter.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    captured = [parameter.grad for parameter in parameters]
    for seed in (1, 2):
        torch.manual_seed(seed)
        x.normal_()
        graph.replay()
        got = [g.clone() for g in captured]
        expected = eager()
        assert all(a.equal(b) for a, b in zip(got, expected, strict=True))


def test_packed_sequences():
    q, k, v = leaves((300, 4, 64), (300, 2, 64), (300, 2, 64))
    cu = torch.tensor([0, 100, 100, 101, 300], device="cuda", dtype=torch.int32)
    options = {"max_seqlen_q": 199, "max_seqlen_k": 199, "causal": True}
    out = attention_packed(q, k, v, cu, cu, impl="triton", **options)
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    spec = AttnSpec(0.125, Band(None, 0), max_q=199, max_k=199, cu_seqlens_q=cu, cu_seqlens_k=cu)
    # bf16 holds the gradient of the squares exactly
    check_gradients(AttnGradients(*got, None), 2 * out.detach(), None, q, k, v, spec)


@pytest.mark.parametrize("masked", [False, True])
def test_the_same_bits_every_time_under_load(masked):
    case = AttnCase(
        5, BRAIN, batch=2, heads=(4, 2), lengths=((200, 333),), head_dims=(64, 64), sinks=True,
        band=Band(150, 0), mask="elements" if masked else "none", block_size=(64, 32),
    )  # fmt: skip
    q, k, v, spec = case.build("cuda")
    out, lse, dout, dlse, first = run(q, k, v, spec)
    other = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    again = AttnGradients(*(torch.empty_like(x) for x in first))
    call = BackwardCall(AttentionCall(q, k, v, spec, True), dout, dlse, out, lse, again)
    different = torch.zeros((), device="cuda", dtype=torch.bool)
    torch.cuda.synchronize()
    for _ in range(1000):
        with torch.cuda.stream(other):
            noise @ noise
        attention_bwd_triton.backward(call)
        for a, b in zip(first, again, strict=True):
            different |= (a != b).any()
    assert not different.item()


def test_more_than_2_31_elements():
    """The last keys and queries against the oracle on what they see; 4.3 GB each."""
    tokens = 2**31 // (128 * 8) + 1000
    q, k, v = (
        torch.randn(1, tokens, 8, 128, device="cuda", dtype=BRAIN).transpose(1, 2) for _ in range(3)
    )
    spec = AttnSpec(128**-0.5, Band(127, 0), max_q=tokens, max_k=tokens)
    call = AttentionCall(q, k, v, spec, deterministic=True)
    out, lse = attention_triton.forward(call)
    dout = torch.randn_like(out)
    gradients = AttnGradients(*(nan_like(x) for x in (q, k, v)), None)
    attention_bwd_triton.backward(BackwardCall(call, dout, None, out, lse, gradients))
    # the last 300 queries and keys see, and are seen by, none but the last 600
    part = [x[:, :1, tokens - 600 :] for x in (dout, q, k, v)]
    spec = spec._replace(max_q=600, max_k=600)
    exact = oracle_gradients(part[0], None, *part[1:], spec)
    plain = oracle_gradients(part[0], None, *part[1:], spec, BRAIN)
    for big, *small in zip(gradients[:3], exact[:3], plain[:3], strict=True):
        want, low = (x[:, :, 300:] for x in small)
        assert_within_budget(big[:, :1, tokens - 300 :], want, low.to(BRAIN))
        assert not big[:, -1, -1].isnan().any() and not big[:, 0, :1000].isnan().any()
