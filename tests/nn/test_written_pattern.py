"""Patterns whose buffers are written in place, as broadcasts and distributed checkpoints do."""

import copy
import gc
import weakref

import pytest
import torch

from blackwell_sparsek.core.errors import InvalidInput
from blackwell_sparsek.nn import BSRLinear, strict_patterns
from blackwell_sparsek.sparse import reading
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

# of 3 x 4 blocks of 16 x 16 in 40 x 50: same number of blocks, other rows and columns
OURS = [(0, 0), (0, 2), (1, 1), (2, 3)]
THEIRS = [(0, 1), (1, 0), (1, 3), (2, 0)]


def with_blocks(positions, **options):
    keep = torch.zeros(3, 4, dtype=torch.bool)
    for row, col in positions:
        keep[row, col] = True
    return BSRLinear(50, 40, (16, 16), keep=keep, **options)


def by_copy(layer, state):
    with torch.no_grad():
        for name, x in layer.state_dict(keep_vars=True).items():
            x.copy_(state[name])


def by_state_dict(layer, state):
    """As `torch.distributed.checkpoint` does: into the tensors of the state dict."""
    for name, x in layer.state_dict().items():
        x.copy_(state[name])


def by_foreach(layer, state):
    own = layer.state_dict()
    for dtype in {x.dtype for x in own.values()}:
        names = [name for name, x in own.items() if x.dtype == dtype]
        torch._foreach_copy_([own[n] for n in names], [state[n] for n in names])


def by_data(layer, state):
    """As FSDP moves buffers: other memory behind the same tensor."""
    for name, x in layer.state_dict(keep_vars=True).items():
        x.data = state[name].clone()


def in_inference_mode(layer, state):
    with torch.inference_mode():
        by_state_dict(layer, state)


WAYS = [by_copy, by_state_dict, by_foreach, by_data, in_inference_mode]


def results(layer, x):
    """y, dx, d_values and the dense weight."""
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    dx, d_values = torch.autograd.grad(y.square().sum(), [x, layer.values])
    return y, dx, d_values, layer.weight.to_dense()


def assert_means(layer, other, x):
    """`layer` has the blocks of `other` and computes what a dense layer with them does."""
    y, dx, d_values, weight = results(layer, x)
    assert torch.equal(weight, other.weight.to_dense())
    dense = other.to_linear()
    exact = copy.deepcopy(dense).double()
    found = []
    for linear, dtype in ((exact, torch.float64), (dense, torch.float32)):
        leaf = x.detach().to(dtype).requires_grad_()
        out = linear(leaf)
        grads = torch.autograd.grad(out.square().sum(), [leaf, linear.weight])
        found.append((out, *grads))
    (y64, dx64, dw64), (y32, dx32, dw32) = found
    assert_within_budget(y, y64, y32, what="y")
    assert_within_budget(dx, dx64, dx32, what="dx")
    kept = dense.weight != 0
    grad = layer.weight.with_data(d_values).to_dense()
    assert_within_budget(grad, dw64 * kept, dw32 * kept, what="d_values")


@pytest.mark.parametrize("impl", ["reference", "eager", "dense", "triton"])
@pytest.mark.parametrize("write", WAYS)
def test_what_is_derived_follows_writes(write, impl):
    ours, theirs = with_blocks(OURS, impl=impl), with_blocks(THEIRS, impl=impl)
    x = normal(5, 50, seed=1)
    results(ours, x)  # everything is derived and cached now
    write(ours, theirs.state_dict())
    assert_means(ours, theirs, x)


