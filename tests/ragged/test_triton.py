"""The portable kernel against the oracle; the same bodies run interpreted and compiled."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.ragged.plan import (
    RaggedWorkspace,
    find_query_tile,
    kernel_records,
    launch_plan,
    part_of_softmax,
    query_tile,
    units_of_program,
    units_of_tile,
)
from blackwell_sparsek.ragged.triton import launch_attn_ragged
from blackwell_sparsek.ragged.tuning import RaggedConfig
from blackwell_sparsek.testing import poison
from blackwell_sparsek.testing.layouts import strided_like
from blackwell_sparsek.testing.ragged_cases import RaggedCase, check_ragged, draw_ragged_case

HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16


def config(programs=5, tile_m=16, tile_n=16):
    return RaggedConfig(tile_m, tile_n, num_warps=4, num_stages=2, programs=programs)


def attend(call, cfg=None):
    """Launch with a poisoned workspace; `out` and `lse` of a case are poisoned too."""
    with poison.poisoned_empty():
        launch_attn_ragged(call, cfg or config())
    return call.out, call.lse


def check(case, device, cfg=None):
    call = case.build(device)
    attend(call, cfg)
    check_ragged(call, what=str(case))
    return call


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(seed, device):
    case = draw_ragged_case(seed, dtypes=(HALF, FLOAT, BRAIN), longest=50)
    check(
        case,
        device,
        config((1, 2, 3, 7, 16)[seed % 5], (16, 32)[seed % 2], (16, 32)[seed % 3 == 0]),
    )


@pytest.mark.parametrize("programs", (1, 2, 3, 5, 8, 12))
def test_any_number_of_programs(programs, device):
    """A long prompt beside decoding steps: its tiles are split at other places each time."""
    case = RaggedCase(1, q_lens=(1, 61, 1, 4), kv_lens=(50, 61, 1, 90), heads=(2, 1))
    check(case, device, config(programs))


@pytest.mark.parametrize("layout", ["paged", "packed"])
def test_layouts_give_the_bits_of_a_contiguous_cache(layout, device):
    case = RaggedCase(2, BRAIN, q_lens=(1, 9, 0, 20), kv_lens=(50, 9, 33, 25))
    plain = attend(case.build(device), config(7))
    other = check(dataclasses.replace(case, layout=layout), device, config(7))
    assert plain[0].equal(other.out) and plain[1].equal(other.lse)


@pytest.mark.parametrize("dtype", [BRAIN, FLOAT])
@pytest.mark.parametrize(
    "layout, block_size", [("paged", 16), ("contiguous", 16), ("contiguous", 20)]
)
def test_listed_rows_that_start_anywhere(layout, block_size, dtype, device):
    """Heads begin at multiples of 16 bytes, tokens do not, and a tile holds several blocks."""
    case = RaggedCase(
        2, dtype, heads=(4, 1), q_lens=(1, 9), kv_lens=(64, 50), layout=layout,
        block_size=block_size,
    )  # fmt: skip
    call = case.build(device)
    caches = {name: strided_like(getattr(call, name), "row_gap") for name in ("k", "v")}
    call = dataclasses.replace(call, **caches)
    attend(call, config(tile_n=32))
    check_ragged(call, what=str(case))


@pytest.mark.parametrize("q_len", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("top_left", [False, True])
def test_alignment(q_len, top_left, device):
    """Fewer keys than queries, as many, and more."""
    case = RaggedCase(
        3, q_lens=(q_len,) * 3, kv_lens=(35, q_len, 7), heads=(3, 1), top_left=top_left
    )
    check(case, device)


@pytest.mark.parametrize(
    "band", [Band(0, 0), Band(15, 0), Band(None, None), Band(3, 5), Band(5, None)]
)
@pytest.mark.parametrize("chunk", [0, 1, 16, 23])
def test_bands_and_chunks(band, chunk, device):
    case = RaggedCase(4, q_lens=(1, 20, 37), kv_lens=(50, 33, 12), band=band, chunk=chunk)
    check(case, device)


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_keys_outside_of_the_band_are_not_read(layout, device):
    """Their slots hold NaN and their pages nothing: they may have been given away."""
    case = RaggedCase(
        5, q_lens=(1, 5), kv_lens=(50, 40), band=Band(7, 0), layout=layout, page_size=16
    )
    call = case.build(device)
    for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        unseen = kv_len - q_len - 7
        if layout == "contiguous":
            call.k[b, :, :unseen], call.v[b, :, :unseen] = torch.nan, torch.nan
        else:
            call.page_table[b, : unseen // 16] = 12345
            call.page_table[b, -(-kv_len // 16) :] = -7
    attend(call)
    check_ragged(call)


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("top_left", [False, True])
def test_keys_outside_of_the_chunk_are_not_read(top_left, layout, device):
    """Queries at the first, or the last, positions of chunks of 16, in both directions."""
    case = RaggedCase(
        22, q_lens=(2, 16), kv_lens=(50, 64), band=Band(None, None), chunk=16, top_left=top_left,
        layout=layout, page_size=16,
    )  # fmt: skip
    call = case.build(device)
    for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        first = 0 if top_left else (kv_len - q_len) // 16
        if layout == "contiguous":
            for x in (call.k, call.v):
                x[b, :, : first * 16], x[b, :, (first + 1) * 16 :] = torch.nan, torch.nan
        else:
            call.page_table[b, :first], call.page_table[b, first + 1 :] = 12345, -7
    attend(call)
    check_ragged(call)


@pytest.mark.parametrize("slopes", ["head", "sequence"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_alibi(slopes, softcap, device):
    case = RaggedCase(6, q_lens=(1, 20), kv_lens=(50, 33), slopes=slopes, softcap=softcap)
    check(case, device)


@pytest.mark.parametrize("fp8", ["tensor", "head"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_fp8(fp8, softcap, device):
    case = RaggedCase(7, BRAIN, layout="paged", fp8=fp8, softcap=softcap, sinks=True)
    check(case, device)


@pytest.mark.parametrize("case", [
    RaggedCase(8, q_lens=(3, 0, 20), kv_lens=(0, 20, 30), padding=5, sinks=True),
    RaggedCase(9, q_lens=(0, 0), kv_lens=(0, 9), padding=40, sinks=True),
    RaggedCase(10, used=True, sinks=True, padding=2, q_lens=(1, 20, 17, 5), kv_lens=(9, 40, 17, 0)),
    RaggedCase(11, used=True, first_keys=True, layout="packed"),
    RaggedCase(12, first_keys=True, moved=True, q_lens=(1, 30), kv_lens=(40, 20)),
    RaggedCase(13, block_size=16, layout="paged", q_lens=(1, 20, 3), kv_lens=(60, 33, 40)),
    RaggedCase(14, block_size=24, q_lens=(1, 20, 3), kv_lens=(60, 33, 40), used=True),
    RaggedCase(15, head_dims=(80, 96)), RaggedCase(16, head_dims=(256, 16)),
], ids=lambda case: str(case.seed))  # fmt: skip
@pytest.mark.parametrize("whole", [False, True])
def test_lengths_and_lists(case, whole, device):
    check(dataclasses.replace(case, batch_invariant=whole), device, config(4))


def test_unused_rows_are_zero(device):
    """Whatever q holds there, and although sinks would give them an lse."""
    case = RaggedCase(8, q_lens=(3, 4), kv_lens=(0, 20), padding=5, sinks=True)
    out, lse = attend(case.build(device))
    assert out[7:].eq(0).all() and lse[:, 7:].eq(-torch.inf).all()
    assert out[:3].eq(0).all() and lse[:, :3].isfinite().all()


def test_bits_do_not_depend_on_neighbours(device):
    """A sequence alone, and with others before and after it, with other tiles and programs."""
    lens = (20, 1, 33), (40, 50, 33)
    together = RaggedCase(17, q_lens=lens[0], kv_lens=lens[1], batch_invariant=True).build(device)
    attend(together, config(7))
    first = 0
    for b, q_len in enumerate(lens[0]):
        rows = slice(first, first + q_len)
        alone = dataclasses.replace(
            together,
            q=together.q[rows],
            out=torch.full_like(together.out[rows], torch.nan),
            lse=torch.full_like(together.lse[:, rows], torch.nan).contiguous(),
            k=together.k[b : b + 1],
            v=together.v[b : b + 1],
            cu_seqlens_q=torch.tensor([0, q_len], dtype=torch.int32, device=device),
            seqlens_k=together.seqlens_k[b : b + 1],
        )
        for programs in (1, 5):
            out, lse = attend(alone, config(programs))
            assert out.equal(together.out[rows]) and lse.equal(together.lse[:, rows])
        first += q_len


def test_every_run_gives_the_same_bits(device):
    case = RaggedCase(18, q_lens=(1, 61, 4), kv_lens=(50, 61, 90))
    first, second = (attend(case.build(device), config(9)) for _ in range(2))
    assert first[0].equal(second[0]) and first[1].equal(second[1])


@pytest.mark.parametrize("name, value, whole", [
    ("seqlens_k", 99, False), ("seqlens_k", -1, True), ("slabs", 99, True), ("slabs", -1, False),
    ("first_key", -1, True), ("first_key", 99, False), ("seqused_q", 6, False),
    ("seqused_q", -1, True), ("page_table", 999, False), ("page_table", -1, True),
    ("kv_blocks", 999, False), ("kv_blocks", -2, True),
])  # fmt: skip
def test_numbers_out_of_range_give_nan(name, value, whole, device):
    """For their sequence only, and without a read."""
    case = RaggedCase(
        19,
        q_lens=(3, 5, 2),
        kv_lens=(20, 30, 40),
        layout="paged" if name == "page_table" else "contiguous",
        moved=name == "slabs",
        first_keys=name == "first_key",
        block_size=16 if name == "kv_blocks" else None,
        batch_invariant=whole,
    )
    call = case.build(device)
    if name == "seqused_q":
        used = torch.tensor(case.q_lens, dtype=torch.int32, device=device)
        call = dataclasses.replace(call, seqused_q=used)
    right = dataclasses.replace(call, out=call.out.clone(), lse=call.lse.clone())
    attend(right)
    wrong = getattr(call, name).clone()
    wrong[1] = value
    call = dataclasses.replace(call, **{name: wrong})
    out, lse = attend(call)
    assert out[3:8].isnan().all() and lse[:, 3:8].isnan().all()
    # the keys of the others may be split at other places
    for rows in (slice(0, 3), slice(8, 10)):
        right.out[rows], right.lse[:, rows] = out[rows], lse[:, rows]
    check_ragged(right)


def test_packed_keys_past_the_end_give_nan(device):
    call = RaggedCase(20, layout="packed", q_lens=(3, 5), kv_lens=(20, 30)).build(device)
    call.cu_seqlens_k[2] = 51
    out, _ = attend(call)
    assert out[3:].isnan().all() and out[:3].isfinite().all()


def test_offsets_out_of_range_stay_in_bounds(device):
    """Offsets past the queries, or falling: nothing outside of `out` is written."""
    for offsets in ([0, 3, 99], [0, 99, 3], [-5, 3, 8]):
        call = RaggedCase(21, q_lens=(3, 5), kv_lens=(20, 30)).build(device)
        call = dataclasses.replace(
            call, cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32, device=device)
        )
        attend(call)


@triton.jit
def _mark_tiles(owners_of_tiles, tables, workspace, sizes, heads, num_tiles, TILE_M: tl.constexpr,
                TILE_N: tl.constexpr, LIGHT_ROWS: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    """Add one to every KV tile of this program, and for each part count one from first to last."""
    total, programs, at, end = units_of_program(workspace, num_tiles, heads.kv)
    q_tile, before = find_query_tile(workspace, at // heads.kv, num_tiles, tl.arange(0, 16))
    while at < end:
        tile_end = tl.load(workspace.ends + q_tile)
        count = tile_end - before
        if count == 0:
            q_tile += 1
        else:
            sequence = tl.load(workspace.owners + q_tile)
            tile = query_tile(tables, sizes, q_tile, sequence, heads.group, TILE_M, False)
            units = units_of_tile(tile, LIGHT_ROWS)
            part, stop = part_of_softmax(
                at, end, before, count, units, heads.kv, total, programs, False
            )
            softmax = owners_of_tiles + (q_tile * heads.kv + part.kv_head) * (MOST + 1)
            if part.mine:
                for kv_tile in range(part.first, part.end):
                    tl.atomic_add(softmax + kv_tile, 1)
                # 0 in the end if no part is missing
                first = tl.program_id(0) == part.first_program
                parts = part.last_program - part.first_program + 1
                tl.atomic_add(softmax + MOST, tl.where(first, parts, 0) - 1)
            at = stop
            if stop == tile_end * heads.kv:
                q_tile += 1
                before = tile_end


@pytest.mark.parametrize("programs", (1, 3, 7, 100))
def test_every_tile_has_one_program_if_some_tiles_count_less(programs, device):
    """Also where there are more programs than tiles."""
    case = RaggedCase(1, q_lens=(1, 61, 0, 4), kv_lens=(50, 61, 1, 90), heads=(4, 2))
    call = case.build(device)
    records = kernel_records(call)
    num_tiles, most = call.q.shape[0] * 2 // 32 + call.batch + 1, 90 // 16 + 1
    plan = [torch.zeros(num_tiles, dtype=torch.int32, device=device) for _ in range(2)]
    workspace = RaggedWorkspace(plan[0], plan[0], *plan)
    launch_plan(call, records, workspace, 32, 16, light_rows=16)
    marks = torch.zeros(num_tiles, 2, most + 1, dtype=torch.int32, device=device)
    heads = records.layout.tensors.heads
    arguments = (marks, records.tables, workspace, records.sizes, heads, num_tiles)
    _mark_tiles[(programs,)](*arguments, TILE_M=32, TILE_N=16, LIGHT_ROWS=16, MOST=most)
    tiles = marks[..., :most]
    # rows 2, 32 at a time of 122, 8, and the padding; causal, at the end of the keys
    counts = [int(x) for x in tiles.sum(-1)[:, 0] if x]
    assert counts == [4, 1, 2, 3, 4, 6]
    assert tiles.max() == 1 and torch.equal(tiles[:, 0], tiles[:, 1])
    assert not marks[..., most].any()


BEHIND_LISTS = """
import ctypes, dataclasses, mmap
import torch
from blackwell_sparsek.ragged.triton import attention_ragged
from blackwell_sparsek.testing.interpreter import interpreter_checks
from blackwell_sparsek.testing.ragged_cases import RaggedCase

