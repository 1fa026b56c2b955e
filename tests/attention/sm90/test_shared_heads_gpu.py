"""The Hopper backward where work tiles share the query heads of a KV head, on a Hopper GPU."""

import random

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.sm90 import launch, resize
from blackwell_sparsek.calls.attention import AttnGradients
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.testing.attention_cases import AttnCase
from blackwell_sparsek.testing.attention_gradients import check_gradients

from .test_backward_gpu import (
    BRAIN,
    HALF,
    capture,
    causal_spec,
    check,
    forward,
    gradients_of,
    repeated,
)

pytestmark = pytest.mark.sm90

CAUSAL = Band(None, 0)
BANDS = (EVERYTHING, CAUSAL, Band(100, 0), Band(0, None), Band(70, 30))
LENGTHS = ((1, 1), (65, 127), (129, 128), (333, 1000), (1000, 333), (700, 700))


def shared_by(monkeypatch, splits):
    for module in (launch, resize):
        monkeypatch.setattr(module, "attn_bwd_sm90_head_splits", lambda *given: splits)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "dims, dtype, softcap",
    [
        ((128, 128), BRAIN, 0.0),
        ((64, 64), HALF, 0.0),
        ((96, 40), BRAIN, 0.0),
        ((64, 128), HALF, 0.0),
        ((128, 128), HALF, 15.0),
    ],
)
@pytest.mark.parametrize("heads, splits", [((14, 2), 7), ((8, 2), 2), ((12, 1), 4)])
def test_gradients(heads, splits, dims, dtype, softcap, deterministic, monkeypatch):
    shared_by(monkeypatch, splits)
    rng = random.Random(f"{heads}{dims}")
    for seed, lengths in enumerate(LENGTHS):
        case = AttnCase(
            seed, dtype, batch=rng.choice([1, 2]), heads=heads, lengths=(lengths,), head_dims=dims,
            band=rng.choice(BANDS), softcap=softcap, sinks=seed == 3,
        )  # fmt: skip
        q, k, v, spec = case.build("cuda")
        if seed % 2:
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        check(q, k, v, spec, seed, str(case), deterministic)


@pytest.mark.parametrize("band", [EVERYTHING, CAUSAL, Band(500, 0)])
@pytest.mark.parametrize("splits", [2, 6])
def test_the_same_bits_in_every_run(splits, band, monkeypatch):
    """Far more work tiles than programs, beside another kernel that takes SMs away."""
    shared_by(monkeypatch, splits)
    case = AttnCase(
        2, BRAIN, batch=2, heads=(24, 4), lengths=((1500, 2100),), head_dims=(128, 128), band=band
    )  # fmt: skip
    q, k, v, spec = case.build("cuda")
    call = (q, k, v, spec, *forward(q, k, v, spec))
    first = repeated(call)
    for got in (first, gradients_of(*call)):
        check_gradients(got, *call[5], q, k, v, spec)


@pytest.mark.usefixtures("recorded_at_once")
@pytest.mark.parametrize("deterministic", [False, True])
def test_replayed_and_resized(deterministic):
    """The tuning's own choice at 28 heads on 4, recorded, replayed, and with lengths never seen."""
    torch.manual_seed(0)
    for tokens in (300, 300, 300, 301, 300, 429, 1000):
        q, dout = (torch.randn(1, 28, tokens, 128, device="cuda", dtype=BRAIN) for _ in "qd")
        k, v = (torch.randn(1, 4, tokens, 128, device="cuda", dtype=BRAIN) for _ in "kv")
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = bsk.attention(*inputs, causal=True, deterministic=deterministic)
        made = AttnGradients(*torch.autograd.grad(out, inputs, dout), None)
        check_gradients(made, dout, None, q, k, v, causal_spec(q))


def test_a_graph():
    """Sums must be zeroed at every replay."""
    q, dout = (torch.randn(1, 8, 333, 64, device="cuda", dtype=BRAIN) for _ in "qd")
    k, v = (torch.randn(1, 1, 333, 64, device="cuda", dtype=BRAIN) for _ in "kv")
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def step():
        return torch.autograd.grad(bsk.attention(*inputs, causal=True), inputs, dout)

    graph, captured = capture(step)
    for _ in range(3):
        graph.replay()
    check_gradients(AttnGradients(*captured, None), dout, None, q, k, v, causal_spec(q))
