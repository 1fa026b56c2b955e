"""A group of one: the plain call, with next to nothing before it."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import blackwell_sparsek as bsk
from blackwell_sparsek.distributed import Plan
from blackwell_sparsek.testing.inputs import normal

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")
api = sys.modules[bsk.distributed.attention.__module__]
LENGTH = 70


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def qkv():
    return [normal(2, heads, LENGTH, 16, seed=heads + i) for i, heads in enumerate((4, 2, 2))]


def option_sets():
    offsets = torch.tensor([0, 7, 50, LENGTH], dtype=torch.int32)
    visible = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5
    partial = bsk.BlockMask.from_element_mask(visible, 16)
    both = bsk.masks.documents(offsets, 16, causal=True).to_element_mask() & visible
    in_both = bsk.BlockMask.from_element_mask(both, 16)
    of_each = bsk.BlockMask.from_element_mask(torch.stack([visible, ~visible])[:, None], 16)
    in_documents = bsk.masks.documents(offsets, 16).to_element_mask()
    in_each = bsk.BlockMask.from_element_mask(of_each.to_element_mask() & in_documents, 16)
    return {
        "causal": ({"causal": True}, None),
        "plan": ({"plan": Plan.contiguous(LENGTH, 1), "method": "ring", "window": 9}, None),
        "partial blocks": ({"block_mask": partial, "causal": True}, None),
        "softmax": ({"sinks": normal(4, seed=5), "softcap": 3.0, "scale": 0.3}, None),
        "lse": ({"return_lse": True, "window": (3, 5), "deterministic": True}, None),
        "documents": (
            {"cu_seqlens": offsets, "causal": True},
            {"block_mask": bsk.masks.documents(offsets, 128, causal=True)},
        ),
        "documents and blocks": (
            {"cu_seqlens": offsets, "causal": True, "block_mask": partial},
            {"block_mask": in_both},
        ),
        "documents and blocks of each sequence": (
            {"cu_seqlens": offsets, "block_mask": of_each},
            {"block_mask": in_each},
        ),
    }


@pytest.mark.parametrize("name", option_sets())
def test_bits_are_those_of_the_plain_call(name):
    options, plain = option_sets()[name]
    if plain is None:
        plain = {key: x for key, x in options.items() if key not in ("plan", "method")}
    results = []
    for call, given in ((bsk.distributed.attention, options), (bsk.attention, plain)):
        inputs = [x.requires_grad_() for x in qkv()]
        found = call(*inputs, **given)
        found = found if isinstance(found, tuple) else (found,)
        gradients = torch.autograd.grad(found[0].square().sum(), inputs)
        results.append([*found, *gradients])
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("name", "most"), [("causal", 50), ("plan", 62), ("documents", 70)])
def test_little_runs_before_the_plain_call(name, most, monkeypatch):
    """Calls of functions rather than microseconds, which depend on the machine.

    One takes 0.1 to 0.3 us, and on an H200 15 us are 3 % of a causal layer of 8k tokens.
    """
    options, _ = option_sets()[name]
    inputs, counted = qkv(), []
    monkeypatch.setattr(api, "attend_whole", lambda q, k, v, **options: (q, q))
    bsk.distributed.attention(*inputs, **options)
    sys.setprofile(lambda frame, event, what: counted.append(event in ("call", "c_call")))
    try:
        bsk.distributed.attention(*inputs, **options)
    finally:
        sys.setprofile(None)
    assert sum(counted) <= most


def test_changed_offsets_are_followed():
    inputs, offsets = qkv(), torch.tensor([0, 20, LENGTH], dtype=torch.int32)
    for middle in (20, 50):
        offsets[1] = middle
        mask = bsk.masks.documents(offsets.clone(), 128)
        found = bsk.distributed.attention(*inputs, cu_seqlens=offsets)
        assert torch.equal(found, bsk.attention(*inputs, block_mask=mask))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "rings"}, "method is unknown; expected one of 'auto'"),
        ({"plan": Plan.contiguous(LENGTH, 2)}, "plan is for another world"),
        ({"plan": Plan.contiguous(64, 1)}, "q has a wrong length; expected 64 tokens on rank 0"),
        ({"plan": Plan.contiguous(LENGTH, 1), "method": "heads"}, "plan does not apply to"),
        ({"cu_seqlens": [0, LENGTH]}, "cu_seqlens is not a tensor"),
        ({"cu_seqlens": torch.tensor([0, LENGTH])}, "cu_seqlens has an unsupported dtype"),
        ({"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, "do not end with the sequence"),
        ({"block_mask": bsk.masks.causal(64, 16)}, "block_mask was made for"),
        (
            {
                "block_mask": bsk.masks.causal(64, 16),
                "cu_seqlens": torch.tensor([0, LENGTH], dtype=torch.int32),
            },
            "attention: block_mask was made for",
        ),
        ({"sinks": torch.zeros(3)}, "sinks has a wrong shape"),
    ],
)
def test_errors(options, message):
    with pytest.raises(bsk.BskError, match=message):
        bsk.distributed.attention(*qkv(), **options)


def test_keys_of_other_tokens_are_refused():
    q, k, v = qkv()
    with pytest.raises(bsk.InvalidInput, match="q/k have different lengths"):
        bsk.distributed.attention(q[:, :, :9], k, v)
    with pytest.raises(bsk.InvalidType, match="q is not a tensor"):
        bsk.distributed.attention(None, k, v, plan=Plan.contiguous(LENGTH, 1))


def test_only_a_bool_says_whether_lse_is_returned():
    given, lengths = qkv(), torch.tensor([3, LENGTH], dtype=torch.int32)
    mesh = init_device_mesh("cpu", (1,))
    placed = [DTensor.from_local(x, mesh, [Shard(2)]) for x in given]
    for value in (1, 0, None):
        for tensors in (given, placed):
            with pytest.raises(bsk.InvalidType, match="return_lse is not a bool"):
                bsk.distributed.attention(*tensors, return_lse=value)
        with pytest.raises(bsk.InvalidType, match="return_lse is not a bool"):
            bsk.distributed.attention_decode(*given, cache_seqlens=lengths, return_lse=value)
