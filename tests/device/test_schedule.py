"""Program order and where sequences lie."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.device.schedule import (
    batch_and_heads,
    count_packed_tiles,
    head_offset,
    place_in_sequence,
    raster_place,
    sequence_of_tile,
    token_span,
)


@triton.jit
def _schedule_probe(out_ptr, num_batch_heads, num_tiles, group, N: tl.constexpr):
    program = tl.minimum(tl.arange(0, N), num_batch_heads * num_tiles - 1)
    batch_head, tile = raster_place(program, num_batch_heads, num_tiles, group)
    tl.store(out_ptr + program * 2, batch_head)
    tl.store(out_ptr + program * 2 + 1, tile)


@pytest.mark.parametrize(
    "planes, tiles, group",
    [(1, 1, 1), (6, 4, 4), (7, 3, 2), (5, 2, 5), (6, 5, 2), (8, 4, 3), (3, 2, 7)],
)
def test_every_tile_once_heavy_ones_first(device, planes, tiles, group):
    out = torch.full((32, 2), -1, dtype=torch.int32, device=device)
    _schedule_probe[(1,)](out, planes, tiles, group, N=32)
    placed = [tuple(x) for x in out[: planes * tiles].tolist()]
    assert sorted(placed) == [(p, t) for p in range(planes) for t in range(tiles)]
    # planes too few for a group of their own belong to the last one
    begins = list(range(0, planes, group))[: max(planes // group, 1)]
    expected = [
        (plane, tile)
        for first, end in itertools.pairwise([*begins, planes])
        for tile in reversed(range(tiles))
        for plane in range(first, end)
    ]
    assert placed == expected


@triton.jit
def _span_probe(out_ptr, cu_ptr, plane, q_heads, group_size, length, strides):
    batch, q_head, kv_head = batch_and_heads(plane, q_heads, group_size)
    start, length = token_span(cu_ptr, batch, length)
    offset = head_offset(batch, kv_head, start, strides)
    tl.store(out_ptr, tl.cast(batch, tl.int64))
    tl.store(out_ptr + 1, tl.cast(q_head, tl.int64))
    tl.store(out_ptr + 2, tl.cast(kv_head, tl.int64))
    tl.store(out_ptr + 3, tl.cast(length, tl.int64))
    tl.store(out_ptr + 4, offset)


@pytest.mark.parametrize("q_heads, group", [(1, 1), (6, 3), (14, 7), (24, 24)])
@pytest.mark.parametrize("packed", [False, True])
def test_spans(device, packed, q_heads, group):
    cu = torch.tensor([0, 4, 4, 11], dtype=torch.int32, device=device)
    strides = (0 if packed else 1000, 17, 3)
    for plane in range(3 * q_heads):
        out = torch.zeros(5, dtype=torch.int64, device=device)
        _span_probe[(1,)](out, cu if packed else None, plane, q_heads, group, 9, strides)
        batch, head = divmod(plane, q_heads)
        start = [0, 4, 4][batch] if packed else 0
        length = [4, 0, 7][batch] if packed else 9
        offset = batch * strides[0] + head // group * 17 + start * 3
        assert out.tolist() == [batch, head, head // group, length, offset]


def test_offsets_pass_32_bits(device):
    out = torch.zeros(5, dtype=torch.int64, device=device)
    strides = (2**31 - 16, 2**30, 2**33)
    _span_probe[(1,)](out, None, 3 * 8 + 7, 8, 1, 5, strides)
    assert out[4].item() == 3 * strides[0] + 7 * strides[1]


@triton.jit
def _packed_probe(
    out_ptr, cu_ptr, num_sequences, heads, group, TILE_M: tl.constexpr, SCAN: tl.constexpr
):
    total = count_packed_tiles(cu_ptr, num_sequences, heads, TILE_M)
    sequence = 0
    work_index = 0
    while work_index < total:
        sequence = sequence_of_tile(
            cu_ptr, work_index, sequence, num_sequences, heads, tl.arange(0, SCAN), TILE_M
        )
        head, tile = place_in_sequence(cu_ptr, work_index, sequence, heads, group, TILE_M)
        tl.store(out_ptr + work_index * 3, sequence)
        tl.store(out_ptr + work_index * 3 + 1, head)
        tl.store(out_ptr + work_index * 3 + 2, tile)
        work_index += 1


@pytest.mark.parametrize("first", [0, 37])
@pytest.mark.parametrize("scan", [2, 4, 16])
@pytest.mark.parametrize(
    "lengths",
    [
        (1,),
        (0,),
        (64, 64, 64),
        (63, 1, 65, 129),
        (0, 0, 0, 200, 0, 1, 0),
        (1,) * 9,
        (0,) * 8 + (70,),
        (70,) + (0,) * 8,
    ],
)
def test_every_tile_of_packed_sequences_once(device, lengths, scan, first):
    heads, group, tile_m = 5, 2, 64
    cu = torch.tensor([first, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32).to(device)
    most = heads * (sum(lengths) // tile_m + len(lengths))
    out = torch.full((most + 1, 3), -1, dtype=torch.int32, device=device)
    _packed_probe[(1,)](out, cu, len(lengths), heads, group, TILE_M=tile_m, SCAN=scan)
    placed = [tuple(x) for x in out.tolist()]
    assert placed.pop() == (-1, -1, -1)
    assert (-1, -1, -1) not in placed
    with_queries = [(s, h, t) for s, h, t in placed if t * tile_m < lengths[s]]
    expected = [
        (sequence, head, tile)
        for sequence, length in enumerate(lengths)
        for group_heads in ((0, 1), (2, 3, 4))
        for tile in reversed(range(-(-length // tile_m)))
        for head in group_heads
    ]
    assert with_queries == expected
