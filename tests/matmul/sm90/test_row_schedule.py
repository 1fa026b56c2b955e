import pytest
import torch

from blackwell_sparsek.matmul.sm90 import row_schedule as module
from blackwell_sparsek.matmul.sm90.config import NarrowSm90Config
from blackwell_sparsek.matmul.sm90.row_schedule import (
    HEADER,
    OUTSIDE,
    TileHeader,
    build_row_schedule,
    row_schedule,
)
from blackwell_sparsek.sparse.matrix import BSRMatrix
from blackwell_sparsek.testing.bsr import random_bsr

TILE_COUNT, ROW_TILE, BLOCKS, _, SPLIT = range(HEADER)


def config(block, tile_m, stage_blocks=1, split_k=1, **options):
    return NarrowSm90Config(*block, tile_m, 16, 16, stage_blocks, 2, SPLIT_K=split_k, **options)


def product(schedule, tiles, values, x, rows):
    """What the kernel makes of a schedule: `values` [nnzb * bh, bw], x [n, K]."""
    width, block_w = schedule.width, values.shape[1]
    out = x.new_full((x.shape[0], rows + tiles.BLOCK_H), float("nan"))
    padded = torch.nn.functional.pad(x, (0, block_w))
    for records in schedule.records:
        for record in records[: int(records[0, TILE_COUNT])]:
            header = TileHeader(*record[:HEADER].tolist())
            row_tile, blocks, col = header.row_tile, header.blocks, header.col
            mine = padded[col : col + tiles.TILE_N]
            acc = x.new_zeros(mine.shape[0], tiles.TILE_M)
            for slot in range(blocks):
                a = int(record[HEADER + slot])
                k = int(record[HEADER + width + slot])
                acc += mine[:, k : k + block_w] @ values[a : a + tiles.TILE_M].T
            assert (record[HEADER + blocks : HEADER + width] == OUTSIDE).all()
            assert (record[HEADER + width + blocks :] == OUTSIDE).all()
            place = out[col : col + tiles.TILE_N, row_tile * tiles.TILE_M :][:, : tiles.TILE_M]
            if tiles.SPLIT_K == 1:
                assert place.isnan().all(), "a tile was assigned twice"
            place.copy_(place.nan_to_num() + acc)
    return out[:, :rows]


@pytest.mark.parametrize("columns", [3, 16, 37])
@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize(
    ("block", "tile_m"), [((64, 32), 64), ((64, 32), 32), ((128, 16), 64), ((16, 16), 16)]
)
def test_every_tile_is_computed_once(columns, programs, block, tile_m):
    a = random_bsr((4 * block[0] + 5, 7 * block[1] - 3), block, seed=1, whole=True)
    x = torch.randint(-3, 4, (columns, a.shape[1])).float()
    tiles = config(block, tile_m)
    schedule = build_row_schedule(a.indptr, a.indices, tiles, columns, programs)
    assert schedule.records.shape[0] <= programs
    got = product(schedule, tiles, a.storage.reshape(-1, block[1]), x, a.shape[0])
    assert torch.equal(got, x @ a.to_dense().T)


def uneven(lengths, block=(64, 32), columns=64):
    """A pattern whose rows have so many blocks."""
    keep = torch.zeros(len(lengths), columns, dtype=torch.bool)
    for row, length in zip(keep, lengths, strict=True):
        row[torch.randperm(columns)[:length]] = True
    shape = (len(lengths) * block[0], columns * block[1])
    values = torch.randint(-3, 4, shape).float()
    return BSRMatrix.from_mask(values, keep, block)


@pytest.mark.parametrize("stage_blocks", [1, 2])
@pytest.mark.parametrize("programs", [3, 9, 10, 132])
def test_the_longest_tiles_are_split_for_idle_programs(programs, stage_blocks):
    torch.manual_seed(0)
    a = uneven([30, 2, 0, 17, 9, 40, 1])
    x = torch.randint(-3, 4, (16, a.shape[1])).float()
    tiles = config((64, 32), 64, stage_blocks, split_k=2)
    schedule = build_row_schedule(a.indptr, a.indices, tiles, 16, programs)
    got = product(schedule, tiles, a.storage.reshape(-1, 32), x, a.shape[0])
    assert torch.equal(got, x @ a.to_dense().T)
    pairs = schedule.records.unflatten(0, (-1, 2))
    # [pairs, 2, tiles]: neighbours share a tile, and have nothing else
    split = pairs[..., SPLIT] > 0
    assert (split[:, 0] == split[:, 1]).all()
    # [pairs, 2, fields]
    shared = pairs[split[:, 0, 0]][:, :, 0]
    assert (shared[:, 0, ROW_TILE] == shared[:, 1, ROW_TILE]).all()
    assert (shared[..., TILE_COUNT] == 1).all()
    # the third is shorter than half of the first with what the exchange costs
    assert shared[:, 0, ROW_TILE].tolist() == {3: [], 9: [5]}.get(programs, [5, 0])
    assert schedule.records.shape[0] <= max(2, programs)
    assert ((shared[:, 0, BLOCKS] - shared[:, 1, BLOCKS]).abs() <= 2 * stage_blocks).all()


