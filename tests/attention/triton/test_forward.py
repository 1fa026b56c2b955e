"""The portable forward kernel against the oracle; the same bodies run interpreted and compiled."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention.triton.forward import launch_attn_fwd
from blackwell_sparsek.attention.triton.tuning import AttnFwdConfig
from blackwell_sparsek.calls.attention import AttentionCall, AttnSpec, empty_lse, empty_out
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.testing import guard, layouts, poison
from blackwell_sparsek.testing.attention_cases import AttnCase, check_attention, draw_case

HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16


def config(tile_m=32, tile_n=16):
    return AttnFwdConfig(tile_m, tile_n, num_warps=4, num_stages=2)


def attend(q, k, v, spec, cfg=None, out=None, lse=None):
    """Launch on poisoned outputs."""
    out = poison.poison_(empty_out(q, v.shape[-1])) if out is None else out
    lse = poison.poison_(empty_lse(q)) if lse is None else lse
    launch_attn_fwd(AttentionCall(q, k, v, spec), out, lse, cfg or config())
    return out, lse


def check(case, device, cfg=None):
    q, k, v, spec = case.build(device)
    out, lse = attend(q, k, v, spec, cfg)
    check_attention(out, lse, q, k, v, spec, what=str(case))
    return out, lse


@pytest.mark.parametrize("seed", range(36))
def test_random_calls(seed, device):
    case = draw_case(seed, dtypes=(HALF, FLOAT, BRAIN))
    q, k, v, spec = case.build(device)
    tile_m = (16, 32, 64)[seed % 3]
    tile_n = (64, 16, 32, 16)[seed % 4]
    if spec.block_mask is not None:
        tile_m = min(tile_m, spec.block_mask.block_size[0])
    out, lse = poison.poison_(empty_out(q, v.shape[-1])), poison.poison_(empty_lse(q))
    q, k, v, out = layouts.different_layouts(q, k, v, out, start=seed)
    attend(q, k, v, spec, config(tile_m, tile_n), out, lse)
    check_attention(out, lse, q, k, v, spec, what=str(case))
    layouts.assert_gaps_untouched(out, "out")


@pytest.mark.parametrize("dim, dim_v", [(1, 1), (8, 16), (80, 96), (112, 72), (128, 8), (40, 256)])
def test_head_dims(dim, dim_v, device):
    check(AttnCase(1, HALF, lengths=((17, 35),), head_dims=(dim, dim_v)), device)


@pytest.mark.parametrize("heads", [(3, 1), (6, 2), (5, 5), (14, 2)])
def test_query_heads_read_their_kv_head(heads, device):
    check(AttnCase(2, HALF, batch=2, heads=heads, lengths=((9, 20),)), device)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32, 33, 200])
@pytest.mark.parametrize("lengths", [(49, 49), (20, 52), (52, 20)])
def test_windows_around_the_tile(window, lengths, device):
    case = AttnCase(window, HALF, lengths=(lengths,), band=Band(window - 1, 0))
    check(case, device, config(32, 16) if window % 2 else config(16, 32))


@pytest.mark.parametrize("band", [Band(None, 0), Band(3, 40), Band(0, None), Band(0, 0)])
@pytest.mark.parametrize("lengths", [(97, 97), (97, 33), (33, 97), (1, 97), (97, 1)])
def test_bands_over_several_tiles(band, lengths, device):
    check(AttnCase(3, FLOAT, lengths=(lengths,), band=band), device)


@pytest.mark.parametrize("block_kv", [16, 32, 64, 128])
@pytest.mark.parametrize("mask", ["blocks", "elements"])
@pytest.mark.parametrize("tile_n", [16, 64])
def test_blocks_of_any_size(block_kv, mask, tile_n, device):
    """Several to a tile, one each, or several tiles to a block."""
    case = AttnCase(
        block_kv + tile_n,
        HALF,
        heads=(2, 1),
        lengths=((40, 150),),
        mask=mask,
        block_size=(64, block_kv),
        mask_broadcast=(True, False),
    )
    check(case, device, config(32, tile_n))
    check(dataclasses.replace(case, band=Band(90, 5)), device, config(64, tile_n))


@pytest.mark.parametrize("any_batch", [False, True])
@pytest.mark.parametrize("any_head", [False, True])
def test_masks_of_batches_and_heads(any_batch, any_head, device):
    case = AttnCase(
        17, HALF, batch=3, heads=(4, 2), lengths=((40, 40),), mask="blocks",
        mask_broadcast=(any_batch, any_head), block_size=(16, 16),
    )  # fmt: skip
    check(case, device, config(16, 32))


@pytest.mark.parametrize("spread", [1e3, 1e6])
@pytest.mark.parametrize("band", [Band(None, None), Band(20, 0)])
def test_huge_logits(spread, band, device):
    case = AttnCase(4, FLOAT, lengths=((20, 40),), band=band, spread=spread, scale=1.0)
    out, _ = check(case, device)
    assert out.isfinite().all()


def test_logits_far_below_any_finite_sentinel(device):
    q = torch.full((1, 1, 4, 16), -1e3, device=device)
    k = torch.full((1, 1, 20, 16), 1e3, device=device)
    v = torch.randn(1, 1, 20, 16, device=device)
    out, lse = attend(q, k, v, AttnSpec(1.0, Band(4, 0)))
    check_attention(out, lse, q, k, v, AttnSpec(1.0, Band(4, 0)))
    assert lse.max() < -1e6


def test_rows_that_see_nothing(device):
    keep = torch.zeros(1, 1, 3, 4, dtype=torch.bool, device=device)
    keep[..., 1, 2] = True
    mask = BlockMask.from_dense(keep, (32, 16), (80, 60))
    q, k, v, _ = AttnCase(5, HALF, lengths=((80, 60),)).build(device)
    out, lse = attend(q, k, v, AttnSpec(0.3, block_mask=mask))
    empty = torch.ones(80, dtype=torch.bool)
    empty[32:64] = False
    assert out[0, 0, empty].eq(0).all() and lse[0, 0, empty].eq(-torch.inf).all()
    check_attention(out, lse, q, k, v, AttnSpec(0.3, block_mask=mask))


def test_no_keys_at_all(device):
    q, k, v, spec = AttnCase(6, HALF, lengths=((20, 1),)).build(device)
    out, lse = attend(q, k[:, :, :0], v[:, :, :0], spec)
    assert out.eq(0).all() and lse.eq(-torch.inf).all()


@pytest.mark.parametrize("shape", [(0, 1, 5, 16), (1, 0, 5, 16), (1, 1, 0, 16)])
def test_nothing_to_compute(shape, device):
    q = torch.empty(shape, device=device)
    k = torch.ones(shape[0], 1, 7, 16, device=device)
    out, lse = attend(q, k, k, AttnSpec(1.0))
    assert out.shape == shape and lse.shape == shape[:3]


def test_packed_sequences_of_every_kind(device):
    lengths = ((0, 5), (1, 0), (33, 33), (0, 0), (17, 40), (40, 17), (1, 1))
    for band in (Band(None, 0), Band(9, 3)):
        check(AttnCase(7, HALF, heads=(2, 1), lengths=lengths, varlen=True, band=band), device)


def test_unused_slots_are_not_read(device):
    """A cache longer than its sequences: everything past the lengths is NaN."""
    q, k, v, spec = AttnCase(8, FLOAT, heads=(2, 2), lengths=((33, 41),), batch=2).build(device)
    caches = [torch.full((2, 2, 128, 16), float("nan"), device=device) for _ in range(2)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[:, :, :41] = x
    for tile_n in (16, 64):
        k_slice, v_slice = (cache[:, :, :41] for cache in caches)
        out, lse = attend(q, k_slice, v_slice, spec, config(32, tile_n))
        check_attention(out, lse, q, k, v, spec)


def test_absent_blocks_are_not_read(device):
    keep = torch.tensor([[True, False, True, False]], device=device)
    mask = BlockMask.from_dense(keep, (32, 16), (20, 64))
    q, k, v, _ = AttnCase(9, FLOAT, lengths=((20, 64),)).build(device)
    spec = AttnSpec(0.2, block_mask=mask)
    exact = attend(q, k, v, spec, config(16, 64))
    k[:, :, 16:32], v[:, :, 48:] = float("nan"), float("nan")
    again = attend(q, k, v, spec, config(16, 64))
    assert all(a.equal(b) for a, b in zip(exact, again, strict=True))


def test_keys_past_the_band_do_not_change_a_bit(device):
    q, k, v, spec = AttnCase(10, HALF, lengths=((32, 32),), band=Band(None, 0)).build(device)
    before = attend(q[:, :, :16], k[:, :, :16], v[:, :, :16], spec, config(16, 16))
    after = attend(q, k, v, spec, config(16, 16))
    assert before[0].equal(after[0][:, :, :16]) and before[1].equal(after[1][:, :, :16])


def test_a_mask_of_everything_is_dense(device):
    q, k, v, spec = AttnCase(11, FLOAT, lengths=((40, 70),), band=Band(50, 0)).build(device)
    for block_kv in (16, 32, 64):
        keep = torch.ones(2, -(-70 // block_kv), dtype=torch.bool, device=device)
        mask = BlockMask.from_dense(keep, (32, block_kv), (40, 70))
        out, lse = attend(q, k, v, spec._replace(block_mask=mask), config(32, 32))
        check_attention(out, lse, q, k, v, spec, what=f"blocks of {block_kv} keys")


def test_expanded_keys(device):
    q, k, v, spec = AttnCase(13, HALF, batch=3, heads=(2, 2), lengths=((9, 20),)).build(device)
    k, v = k[:1, :1].expand(3, 2, 20, 16), v[:1].expand(3, 2, 20, 16)
    out, lse = attend(q, k, v, spec)
    check_attention(out, lse, q, k, v, spec)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mask", ["none", "elements"])
@pytest.mark.parametrize("varlen", [False, True])
def test_nothing_outside_the_tensors_is_touched(side, mask, varlen, interpreted):
    lengths = ((17, 35), (0, 3), (20, 21)) if varlen else ((33, 49),)
    case = AttnCase(
        14, HALF, lengths=lengths, head_dims=(24, 40), mask=mask, sinks=True, varlen=varlen,
        band=Band(20, 4), block_size=(32, 16),
    )  # fmt: skip
    q, k, v, spec = case.build("cpu")
    out, lse = poison.poison_(empty_out(q, 40)), poison.poison_(empty_lse(q))
    q, k, v, out, lse, sinks = guard.guard_pages(q, k, v, out, lse, spec.sinks, side=side)
    spec = spec._replace(sinks=sinks)
    if varlen:
        cu_q, cu_k = guard.guard_pages(spec.cu_seqlens_q, spec.cu_seqlens_k, side=side)
        spec = spec._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    if spec.block_mask is not None:
        tensors = guard.guard_pages(*spec.block_mask.tensors(), side=side)
        m = spec.block_mask
        m = BlockMask._from_tensors(tensors, m.batch, m.heads, m.seq_lengths, m.block_size)
        spec = spec._replace(block_mask=m)
    attend(q, k, v, spec, config(32, 64), out, lse)
    check_attention(out, lse, q, k, v, spec)


FAR = 2**31 + 64


@pytest.mark.parametrize("tensor", ["q", "k", "v", "out"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_past_32_bits(tensor, dim, interpreted):
    """One tensor at a time has a stride that takes its second index past 2^31 elements."""
    q, k, v, spec = AttnCase(15, HALF, batch=2, heads=(2, 2), lengths=((2, 3),)).build("cpu")
    tensors = {"q": q, "k": k, "v": v, "out": poison.poison_(torch.empty_like(q))}
    small = tensors[tensor]
    strides = [256, 128, 16, 1]
    strides[dim] = FAR if dim < 2 else FAR // 2 + 1
    if dim == 2 and tensor in ("q", "out"):
        strides[dim] = FAR
    far = guard.huge_zeros(small.shape, HALF, strides)
    far.copy_(small)
    tensors[tensor] = far
    out, lse = attend(
        tensors["q"], tensors["k"], tensors["v"], spec, config(16, 16), tensors["out"]
    )
    check_attention(out.clone(), lse, q, k, v, spec)


def test_strides_near_32_bits_times_rows(interpreted):
    """Strides fit 32 bits; their product with a row does not."""
    q, k, v, spec = AttnCase(16, HALF, lengths=((5, 5),)).build("cpu")
    stride = 2**30
    far = [guard.huge_zeros(x.shape, HALF, (16, 16, stride, 1)).copy_(x) for x in (q, k, v)]
    out = guard.huge_zeros(q.shape, HALF, (16, 16, stride, 1))
    out, lse = attend(*far, spec, config(16, 16), out)
    check_attention(out.clone(), lse, q, k, v, spec)
