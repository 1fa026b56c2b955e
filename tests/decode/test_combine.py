"""Combining parts in a launch of its own: rows, columns, sinks, scales, and what is left alone."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.calls.decode import DecodeCall
from blackwell_sparsek.decode import combine
from blackwell_sparsek.decode.triton import DecodeWorkspace
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

PROGRAMS, ROWS, COLUMNS, SLICES = 65, 8, 16, 2
Q_LEN, GROUP, KV_HEADS, BATCH = 2, 5, 2, 2
HEAD_TILES = 2 * KV_HEADS  # ten rows in tiles of eight


def _call(device, *, sinks, v_scale):
    dim = SLICES * COLUMNS
    q = normal(BATCH, KV_HEADS * GROUP, Q_LEN, dim, seed=1, device=device)
    cache = normal(BATCH, KV_HEADS, 4, dim, seed=2, device=device)
    lengths = torch.tensor([4, 4], dtype=torch.int32, device=device)
    return DecodeCall(
        q, cache, cache, lengths, scale=1.0, band=Band(None, 0),
        sinks=normal(KV_HEADS * GROUP, seed=3, device=device) if sinks else None,
        v_scale=torch.tensor([0.5, 2.0], device=device) if v_scale else None,
    )  # fmt: skip


def _workspace(device, parts_of):
    """Parts of all softmaxes, each from programs of its own, and NaN where nobody wrote."""
    acc = torch.full((SLICES, 2 * PROGRAMS, ROWS, COLUMNS), torch.nan, device=device)
    states = torch.full((SLICES, 2 * PROGRAMS, 2, ROWS), torch.nan, device=device)
    records = torch.zeros(BATCH * HEAD_TILES, 5, dtype=torch.int32, device=device)
    first = 0
    for softmax, parts in enumerate(parts_of):
        sequence, head_tile = divmod(softmax, HEAD_TILES)
        rows = ROWS if head_tile % 2 == 0 else Q_LEN * GROUP - ROWS
        for part in range(parts if parts > 1 else 0):
            slot = 2 * (first + part) + (part == 0)
            acc[:, slot, :rows] = normal(SLICES, rows, COLUMNS, seed=slot, device=device)
            states[:, slot, 0, :rows] = 3 * normal(rows, seed=100 + slot, device=device)
            states[:, slot, 1, :rows] = normal(rows, seed=200 + slot, device=device).abs() + 0.1
        record = [first, parts, sequence, head_tile, 4]
        records[softmax] = torch.tensor(record, dtype=torch.int32, device=device)
        first += parts
    assert first <= PROGRAMS
    # as the kernels lay them out: accumulators and then states of each slice
    memory = torch.cat([acc.flatten(1), states.flatten(1)], 1).contiguous()
    return DecodeWorkspace(memory, None, records), acc, states


def _expected(acc, states, records, call, dtype):
    """Rows of out and lse, computed in `dtype`, for the softmaxes of several parts."""
    for first, parts, sequence, head_tile, _ in records.tolist():
        if parts < 2:
            continue
        slots = [2 * (first + part) + (part == 0) for part in range(parts)]
        kv_head, tile = divmod(head_tile, 2)
        for row in range(ROWS * tile, min(ROWS * (tile + 1), Q_LEN * GROUP)):
            head, token = kv_head * GROUP + row % GROUP, row // GROUP
            m, total = states[0, slots, :, row % ROWS].to(dtype).unbind(1)
            weights = torch.exp2(m - m.max())
            values = torch.cat([(acc[s, slots, row % ROWS].to(dtype) * weights[:, None]).sum(0)
                                for s in range(SLICES)])  # fmt: skip
            total = (weights * total).sum() * torch.exp2(m.max())
            values = values * torch.exp2(m.max())
            if call.sinks is not None:
                total = total + call.sinks[head].to(dtype).exp()
            scale = 1.0 if call.v_scale is None else call.v_scale[kv_head].to(dtype)
            yield (sequence, head, token), values / total * scale, total.log()


@pytest.mark.parametrize(
    ("rows_at_once", "groups", "everything"),
    [(1, 1, False), (4, 1, True), (1, 2, True), (1, 4, False)],
)
def test_parts_become_rows(device, monkeypatch, rows_at_once, groups, everything):
    if rows_at_once == 4:
        monkeypatch.setattr(combine, "MANY_PROGRAMS", 0)
    monkeypatch.setattr(combine, "_groups", lambda *sizes: groups)
    call = _call(device, sinks=everything, v_scale=everything)
    # with two groups, 37 parts take two rounds, of which the second one is for five parts
    workspace, acc, states = _workspace(device, [2, 1, 37, 3, 1, 2, 5, 4])
    out = torch.full((BATCH, KV_HEADS * GROUP, Q_LEN, SLICES * COLUMNS), 7.0, device=device)
    lse = torch.full(out.shape[:-1], 7.0, device=device)
    combine.launch_attn_decode_combine(
        out, lse, call, workspace, (ROWS, COLUMNS), PROGRAMS, pdl=False
    )
    written = torch.zeros(lse.shape, dtype=torch.bool, device=device)
    parts = (acc, states, workspace.records, call)
    rows = {}
    for dtype in (torch.float64, torch.float32):
        places, values, logarithms = zip(*_expected(*parts, dtype), strict=True)
        rows[dtype] = torch.stack(values), torch.stack(logarithms)
    (exact, exact_lse), (plain, plain_lse) = rows.values()
    where = tuple(torch.tensor(places, device=device).T)
    assert_within_budget(out[where], exact, plain, what="out")
    assert_within_budget(lse[where], exact_lse, plain_lse, what="lse")
    written[where] = True
    # a softmax of one part has been written by its program
    assert written.any() and not written.all()
    assert (out[~written] == 7.0).all() and (lse[~written] == 7.0).all()


@pytest.mark.parametrize(
    ("programs", "warps", "parts", "groups"),
    [
        (256, 2, 66, 4),  # 128 heads of a latent cache, one sequence: more would not run at once
        (32, 2, 132, 8),  # 16 heads
        (128, 2, 16, 1),
        (128, 2, 17, 2),
        (512, 1, 33, 4),
        (1024, 8, 4, 1),
    ],
)
def test_parts_are_shared_while_all_programs_run_at_once(programs, warps, parts, groups):
    assert combine._groups(programs, warps, parts) == groups
