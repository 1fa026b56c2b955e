"""The Hopper forward under JAX without a GPU: what is planned, launched and chosen."""

import json
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")
pytest.importorskip("triton")

import jax.numpy as jnp  # noqa: E402

import blackwell_sparsek.jax as bsk_jax  # noqa: E402
from blackwell_sparsek.calls.attention import AttentionCall, AttnSpec  # noqa: E402
from blackwell_sparsek.core.env import environment_for_compiler  # noqa: E402
from blackwell_sparsek.core.errors import Unsupported  # noqa: E402
from blackwell_sparsek.jax import attention_sm90, attention_triton, driver_calls  # noqa: E402
from blackwell_sparsek.launch.description import ArraySpec  # noqa: E402
from blackwell_sparsek.launch.descriptors import Descriptor  # noqa: E402
from blackwell_sparsek.masks.band import Band  # noqa: E402
from blackwell_sparsek.testing.captured_launches import captured_launches  # noqa: E402

from .kernels import H200  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]


def as_noted(value):
    """An argument with dtypes for arrays, and with what a descriptor says of its own."""
    if isinstance(value, Descriptor):
        return (as_noted(value.base), *map(tuple, (value.shape, value.strides, value.block)))
    if hasattr(value, "shape"):
        return str(value.dtype).removeprefix("torch.")
    return tuple(map(as_noted, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("band", [Band(None, None), Band(None, 0), Band(255, 3)])
@pytest.mark.parametrize("lengths", [(300, 500), (4096, 4096), (1, 64)])
def test_jax_plans_what_torch_launches(dim, band, lengths):
    """Kernel, arguments in order, tiles, grid and options are those of torch's launcher."""
    shape_q, shape_kv = (1, 16, lengths[0], dim), (1, 4, lengths[1], dim)
    spec = AttnSpec(0.125, band, None, 0.0, max_q=lengths[0], max_k=lengths[1])
    with captured_launches(90) as launches:
        # imported late: the patches of `captured_launches` see only what is loaded
        from blackwell_sparsek.attention.sm90.launch import forward

        shapes = (shape_q, shape_kv, shape_kv)
        q, k, v = (torch.empty(x, dtype=torch.bfloat16, device="meta") for x in shapes)
        forward(AttentionCall(q, k, v, spec))
    options = attention_triton.KernelOptions(0.125, 0.0, band, H200, "", "ieee", hopper=True)
    arrays = attention_triton.AttentionArrays()
    inputs = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]
    call = arrays.add_call(options, (*inputs, None, None), transposed=False)
    (planned,) = attention_triton.plan_forward(options, call, None)
    (right,) = launches
    assert planned.kernel is right.kernel and planned.options == right.options
    found, expected = (
        dict(zip(x.kernel.arg_names, map(as_noted, x.args), strict=True)) for x in (planned, right)
    )
    assert found == expected


def problem(**changes):
    facts = {"arch": H200, "dtype": jnp.dtype("bfloat16"), "batch": 1, "heads_q": 8, "heads_kv": 2}
    facts |= {"max_q": 64, "max_k": 64, "head_dim": 128, "head_dim_v": 128, "banded": False}
    facts |= {"mask_block": None, "softcap": False, "positive": True}
    return attention_sm90.HopperProblem(**facts | changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": jnp.dtype("float32")}, "float32 has no 16-bit WGMMA"),
        ({"head_dim": 100}, "needs head dimensions up to 256 in steps of 8, got 100 and 128"),
        ({"positive": False}, "needs a scale above zero"),
        ({"max_k": 0}, "TMA cannot describe zero keys"),
        ({"mask_block": (32, 64)}, "query blocks of 32 are not a multiple of 64"),
    ],
)
def test_why_not(changes, why):
    assert attention_sm90.why_not_sm90(problem(**changes)) == why


def test_releases_and_interpreters_that_it_does_not_run_with(monkeypatch):
    from blackwell_sparsek.core import compat

    monkeypatch.setattr(attention_sm90, "triton_interpreted", lambda: True)
    assert "TRITON_INTERPRET" in attention_sm90.why_not_sm90(problem())
    monkeypatch.setattr(attention_sm90, "triton_interpreted", lambda: False)
    assert attention_sm90.why_not_sm90(problem()) is None
    monkeypatch.setattr(attention_sm90, "why_no_ffi", lambda: "needs another jaxlib")
    assert attention_sm90.why_not_sm90(problem()) == "needs another jaxlib"
    monkeypatch.setattr(compat, "triton_version", lambda: (3, 5))
    assert "known to work with triton 3.6" in attention_sm90.why_not_sm90(problem())


