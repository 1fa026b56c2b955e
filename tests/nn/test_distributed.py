import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from blackwell_sparsek.nn import BSRLinear

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fully_sharded_training_and_state(mesh):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(BSRLinear(33, 40, (16, 16), sparsity=0.4), BSRLinear(40, 8, (8, 16)))
    plain, x = copy.deepcopy(model), torch.randn(4, 33)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    for m in (model, plain):
        m(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)
    model.load_state_dict(model.state_dict())
    options = StateDictOptions(full_state_dict=True)
    full = copy.deepcopy(get_model_state_dict(model, options=options))
    with torch.no_grad():
        model[0].values.zero_()
    set_model_state_dict(model, full, options=options)
    assert torch.equal(model[0].values.full_tensor(), plain[0].values)
    full["0.indices"].fill_(99)
    with pytest.raises(RuntimeError, match="indices is out of range"):
        set_model_state_dict(model, full, options=options)
