"""Hooks on compilation get the constants of our kernels, whatever they are."""

import inspect
import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
import triton.language as tl
from triton import knobs
from triton.runtime import jit

from blackwell_sparsek.launch.compile_hooks import constants_as_text
from blackwell_sparsek.matmul.sm90.config import WarpRowsConfig

CONSTANTS = {
    (0,): 16,
    (1,): "silu",
    (2,): None,
    (3,): tl.constexpr(WarpRowsConfig()),
    (4,): WarpRowsConfig(),
    (5,): tl.constexpr(2),
    (6,): tl.float32,
}


def written(constants):
    """What Triton hands to a hook."""
    options = SimpleNamespace(num_warps=4)
    given = {"target": SimpleNamespace(arch=90)}
    extra = [given[p] for p in list(inspect.signature(WRITE).parameters)[6:]]
    text = jit.serialize_specialization_data("kernel", {}, constants, {}, options, "key", *extra)
    return json.loads(text)["constant_vals"]


WRITE = jit.serialize_specialization_data


@pytest.mark.parametrize("hook", ["jit_cache_hook", "jit_post_compile_hook"])
def test_constants_that_json_does_not_hold_are_text(monkeypatch, hook):
    with pytest.raises(TypeError, match="WarpRowsConfig is not JSON"):
        written(CONSTANTS)
    monkeypatch.setattr(knobs.runtime, hook, lambda **kwargs: None)
    with constants_as_text():
        found = written(CONSTANTS)
    assert found[:3] == [16, "silu", None] and found[5] == {"constexpr": 2}
    assert all("CHUNK=128" in found[i] for i in (3, 4)) and found[6] == "fp32"
    assert jit.serialize_specialization_data is WRITE


def test_without_a_hook_triton_stays_as_it_is():
    with constants_as_text():
        assert jit.serialize_specialization_data is WRITE


def test_threads_that_compile_leave_triton_as_it_was(monkeypatch):
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **kwargs: None)
    began = threading.Event()

    def compile_too():
        began.set()
        with constants_as_text():
            pass

    with constants_as_text():
        other = threading.Thread(target=compile_too)
        other.start()
        began.wait()
        # until it waits for this thread
        time.sleep(0.2)
    other.join()
    assert jit.serialize_specialization_data is WRITE


SCRIPT = """
import torch
from triton import knobs
import blackwell_sparsek as bsk

heard = []
knobs.runtime.jit_post_compile_hook = lambda **kwargs: heard.append(kwargs["fn"].name)
q = torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
bsk.attention(q, q, q, causal=True)
assert heard
"""


@pytest.mark.gpu
def test_a_hook_hears_of_our_kernels():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