def test_a_write_that_changes_only_the_rows_is_followed():
    ours = with_blocks([(0, 1), (1, 2)])
    x = normal(3, 50, seed=2)
    results(ours, x)
    ours.indptr.copy_(torch.tensor([0, 2, 2, 2]))
    theirs = with_blocks([(0, 1), (0, 2)])
    with torch.no_grad():
        theirs.values.copy_(ours.values)
        theirs.bias.copy_(ours.bias)
    assert_means(ours, theirs, x)


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_code_follows_writes(grad):
    ours, theirs = with_blocks(OURS), with_blocks(THEIRS)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = normal(5, 50, seed=1).requires_grad_(grad)
    for state in (theirs.state_dict(), copy.deepcopy(ours.state_dict()), theirs.state_dict()):
        with torch.set_grad_enabled(grad):
            compiled(x)
            by_state_dict(ours, state)
            y = compiled(x)
            assert torch.equal(y, ours(x))
            if grad:
                leaves = [x, ours.values]
                got = torch.autograd.grad(y.sum(), leaves)
                expected = torch.autograd.grad(ours(x).sum(), leaves)
                assert all(map(torch.equal, got, expected))
    assert torch.equal(y, theirs(x))


def test_an_exported_program_follows_writes():
    ours, theirs = with_blocks(OURS), with_blocks(THEIRS)
    x = normal(5, 50, seed=1)
    exported = torch.export.export(ours, (x,)).module()
    exported(x)
    for name, buffer in exported.named_buffers():
        buffer.copy_(theirs.state_dict()[name])
    with torch.no_grad():
        for name, value in exported.named_parameters():
            value.copy_(theirs.state_dict()[name])
    assert torch.equal(exported(x), theirs(x))


def test_gradients_are_those_of_the_pattern_of_their_forward():
    ours, theirs = with_blocks(OURS), with_blocks(THEIRS)
    x = normal(5, 50, seed=1).requires_grad_()
    (expected,) = torch.autograd.grad(ours(x).sum(), ours.values)
    y = ours(x)
    ours.indices.copy_(theirs.indices)
    ours.indptr.copy_(theirs.indptr)
    (got,) = torch.autograd.grad(y.sum(), ours.values)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("name", "entry", "value", "problem"),
    [
        ("indices", 1, 4, r"indices is out of range at entry 1.*\[0, 4\), got 4"),
        ("indices", 0, -1, "indices is out of range at entry 0"),
        ("indptr", 3, 2**31 - 1, "indptr has a wrong end"),
        ("weight_shape", 1, 49, r"weight_shape is that of another layer.*\[40, 50\], got \[40, 49"),
    ],
)
def test_no_kernel_follows_a_malformed_write(name, entry, value, problem):
    ours = with_blocks(OURS)
    x, before = normal(5, 50, seed=1), copy.deepcopy(ours.state_dict())
    expected = ours(x)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    compiled(x)
    getattr(ours, name)[entry] = value
    ours.indptr.add_(0)
    for use in (lambda: ours(x), lambda: ours.weight, ours.reset_parameters):
        with pytest.raises(InvalidInput, match=f"(?s)BSRLinear, whose buffers .*{problem}"):
            use()
    if name != "weight_shape":
        with pytest.raises(InvalidInput, match=problem):
            compiled(x)
    by_copy(ours, before)
    assert torch.equal(ours(x), expected) and torch.equal(compiled(x), expected)


def test_load_state_dict_mends_a_malformed_write():
    ours = with_blocks(OURS)
    x, before = normal(5, 50, seed=1), copy.deepcopy(ours.state_dict())
    expected = ours(x)
    ours.indices.fill_(99)
    with strict_patterns(), pytest.raises(RuntimeError, match="has another pattern"):
        ours.load_state_dict(before)
    ours.load_state_dict(before)
    assert torch.equal(ours(x), expected)


def test_a_layer_from_the_meta_device_takes_what_is_written_to_all_of_its_buffers():
    theirs = with_blocks(THEIRS)
    ours = with_blocks(OURS).to("meta")
    ours.to_empty(device="cpu")
    state, x = theirs.state_dict(), normal(5, 50, seed=1)
    with torch.no_grad():
        ours.values.copy_(state["values"])
        ours.bias.copy_(state["bias"])
    for name in ("indptr", "weight_shape"):
        getattr(ours, name).copy_(state[name])
        with pytest.raises(InvalidInput, match=r"no pattern yet.*nothing written to .*indices"):
            ours(x)
    # moving it does not count as writing
    ours.double().float().to("cpu")
    with pytest.raises(InvalidInput, match="no pattern yet"):
        ours(x)
    ours.indices.copy_(state["indices"])
    assert_means(ours, theirs, x)


