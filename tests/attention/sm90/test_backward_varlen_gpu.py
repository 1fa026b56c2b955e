"""The Hopper backward of packed sequences with wide heads, on a Hopper GPU."""

import random

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.testing.attention_cases import AttnCase

from .test_backward_gpu import BRAIN, HALF, HOPPER, check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs sm_90")]

BANDS = (EVERYTHING, Band(None, 0), Band(100, 0), Band(0, None), Band(70, 30))


@pytest.mark.parametrize(
    "dims, dtype, softcap",
    [
        ((192, 128), BRAIN, 0.0),
        ((256, 256), BRAIN, 0.0),
        ((160, 160), HALF, 0.0),
        ((64, 256), HALF, 0.0),
        ((192, 128), HALF, 15.0),
    ],
)
@pytest.mark.parametrize("seed", range(6))
def test_random_sequences(dims, dtype, softcap, seed):
    """Lengths of queries and keys drawn apart, none, one, and more than a tile of either."""
    rng = random.Random(seed)
    some = (0, 1, 63, 64, 65, 128, 129, 200, 333, rng.randint(1, 900))
    lengths = [(rng.choice(some), rng.choice(some)) for _ in range(rng.choice([1, 2, 5, 20]))]
    lengths.append((77, 150))
    case = AttnCase(
        seed, dtype, heads=rng.choice([(4, 2), (6, 1), (2, 2)]), lengths=tuple(lengths),
        head_dims=dims, band=rng.choice(BANDS), softcap=softcap, sinks=seed % 2 == 0, varlen=True,
    )  # fmt: skip
    check(*case.build("cuda"), seed, str(case))


def test_more_sequences_than_are_searched_at_a_time():
    lengths = tuple((1 + i % 5, 1 + i % 7) for i in range(300))
    case = AttnCase(
        1, BRAIN, heads=(2, 1), lengths=lengths, head_dims=(192, 128), band=Band(None, 0),
        varlen=True,
    )  # fmt: skip
    check(*case.build("cuda"), 1, str(case))


def test_neighbouring_sequences_do_not_count():
    """NaN in the sequence before and behind reaches none of the gradients of one between."""
    torch.manual_seed(0)
    lengths = (100, 130, 70)
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (torch.randn(300, 2, 192, device="cuda", dtype=BRAIN) for _ in "qkv")
    clean = [x.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x[:100], x[230:] = torch.nan, torch.nan
    inside = slice(100, 230)
    got, want = (
        torch.autograd.grad(
            bsk.attention_varlen(
                *given, offsets, offsets, max_seqlen_q=130, max_seqlen_k=130, causal=True,
                impl=impl,
            )[inside].float().sum(),
            given,
        )
        for given, impl in (
            ([x.requires_grad_() for x in (q, k, v)], "auto"),
            ([x.requires_grad_() for x in clean], "reference"),
        )
    )  # fmt: skip
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x[inside], y[inside], atol=2e-2, rtol=2e-2)
