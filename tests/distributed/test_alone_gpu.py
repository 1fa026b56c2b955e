"""A group of one on a GPU: the plain call, also repeated, captured and on another stream."""

import pytest
import torch
import torch.distributed as dist

import blackwell_sparsek as bsk
from blackwell_sparsek.distributed import Plan
from blackwell_sparsek.testing.inputs import normal

pytestmark = pytest.mark.gpu
LENGTH = 1000


@pytest.fixture(params=["nccl", "gloo"])
def group(request, tmp_path):
    available = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available}
    if not available[request.param]():
        pytest.skip(f"torch is built without {request.param}")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(request.param, store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def qkv(dtype=torch.bfloat16):
    heads = (8, 2, 2)
    return [normal(1, h, LENGTH, 64, seed=i).to("cuda", dtype) for i, h in enumerate(heads)]


def option_sets():
    offsets = torch.tensor([0, 300, LENGTH], dtype=torch.int32, device="cuda")
    documents = bsk.masks.documents(offsets, 128, causal=True)
    return {
        "causal": ({"causal": True}, {"causal": True}),
        "window": ({"window": 100, "causal": True}, {"window": 100, "causal": True}),
        "documents": ({"cu_seqlens": offsets, "causal": True}, {"block_mask": documents}),
    }


@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_bits_are_those_of_the_plain_call(name, group):
    options, plain = option_sets()[name]
    inputs, plan = qkv(), Plan.contiguous(LENGTH, 1)
    expected = bsk.attention(*inputs, return_lse=True, **plain)
    for _ in range(3):
        found = bsk.distributed.attention(*inputs, plan=plan, return_lse=True, **options)
        assert all(map(torch.equal, found, expected))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = bsk.distributed.attention(*inputs, plan=plan, return_lse=True, **options)
    stream.synchronize()
    assert all(map(torch.equal, found, expected))


def test_a_call_may_be_captured(group):
    inputs, plan = qkv(), Plan.contiguous(LENGTH, 1)
    bsk.distributed.attention(*inputs, plan=plan, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bsk.distributed.attention(*inputs, plan=plan, causal=True)
    inputs[0].neg_()
    graph.replay()
    assert torch.equal(out, bsk.attention(*inputs, causal=True))
