"""The plugin for runs on a GPU: what fails is printed at once, a lost context ends its worker."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from blackwell_sparsek.testing import failures

FAILING = """
import os
import pathlib


def test_wrong():
    os.write(2, b"a warning of the driver\\n")
    assert "this" == "that"


def test_after():
    printed = pathlib.Path("printed").read_text()
    assert "FAILED test_one.py::test_wrong (call)" in printed
    assert "assert 'this' == 'that'" in printed
    assert "a warning of the driver" in printed
"""


def test_a_failure_is_printed_before_the_next_test(tmp_path):
    (tmp_path / "test_one.py").write_text(FAILING)
    plugin = ["-p", "blackwell_sparsek.testing.failures"]
    with open(tmp_path / "printed", "w") as printed:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *plugin, "test_one.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=printed,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
            check=False,
        )
    assert "1 failed, 1 passed" in done.stdout


def _lost():
    raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def ended(monkeypatch):
    """The exit statuses of a worker, which goes on here."""
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return statuses


@pytest.mark.parametrize("in_use", [False, True])
@pytest.mark.parametrize("lost", [False, True])
def test_a_worker_that_lost_its_context_ends(monkeypatch, capfd, ended, in_use, lost):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "synchronize", _lost if lost else lambda: None)
    failures.ContextWatch().pytest_runtest_logfinish("tests/test_one.py::test_wrong", None)
    assert ended == ([failures.LOST_CONTEXT] if in_use and lost else [])
    assert ("left CUDA unusable: an illegal" in capfd.readouterr().err) == (in_use and lost)


@pytest.mark.parametrize("failed", [False, True])
def test_a_worker_without_random_numbers_ends_after_a_failure(monkeypatch, capfd, ended, failed):
    """As a capture that failed leaves it; after a test that passed, their state must not move."""

    def no_numbers(size, device):
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    monkeypatch.setattr(torch, "rand", no_numbers)
    watch = failures.ContextWatch()
    for outcome in (failed, False):
        watch.pytest_runtest_logreport(SimpleNamespace(failed=outcome))
    for _ in range(2):
        watch.pytest_runtest_logfinish("tests/test_one.py::test_wrong", None)
    assert ended == [failures.LOST_CONTEXT] * failed
    assert ("Offset increment" in capfd.readouterr().err) == failed


@pytest.mark.parametrize("worker", [False, True])
def test_only_workers_watch_their_context(worker):
    registered = []
    config = SimpleNamespace(pluginmanager=SimpleNamespace(register=registered.append))
    if worker:
        config.workerinput = {}
    failures.pytest_configure(config)
    assert [type(x) for x in registered] == [failures.ContextWatch] * worker
