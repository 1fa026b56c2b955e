"""The Hopper backward with sums over 96 of 128 columns, on a Hopper GPU."""

import random

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention.sm90 import launch
from blackwell_sparsek.attention.sm90.tuning import attn_bwd_sm90_config
from blackwell_sparsek.calls.attention import AttnProblem
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.testing.attention_cases import AttnCase

from .test_backward_gpu import BRAIN, HALF, check

pytestmark = pytest.mark.sm90

BANDS = (EVERYTHING, Band(None, 0), Band(100, 0), Band(0, None))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "dims, dtype, softcap",
    [
        ((96, 96), BRAIN, 0.0),
        ((72, 88), HALF, 0.0),
        ((80, 128), BRAIN, 0.0),
        ((128, 96), BRAIN, 0.0),
        ((96, 64), HALF, 12.0),
    ],
)
@pytest.mark.parametrize("blocks", [None, (128, 128)])
def test_gradients(dims, dtype, softcap, blocks, deterministic, monkeypatch):
    """Heads are not shared here; columns past the head dim are zeros in shared memory."""
    monkeypatch.setattr(launch, "attn_bwd_sm90_head_splits", lambda *given: 1)
    rng = random.Random(f"{dims}")
    for seed, (sq, sk) in enumerate(((1, 1), (65, 127), (333, 1000), (1000, 333), (700, 700))):
        case = AttnCase(
            seed, dtype, batch=rng.choice([1, 2]), heads=(4, 2), lengths=((sq, sk),),
            head_dims=dims, band=rng.choice(BANDS), softcap=softcap,
        )  # fmt: skip
        q, k, v, spec = case.build("cuda")
        if blocks is not None:
            keep = torch.rand(1, 4, -(-sq // 128), -(-sk // 128), device="cuda") < 0.7
            spec = spec._replace(block_mask=BlockMask.from_dense(keep, blocks, (sq, sk)))
        problem = AttnProblem.of(q, k, v, spec, backward=True, deterministic=deterministic)
        config = attn_bwd_sm90_config(problem)
        assert 96 in (config.SCORE_D, config.SCORE_DV)
        check(q, k, v, spec, seed, str(case), deterministic)


def test_columns_of_neighbouring_tensors_do_not_count():
    """NaN in the columns behind the last one of a wider tensor, which a tile would cover."""
    q, k, v, spec = AttnCase(
        5, BRAIN, heads=(2, 2), lengths=((130, 190),), head_dims=(96, 96)
    ).build("cuda")
    inside = []
    for x in (q, k, v):
        wide = x.new_full((*x.shape[:3], 128), torch.nan)
        wide[..., :96] = x
        inside.append(wide[..., :96])
    check(*inside, spec)
