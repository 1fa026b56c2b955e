"""The split backward of wide heads on a Hopper GPU: what the one kernel is tested with, by two."""

import random

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.sm90 import tuning
from blackwell_sparsek.attention.sm90.config_split import WideSplit
from blackwell_sparsek.calls.attention import AttnGradients
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.testing.attention_cases import AttnCase, draw_case, in_structure
from blackwell_sparsek.testing.attention_gradients import check_gradients

from . import test_backward_gpu as one_kernel
from .test_backward_gpu import BRAIN, CALLS, HALF, check, pytestmark  # noqa: F401

# Tiles of D and Dv, softcap, dtype: each is compiled once.
STRUCTURES = (
    (256, 256, False, BRAIN),
    (192, 128, True, HALF),
    (192, 128, False, HALF),
    (192, 192, False, BRAIN),
    (128, 256, False, BRAIN),
    (256, 64, False, HALF),
)


@pytest.fixture(autouse=True, params=[WideSplit(), WideSplit(NARROW_TILES=True)], ids=str)
def split(request, monkeypatch):
    monkeypatch.setattr(tuning, "WIDE_SPLIT", request.param)


@pytest.mark.parametrize("structure", range(len(STRUCTURES)))
def test_random_calls(structure):
    tile_d, tile_dv, softcap, dtype = STRUCTURES[structure]
    for seed in range(1000 + structure * CALLS, 1000 + (structure + 1) * CALLS):
        rng = random.Random(seed)
        case = draw_case(seed, head_dims=(64,), longest=300, most_heads=14)
        lengths = tuple(max(n, 1) for n in case.lengths[0])
        if seed % 4 == 0:
            lengths = rng.randint(1, 1300), rng.randint(1, 1300)
        given = {"dtype": dtype, "varlen": False, "lengths": (lengths,)}
        case = in_structure(case, rng, (tile_d, tile_dv), None, softcap, **given)
        q, k, v, spec = case.build("cuda")
        if seed % 3 == 0:
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        check(q, k, v, spec, seed, f"{case}", deterministic=seed % 2 == 0)


@pytest.mark.parametrize("band", [EVERYTHING, Band(None, 0), Band(500, 0)])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)])
def test_the_same_bits_in_every_run(band, dims):
    one_kernel.test_the_same_bits_in_every_run(None, band, dims)


@pytest.mark.parametrize("banded", [False, True])
@pytest.mark.parametrize("dims", [(160, 160), (192, 128), (256, 256)])
def test_more_work_tiles_than_programs(banded, dims):
    one_kernel.test_more_work_tiles_than_programs(None, banded, dims)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, True), (False, False, True)]
)
def test_only_what_was_asked_for(wanted):
    one_kernel.test_only_what_was_asked_for(wanted, False, 256)


@pytest.mark.parametrize("dim", [192, 256])
def test_rows_that_see_nothing(dim):
    one_kernel.test_rows_that_see_nothing(dim)


@pytest.mark.parametrize("dim", [192, 256])
def test_memory_around_the_inputs_is_not_read(dim):
    one_kernel.test_memory_around_the_inputs_is_not_read(dim)


@pytest.mark.parametrize("queries", [1, 63, 65, 129, 333])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)])
def test_ends_of_tiles(queries, dims):
    """A window, whose tiles have edges on both sides."""
    case = AttnCase(
        7, BRAIN, heads=(4, 2), lengths=((queries, 2 * queries + 1),), head_dims=dims,
        band=Band(100, 30),
    )  # fmt: skip
    check(*case.build("cuda"))


def test_autograd_with_other_lengths():
    """Calls of other lengths are not given to launches that know one kernel."""
    torch.manual_seed(0)
    for length in (300, 333, 300, 129):
        q, k, v = (
            torch.randn(1, 2, length, 192, device="cuda", dtype=BRAIN, requires_grad=True)
            for _ in "qkv"
        )
        weight = torch.randn(1, 2, length, 192, device="cuda", dtype=BRAIN)
        out = bsk.attention(q, k, v, causal=True, impl="sm90")
        got = torch.autograd.grad((out * weight).sum(), (q, k, v))
        spec = one_kernel.causal_spec(q)
        check_gradients(AttnGradients(*got, None), weight, None, q, k, v, spec)
