"""The example trains every layer; the whole of it learns the task."""

import importlib.util
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "learn_recall.py"
NAMES = ["moba", "nsa", "indexer", "sparsek"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("learn_recall", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_has_a_gradient(name, example):
    model, _ = example.train(name, 1)
    keys, values, answers = example.batch_of(torch.Generator().manual_seed(3))
    model.zero_grad()
    logits, loss = model(keys, values)
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten()) + loss
    total.backward()
    assert all(w.grad is not None and w.grad.any() for w in model.parameters())


def test_answers_are_values_of_the_keys_that_are_asked_for(example):
    keys, values, answers = example.batch_of(torch.Generator().manual_seed(2))
    for b, t in ((0, 0), (1, 5), (7, 15)):
        place = (keys[b, : example.READ] == keys[b, example.READ + t]).nonzero().item()
        assert values[b, place] == answers[b, t]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_learns_the_task(name, example):
    _, accuracy = example.train(name, example.STEPS[name])
    assert accuracy > 0.9
