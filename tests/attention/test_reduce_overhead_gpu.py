"""Calls that torch.compile puts into CUDA graphs keep nothing in the memory of a graph."""

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.testing.bsr import random_bsr

pytestmark = pytest.mark.gpu
BRAIN = torch.bfloat16


def compiled(function, *inputs):
    """Warmed up, recorded, replayed: three calls, each on new inputs, against the plain call."""
    torch._dynamo.reset()
    fast = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    for scale in (1.0, 0.5, 2.0):
        given = [x * scale if x.is_floating_point() else x for x in inputs]
        torch.compiler.cudagraph_mark_step_begin()
        got = fast(*given).clone()
        assert torch.equal(got, function(*given))


@pytest.mark.parametrize("tokens", [1, 16, 512])
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (128, 128)])
def test_products(block, tokens):
    weight = random_bsr((512, 384), block, seed=3, dtype=BRAIN, device="cuda")
    compiled(lambda x: bsk.matmul(x, weight.T), torch.randn(tokens, 384, device="cuda").to(BRAIN))


@pytest.mark.parametrize("block", [None, 64, 128])
def test_attention(block):
    q, k, v = (torch.randn(1, 4, 700, 128, device="cuda").to(BRAIN) for _ in range(3))
    mask = None
    if block is not None:
        mask = bsk.masks.global_local(700, block, local_blocks=2, global_blocks=1, device="cuda")
    compiled(lambda q, k, v: bsk.attention(q, k, v, causal=True, block_mask=mask), q, k, v)


@pytest.mark.parametrize("dtype", [BRAIN, torch.float32])
def test_decoding(dtype):
    q = torch.randn(3, 8, 1, 128, device="cuda", dtype=dtype)
    k, v = (torch.randn(3, 2, 900, 128, device="cuda", dtype=dtype) for _ in range(2))
    lengths = torch.tensor([900, 1, 333], device="cuda", dtype=torch.int32)
    compiled(lambda q, k, v, n: bsk.attention_decode(q, k, v, cache_seqlens=n), *(q, k, v), lengths)
