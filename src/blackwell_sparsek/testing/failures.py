"""A pytest plugin for long runs on a GPU: failures as they happen, and one failure for one fault.

    python -m pytest -p blackwell_sparsek.testing.failures -n 12 -m gpu tests

A kernel that faults destroys the CUDA context of its process, and every later test there would fail
as well. A worker of pytest-xdist ends itself after such a test, and xdist starts another.
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
    return report


def pytest_configure(config: Any) -> None:
    """In a worker of pytest-xdist, look after the CUDA context."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(ContextWatch())


class ContextWatch:
    """Ends a worker whose CUDA context was destroyed by the test that has just finished."""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """Wait for the GPU: a fault that nobody waited for shows here."""
        in_use: Callable[[], bool] = torch.cuda.is_initialized
        if in_use():
            self._check(nodeid)

    def _check(self, nodeid: str) -> None:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            text = f"\n{nodeid} destroyed the CUDA context: {error}"
            print(text, file=sys.__stderr__, flush=True)
            os._exit(LOST_CONTEXT)