def test_choice(monkeypatch):
    attention = sys.modules["blackwell_sparsek.jax.attention"]
    monkeypatch.setattr(attention, "why_no_kernels", lambda device, dtype: None)
    monkeypatch.setattr(attention, "arch_of", lambda device: H200)
    monkeypatch.setattr(attention_sm90, "triton_interpreted", lambda: False)
    x = jnp.zeros((1, 2, 64, 64), jnp.bfloat16)
    asked = bsk_jax.explain(bsk_jax.attention, x, x, x, impl="sm90")
    assert asked.chosen == "sm90" and asked.reasons["triton"] == "comes after sm90"
    assert bsk_jax.explain(bsk_jax.attention, x, x, x).chosen == "sm90"
    few = bsk_jax.explain(bsk_jax.attention, x[:, :, :8], x, x)
    assert few.chosen == "triton" and "8 queries fill too little" in few.reasons["sm90"]
    with pytest.raises(Unsupported, match="impl='sm90' float32 has no 16-bit WGMMA"):
        bsk_jax.attention(*[x.astype(jnp.float32)] * 3, impl="sm90")


def test_arrays_that_broadcast_get_memory():
    q, k = jnp.zeros((3, 2, 8, 16)), jnp.zeros((1, 2, 8, 16))
    own = attention_sm90.with_own_memory((q, k, k, None, None))
    assert [None if x is None else x.shape[0] for x in own] == [3, 3, 3, None, None]


def test_a_launch_that_was_described_elsewhere():
    call = SimpleNamespace(attribute=lambda name: "0123")
    with pytest.raises(RuntimeError, match="no launch 0123 was described in this process"):
        driver_calls.execute(call)


def test_the_first_launch_registers_what_programs_call(monkeypatch):
    """Once for all launches: a program that JAX compiled names the launch by its digest alone."""
    registered, called = [], []

    class Described:
        def __init__(self, launch, names, counters, sm):
            self.digest = f"{launch} {names} {counters} {sm}"

    def ffi_call(target, results):
        return lambda *arrays, launch: called.append((target, launch, arrays)) or results

    monkeypatch.setattr(driver_calls, "DescribedLaunch", Described)
    monkeypatch.setattr(driver_calls, "_launches", {})
    monkeypatch.setattr(driver_calls.ffi, "register", lambda *args: registered.append(args))
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    half, word = jnp.dtype("float16"), jnp.dtype("int32")
    used = {
        "q": ArraySpec.contiguous_of("q", "input", (3, 8), half),
        "out": ArraySpec.contiguous_of("out", "output", (5, 7), half),
        "counters": ArraySpec.contiguous_of("counters", "counters", (9,), word),
    }
    q = jnp.zeros((3, 8), half)
    for launch in ("first", "second", "first"):
        (out,) = driver_calls.launch_by_driver(launch, used, {"q": q}, ["out"], H200)
        assert out.shape == (5, 7) and out.dtype == half
    assert registered == [(driver_calls.TARGET, driver_calls.execute, "CUDA")]
    digests = [f"{launch} ('q', 'out') 9 90" for launch in ("first", "second")]
    assert list(driver_calls._launches) == digests
    assert called == [(driver_calls.TARGET, x, (q,)) for x in (*digests, digests[0])]


@pytest.mark.exhaustive
def test_launches_on_a_driver_that_notes_them(tmp_path):
    """Through XLA's CPU backend, with real kernels, and without torch."""
    environment = {**environment_for_compiler(), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.jax.launch_on_fake_gpu"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *found, compiled = json.loads(done.stdout.splitlines()[-1])
    # lengths are no constants
    assert compiled["count"] == 1
    keys = [[64, 500, 2, 2], [128, 64000, 128000], [64, 128, 1, 1]]
    for case in found:
        # half as many queries from place to place: a work tile is 64 queries of a head
        queries = 200 if case["name"] == "other lengths" else 300
        rows = [[64, queries, 4, 2], [128, 128 * queries, 512 * queries], [64, 64, 1, 1]]
        assert case["traced"] == 1 and len(case["launched"]) == 2
        for stream, grid, threads, attributes, values in case["launched"]:
            programs = 8 * -(-queries // 64)
            # PDL; four warps for the consumer, one for the producer, rounded up
            assert (stream, grid, threads, attributes) == (0, programs, 256, [6]), case["name"]
            maps = [x for x in values if isinstance(x, list)]
            assert maps == [
                ["result 0", *rows],
                ["argument 0", *rows],
                ["argument 1", *keys],
                ["argument 2", *keys],
            ]
            assert values.count("result 1") == 1
