"""A pytest plugin that puts this package where a suite would use torch's own code.

`BSK_PEER_SUITE` names the suite, `BSK_PEER_SIDE` is `ours` or `control`; with `control` nothing is
replaced. Loaded by `tests.peers.run`, in a process that runs in the sources of the suite.
"""

import os

import pytest


def _transformers():
    """Models that ask for sdpa, or for nothing, get this package's attention."""
    from transformers import PreTrainedModel

    from blackwell_sparsek.integrations.huggingface import register

    name = register()
    original = PreTrainedModel.get_correct_attn_implementation

    def chosen(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        return name if found == "sdpa" else found

    PreTrainedModel.get_correct_attn_implementation = chosen


def _torch_sdpa():
    """`scaled_dot_product_attention`, also where a test imported it by name."""
    import torch

    from blackwell_sparsek import scaled_dot_product_attention
    from blackwell_sparsek.core.errors import BskError

    original = torch.nn.functional.scaled_dot_product_attention

    def ours(*args, **kwargs):
        try:
            return scaled_dot_product_attention(*args, **kwargs)
        except BskError:
            # refusals are documented; what is computed must be right
            return original(*args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = ours


def _torch_bsr():
    from blackwell_sparsek import enable_torch_sparse

    enable_torch_sparse()


REPLACE = {"transformers": _transformers, "torch-sdpa": _torch_sdpa, "torch-bsr": _torch_bsr}


def pytest_configure(config):
    """Replace what the suite is about."""
    side = os.environ.get("BSK_PEER_SIDE")
    if side not in ("ours", "control"):
        raise pytest.UsageError(f"BSK_PEER_SIDE is {side!r}; expected 'ours' or 'control'")
    if side == "ours":
        REPLACE[os.environ["BSK_PEER_SUITE"]]()