def test_rows_of_like_length_are_not_split():
    a = uneven([6] * 9)
    schedule = build_row_schedule(a.indptr, a.indices, config((64, 32), 64, split_k=2), 16, 132)
    # one more where the pairs would not come out even
    assert schedule.records.shape[0] == 10
    assert not schedule.records[..., SPLIT].any()


@pytest.mark.parametrize("lengths", [[20, 3, 4, 5], [3, 20, 4, 5]])
def test_a_program_without_a_tile_makes_no_record_longer(lengths):
    """One row of four is split: five programs, and one without a tile to fill its cluster."""
    a = uneven(lengths)
    schedule = build_row_schedule(a.indptr, a.indices, config((64, 32), 64, split_k=2), 16, 132)
    assert schedule.records[:, 0, TILE_COUNT].tolist() == [1] * 5 + [0]
    assert schedule.records[:, 0, BLOCKS].tolist() == [10, 10, 5, 4, 3, 0]
    assert schedule.width == 10
    assert (schedule.records[5, 0, HEADER:] == OUTSIDE).all()


@pytest.mark.parametrize("rows, prefetch", [(64, 8), (96, 5), (132, 3), (1, 32)])
def test_clusters_share_what_they_prefetch(rows, prefetch):
    """8 MB in all: blocks of 16 KB, at most one for each lane of a warp."""
    indptr = torch.arange(rows + 1, dtype=torch.int32)
    indices = torch.zeros(rows, dtype=torch.int32)
    tiles = config((64, 128), 64, split_k=2)
    assert build_row_schedule(indptr, indices, tiles, 16, 132).prefetch == prefetch


def test_no_program_reads_much_more_than_another():
    torch.manual_seed(0)
    lengths = torch.randint(3, 12, (224,))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    indices = torch.zeros(int(lengths.sum()), dtype=torch.int32)
    tiles = config((128, 128), 64)
    schedule = build_row_schedule(indptr, indices, tiles, 16, 132)
    counts = schedule.records[:, 0, TILE_COUNT]
    blocks = torch.stack([r[: int(r[0, TILE_COUNT]), BLOCKS].sum() for r in schedule.records])
    assert int(counts.sum()) == 448
    assert int(blocks.max()) <= 1.1 * 2 * int(lengths.sum()) / 132


@pytest.mark.parametrize(
    "rows, length, tile_m, prefetch",
    [
        # 64 tiles of 16 KB for 132 programs: 8 MB, and a block more in each row
        (32, 8, 64, 32),
        (32, 9, 64, 4),
        # 96 tiles: the next kernel finds few idle SMs
        (48, 1, 64, 4),
        (32, 8, 32, 0),
    ],
)
def test_how_many_blocks_are_prefetched(rows, length, tile_m, prefetch):
    indptr = torch.arange(rows + 1, dtype=torch.int32) * length
    indices = torch.arange(length, dtype=torch.int32).repeat(rows)
    tiles = config((128, 128), tile_m)
    assert build_row_schedule(indptr, indices, tiles, 16, 132).prefetch == prefetch


def test_one_long_row_has_no_schedule():
    lengths = torch.zeros(4096, dtype=torch.int64)
    lengths[7] = 2048
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    indices = torch.arange(2048, dtype=torch.int32)
    assert build_row_schedule(indptr, indices, config((64, 16), 64), 16, 132) is None


def test_a_schedule_is_built_once_for_each_tiling(monkeypatch):
    a = random_bsr((96, 96), (32, 16), seed=3)
    made = []
    build = module.build_row_schedule
    monkeypatch.setattr(
        module, "build_row_schedule", lambda *args: made.append(args) or build(*args)
    )
    first = config((32, 16), 32)
    same = config((32, 16), 32, ACTIVATION="relu")
    other = config((32, 16), 16)
    for tiles in (first, same, first, other):
        assert row_schedule(a.indptr, a.indices, tiles, 4, 4) is not None
    assert len(made) == 2
    row_schedule(a.indptr, a.indices, first, 4, 5)
    assert len(made) == 3
    # as many columns as a tile has need no schedule of their own, more do
    row_schedule(a.indptr, a.indices, first, 16, 4)
    assert len(made) == 3
    row_schedule(a.indptr, a.indices, first, 17, 4)
    assert len(made) == 4


def test_split_tiles_have_schedules_of_their_own():
    a = uneven([30, 1])
    whole, split, split_in_twos = (
        row_schedule(a.indptr, a.indices, config((64, 32), 64, *tiling), 16, 132)
        for tiling in ((1, 1), (1, 2), (2, 2))
    )
    assert (whole.width, split.width, split_in_twos.width) == (30, 15, 16)
    again = config((64, 32), 64, 2, split_k=1)
    assert row_schedule(a.indptr, a.indices, again, 16, 132) is whole


def test_few_blocks_may_leave_many_slots_empty():
    """2**18 slots are allowed beside four for each block, more than a row table may have."""
    lengths = torch.zeros(1024, dtype=torch.int64)
    lengths[7] = 200
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    indices = torch.arange(200, dtype=torch.int32)
    schedule = build_row_schedule(indptr, indices, config((64, 16), 64), 16, 1024)
    assert schedule.width == 200
    assert module.build_row_table(indptr, indices, None) is None
