import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.nn import BSRLinear
from blackwell_sparsek.prune import CubicSchedule, GradualPruner, shrink_
from blackwell_sparsek.testing.inputs import normal

from .. import fuzzing


def train_step(model, optimizer, seed):
    optimizer.zero_grad()
    features = next(m.in_features for m in model.modules() if isinstance(m, BSRLinear))
    model(normal(8, features, seed=seed)).square().mean().backward()
    optimizer.step()


def test_drops_the_weakest_of_what_exists():
    layer = BSRLinear(64, 48, (16, 16), sparsity=0.25, bias=False)
    norms = layer.values.detach().flatten(1).norm(dim=1)
    expected = layer.values.detach()[norms >= norms.sort(descending=True).values[5]]
    shrink_(layer, 0.5)
    assert layer.nnz_blocks == 6 and torch.equal(layer.values, expected)
    layer.weight.validate()
    values = layer.values
    shrink_(layer, 0.5)
    assert layer.values is values


def test_per_row():
    layer = BSRLinear(64, 48, (16, 16))
    with torch.no_grad():
        layer.values[:4] *= 100
    other = copy.deepcopy(layer)
    shrink_(layer, 8 / 12, per_row=True)
    assert layer.indptr.diff().tolist() in ([2, 1, 1], [1, 2, 1], [1, 1, 2])
    shrink_(other, 8 / 12)
    assert other.indptr.diff().tolist() == [4, 0, 0]


def test_per_row_keeps_as_many_as_were_asked_for_where_rows_lack_some():
    keep = torch.zeros(4, 8, dtype=torch.bool)
    keep[:2], keep[2, 0] = True, True
    layer = BSRLinear(128, 64, (16, 16), keep=keep)
    before = layer.weight.to_dense().detach()
    shrink_(layer, 0.6, per_row=True)  # 13 of 32 blocks stay
    assert sorted(layer.indptr.diff().tolist()) == [0, 1, 6, 6]
    after = layer.weight.to_dense().detach()
    assert torch.equal(after[after != 0], before[after != 0])


