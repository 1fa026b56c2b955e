"""Unions of the lists of neighbouring queries, and walks through them, against sets in Python."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

import blackwell_sparsek as bsk
from blackwell_sparsek.device import masks
from blackwell_sparsek.sparse_attention.triton import unions
from blackwell_sparsek.sparse_attention.triton.unions import merge_lists

from .. import problems

OPEN = 2**30
TILE = 16


def merged(problem, tokens):
    """The unions of a problem as {tile: (entries by section, bits of wrong queries)}."""
    call = problems.call_of(*problem)
    made = merge_lists(call, tokens)
    found = {}
    for tile, (both, first, second, wrong) in enumerate(made.counts.tolist()):
        row, half = made.entries[tile].tolist(), made.capacity // 2
        ends = row[:both], row[half - first : half][::-1], row[half : half + second]
        found[tile] = [[(x & (2**32 - 1), x >> 32) for x in section] for section in ends], wrong
    return call, found


def expected(call, tokens, tile):
    """The entries of a tile of queries, by section, and bits of wrong ones."""
    chosen, heads = call.spec.selection, call.spec.selection.heads
    tiles = -(-call.spec.max_q // tokens)
    batch, head, place = tile // tiles // heads, tile // tiles % heads, tile % tiles
    first, length = 0, call.spec.max_q
    lists = batch
    if call.spec.cu_seqlens_q is not None:
        first, end = call.spec.cu_seqlens_q[batch : batch + 2].tolist()
        length, lists = end - first, 0
    words, wrong = {}, 0
    for t in range(min(tokens, length - place * tokens)):
        token = first + place * tokens + t
        count = int(chosen.counts[lists, head, token])
        if not 0 <= count <= chosen.most:
            wrong |= 1 << t
            continue
        for block in chosen.ids[lists, head, token, :count].tolist():
            if 0 <= block < chosen.num_blocks:
                words[block] = words.get(block, 0) | 1 << t
            else:
                wrong |= 1 << t
    low = (1 << tokens // 2) - 1
    sections = [[], [], []]
    for block in sorted(words):
        word = words[block]
        which = 0 if word & low and word & ~low else 1 if word & low else 2
        sections[which].append((block, word))
    return sections, wrong


def signed(word):
    return word - 2**32 if word >= 2**31 else word


def check(problem, tokens):
    call, found = merged(problem, tokens)
    lengths = [call.spec.max_q] * call.batch
    if call.spec.cu_seqlens_q is not None:
        lengths = call.spec.cu_seqlens_q.diff().tolist()
    tiles = -(-call.spec.max_q // tokens)
    for tile, (sections, wrong) in found.items():
        batch, place = tile // tiles // call.spec.selection.heads, tile % tiles
        if place * tokens < lengths[batch]:
            wanted, spoilt = expected(call, tokens, tile)
            wanted = [[(block, signed(word)) for block, word in part] for part in wanted]
            assert (sections, wrong) == (wanted, signed(spoilt)), f"tile {tile}"


@pytest.mark.parametrize(
    "given",
    [
        {"lengths": (13, 90), "granularity": 4, "most": 9},
        {"lengths": (34, 21), "granularity": 1, "most": 7, "batch": 2, "lists": 2, "heads": (4, 2)},
        {"lengths": (3, 40), "granularity": 16, "most": 0},
    ],
)
def test_every_entry_once_with_its_queries(given, device):
    check(problems.dense(**given, device=device), 32 if given["granularity"] == 1 else 10)


def test_packed(device):
    given = {"granularity": 4, "most": 6, "heads": (4, 2), "lists": 2, "device": device}
    check(problems.packed(q_lens=(5, 0, 17), k_lens=(9, 3, 40), **given), 10)


def test_numbers_out_of_range(device):
    (q, k, v, chosen), options = problems.dense(
        lengths=(12, 90), granularity=4, most=6, device=device
    )
    ids, counts = chosen.ids.clone(), chosen.counts.clone()
    ids[0, 0, 2:7] = torch.tensor([0, 1, 2, 3, 4, 5], device=device)
    ids[0, 0, 2, 5], ids[0, 0, 3, 5], ids[0, 0, 4, 0] = 23, 2**31 - 1, -7
    # in the other half of the tile too
    ids[0, 0, 6, 5] = 24
    counts[0, 0, 2:7] = 6
    counts[0, 0, 7], counts[0, 0, 8] = 7, -1
    bad = bsk.KeySelection._from_tensors(ids, counts, 4, 90)
    call, found = merged(((q, k, v, bad), options), 10)
    sections, wrong = found[0]
    assert (sections, wrong) == expected(call, 10, 0)
    assert wrong == 1 << 2 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 8


def test_lists_that_do_not_ascend_stay_in_their_places(device):
    (q, k, v, chosen), options = problems.dense(
        lengths=(10, 90), granularity=4, most=6, device=device
    )
    ids = torch.randint(0, 23, chosen.ids.shape, device=device, dtype=torch.int32)
    bad = bsk.KeySelection._from_tensors(ids, torch.full_like(chosen.counts, 6), 4, 90)
    call = problems.call_of((q, k, v, bad), options)
    made = merge_lists(call, 10)
    both, first, second, wrong = made.counts[0].tolist()
    assert both + first <= 30 and second <= 30 and wrong == 0


@triton.jit
def _owners_probe(out_ptr, common, first, second):
    for number in range(common + first + second):
        tl.store(out_ptr + number, unions.owner_of(number, common, first, second))


@pytest.mark.parametrize(
    ("common", "first", "second"), [(2, 0, 0), (0, 3, 3), (1, 0, 2), (3, 5, 2), (0, 1, 4)]
)
def test_tiles_of_the_halves_alternate(common, first, second, device):
    out = torch.full((common + first + second,), -1, dtype=torch.int32, device=device)
    _owners_probe[(1,)](out, common, first, second)
    turns = min(first, second)
    rest = [0] * (first - turns) + [1] * (second - turns)
    assert out.tolist() == [2] * common + [0, 1] * turns + rest


@triton.jit
def _walk_probe(
    pos_ptr, word_ptr, owner_ptr, total_ptr, made, program, q_start, q_len, kv_len, right, left,
    near_right, TOKENS: tl.constexpr, TILE_N: tl.constexpr, BLOCK_KV: tl.constexpr,
    LOCAL: tl.constexpr,
):  # fmt: skip
    counts = made.counts + program * 4
    near_tiles = program - program
    near_lo = near_tiles
    if LOCAL:
        near_lo, hi = masks.kv_range(q_start, q_start + TOKENS, q_len, kv_len, left, near_right)
        near_tiles = (tl.maximum(hi - near_lo, 0) + TILE_N - 1) // TILE_N
    walk = unions.union_walk(
        tl.load(counts), tl.load(counts + 1), tl.load(counts + 2), made.capacity, near_tiles,
        TILE_N // BLOCK_KV,
    )  # fmt: skip
    at = unions.QueriesAt(
        masks.position(q_start, q_len, kv_len),
        ~masks.bits_from(tl.minimum(q_len - q_start, TOKENS)), kv_len, right,
        near_lo, left, near_right,
    )  # fmt: skip
    total = walk.common + walk.first_tiles + walk.second_tiles
    tl.store(total_ptr, total)
    key = tl.arange(0, TILE_N)
    for number in range(total):
        places = unions.entry_places(walk, number, key, TILE_N, BLOCK_KV)
        entries = tl.load(
            made.entries + program * made.capacity + places.at, mask=places.listed, other=0
        )
        found = unions.keys_of_tile(
            at, entries, walk.near_tiles, number, key, TILE_N, BLOCK_KV, LOCAL
        )
        tl.store(pos_ptr + number * TILE_N + key, found.kv_pos)
        tl.store(word_ptr + number * TILE_N + key, found.words)
        owns = unions.owner_of(number, walk.common, walk.first_tiles, walk.second_tiles)
        tl.store(owner_ptr + number, owns)
    # nothing follows the last tile
    past = unions.entry_places(walk, total, key, TILE_N, BLOCK_KV)
    tl.store(total_ptr + 1, tl.max(past.listed.to(tl.int32), 0))


@pytest.mark.parametrize(
    ("granularity", "right", "near", "lengths"),
    [
        (1, 0, (5, 0), (13, 30)),
        (4, 0, None, (23, 50)),
        (4, OPEN, (3, 2), (15, 40)),
        (4, 0, (OPEN, 0), (7, 7)),
        (16, 0, (0, 0), (30, 23)),
    ],
)
def test_a_walk_meets_every_visible_key_once(granularity, right, near, lengths, device):
    tokens, (q_len, kv_len) = 10, lengths
    problem = problems.dense(
        lengths=lengths, granularity=granularity, most=-(-30 // granularity), device=device, seed=3
    )
    call = problems.call_of(*problem)
    made = merge_lists(call, tokens)
    left, near_right = near or (-1, -1)
    chosen = call.spec.selection.to_dense()[0, 0].tolist()
    for place in range(-(-q_len // tokens)):
        pos = torch.full((64, TILE), -1, dtype=torch.int32, device=device)
        words, owners = pos.clone(), pos[:, 0].clone()
        totals = torch.zeros(2, dtype=torch.int32, device=device)
        _walk_probe[(1,)](
            pos, words, owners, totals, made, place, place * tokens, q_len, kv_len, right, left,
            near_right, TOKENS=tokens, TILE_N=TILE, BLOCK_KV=granularity, LOCAL=near is not None,
        )  # fmt: skip
        total, past = totals.tolist()
        assert past == 0
        met = {}
        for i, j in itertools.product(range(total), range(TILE)):
            word, key = int(words[i, j]), int(pos[i, j])
            owns = {0: range(5), 1: range(5, 10), 2: range(10)}[int(owners[i])]
            for t in range(32):
                if word >> t & 1:
                    assert t in owns and 0 <= key < kv_len
                    met[t, key] = met.get((t, key), 0) + 1
        for t in range(min(tokens, q_len - place * tokens)):
            token = place * tokens + t
            p = token + kv_len - q_len
            for key in range(kv_len):
                is_near = near is not None and p - left <= key <= p + near_right
                seen = is_near or (chosen[token][key] and key <= p + right)
                assert met.pop((t, key), 0) == int(seen), (token, key)
        assert not met
