"""Device functions compile inside of Gluon kernels too, dense and with block lists."""

import os
import pathlib

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.testing.compile_only import compile_kernels, table

HERE = pathlib.Path(__file__).parent


def test_gluon_kernels_call_the_same_functions(monkeypatch):
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    records = compile_kernels([90], package="gluon_probes")
    assert len(records) == 5
    assert not any(record["problems"] for record in records), "\n" + table(records)
