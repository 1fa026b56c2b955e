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
