"""The backward kernels against the oracle; the same bodies run interpreted and compiled."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention.triton.backward import launch_attn_dkdv, launch_attn_dq
from blackwell_sparsek.attention.triton.delta import launch_attn_delta, launch_sink_gradients
from blackwell_sparsek.attention.triton.tuning import AttnBwdConfig
from blackwell_sparsek.calls.attention import AttentionCall, AttnGradients, AttnSpec, BackwardCall
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.reference.attention import attention as oracle
from blackwell_sparsek.testing import guard, layouts, poison
from blackwell_sparsek.testing.attention_cases import AttnCase, draw_case
from blackwell_sparsek.testing.attention_gradients import check_gradients, upstream

HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16


def config(tile_m, tile_n):
    return AttnBwdConfig(tile_m, tile_n, num_warps=4, num_stages=2)


def empty_gradients(q, k, v, spec):
    dsinks = None if spec.sinks is None else poison.nan_like(spec.sinks)
    return AttnGradients(*(poison.nan_like(x) for x in (q, k, v)), dsinks)


def backward(gradients, dout, dlse, q, k, v, spec, forward=None, tiles=(32, 16)):
    """Fill `gradients` from the oracle's result; `tiles` are those of a kernel's own side."""
    out, lse = oracle(q, k, v, spec) if forward is None else forward
    own, other = tiles
    tile_m = tile_n = own
    if spec.block_mask is not None:
        tile_m, tile_n = (min(own, side) for side in spec.block_mask.block_size)
    delta = poison.nan_like(lse)
    launch_attn_delta(delta, dout, out, dlse, lse)
    call = BackwardCall(AttentionCall(q, k, v, spec), dout, dlse, out, lse, gradients)
    if gradients.dq is not None:
        launch_attn_dq(call, delta, config(tile_m, other))
    launch_attn_dkdv(call, delta, config(other, tile_n))
    if gradients.dsinks is not None:
        launch_sink_gradients(gradients.dsinks, spec.sinks, lse, delta, spec.cu_seqlens_q)


def check(case, device, tiles=(32, 16), with_dlse=True):
    q, k, v, spec = case.build(device)
    forward = oracle(q, k, v, spec)
    dout, dlse = upstream(*forward, case.seed)
    dlse = dlse if with_dlse else None
    gradients = empty_gradients(q, k, v, spec)
    backward(gradients, dout, dlse, q, k, v, spec, forward, tiles)
    check_gradients(gradients, dout, dlse, q, k, v, spec, what=str(case))
    return gradients


@pytest.mark.parametrize("seed", range(16))
def test_random_calls(seed, device):
    case = draw_case(seed, dtypes=(HALF, FLOAT, BRAIN))
    q, k, v, spec = case.build(device)
    out, lse = oracle(q, k, v, spec)
    dout, dlse = upstream(out, lse, seed)
    dq, dk, dv, dsinks = empty_gradients(q, k, v, spec)
    q, k, v, out, dout, dq, dk, dv = layouts.different_layouts(
        q, k, v, out, dout, dq, dk, dv, start=seed
    )
    gradients = AttnGradients(dq, dk, dv, dsinks)
    tiles = ((16, 64), (32, 16), (64, 32), (32, 32))[seed % 4]
    backward(gradients, dout, dlse, q, k, v, spec, (out, lse), tiles)
    check_gradients(gradients, dout, dlse, q, k, v, spec, what=str(case))
    for name, gradient in zip("qkv", gradients, strict=False):
        layouts.assert_gaps_untouched(gradient, f"d{name}")


@pytest.mark.parametrize("dim, dim_v", [(1, 1), (80, 96), (72, 8), (40, 256)])
def test_head_dims(dim, dim_v, device):
    check(AttnCase(1, HALF, lengths=((17, 35),), head_dims=(dim, dim_v)), device)


@pytest.mark.parametrize("heads", [(3, 1), (4, 2)])
def test_query_heads_add_up_in_their_kv_head(heads, device):
    check(AttnCase(2, HALF, batch=2, heads=heads, lengths=((9, 20),)), device)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 33])
@pytest.mark.parametrize("lengths", [(49, 49), (20, 52), (52, 20)])
def test_windows_around_the_tile(window, lengths, device):
    case = AttnCase(window, HALF, lengths=(lengths,), band=Band(window - 1, 0))
    check(case, device, (32, 16) if window % 2 else (16, 32))


@pytest.mark.parametrize("band", [Band(None, 0), Band(3, 40), Band(0, None)])
@pytest.mark.parametrize("lengths", [(97, 65), (33, 97), (1, 97), (97, 1)])
def test_bands_over_several_tiles(band, lengths, device):
    check(AttnCase(3, HALF, lengths=(lengths,), band=band), device)


@pytest.mark.parametrize("block_size", [(64, 16), (16, 64), (32, 32), (16, 128)])
@pytest.mark.parametrize("mask", ["blocks", "elements"])
@pytest.mark.parametrize("other", [16, 64])
def test_blocks_of_any_size(block_size, mask, other, device):
    """Several to a tile, one each, or several tiles to a block, in both directions."""
    case = AttnCase(
        sum(block_size) + other,
        HALF,
        heads=(2, 1),
        lengths=((50, 70),),
        mask=mask,
        block_size=block_size,
        mask_broadcast=(True, False),
        band=Band(90, 5) if other == 16 else Band(None, None),
    )
    check(case, device, (32, other))


@pytest.mark.parametrize("any_batch, any_head", [(False, False), (True, False), (False, True)])
def test_masks_of_batches_and_heads(any_batch, any_head, device):
    case = AttnCase(
        17, HALF, batch=2, heads=(4, 2), lengths=((20, 20),), mask="blocks",
        mask_broadcast=(any_batch, any_head), block_size=(16, 16),
    )  # fmt: skip
    check(case, device, (16, 32))


@pytest.mark.parametrize("scale, softcap", [(0.0, 0.0), (-0.3, 0.0), (-0.3, 3.0)])
def test_scales_of_any_sign(scale, softcap, device):
    check(AttnCase(4, HALF, lengths=((20, 40),), band=Band(30, 0), scale=scale, softcap=softcap),
          device)  # fmt: skip


def test_rows_that_see_nothing(device):
    """Zero gradients for them, whatever comes back, and right ones beside them."""
    keep = torch.zeros(1, 1, 3, 4, dtype=torch.bool, device=device)
    keep[..., 1, 2] = True
    mask = BlockMask.from_dense(keep, (32, 16), (80, 60))
    q, k, v, _ = AttnCase(5, HALF, lengths=((80, 60),)).build(device)
    spec = AttnSpec(0.3, block_mask=mask, max_q=80, max_k=60)
    out, lse = oracle(q, k, v, spec)
    dout, dlse = upstream(out, lse, 5)
    hurt = dlse.masked_fill(lse == -torch.inf, torch.nan)
    gradients = empty_gradients(q, k, v, spec)
    backward(gradients, dout, hurt, q, k, v, spec, (out, lse))
    check_gradients(gradients, dout, dlse, q, k, v, spec)
    dq, dk, dv, _ = gradients
    assert dq[0, 0, :32].eq(0).all() and dq[0, 0, 64:].eq(0).all()
    for x in (dk, dv):
        assert x[0, 0, :32].eq(0).all() and x[0, 0, 48:].eq(0).all()
        assert x[0, 0, 32:48].ne(0).any()


def test_no_keys_and_no_queries(device):
    q, k, v, spec = AttnCase(6, HALF, lengths=((20, 3),)).build(device)
    for queries, keys in ((q, k[:, :, :0]), (q[:, :, :0], k)):
        values = v[:, :, : keys.shape[2]]
        gradients = empty_gradients(queries, keys, values, spec)
        out = torch.zeros_like(queries)
        lse = torch.full(queries.shape[:3], -torch.inf, device=device)
        backward(gradients, out, None, queries, keys, values, spec, (out, lse))
        assert all(x.eq(0).all() for x in gradients[:3])


def test_packed_sequences_of_every_kind(device):
    lengths = ((0, 5), (1, 0), (33, 33), (0, 0), (17, 40), (40, 17), (1, 1))
    for band in (Band(None, 0), Band(9, 3)):
        case = AttnCase(7, HALF, heads=(2, 1), lengths=lengths, varlen=True, band=band, sinks=True)
        check(case, device)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,)])
def test_only_what_was_asked_for(wanted, device):
    """The same bits as when all are; nothing else is written."""
    q, k, v, spec = AttnCase(8, HALF, heads=(2, 1), lengths=((33, 40),)).build(device)
    out, lse = oracle(q, k, v, spec)
    dout, dlse = upstream(out, lse, 8)
    everything = empty_gradients(q, k, v, spec)
    backward(everything, dout, dlse, q, k, v, spec, (out, lse))
    some = [x if i in wanted else None for i, x in enumerate(empty_gradients(q, k, v, spec))]
    backward(AttnGradients(*some), dout, dlse, q, k, v, spec, (out, lse))
    assert all(some[i].equal(everything[i]) for i in wanted)


def test_sinks_of_many_rows(device):
    """More queries than one program adds up; rows of delta past the queries are not read."""
    heads, rows = 2, 20000
    padded = torch.full((2, heads, rows + 96), torch.nan, device=device)
    lse, delta = torch.randn(2, heads, rows, device=device), padded[..., :rows]
    delta.copy_(torch.randn(2, heads, rows))
    sinks, dsinks = torch.randn(heads, device=device), torch.full((heads,), torch.nan).to(device)
    lse[1, 1, 7], delta[1, 1, 7] = -torch.inf, 0.0
    launch_sink_gradients(dsinks, sinks, lse, padded, None)
    p = torch.exp(sinks.double()[:, None] - lse.double()).masked_fill(lse == -torch.inf, 0.0)
    torch.testing.assert_close(dsinks.double(), -(p * delta.double()).sum((0, 2)), rtol=1e-4,
                               atol=0.0)  # fmt: skip


def test_unused_slots_are_not_read(device):
    """Tensors longer than their sequences: everything past the lengths is NaN."""
    q, k, v, spec = AttnCase(9, FLOAT, heads=(2, 2), lengths=((33, 41),)).build(device)
    out, lse = oracle(q, k, v, spec)
    dout, dlse = upstream(out, lse, 9)

    def in_cache(x):
        cache = torch.full((1, 2, 128, 16), torch.nan, device=device)
        cache[:, :, : x.shape[2]] = x
        return cache[:, :, : x.shape[2]]

    gradients = empty_gradients(q, k, v, spec)
    inputs = [in_cache(x) for x in (dout, q, k, v, out)]
    backward(gradients, inputs[0], dlse, *inputs[1:4], spec, (inputs[4], lse), (32, 64))
    check_gradients(gradients, dout, dlse, q, k, v, spec)


def test_absent_blocks_are_not_read(device):
    keep = torch.tensor([[True, False, True, False], [False, False, True, False]], device=device)
    mask = BlockMask.from_dense(keep, (32, 16), (64, 64))
    q, k, v, _ = AttnCase(10, FLOAT, lengths=((64, 64),)).build(device)
    spec = AttnSpec(0.2, block_mask=mask)
    out, lse = oracle(q, k, v, spec)
    dout, dlse = upstream(out, lse, 10)
    before, after = (empty_gradients(q, k, v, spec) for _ in range(2))
    backward(before, dout, dlse, q, k, v, spec, (out, lse), (16, 64))
    for hidden in (slice(16, 32), slice(48, 64)):
        k[:, :, hidden], v[:, :, hidden] = torch.nan, torch.nan
    backward(after, dout, dlse, q, k, v, spec, (out, lse), (16, 64))
    assert all(a.equal(b) for a, b in zip(before[:3], after[:3], strict=True))
    assert before.dk[:, :, 16:32].eq(0).all() and before.dv[:, :, 48:].eq(0).all()


def test_expanded_keys(device):
    q, k, v, spec = AttnCase(13, HALF, batch=3, heads=(2, 2), lengths=((9, 20),)).build(device)
    k, v = k[:1, :1].expand(3, 2, 20, 16), v[:1].expand(3, 2, 20, 16)
    forward = oracle(q, k, v, spec)
    dout, dlse = upstream(*forward, 13)
    gradients = empty_gradients(q, k, v, spec)
    backward(gradients, dout, dlse, q, k, v, spec, forward)
    check_gradients(gradients, dout, dlse, q, k, v, spec)


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
    out, lse = oracle(q, k, v, spec)
    dout, dlse = upstream(out, lse, 14)
    gradients = AttnGradients(*guard.guard_pages(*empty_gradients(q, k, v, spec), side=side))
    q, k, v, out, lse, dout, dlse, sinks = guard.guard_pages(
        q, k, v, out, lse, dout, dlse, spec.sinks, side=side
    )
    spec = spec._replace(sinks=sinks)
    if varlen:
        cu_q, cu_k = guard.guard_pages(spec.cu_seqlens_q, spec.cu_seqlens_k, side=side)
        spec = spec._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    if spec.block_mask is not None:
        m = spec.block_mask
        tensors = guard.guard_pages(*m.tensors(), side=side)
        m = BlockMask._from_tensors(tensors, m.batch, m.heads, m.seq_lengths, m.block_size)
        spec = spec._replace(block_mask=m)
    backward(gradients, dout, dlse, q, k, v, spec, (out, lse), (32, 64))
    check_gradients(gradients, dout, dlse, q, k, v, spec)


FAR = 2**31 + 64


@pytest.mark.parametrize("tensor", ["q", "k", "v", "dout", "dq", "dk", "dv"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_past_32_bits(tensor, dim, interpreted):
    """One tensor at a time has a stride that takes its second index past 2^31 elements."""
    q, k, v, spec = AttnCase(15, HALF, batch=2, heads=(2, 2), lengths=((2, 2),)).build("cpu")
    forward = oracle(q, k, v, spec)
    dout, dlse = upstream(*forward, 15)
    names = ("q", "k", "v", "dout", "dq", "dk", "dv")
    empty = empty_gradients(q, k, v, spec)
    tensors = dict(zip(names, (q, k, v, dout, *empty[:3]), strict=True))
    strides = [64, 32, 16, 1]
    strides[dim] = FAR
    small = tensors[tensor]
    tensors[tensor] = guard.huge_zeros(small.shape, HALF, strides).copy_(small)
    gradients = AttnGradients(tensors["dq"], tensors["dk"], tensors["dv"], None)
    backward(
        gradients, tensors["dout"], dlse, tensors["q"], tensors["k"], tensors["v"], spec, forward
    )
    gradients = AttnGradients(*(x.clone() for x in gradients[:3]), None)
    check_gradients(gradients, dout, dlse, q, k, v, spec)


def test_the_same_bits_whatever_else_is_in_the_batch(device):
    case = AttnCase(16, HALF, batch=2, heads=(2, 1), lengths=((40, 40),), band=Band(None, 0))
    both = check(case, device)
    q, k, v, spec = case.build(device)
    forward = oracle(q, k, v, spec)
    dout, dlse = upstream(*forward, case.seed)
    one = [x[1:] for x in (dout, dlse, q, k, v)]
    gradients = empty_gradients(*one[2:], spec)
    backward(gradients, *one, spec, tuple(x[1:] for x in forward))
    for a, b in zip(both[:3], gradients[:3], strict=True):
        assert a[1:].equal(b)


def test_gradients_without_dlse(device):
    case = AttnCase(18, HALF, heads=(2, 1), lengths=((33, 50),), band=Band(20, 3))
    check(case, device, with_dlse=False)
    check(dataclasses.replace(case, sinks=True, softcap=4.0), device, with_dlse=False)
