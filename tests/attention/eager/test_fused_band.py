"""The fused inside of a band equals the oracle, and ends where it says."""

import pytest
import torch

from blackwell_sparsek.attention.eager import forward
from blackwell_sparsek.attention.eager import forward as fused_band
from blackwell_sparsek.attention.eager.forward import attention
from blackwell_sparsek.attention.eager.visits import Extent
from blackwell_sparsek.calls.attention import AttnSpec
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.testing.attention_cases import check_attention
from blackwell_sparsek.testing.inputs import qkv
from blackwell_sparsek.testing.layouts import different_layouts


@pytest.fixture
def covered(monkeypatch):
    """The ranges of queries that the fused kernel computed."""
    ranges = []
    inside = fused_band.attend_inside

    def spy(*args):
        ranges.append(inside(*args))
        return ranges[-1]

    monkeypatch.setattr(forward, "attend_inside", spy)
    return ranges


@pytest.mark.parametrize("band", [(0, 0), (1, 0), (63, 0), (64, 1), (65, 100), (0, 7)])
@pytest.mark.parametrize("lengths", [(500, 500), (400, 631), (600, 560)])
def test_bands_match_the_oracle(covered, band, lengths):
    sq, sk = lengths
    q, k, v = qkv(2, 4, 2, sq, sk, 24, seed=sum(band))
    q, k, v = different_layouts(q, k, v, start=sk)
    spec = AttnSpec(0.3, Band(*band), max_q=sq, max_k=sk)
    out, lse = attention(q, k, v, spec)
    begin, end = covered[0]
    assert end - begin >= fused_band.MIN_TILES * fused_band.TILE_Q
    check_attention(out, lse, q, k, v, spec, what=f"{band} {lengths}")


@pytest.mark.parametrize(
    "change",
    [
        {"band": Band(None, 1)},
        {"band": Band(3, None)},
        {"softcap": 5.0},
        {"sinks": torch.zeros(2)},
        {"band": Band(400, 0)},
    ],
)
def test_what_it_cannot_do_is_left_to_the_tiles(covered, change):
    q, k, v = qkv(1, 2, 2, 512, 512, 16, seed=1)
    spec = AttnSpec(0.25, Band(7, 0), max_q=512, max_k=512)
    attention(q, k, v, spec)
    assert covered.pop() == (64, 512)
    spec = spec._replace(**change)
    out, lse = attention(q, k, v, spec)
    assert covered == [(0, 0)]
    check_attention(out, lse, q, k, v, spec)


def test_inputs_that_are_not_finite_go_tile_by_tile(covered):
    q, k, v = qkv(1, 1, 1, 512, 512, 16, seed=2)
    v[0, 0, 100, 3] = float("nan")
    out, _ = attention(q, k, v, AttnSpec(0.25, Band(7, 0), max_q=512, max_k=512))
    assert covered == []
    assert out.isnan().any(-1).nonzero()[:, 2].tolist() == list(range(100, 108))


def test_windows_are_views():
    x = torch.arange(40.0).view(20, 2)
    windows = fused_band._windows(x[2:], 1, 1, 5, 3)
    assert windows.data_ptr() == x[3:].data_ptr()
    assert torch.equal(windows[0, 2], x[3:8])


def test_extent_of_the_inside():
    q = torch.zeros(1, 1, 640, 16)
    spec = AttnSpec(1.0, Band(100, 3), max_q=640, max_k=700)
    first, last = fused_band._inside(q, q, spec, Extent(640, 700))
    # query 64 sits at position 124 and sees key 24; query 639 would want a key past the end
    assert (first, last) == (1, 9)
