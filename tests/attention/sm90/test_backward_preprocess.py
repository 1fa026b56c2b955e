"""Preprocess and postprocess of the Hopper backward: terms of each query, and rounding sums."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention.sm90.backward_preprocess import (
    KeySums,
    launch_attn_bwd_postprocess,
    launch_attn_bwd_preprocess,
    launch_attn_bwd_round_keys,
)
from blackwell_sparsek.attention.sm90.schedule import packed_rows
from blackwell_sparsek.testing import layouts
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.poison import nan_like


def as_threads_hold_them(sums):
    """Each [64, 64] as the accumulator of a warp group lies in registers: fours of a thread."""
    batch_heads, rows, width = sums.shape
    # row: tile, warp, half, thread; column: tile, eighth, thread, one of two
    tiles = sums.view(batch_heads, rows // 64, 4, 2, 8, width // 64, 8, 4, 2)
    return tiles.permute(0, 1, 5, 6, 2, 4, 7, 3, 8).reshape(sums.shape)


@pytest.mark.parametrize("length", [1, 64, 130])
@pytest.mark.parametrize(
    "v_dim, tile_d, ordered", [(16, 64, False), (24, 128, True), (136, 192, False)]
)
def test_preprocess(length, v_dim, tile_d, ordered, device):
    shape, padded = (2, 3, length, v_dim), -(-length // 128) * 128
    out, dout = (normal(*shape, seed=i, dtype=torch.float16, device=device) for i in range(2))
    lse, dlse = (normal(*shape[:3], seed=i, device=device) for i in (2, 3))
    lse[..., 0] = -torch.inf
    lse_log2, delta = (torch.full((6, padded), torch.nan, device=device) for _ in range(2))
    sums = torch.full((6, padded, tile_d), torch.nan, device=device)
    wide = layouts.different_layouts(out, dout)
    semaphores = torch.full((6, padded // 64, 2), 7, dtype=torch.int32, device=device)
    launch_attn_bwd_preprocess(
        lse_log2, delta, sums, semaphores if ordered else None, *wide, lse, dlse
    )
    assert (semaphores == (0 if ordered else 7)).all()
    assert sums.isnan().all() if ordered else (sums == 0).all()
    exact = (out.double() * dout.double()).sum(-1) - dlse
    exact[..., 0] = 0
    torch.testing.assert_close(delta[:, :length].view(lse.shape).double(), exact, atol=1e-5, rtol=0)
    assert (delta[:, length:] == 0).all()
    expected = (lse / torch.log(torch.tensor(2.0))).masked_fill(lse == -torch.inf, torch.inf)
    torch.testing.assert_close(lse_log2[:, :length].view(lse.shape), expected)
    assert (lse_log2[:, length:] == torch.inf).all()


def test_preprocess_without_sums(device):
    """What the split backward needs: the same terms, and nothing else."""
    out, dout = (normal(1, 2, 70, 16, seed=i, device=device) for i in range(2))
    lse = normal(1, 2, 70, seed=2, device=device)
    expected, got = ([torch.full((2, 128), torch.nan, device=device) for _ in "ld"] for _ in "eg")
    sums = torch.empty(2, 128, 64, device=device)
    launch_attn_bwd_preprocess(*expected, sums, None, out, dout, lse, None)
    launch_attn_bwd_preprocess(*got, None, None, out, dout, lse, None)
    assert all(x.equal(y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("length", [1, 64, 130])
@pytest.mark.parametrize(
    "kind, block_q", [("contiguous", None), ("outer_gap", 64), ("outer_gap", 128)]
)
@pytest.mark.parametrize("dim, tile_d", [(40, 64), (72, 128), (136, 192), (256, 256)])
def test_postprocess(length, kind, block_q, dim, tile_d, device):
    padded = -(-length // 128) * 128
    sums = normal(6, padded, tile_d, seed=1, device=device)
    dq = layouts.strided_like(torch.empty(2, 3, length, dim, dtype=torch.float16), kind)
    dq = nan_like(dq.to(device)) if kind == "contiguous" else dq.to(device)
    expected = (sums[:, :length, :dim] * 0.5).to(torch.float16).view(2, 3, length, dim)
    semaphores = None
    if block_q is not None:
        semaphores = torch.ones(6, padded // 64, 2, dtype=torch.int32, device=device)
        # no KV tile added to the first rows of a head, whatever the rest of a block counts
        semaphores[2, 0] = 0
        sums[2, :block_q] = torch.nan
        expected[0, 2, :block_q] = 0
    launch_attn_bwd_postprocess(dq, as_threads_hold_them(sums), semaphores, block_q or 64, 0.5)
    assert dq.equal(expected)


@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (130, 64), (70, 900)])
def test_preprocess_zeroes_sums_of_keys(q_len, kv_len, device):
    """Whatever the number of programs, which is that of tiles of queries."""
    out, dout = (normal(1, 4, q_len, 16, seed=i, device=device) for i in range(2))
    lse = normal(1, 4, q_len, seed=2, device=device)
    padded = -(-q_len // 128) * 128
    expected, got = (
        [torch.full((4, padded), torch.nan, device=device) for _ in "ld"] for _ in "eg"
    )
    sums = torch.empty(4, padded, 64, device=device)
    # a tensor around each, to see what is written beside it
    rows = 2 * -(-kv_len // 128) * 128
    around = [torch.full((rows + 2, width), torch.nan, device=device) for width in (128, 64)]
    key_sums = KeySums(*(x[1:-1].view(2, rows // 2, -1) for x in around))
    launch_attn_bwd_preprocess(*expected, sums, None, out, dout, lse, None)
    launch_attn_bwd_preprocess(*got, sums, None, out, dout, lse, None, key_sums)
    assert all(x.equal(y) for x, y in zip(got, expected, strict=True))
    for x in around:
        assert (x[1:-1] == 0).all() and x[0].isnan().all() and x[-1].isnan().all()


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("length, kind", [(1, "contiguous"), (64, "outer_gap"), (130, "bshd")])
@pytest.mark.parametrize("dims, tiles", [((40, 64), (64, 64)), ((72, 24), (128, 64))])
def test_round_keys(length, kind, splits, dims, tiles, device):
    """dk and dv of 2 x 3 heads; `splits` work tiles had a share of the query heads each."""
    padded = -(-length // 128) * 128
    sums = [
        normal(6 * splits, padded, width, seed=i, device=device) for i, width in enumerate(tiles)
    ]
    gradients = []
    for dim in dims:
        x = torch.empty(2, 3, length, dim, dtype=torch.float16)
        if kind == "bshd":
            x = torch.empty(2, length, 3, dim, dtype=torch.float16).transpose(1, 2)
        x = layouts.strided_like(x, kind) if kind == "outer_gap" else x
        gradients.append(x.to(device).fill_(torch.nan))
    held = KeySums(*map(as_threads_hold_them, sums))
    launch_attn_bwd_round_keys(*gradients, held, 0.5)
    for got, x, dim, scale in zip(gradients, sums, dims, (0.5, 1.0), strict=True):
        total = x.view(2, 3, splits, padded, -1)[..., :length, :dim]
        # added in the order of the splits, in fp32
        expected = total[:, :, 0]
        for i in range(1, splits):
            expected = expected + total[:, :, i]
        assert got.equal((expected * scale).to(torch.float16))


SEQUENCES = (130, 0, 1)


def offsets_of(lengths, device, first=0):
    return torch.tensor([first, *lengths], dtype=torch.int32, device=device).cumsum(0).int()


def rows_of(lengths, workspace):
    """Rows of each sequence in a workspace, which begin at multiples of 128 (`first_slot`)."""
    first = 0
    for i, length in enumerate(lengths):
        start = (first // 128 + i) * 128
        yield first, length, workspace[:, start : start + length]
        first += length


def test_preprocess_of_packed_sequences(device):
    """Each sequence as if it were alone; what lies between them counts for nothing."""
    first, heads, v_dim = 7, 2, 24
    tokens = first + sum(SEQUENCES) + 5
    out, dout = (
        normal(tokens, heads, v_dim, seed=i, dtype=torch.float16, device=device) for i in range(2)
    )
    lse, dlse = (normal(heads, tokens, seed=i, device=device) for i in (2, 3))
    # tokens of no sequence
    for x in (out, dout):
        x[:first], x[first + sum(SEQUENCES) :] = torch.nan, torch.nan
    padded = packed_rows(tokens, len(SEQUENCES))
    lse_log2, delta = (torch.full((heads, padded), torch.nan, device=device) for _ in range(2))
    sums = torch.full((heads, padded, 192), torch.nan, device=device)
    offsets = offsets_of(SEQUENCES, device, first)
    launch_attn_bwd_preprocess(
        lse_log2, delta, sums, None, out, dout, lse, dlse, cu_seqlens=offsets
    )
    assert (sums == 0).all()
    exact = (out.double() * dout.double()).sum(-1).T - dlse
    filled = torch.zeros_like(delta, dtype=torch.bool)
    for (at, length, got), (_, _, log2), (_, _, mark) in zip(
        *(rows_of(SEQUENCES, x) for x in (delta, lse_log2, filled)), strict=True
    ):
        expected = exact[:, first + at : first + at + length]
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)
        expected = lse[:, first + at : first + at + length] / torch.log(torch.tensor(2.0))
        torch.testing.assert_close(log2, expected)
        mark.fill_(True)
    assert (lse_log2[~filled] == torch.inf).all() and (delta[~filled] == 0).all()


def test_postprocess_of_packed_sequences(device):
    heads, dim, tokens = 2, 136, sum(SEQUENCES) + 5
    padded = packed_rows(tokens, len(SEQUENCES))
    sums = normal(heads, padded, 192, seed=1, device=device)
    dq = torch.full((tokens, heads, dim), torch.nan, dtype=torch.float16, device=device)
    launch_attn_bwd_postprocess(
        dq, as_threads_hold_them(sums), None, 128, 0.5, offsets_of(SEQUENCES, device)
    )
    for at, length, rows in rows_of(SEQUENCES, sums):
        expected = (rows[..., :dim] * 0.5).to(torch.float16).transpose(0, 1)
        assert dq[at : at + length].equal(expected)
    assert dq[sum(SEQUENCES) :].isnan().all()
