"""Fixtures of the tests of attention."""

import pytest

from blackwell_sparsek.attention import resize, resize_backward


@pytest.fixture
def recorded_at_once(monkeypatch):
    """The second call of the same lengths is recorded, and not only one that comes often."""
    for module in (resize, resize_backward):
        monkeypatch.setattr(module, "RESIZED_CALLS", 1)
