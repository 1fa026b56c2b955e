"""Every example in a docstring runs, and every public function has one."""

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import types

import pytest
import torch

import blackwell_sparsek as bsk

# Kernel files hold no examples and would import triton; command lines are tested where they live;
# the classes for vLLM import it.
SKIPPED = (
    "blackwell_sparsek.device",
    "blackwell_sparsek.integrations.sglang.backend",
    "blackwell_sparsek.integrations.vllm.backend",
)
if importlib.util.find_spec("jax") is None:
    SKIPPED += ("blackwell_sparsek.jax.",)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def examples():
    """All docstrings with examples, by their full name."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {}
    for module in pkgutil.walk_packages(bsk.__path__, "blackwell_sparsek."):
        if f"{module.name}.".startswith(SKIPPED) or module.name.endswith(("__main__", "_worker")):
            continue
        for test in finder.find(importlib.import_module(module.name)):
            if test.examples:
                found[test.name] = test
    return found


def public_functions(module):
    """Functions among the public names, those of public modules included."""
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from public_functions(value)
        elif inspect.isfunction(value):
            yield value


def run(test):
    torch.manual_seed(0)
    output = []
    results = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=output.append)
    return results.failed, "".join(output)


EXAMPLES = examples()


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example(name):
    failed, output = run(EXAMPLES[name])
    assert not failed, output


def test_every_public_function_has_an_example():
    without = [
        f.__qualname__ for f in public_functions(bsk) if ">>>" not in (inspect.getdoc(f) or "")
    ]
    assert without == []


# What a function returns, with the example in the docstring of that function.
RESULTS = {"MethodDecision", "PageSummaries", "SentBytes", "SparsifiedLayer", "Traffic"}
# Made by `ColwiseBSR`, whose example has both.
MADE = {"ParallelBSRLinear", "RowwiseBSR"}


def public_classes(module):
    """Classes among the public names but exceptions, those of public modules included."""
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from public_classes(value)
        elif inspect.isclass(value) and not issubclass(value, Exception):
            yield value


def test_every_public_class_has_an_example():
    found = set(public_classes(bsk))
    without = {c.__name__ for c in found if ">>>" not in (inspect.getdoc(c) or "")}
    assert without == RESULTS | MADE


def test_every_public_function_says_what_it_raises():
    # it takes no arguments
    without = {
        f.__qualname__
        for f in public_functions(bsk)
        if not re.search(r"^Raises\n-----|\braises?\b", inspect.getdoc(f) or "", re.I | re.M)
    }
    assert without == {"count_bytes"}


def unexplained(function):
    """Parameters that the documentation of a function does not name."""
    text = inspect.getdoc(function) or ""
    parameters = inspect.signature(function).parameters
    return [name for name in parameters if not re.search(rf"\b{name}\b", text)]


def test_every_parameter_of_a_public_function_is_explained():
    found = {f.__qualname__: unexplained(f) for f in public_functions(bsk)}
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_a_planted_parameter_is_found():
    def function(known, forgotten):
        """Do it. known : int"""

    assert unexplained(function) == ["forgotten"]


def test_a_wrong_example_fails():
    parser = doctest.DocTestParser()
    right = parser.get_doctest(">>> 1 + 1\n2\n", {}, "right", None, None)
    wrong = parser.get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert run(right)[0] == 0
    failed, output = run(wrong)
    assert failed == 1 and "Expected:" in output
