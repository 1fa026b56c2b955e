"""A pytest plugin for long runs on a GPU: failures as they happen, and one failure for one fault.

    python -m pytest -p blackwell_sparsek.testing.failures -n 12 -m gpu tests

A kernel that faults destroys the CUDA context of its process, and a CUDA graph whose capture failed
leaves random numbers unusable there: every later test would fail as well. A worker of pytest-xdist
ends itself after such a test, and xdist starts another.
"""

import os
import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

# What a worker exits with when its context is gone.
LOST_CONTEXT = 70


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    """Print a failure to the terminal at once: what follows may take minutes, or hang."""
    report = yield
    if report.failed:
        # pytest captures sys.stderr, and workers send their output only with their reports
        print(f"\nFAILED {report.nodeid} ({report.when})", file=sys.__stderr__)
        print(report.longreprtext, file=sys.__stderr__, flush=True)
        for title, text in report.sections:
            print(f"--- {title} ---\n{text}", file=sys.__stderr__, flush=True)
    return report


def pytest_configure(config: Any) -> None:
    """In a worker of pytest-xdist, look after the CUDA context."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(ContextWatch())


class ContextWatch:
    """Ends a worker in which CUDA cannot be used after the test that has just finished."""

    def __init__(self) -> None:
        self._failed = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a failure: random numbers are tried after one, because that moves their state."""
        self._failed |= report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """Wait for the GPU: a fault that nobody waited for shows here."""
        in_use: Callable[[], bool] = torch.cuda.is_initialized
        if in_use():
            self._check(nodeid)
        self._failed = False

    def _check(self, nodeid: str) -> None:
        try:
            torch.cuda.synchronize()
            if self._failed:
                torch.rand(1, device="cuda")
        except RuntimeError as error:
            text = f"\n{nodeid} left CUDA unusable: {error}"
            print(text, file=sys.__stderr__, flush=True)
            os._exit(LOST_CONTEXT)