OPTIMIZERS = [
    (torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    (torch.optim.Adafactor, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_training_goes_on_as_if_the_dropped_blocks_had_never_been(kind, options):
    """Gradients of kept blocks do not depend on others here, so both histories must agree."""
    keep = torch.ones(2, 3, dtype=torch.bool)
    layer = BSRLinear(48, 32, (16, 16), keep=keep)
    optimizer = kind(layer.parameters(), **options)
    grads = [normal(6, 16, 16, seed=seed) for seed in range(4)]
    with torch.no_grad():
        layer.values[[1, 4]] *= 1e-3
    small = BSRLinear(48, 32, (16, 16), keep=torch.tensor([[1, 0, 1], [1, 0, 1]]).bool())
    with torch.no_grad():
        small.values.copy_(layer.values[[0, 2, 3, 5]])
    small_optimizer = kind(small.parameters(), **options)
    for step, grad in enumerate(grads):
        if step == 2:
            shrink_(layer, 2 / 6, optimizer=optimizer)
            assert optimizer.param_groups[0]["params"][0] is layer.values
        part = grad[[0, 2, 3, 5]]
        layer.values.grad = grad.clone() if step < 2 else part.clone()
        small.values.grad = part.clone()
        optimizer.step()
        small_optimizer.step()
    state, small_state = optimizer.state[layer.values], small_optimizer.state[small.values]
    if kind is torch.optim.Adafactor:
        # Its update is scaled by the norm of the whole parameter; only the shapes must fit.
        assert {k: v.shape for k, v in state.items()} == {
            k: v.shape for k, v in small_state.items()
        }
        return
    assert torch.equal(layer.values, small.values)
    for name, x in small_state.items():
        assert torch.equal(state[name], x), name
    optimizer.load_state_dict(optimizer.state_dict())


class Factored(torch.optim.SGD):
    """Keeps what `state_of` makes of a parameter, as optimizers of other packages do."""

    def __init__(self, params, state_of):
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = state_of(p)


def test_factors_of_moments_follow_the_blocks():
    layer = BSRLinear(64, 48, (16, 8), bias=False)
    state = {
        "rows": normal(24, 16, seed=0),
        "columns": normal(24, 8, seed=0),
        "norms": normal(24, seed=0),
        "step": 3,
    }
    state["shared"] = normal(1, 16, 8, seed=0)
    optimizer = Factored(layer.parameters(), lambda p: dict(state))
    norms = layer.values.detach().flatten(1).norm(dim=1)
    kept = norms >= norms.sort(descending=True).values[11]
    shrink_(layer, 0.5, optimizer=optimizer)
    found = optimizer.state[layer.values]
    for name in ("rows", "columns", "norms"):
        assert torch.equal(found[name], state[name][kept]), name
    assert found["step"] == 3 and found["shared"] is state["shared"]


@pytest.mark.parametrize(
    ("name", "state", "got"),
    [
        ("flat", normal(12 * 256, seed=0), r"\[3072\]"),
        ("quantized", normal(7, seed=0), r"\[7\]"),
        ("of_rows", normal(12, 12, seed=0), r"\[12, 12\]"),
        ("moments", [normal(12, 16, 16, seed=0)], "list"),
    ],
)
def test_state_that_is_not_of_blocks_is_refused(name, state, got):
    layer = BSRLinear(64, 48, (16, 16), bias=False)
    optimizer = Factored(layer.parameters(), lambda p: {"step": 1, name: state})
    values = layer.values
    text = rf"optimizer has a state '{name}' that cannot be split .*, got {got}$"
    with pytest.raises(InvalidInput, match=text):
        shrink_(layer, 0.5, optimizer=optimizer)
    assert layer.values is values and layer.nnz_blocks == 12
    assert optimizer.state[values][name] is state


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer as accelerate does; its groups and state are those of the other."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()


class Sharded(torch.optim.SGD):
    """Trains its parameters by an optimizer within, with groups of its own."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, lr=0.1)
        self.optim = torch.optim.SGD(params, lr=0.1)


def test_optimizers_that_would_train_what_was_replaced_are_refused():
    model = nn.Sequential(BSRLinear(64, 48, (16, 16)))
    values = model[0].values
    for optimizer, holder in (
        (torch.optim.LBFGS(model.parameters()), "_params"),
        (Wrapper(torch.optim.LBFGS(model.parameters())), "optimizer._params"),
        (Sharded(model.parameters()), "optim.param_groups"),
    ):
        with pytest.raises(InvalidInput, match=f"optimizer also holds the layer in '{holder}'"):
            shrink_(model[0], 0.5, optimizer=optimizer)
        assert model[0].values is values
    optimizer = Wrapper(torch.optim.AdamW(model.parameters()))
    train_step(model, optimizer, 0)
    shrink_(model[0], 0.5, optimizer=optimizer)
    before = model[0].values.detach().clone()
    train_step(model, optimizer, 1)
    assert not torch.equal(model[0].values, before)


def test_gradual_pruning_follows_the_schedule_and_trains():
    model = nn.Sequential(BSRLinear(64, 64, (16, 16)), nn.GELU(), BSRLinear(64, 32, (16, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = CubicSchedule(final=0.75, end=8)
    pruner = GradualPruner(model, schedule, optimizer=optimizer, every=2)
    seen = []
    for step in range(10):
        train_step(model, optimizer, step)
        assert pruner.step() == schedule(step + 1)
        seen.append((model[0].nnz_blocks, model[2].nnz_blocks))
    assert seen[0] == (16, 8) and seen[1] == seen[2] and seen[-1] == (4, 2)
    assert seen == sorted(seen, reverse=True)
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert len(optimizer.state) == 4
    other = GradualPruner(model, schedule)
    other.load_state_dict(pruner.state_dict())
    assert other.step() == 0.75 and other.steps == 11


def test_errors():
    layer = BSRLinear(64, 48, (16, 16), sparsity=0.5)
    problem = r"dropped blocks do not come back; expected at least the present sparsity, 0.5, got"
    with pytest.raises(InvalidInput, match=problem):
        shrink_(layer, 0.4)
    with pytest.raises(InvalidInput, match=r"optimizer does not hold the layer.*got SGD"):
        shrink_(layer, 0.75, optimizer=torch.optim.SGD([layer.bias], lr=0.1))
    assert layer.nnz_blocks == 6
    with pytest.raises(InvalidType, match=r"layer has a wrong type.*BSRLinear, got Linear"):
        shrink_(nn.Linear(2, 2), 0.5)
    with pytest.raises(InvalidInput, match="norm is unknown"):
        shrink_(layer, 0.75, norm="l3")
    with pytest.raises(InvalidType, match=r"schedule cannot be called.*CubicSchedule, got float"):
        GradualPruner(layer, 0.9)
    for optimizer in ("adam", [layer.values]):
        with pytest.raises(InvalidType, match="shrink_: optimizer has a wrong type"):
            shrink_(layer, 0.75, optimizer=optimizer)
        with pytest.raises(InvalidType, match="GradualPruner: optimizer has a wrong type"):
            GradualPruner(layer, CubicSchedule(0.9, end=5), optimizer=optimizer)
    with pytest.raises(InvalidType, match="model has a wrong type"):
        GradualPruner([layer], CubicSchedule(0.9, end=5))
    with pytest.raises(InvalidInput, match=r"model has no layers; expected BSRLinear.*sparsify_"):
        GradualPruner(nn.Linear(2, 2), CubicSchedule(0.9, end=5)).step()
    tied = nn.Sequential(BSRLinear(64, 64, 16), BSRLinear(64, 64, 16))
    tied[1].values = tied[0].values
    with pytest.raises(InvalidInput, match="model has layers that share their values"):
        GradualPruner(tied, CubicSchedule(0.9, end=5)).step()
    assert tied[0].values is tied[1].values
    with pytest.raises(InvalidInput, match=r"every is out of range.*got 0"):
        GradualPruner(layer, CubicSchedule(0.9, end=5), every=0)


def test_follows_the_cubic_and_holds_its_ends():
    schedule = CubicSchedule(final=0.9, initial=0.1, begin=10, end=30)
    assert [schedule(step) for step in (0, 10)] == [0.1, 0.1]
    assert schedule(20) == pytest.approx(0.9 - 0.8 / 8)
    assert [schedule(step) for step in (30, 10**9)] == [0.9, 0.9]
    values = [schedule(step) for step in range(10, 31)]
    gains = [b - a for a, b in pairwise(values)]
    assert all(gain > 0 for gain in gains)
    assert all(b < a for a, b in pairwise(gains))


def test_errors_of_the_schedule():
    with pytest.raises(InvalidInput, match=r"begin is too late; expected a step before end = 5"):
        CubicSchedule(final=0.5, begin=5, end=5)
    CubicSchedule(final=0.5, begin=4, end=5)
    with pytest.raises(InvalidInput, match=r"initial is too large; expected at most final = 0.5"):
        CubicSchedule(final=0.5, initial=0.6, end=5)
    CubicSchedule(final=0.5, initial=0.5, end=5)
    with pytest.raises(InvalidInput, match=r"final: sparsity is out of range"):
        CubicSchedule(final=1.5, end=5)


@pytest.mark.parametrize(("state", "got"), [([3], "list"), ({"step": 3}, r"\['step'\]")])
def test_a_state_without_steps_is_named(state, got):
    pruner = GradualPruner(BSRLinear(32, 32, (16, 16)), CubicSchedule(0.5, end=4))
    with pytest.raises(InvalidInput, match=rf"state has no steps; expected .*, got {got}$"):
        pruner.load_state_dict(state)


def assert_refused_or_used(state):
    """Whether the state is taken; if not, an error says so, and nothing has changed."""
    model = nn.Sequential(BSRLinear(32, 32, (16, 16)))
    pruner = GradualPruner(model, CubicSchedule(0.5, end=4))
    pruner.step()
    try:
        pruner.load_state_dict(state)
    except InvalidInput as error:
        assert str(error).startswith("GradualPruner.load_state_dict: ")
        assert fuzzing.is_one_sentence(error), error
        assert pruner.steps == 1
        return False
    assert pruner.steps == state["steps"] >= 0
    assert 0 <= pruner.step() <= 0.5
    return True


@pytest.mark.parametrize(
    "state",
    [{}, {"steps": "3"}, {"steps": None}, {"steps": 2.5}, {"steps": -1}, {"steps": True}, [], None],
    ids=str,
)
def test_a_wrong_state_is_refused_and_changes_nothing(state):
    assert not assert_refused_or_used(state)
    assert assert_refused_or_used({"steps": 7})


def test_any_state_is_refused_or_continues():
    counts = [0, 0]
    for value in fuzzing.ODD_STATES:
        for state in (value, {"steps": value}, {"steps": value, 3: 4}):
            try:
                counts[assert_refused_or_used(state)] += 1
            except Exception as error:
                raise AssertionError(f"{type(value)} in {type(state)}") from error
    assert counts[0] > 100 and counts[1] > 0


@settings(max_examples=100)
@given(state=fuzzing.values | fuzzing.changed({"steps": 7}))
def test_any_other_state_is_refused_or_continues(state):
    assert_refused_or_used(state)
