"""Layers under DDP, FSDP2 and distributed checkpoints, in one process and in two."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from blackwell_sparsek.nn import BSRLinear
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

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


# Two processes. Blocks of 16 x 16 in 40 x 33: same number, other rows and columns.
PATTERNS = [
    [[1, 0, 1], [0, 1, 0], [1, 0, 0]],
    [[0, 1, 0], [1, 0, 0], [0, 1, 1]],
]


def layer_of(pattern):
    keep = torch.tensor(PATTERNS[pattern], dtype=torch.bool)
    return BSRLinear(33, 40, (16, 16), keep=keep)


def run_in_two(work, tmp_path):
    """`work(rank, tmp_path)` in two processes of one group."""
    args = (work, str(tmp_path))
    torch.multiprocessing.start_processes(_member, args=args, nprocs=2, start_method="spawn")


def _member(rank, work, tmp_path):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = dist.FileStore(f"{tmp_path}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        work(rank, tmp_path)
    finally:
        dist.destroy_process_group()


def of_first(tensor):
    """What rank 0 has."""
    tensor = tensor.detach().clone()
    dist.broadcast(tensor, 0)
    return tensor


def assert_trains_as_dense(model, dense, rank, steps=2):
    """A few steps of `model` against the dense layer with the same blocks, on the whole batch."""
    exact, kept = copy.deepcopy(dense).double(), dense.weight != 0
    linears = (dense, exact)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, *linears)]
    for step in range(steps):
        both = normal(2, 6, 33, seed=step)
        x = both[rank].clone().requires_grad_()
        y = model(x)
        y.square().mean().backward()
        found = []
        for linear in linears:
            whole = both.to(linear.weight.dtype, copy=True).requires_grad_()
            out = linear(whole)
            out.square().mean().backward()
            linear.weight.grad.mul_(kept)
            # the mean over a batch of half the size
            found.append((out[rank], 2 * whole.grad[rank]))
        (y32, dx32), (y64, dx64) = found
        assert_within_budget(y, y64, y32, what=f"y of step {step}")
        assert_within_budget(x.grad, dx64, dx32, what=f"dx of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _ddp(rank, tmp_path):
    layer = layer_of(rank)
    layer(torch.ones(1, 33)).sum().backward()  # its own pattern is derived and cached
    layer.zero_grad()
    values, bias = of_first(layer.values), of_first(layer.bias)
    model = nn.parallel.DistributedDataParallel(layer)
    expected = layer_of(0)
    with torch.no_grad():
        expected.values.copy_(values)
        expected.bias.copy_(bias)
    assert torch.equal(layer.weight.to_dense(), expected.weight.to_dense())
    pattern = layer.pattern
    assert_trains_as_dense(model, expected.to_linear(), rank)
    # broadcasts of the same pattern, one in every forward, cost nothing that was derived
    assert layer.pattern is pattern
    # two forwards before a backward: the second broadcasts while the first still needs its pattern
    (model(torch.ones(2, 33)).sum() + model(torch.ones(1, 33)).sum()).backward()


def test_ddp_gives_every_process_the_pattern_of_the_first(tmp_path):
    run_in_two(_ddp, tmp_path)


def _fsdp(rank, tmp_path):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    layer = layer_of(0)
    dense = layer.to_linear()
    model = fully_shard(nn.Sequential(layer), mesh=mesh)
    assert layer.values.to_local().shape[0] < layer.nnz_blocks
    assert_trains_as_dense(model, dense, rank)
    # another pattern, in place, while the values are sharded
    torch.manual_seed(1)
    other = layer_of(1)
    saved = {f"0.{name}": x for name, x in other.state_dict().items()}
    path = f"{tmp_path}/other"
    dcp.save(saved, checkpoint_id=path)
    dcp.load(model.state_dict(), checkpoint_id=path)
    assert_trains_as_dense(model, other.to_linear(), rank)


def test_fully_sharded_layers_train_and_follow_a_checkpoint(tmp_path):
    run_in_two(_fsdp, tmp_path)


def _checkpoints(rank, tmp_path):
    torch.manual_seed(0)
    trained = nn.Sequential(layer_of(0))
    dcp.save(trained.state_dict(), checkpoint_id=f"{tmp_path}/trained")
    x = normal(5, 33, seed=3).requires_grad_()
    for pattern in (0, 1):
        model = nn.Sequential(layer_of(pattern))
        model(x).sum().backward()
        dcp.load(model.state_dict(), checkpoint_id=f"{tmp_path}/trained")
        got, expected = model(x), trained(x)
        assert torch.equal(got, expected)
        (dx,), (wanted,) = (torch.autograd.grad(y.sum(), x) for y in (got, expected))
        assert torch.equal(dx, wanted)
        assert torch.equal(model[0].weight.to_dense(), trained[0].weight.to_dense())
    fewer = nn.Sequential(BSRLinear(33, 40, (16, 16), sparsity=0.7))
    before = copy.deepcopy(fewer.state_dict())
    with pytest.raises(CheckpointException, match=r"(?s)[Ss]ize mismatch.*0\.(values|indices)"):
        dcp.load(fewer.state_dict(), checkpoint_id=f"{tmp_path}/trained")
    assert all(torch.equal(x, before[name]) for name, x in fewer.state_dict().items())


def test_distributed_checkpoints_load_into_another_pattern(tmp_path):
    run_in_two(_checkpoints, tmp_path)
