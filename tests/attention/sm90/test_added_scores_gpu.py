"""ALiBi and a bias in the Hopper forward, on a Hopper GPU."""

import random

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.testing.attention_cases import AttnCase, check_attention

from .test_forward_gpu import BRAIN, HALF, run

pytestmark = pytest.mark.sm90

BANDS = (EVERYTHING, Band(None, 0), Band(100, 0), Band(0, None))
LENGTHS = ((1, 1), (65, 127), (333, 1000), (1000, 333), (700, 700))


@pytest.mark.parametrize(
    "dims, dtype, blocks, options",
    [
        ((128, 128), BRAIN, None, {}),
        ((64, 64), HALF, None, {}),
        ((128, 128), HALF, None, {"softcap": 9.0, "sinks": True}),
        ((128, 128), BRAIN, (128, 64), {}),
        ((64, 64), BRAIN, (64, 16), {"sinks": True}),
        ((192, 128), BRAIN, None, {}),
        ((256, 256), BRAIN, None, {}),
    ],
    ids=str,
)
def test_dense_batches(dims, dtype, blocks, options):
    rng = random.Random(f"{dims}{blocks}")
    for seed, lengths in enumerate(LENGTHS):
        case = AttnCase(
            seed, dtype, batch=2, heads=(4, 2), lengths=(lengths,), head_dims=dims,
            band=rng.choice(BANDS), mask="elements" if blocks else "none",
            block_size=blocks or (32, 32), mask_broadcast=(False, False),
            alibi=rng.choice(("heads", "batch")), **options,
        )  # fmt: skip
        q, k, v, spec = case.build("cuda")
        check_attention(*run(q, k, v, spec), q, k, v, spec, what=f"{case}")


@pytest.mark.parametrize(
    "dims, dtype, blocks, options",
    [
        ((128, 128), BRAIN, None, {"bias": (False, False)}),
        ((64, 64), HALF, None, {"bias": (True, False), "alibi": "batch"}),
        ((128, 128), HALF, None, {"bias": (False, True), "softcap": 9.0, "sinks": True}),
        ((128, 128), BRAIN, (128, 64), {"bias": (True, True)}),
        ((128, 128), BRAIN, (64, 64), {"bias": (False, False)}),
        ((64, 64), BRAIN, (64, 16), {"bias": (False, False), "alibi": "heads"}),
        ((192, 128), BRAIN, None, {"bias": (False, False)}),
        ((256, 256), BRAIN, None, {"bias": (False, False)}),
    ],
    ids=str,
)
def test_bias(dims, dtype, blocks, options):
    rng = random.Random(f"{dims}{blocks}")
    for seed, lengths in enumerate((*LENGTHS, (65, 5000))):
        case = AttnCase(
            seed, dtype, batch=2, heads=(4, 2), lengths=(lengths,), head_dims=dims,
            band=rng.choice(BANDS), mask="elements" if blocks else "none",
            block_size=blocks or (32, 32), mask_broadcast=(False, False), **options,
        )  # fmt: skip
        q, k, v, spec = case.build("cuda")
        check_attention(*run(q, k, v, spec), q, k, v, spec, what=f"{case}")


@pytest.mark.parametrize("layout", ["keys first", "expanded", "every other key", "-inf", "float32"])
def test_layouts_and_values_of_a_bias(layout):
    q, k, v, spec = AttnCase(
        5, BRAIN, heads=(4, 2), lengths=((300, 333),), head_dims=(64, 64), bias=(False, False)
    ).build("cuda")
    bias = spec.bias
    if layout == "keys first":
        bias = bias.mT.contiguous().mT
    elif layout == "expanded":
        bias = bias[:, :, :, :1].expand_as(bias)
    elif layout == "every other key":
        bias = torch.stack([bias, torch.full_like(bias, torch.nan)], -1).flatten(-2)[..., ::2]
    elif layout == "-inf":
        bias = bias.masked_fill(bias > 1, -torch.inf)
        bias[..., 7, :] = -torch.inf
    else:
        bias = bias.float()
    spec = spec._replace(bias=bias)
    check_attention(*run(q, k, v, spec), q, k, v, spec, what=layout)


@pytest.mark.parametrize("dims, dtype", [((64, 64), BRAIN), ((128, 128), HALF)], ids=str)
def test_packed_sequences(dims, dtype):
    for seed, band in enumerate(BANDS):
        lengths = ((3, 70), (0, 5), (200, 200), (129, 700))
        case = AttnCase(
            seed, dtype, heads=(4, 2), lengths=lengths, head_dims=dims, band=band, varlen=True,
            alibi="batch",
        )  # fmt: skip
        q, k, v, spec = case.build("cuda")
        check_attention(*run(q, k, v, spec), q, k, v, spec, what=f"{case}")


def test_the_call_by_name_equals_the_portable_kernel_within_its_budget():
    q, k, v, spec = AttnCase(
        3, BRAIN, heads=(4, 2), lengths=((500, 500),), head_dims=(64, 64), alibi="heads"
    ).build("cuda")
    options = {"alibi_slopes": spec.alibi_slopes, "causal": True, "return_lse": True}
    out, lse = bsk.attention(q, k, v, **options, impl="sm90")
    spec = spec._replace(band=Band(None, 0))
    check_attention(out, lse, q, k, v, spec, what="by name")
    assert torch.isfinite(out).all()
