import doctest
import importlib
import pkgutil
import warnings

import pytest

import blackwell_sparsek.integrations
import blackwell_sparsek.nn
import blackwell_sparsek.prune

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (
        blackwell_sparsek.nn,
        blackwell_sparsek.prune,
        blackwell_sparsek.integrations,
    )
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_public_names_have_examples():
    from blackwell_sparsek import nn, prune
    from blackwell_sparsek.integrations.torch_sparse import enable_torch_sparse

    names = [getattr(package, name) for package in (nn, prune) for name in package.__all__]
    summaries = (prune.SparsifySummary, prune.SparsifiedLayer)
    for public in (*names, enable_torch_sparse):
        assert public in summaries or ">>> " in public.__doc__, public
