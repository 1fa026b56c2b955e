"""What tests of several kernels on a GPU share."""

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch


@pytest.fixture
def on_few_sms():
    """A context: for odd seeds, programs of the Hopper forward take many pieces of work."""
    from blackwell_sparsek.attention.sm90 import launch as fwd_sm90_launch
    from blackwell_sparsek.core.arch import arch_of

    def few(seed):
        if seed % 2 == 0:
            return contextlib.nullcontext()
        arch = dataclasses.replace(arch_of(torch.device("cuda")), num_sms=1 + seed % 4 // 2)
        return mock.patch.object(fwd_sm90_launch, "arch_of", lambda device: arch)

    return few
