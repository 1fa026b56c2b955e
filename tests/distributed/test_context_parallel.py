"""torch's `context_parallel` with torch's attention patched: right or refused, never local."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

import blackwell_sparsek as bsk
from blackwell_sparsek.integrations import torch_sdpa

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_inside_of_a_patch_shards_reach_torch_as_dtensors(mesh, monkeypatch):
    """Only torch knows which tokens a shard has, so it must get the call."""
    seen = []
    # leaving the patch restores `_original`; this restores torch's function after that
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
    monkeypatch.setattr(torch_sdpa, "_original", lambda q, *_, **__: seen.append(q) or q)
    x = torch.randn(1, 2, 64, 16)
    with bsk.patch_sdpa() as patch:
        ours = F.scaled_dot_product_attention
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            F.scaled_dot_product_attention(x, x, x, is_causal=True)
        assert F.scaled_dot_product_attention is ours
    assert patch.taken == 0 and len(seen) == 1 and isinstance(seen[0], DTensor)
    assert next(iter(patch.left)).endswith("got DTensor")


def test_a_patch_inside_is_refused_and_changes_nothing(mesh):
    x = torch.randn(1, 2, 64, 16)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        theirs = F.scaled_dot_product_attention
        refused = pytest.raises(bsk.Unsupported, match="context_parallel is active; expected patch")
        with refused, bsk.patch_sdpa():
            pass
        assert F.scaled_dot_product_attention is theirs
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    with bsk.patch_sdpa() as patch:
        F.scaled_dot_product_attention(x, x, x)
    assert patch.taken == 1
