"""Calls with ever new masks and training calls, repeated by recorded launches, on a GPU."""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek import BlockMask
from blackwell_sparsek.attention import api as functional_attention
from blackwell_sparsek.calls.attention import AttnGradients, AttnSpec
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.testing.attention_cases import check_attention, oracle
from blackwell_sparsek.testing.attention_gradients import check_gradients
from blackwell_sparsek.testing.tolerance import assert_within_budget

pytestmark = pytest.mark.gpu
HEADS, LENGTH, DIM = 4, 1024, 64


@contextlib.contextmanager
def repeated_only():
    """Inside, a call that is made in full fails, and so does one that waits."""
    full = functional_attention.checked_call

    def refuse(*args, **options):
        raise AssertionError("not repeated")

    functional_attention.checked_call = refuse
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        functional_attention.checked_call = full
        torch.cuda.set_sync_debug_mode("default")


def kept(seed, density=0.4, block=128):
    generator = torch.Generator().manual_seed(seed)
    blocks = LENGTH // block
    keep = torch.rand(1, HEADS, blocks, blocks, generator=generator) < density
    keep[0, 0, 0] = False
    return keep


def tensors(seed, grad=False):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shape = (1, HEADS, LENGTH, DIM)
    made = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(4)
    ]
    return [x.requires_grad_() for x in made[:3]] if grad else made[:3], made[3]


def spec_of(keep, causal, block=128):
    mask = None if keep is None else BlockMask.from_dense(keep, block).to("cuda")
    band = Band(None, 0) if causal else EVERYTHING
    return AttnSpec(DIM**-0.5, band, mask, max_q=LENGTH, max_k=LENGTH)


def check_out(out, keep, seed, causal, block=128):
    (q, k, v), _ = tensors(seed)
    spec = spec_of(keep, causal, block)
    exact, _ = oracle(q.double(), k.double(), v.double(), spec)
    plain, _ = oracle(q, k, v, spec, precision=q.dtype)
    assert_within_budget(out, exact, plain)


def check_step(got, keep, seed, causal):
    """Check an output and the gradients of q, k and v."""
    out, *gradients = got
    check_out(out, keep, seed, causal)
    inputs, dout = tensors(seed)
    check_gradients(AttnGradients(*gradients, None), dout, None, *inputs, spec_of(keep, causal))


@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_a_new_mask_every_call(causal, impl, block):
    options = {"causal": causal, "impl": impl}
    (q, k, v), _ = tensors(0)
    keep = kept(0, block=block).cuda()
    for _ in range(2):
        bsk.attention(q, k, v, block_mask=BlockMask.from_dense(keep, block), **options)
    for seed in range(1, 5):
        (q, k, v), _ = tensors(seed)
        keep = kept(seed, 0.1 * seed, block).cuda()
        with repeated_only():
            mask = BlockMask.from_dense(keep, block)
            got = [bsk.attention(q, k, v, block_mask=mask, **options) for _ in range(2)]
            # memory of lists that have ended serves the next mask
            del mask
        for out in got:
            check_out(out, keep, seed, causal, block)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_training_with_a_new_mask_every_step(causal, impl, deterministic):
    options = {"causal": causal, "impl": impl, "deterministic": deterministic}
    for seed in range(5):
        inputs, dout = tensors(seed, grad=True)
        mask = BlockMask.from_dense(kept(seed, 0.1 * (seed + 1)).cuda(), 128)
        waits = deterministic or seed < 2
        for _ in range(2):
            with contextlib.nullcontext() if waits else repeated_only():
                out = bsk.attention(*inputs, block_mask=mask, **options)
                got = [out, *torch.autograd.grad(out, inputs, dout)]
            check_step(got, kept(seed, 0.1 * (seed + 1)), seed, causal)


@pytest.mark.usefixtures("recorded_at_once")
def test_training_without_a_mask():
    for seed in range(4):
        inputs, dout = tensors(seed, grad=True)
        with repeated_only() if seed > 1 else contextlib.nullcontext():
            out, lse = bsk.attention(*inputs, causal=True, return_lse=True)
            dlse = torch.ones_like(lse)
            gradients = torch.autograd.grad((out, lse), inputs, (dout, dlse))
        q, k, v = (x.detach() for x in inputs)
        spec = spec_of(None, causal=True)
        check_attention(out.detach(), lse.detach(), q, k, v, spec)
        check_gradients(AttnGradients(*gradients, None), dout, dlse, q, k, v, spec)


def test_masks_on_other_streams():
    (q, k, v), _ = tensors(0)
    mask = BlockMask.from_dense(kept(3).cuda(), 128)
    expected = bsk.attention(q, k, v, block_mask=mask)
    for _ in range(3):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outs = [bsk.attention(q, k, v, block_mask=mask) for _ in range(2)]
            outs.append(
                bsk.attention(q, k, v, block_mask=BlockMask.from_dense(kept(3).cuda(), 128))
            )
        torch.cuda.current_stream().wait_stream(stream)
        assert all(torch.equal(out, expected) for out in outs)


def test_a_graph_of_a_training_step_with_its_mask():
    keep = kept(0).cuda()
    inputs, dout = tensors(0, grad=True)

    def step():
        mask = BlockMask.from_dense(keep, 128)
        out = bsk.attention(*inputs, block_mask=mask, causal=True)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in (1, 2):
        keep.copy_(kept(seed))
        graph.replay()
        torch.cuda.synchronize()
        check_step(results, kept(seed), 0, True)


def test_lists_end_with_their_mask():
    (q, k, v), _ = tensors(0)

    def call():
        bsk.attention(q, k, v, block_mask=BlockMask.from_dense(kept(1).cuda(), 128))

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
