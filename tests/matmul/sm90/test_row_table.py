import gc

import pytest
import torch

from blackwell_sparsek.matmul.sm90 import row_schedule as module
from blackwell_sparsek.matmul.sm90.row_schedule import TABLE_HEADER, build_row_table, row_table
from blackwell_sparsek.testing.bsr import random_bsr


@pytest.mark.parametrize("turned", [False, True])
def test_records_hold_every_block_once(turned):
    pattern = random_bsr((100, 70), (16, 16), seed=1).pattern
    indptr, indices, t_indptr, t_indices, t_perm = pattern.tensors()
    args = (t_indptr, t_indices, t_perm) if turned else (indptr, indices, None)
    records, width = build_row_table(*args)
    starts = args[0].tolist()
    assert records.dtype == torch.int32 and records.shape[1] == TABLE_HEADER + 2 * width
    lengths = []
    for row, blocks, *slots in records.tolist():
        entries, columns = slots[:width], slots[width:]
        span = range(starts[row], starts[row + 1])
        assert blocks == len(span)
        assert entries[:blocks] == [t_perm[i].item() if turned else i for i in span]
        assert columns[:blocks] == [args[1][i].item() for i in span]
        assert set(entries[blocks:] + columns[blocks:]) <= {-1}
        lengths.append(blocks)
    assert sorted(r[0] for r in records.tolist()) == list(range(len(starts) - 1))
    assert lengths == sorted(lengths, reverse=True) and max(lengths) == width


def test_tables_are_kept_with_and_without_perm_and_die_with_the_pattern():
    pattern = random_bsr((50, 50), (16, 16), seed=2).pattern
    before = len(module._TABLES)
    _, _, indptr, indices, perm = pattern.tensors()
    stored_by_columns, stored_by_rows = (row_table(indptr, indices, p) for p in (perm, None))
    assert row_table(indptr, indices, perm) is stored_by_columns
    assert row_table(indptr, indices, None) is stored_by_rows
    assert not torch.equal(stored_by_columns.records, stored_by_rows.records)
    assert len(module._TABLES) == before + 1
    del pattern, indptr, indices, perm
    gc.collect()
    assert len(module._TABLES) == before


def test_one_long_row_among_many_gets_no_table(monkeypatch):
    monkeypatch.setattr(module, "_TABLE_SPARE_SLOTS", 100)
    indices = torch.arange(50, dtype=torch.int32)
    indptr = torch.full((7,), 50, dtype=torch.int32)
    indptr[0] = 0
    assert build_row_table(indptr, indices, None).width == 50  # 6 rows of 50 <= 4 * 50 + 100
    assert build_row_table(torch.cat([indptr, indptr[-1:]]), indices, None) is None


def test_no_blocks():
    empty = torch.zeros(0, dtype=torch.int32)
    records, width = build_row_table(torch.zeros(4, dtype=torch.int32), empty, None)
    assert width == 1 and records.tolist() == [[0, 0, -1, -1], [1, 0, -1, -1], [2, 0, -1, -1]]