READ_WRITE, PRIVATE_ANONYMOUS, NOTHING = 3, 0x22, 0
libc, page = ctypes.CDLL(None), ctypes.c_size_t(mmap.PAGESIZE)
libc.mmap.restype = ctypes.c_void_p
both = ctypes.c_size_t(2 * page.value)
end = libc.mmap(None, both, READ_WRITE, PRIVATE_ANONYMOUS, -1, ctypes.c_long(0)) + page.value
assert libc.mprotect(ctypes.c_void_p(end), page, NOTHING) == 0

case = RaggedCase(3, q_lens=(1, 1), kv_lens=(40, 33), padding=3, layout="paged", block_size=16)
call = case.build("cpu")
count = call.kv_blocks.numel()
memory = (ctypes.c_int32 * count).from_address(end - 4 * count)
lists = torch.frombuffer(memory, dtype=torch.int32).view(call.kv_blocks.shape)
lists.copy_(call.kv_blocks)
with interpreter_checks():
    attention_ragged(dataclasses.replace(call, kv_blocks=lists))
assert call.out[2:].eq(0).all()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a page of memory that cannot be read")
def test_padding_reads_no_list():
    """The memory behind the lists of the last sequence cannot be read here."""
    done = subprocess.run(
        [sys.executable, "-c", BEHIND_LISTS],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