def test_layers_made_in_inference_mode_follow_writes():
    with torch.inference_mode():
        ours, theirs = with_blocks(OURS), with_blocks(THEIRS)
        x = normal(5, 50, seed=1)
        ours.to(torch.float64).to(torch.float32)
        ours(x)
        by_state_dict(ours, theirs.state_dict())
        assert torch.equal(ours(x), theirs(x))
        # buffers that do not count their writes are compared in every call
        ours.indptr, ours.indices = ours.indptr.clone(), ours.indices.clone()
        assert ours.indices.is_inference()
        ours(x)
        ours.indptr.copy_(torch.tensor([0, 1, 2, 4]))
        ours.indices.copy_(torch.tensor([3, 0, 1, 2]))
        assert ours.weight.pattern.indices.tolist() == [3, 0, 1, 2]


def test_old_patterns_and_layers_are_freed():
    ours, theirs = with_blocks(OURS), with_blocks(THEIRS)
    ours(normal(2, 50, seed=2))
    gone = [weakref.ref(ours.pattern), weakref.ref(ours)]
    by_copy(ours, theirs.state_dict())
    ours(normal(2, 50, seed=2))
    gc.collect()
    first, layer = gone
    assert first() is None and layer() is ours
    gone = [weakref.ref(ours.pattern), layer]
    del ours
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("columns", [8, 512])
def test_replayed_launches_follow_writes(block, columns):
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    sizes = (16 * block, 12 * block, (block, block))
    keep = torch.rand(12, 16) < 0.4
    other = keep.flatten()[torch.randperm(keep.numel())].view_as(keep)
    ours, theirs = (BSRLinear(*sizes, keep=x, **options) for x in (keep, other))
    x = normal(columns, 16 * block, seed=3, **options)
    with torch.no_grad():
        for _ in range(3):
            ours(x)
        by_state_dict(ours, theirs.state_dict())
        for _ in range(3):
            assert torch.equal(ours(x), theirs(x))
        assert torch.equal(ours.weight.to_dense(), theirs.weight.to_dense())


@pytest.mark.gpu
def test_a_graph_captured_before_a_write_reads_no_freed_memory():
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    ours, theirs = with_blocks(OURS, **options), with_blocks(THEIRS, **options)
    x = normal(32, 50, seed=3, **options)
    with torch.no_grad():
        expected = ours(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ours(x)
        for name in ("indptr", "indices"):
            getattr(ours, name).copy_(getattr(theirs, name))
        ours(x)
        # would get the memory of the pattern that was replaced
        taken = [torch.full((16,), 10**6, dtype=torch.int32, device="cuda") for _ in range(64)]
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(y, expected) and len(taken) == 64


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_reads_the_pattern_only_after_writes(backend, monkeypatch):
    ours, theirs = with_blocks(OURS), with_blocks(THEIRS)
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    x, reads, read = normal(5, 50, seed=1).requires_grad_(), [], reading._copied

    def counted(*args):
        reads.append(1)
        return read(*args)

    monkeypatch.setattr(reading, "_copied", counted)
    for _ in range(3):
        compiled(x).sum().backward()
    assert reads == []
    by_state_dict(ours, theirs.state_dict())
    for _ in range(3):
        compiled(x).sum().backward()
    assert reads == [1]


def test_functional_calls_take_other_buffers():
    ours, theirs = with_blocks(OURS), with_blocks(THEIRS)
    x, expected = normal(5, 50, seed=1), ours(normal(5, 50, seed=1))
    assert torch.equal(torch.func.functional_call(ours, theirs.state_dict(), (x,)), theirs(x))
    assert torch.equal(ours(x), expected)
    # an ensemble of layers with different patterns
    states = [layer.state_dict() for layer in (ours, theirs)]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}

    def one(state):
        return torch.func.functional_call(ours, state, (x,))

    with torch.no_grad():
        assert torch.equal(torch.vmap(one)(stacked), torch.stack([ours(x), theirs(x)]))
