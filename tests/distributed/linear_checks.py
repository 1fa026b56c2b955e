"""What every rank checks of layers that are split among ranks; run by test_ranks.py."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import blackwell_sparsek as bsk
from blackwell_sparsek.distributed import (
    ColwiseBSR,
    FeatureSplit,
    RowwiseBSR,
    split_features,
)
from blackwell_sparsek.nn import BSRLinear, strict_patterns
from blackwell_sparsek.testing.inputs import normal

CHECKS = {}
HIDDEN, WIDE, BLOCK = 48, 128, (16, 8)


def check(function):
    CHECKS[function.__name__] = function
    return function


def skewed(rows, cols, seed):
    """Blocks that are dense in the first rows and columns, and rare in the last."""
    chance = torch.linspace(1, 0, rows)[:, None] * torch.linspace(1.5, 0.2, cols)
    return torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed)) < chance


class MLP(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.gate = BSRLinear(HIDDEN, WIDE, BLOCK, keep=skewed(8, 6, seed), activation="silu")
        self.up = BSRLinear(HIDDEN, WIDE, BLOCK, keep=skewed(8, 6, seed + 1))
        self.down = BSRLinear(WIDE, HIDDEN, (8, 16), keep=skewed(6, 8, seed + 2))
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.dense(self.down(self.gate(x) * self.up(x)))


def split_of(model, ranks):
    weights = [(model.gate, "rows"), (model.up, "rows"), (model.down, "columns")]
    return split_features(weights, ranks)


def parallel(model, mesh, **options):
    split = split_of(model, mesh.size())
    styles = {
        "gate": ColwiseBSR(split),
        "up": ColwiseBSR(split),
        "down": RowwiseBSR(split, **options),
    }
    return parallelize_module(model, mesh, styles)


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_same_gradients(model, plain):
    """Gradients as dense matrices: the order of the values differs."""
    rank = dist.get_rank(model.gate._mesh.get_group())
    for name in ("gate", "up", "down"):
        layer, whole = getattr(model, name), getattr(plain, name)
        expected = whole.weight.with_data(whole.values.grad).to_dense()
        local = layer.values.grad.to_local()[: layer.nnz_blocks]
        found = layer.weight.with_data(local).to_dense()
        own = layer._parts.split.features(rank)
        part = expected[:, own] if name == "down" else expected[own]
        torch.testing.assert_close(found, part)
        if name == "down":
            torch.testing.assert_close(full(layer.bias.grad), whole.bias.grad)
        else:
            torch.testing.assert_close(layer.bias.grad.to_local(), whole.bias.grad[own])


@check
def split_layers_compute_and_differentiate_as_one(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world,))
    plain = MLP()
    model = parallel(copy.deepcopy(plain), mesh)
    x = normal(2, 5, HIDDEN, seed=0).requires_grad_()
    same = x.detach().clone().requires_grad_()
    out, expected = model(x), plain(same)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, same.grad)
    assert_same_gradients(model, plain)
    assert model.gate.out_features == WIDE // world and model.down.in_features == WIDE // world
    stored = sum(layer.nnz_blocks for layer in (model.gate, model.up, model.down))
    counts = torch.zeros(world, dtype=torch.int64)
    counts[rank] = stored
    dist.all_reduce(counts)
    assert int(counts.sum()) == sum(x.nnz_blocks for x in (plain.gate, plain.up, plain.down))
    # with 8 units no split is even, but runs of units are much less so; see test_linear.py
    runs = FeatureSplit.contiguous(WIDE, 16, world)
    ends = plain.gate.indptr[:: 8 // world].diff() + plain.up.indptr[:: 8 // world].diff()
    unequal = ends + plain.down.weight.T.indptr[:: 8 // world].diff()
    assert counts.max() < unequal.max() and split_of(plain, world) != runs


@check
def ranks_take_the_weights_of_the_first(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world,))
    keep = skewed(8, 6, 0)
    torch.manual_seed(rank)
    layer = BSRLinear(HIDDEN, WIDE, BLOCK, keep=keep)
    first = copy.deepcopy(layer.state_dict())
    for x in first.values():
        dist.broadcast(x, 0)
    parallelize_module(layer, mesh, ColwiseBSR())
    found = layer.state_dict()
    assert all(torch.equal(found[name], x) for name, x in first.items())
    more = BSRLinear(HIDDEN, WIDE, BLOCK, sparsity=0.5 if rank == 1 else 0.0)
    with pytest.raises(bsk.InvalidInput, match="rank 1 has other arguments"):
        parallelize_module(more, mesh, ColwiseBSR())


@check
def layouts_of_inputs_and_outputs(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world,))
    plain = MLP()
    split = split_of(plain, world)
    x = normal(2, 4 * world, HIDDEN, seed=0)
    part = slice(4 * rank, 4 * rank + 4)
    # sequence parallel: each rank has a part of the tokens before and after
    model = copy.deepcopy(plain)
    styles = {
        "gate": ColwiseBSR(split, input_layouts=Shard(1)),
        "up": ColwiseBSR(split, input_layouts=Shard(1)),
        "down": RowwiseBSR(split, output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, styles)
    own = x[:, part].clone().requires_grad_()
    whole = x.clone().requires_grad_()
    torch.testing.assert_close(model(own), plain(whole)[:, part])
    model(own).square().sum().backward()
    plain(whole).square().sum().backward()
    torch.testing.assert_close(own.grad, whole.grad[:, part])
    assert_same_gradients(model, plain)
    # outputs and inputs of the whole layer, in their own order
    wide = parallelize_module(
        copy.deepcopy(plain.up), mesh, ColwiseBSR(split, output_layouts=Replicate())
    )
    torch.testing.assert_close(wide(x), plain.up(x))
    narrow = parallelize_module(
        copy.deepcopy(plain.down), mesh, RowwiseBSR(split, input_layouts=Replicate())
    )
    y = normal(3, WIDE, seed=1).requires_grad_()
    same = y.detach().clone().requires_grad_()
    torch.testing.assert_close(narrow(y), plain.down(same))
    narrow(y).square().sum().backward()
    plain.down(same).square().sum().backward()
    torch.testing.assert_close(y.grad, same.grad)
    placed = parallelize_module(
        copy.deepcopy(plain.down), mesh, RowwiseBSR(split, use_local_output=False)
    )
    features = split.features(rank)
    found = placed(y.detach()[:, features])
    assert isinstance(found, DTensor) and found.placements == (Replicate(),)
    for width in (WIDE - 1, WIDE + 1):
        with pytest.raises(bsk.InvalidInput, match=f"x does not fit; expected .*{WIDE}], the inp"):
            narrow(torch.zeros(3, width))
    assert bsk.explain(narrow).layers[0].nnz_blocks == narrow.nnz_blocks
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = narrow(y), plain.down(same)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)


@check
def dense_layers_beside_split_ones(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(HIDDEN, WIDE),
        BSRLinear(WIDE, HIDDEN, BLOCK, keep=skewed(3, 16, 0)),
        BSRLinear(HIDDEN, WIDE, BLOCK, keep=skewed(8, 6, 0)),
        nn.Linear(WIDE, HIDDEN),
    ).double()
    styles = {"0": ColwiseParallel(), "1": RowwiseBSR(), "2": ColwiseBSR(), "3": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(plain), mesh, styles)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    for step in range(3):
        # fp64, because AdamW turns roundings of small gradients into whole steps
        x = normal(4, HIDDEN, seed=step).double()
        norms = []
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            norms.append(full(nn.utils.clip_grad_norm_(m.parameters(), 1.0)))
            optimizer.step()
        torch.testing.assert_close(*norms)
    torch.testing.assert_close(model(x), plain(x))


@check
def fully_sharded_on_a_second_dimension(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    plain = MLP()
    model = parallel(copy.deepcopy(plain), mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    shares = world // 2
    for step in range(2):
        x = normal(2 * shares, HIDDEN, seed=step)
        at = mesh.get_local_rank("dp")
        own = x[2 * at : 2 * at + 2]
        model(own).square().mean().backward()
        plain(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = model.state_dict()
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(full(found[name]), x)
    saved = {name: full(x).clone() for name, x in found.items() if not name.startswith("dense")}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved, strict=False)
    again = model.state_dict()
    assert all(torch.equal(full(again[name]), x) for name, x in saved.items())


@check
def data_parallel_on_a_second_dimension(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    plain = MLP()
    model = parallel(copy.deepcopy(plain), mesh["tp"])
    replica = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (replica, plain)]
    at, shares = mesh.get_local_rank("dp"), world // 2
    for step in range(2):
        x = normal(2 * shares, HIDDEN, seed=step)
        out = replica(x[2 * at : 2 * at + 2])
        expected = plain(x)
        torch.testing.assert_close(out, expected[2 * at : 2 * at + 2])
        out.square().mean().backward()
        expected.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = replica.module.state_dict()
    saved = {name: x.clone() for name, x in found.items() if not name.startswith("dense")}
    for name, x in saved.items():
        torch.testing.assert_close(x, plain.state_dict()[name])
    before = list(replica.parameters())
    with torch.no_grad():
        for parameter in before:
            parameter.zero_()
    replica.module.load_state_dict(saved, strict=False)
    assert all(a is b for a, b in zip(before, replica.parameters(), strict=True))
    again = replica.module.state_dict()
    assert all(torch.equal(again[name], x) for name, x in saved.items())


@check
def checkpoints_load_into_other_numbers_of_ranks(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world,))
    trained = MLP(seed=0)
    x = normal(3, HIDDEN, seed=0)
    expected = trained(x)
    model = parallel(copy.deepcopy(trained), mesh)
    path = f"{folder}/trained"
    dcp.save(model.state_dict(), checkpoint_id=path)
    # one process with all blocks
    alone = MLP(seed=0)
    with torch.no_grad():
        alone.down.values.zero_()
    state = alone.state_dict()
    dcp.load(state, checkpoint_id=path)
    alone.load_state_dict(state)
    torch.testing.assert_close(alone(x), expected)
    # ranks in pairs, with another split
    pairs = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    fewer = MLP(seed=0)
    with torch.no_grad():
        for parameter in fewer.parameters():
            parameter.zero_()
    styles = {"gate": ColwiseBSR(), "up": ColwiseBSR(), "down": RowwiseBSR()}
    parallelize_module(fewer, pairs, styles)
    state = fewer.state_dict()
    dcp.load(state, checkpoint_id=path)
    fewer.load_state_dict(state)
    torch.testing.assert_close(fewer(x), expected)


@check
def other_patterns_are_refused_or_loaded(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world,))
    whole = BSRLinear(HIDDEN, WIDE, BLOCK, keep=skewed(8, 6, 0))
    other = BSRLinear(HIDDEN, WIDE, BLOCK, keep=skewed(8, 6, 5))
    for x in other.parameters():
        dist.broadcast(x.detach(), 0)
    layer = parallelize_module(whole, mesh, ColwiseBSR(output_layouts=Replicate()))
    before = layer.state_dict()
    with strict_patterns(), pytest.raises(RuntimeError, match="has another pattern"):
        layer.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*indptr"):
        layer.load_state_dict({"values": before["values"]})
    assert all(torch.equal(layer.state_dict()[name], x) for name, x in before.items())
    layer.load_state_dict(other.state_dict())
    x = normal(3, HIDDEN, seed=0)
    torch.testing.assert_close(layer(x), other(x))


@check
def a_wrong_layer_on_one_rank_is_an_error_on_all(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world,))
    layer = BSRLinear(64, 64, (16, 16))
    expected = "rank 1 has failed; expected valid arguments on all ranks"
    wrong = {
        "module has a wrong type": (nn.Linear(64, 64), RowwiseBSR()),
        "activation cannot be computed": (
            BSRLinear(64, 64, (16, 16), activation="relu"),
            RowwiseBSR(),
        ),
        "split does not fit the layer": (
            layer,
            RowwiseBSR(FeatureSplit.contiguous(128 * world, 16, world)),
        ),
    }
    for problem, (module, style) in wrong.items():
        given = (module, style) if rank == 1 else (layer, RowwiseBSR())
        with pytest.raises(bsk.BskError, match=problem if rank == 1 else expected):
            parallelize_module(given[0], mesh, given[1])
        assert type(layer) is BSRLinear


@check
def styles_refuse_what_does_not_fit(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world,))
    layer = BSRLinear(48, 96 + 16, (16, 16))
    with pytest.raises(bsk.InvalidInput, match="features cannot be split evenly; expected a mult"):
        parallelize_module(copy.deepcopy(layer), mesh, ColwiseBSR())
    wrong = FeatureSplit.contiguous(64 * world, 16, world)
    with pytest.raises(bsk.InvalidInput, match="split does not fit the layer; expected 112 feat"):
        parallelize_module(copy.deepcopy(layer), mesh, ColwiseBSR(wrong))
    with pytest.raises(bsk.InvalidType, match="module has a wrong type; expected BSRLinear, got L"):
        parallelize_module(nn.Linear(4, 4), mesh, ColwiseBSR())
    active = BSRLinear(64, 64, (16, 16), activation="relu")
    with pytest.raises(bsk.Unsupported, match="activation cannot be computed on parts of a sum"):
        parallelize_module(active, mesh, RowwiseBSR())
    done = parallelize_module(BSRLinear(64, 64, (16, 16)), mesh, ColwiseBSR())
    with pytest.raises(bsk.InvalidType, match="expected BSRLinear, got ParallelBSRLinear"):
        parallelize_module(done, mesh, ColwiseBSR())
    for name, arguments in (("to_linear", ()), ("reset_parameters", ()), ("keep_blocks_", (0,))):
        with pytest.raises(bsk.Unsupported, match=f"{name} does not apply to a layer that is spl"):
            getattr(done, name)(*arguments)
