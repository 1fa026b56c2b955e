"""Every function of the mask file against tables that can be read, and against brute force."""

import itertools
import random

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.device import masks

OPEN = 2**30


@triton.jit
def _visible_probe(out_ptr, q_len, kv_len, left, right, Q: tl.constexpr, KV: tl.constexpr):
    q_pos = masks.position(tl.arange(0, Q), q_len, kv_len)
    kv_pos = tl.arange(0, KV)
    seen = masks.band_visible(q_pos[:, None], kv_pos[None, :], kv_len, left, right)
    offs = tl.arange(0, Q)[:, None] * KV + tl.arange(0, KV)[None, :]
    tl.store(out_ptr + offs, seen.to(tl.int32))


def visible_elements(device, q_len, kv_len, left, right):
    """int [q_len, kv_len] from the device; rows and keys that do not exist are cut off."""
    out = torch.full((16, 32), -1, dtype=torch.int32, device=device)
    _visible_probe[(1,)](out, q_len, kv_len, left, right, Q=16, KV=32)
    assert not out[:, kv_len:].any(), "keys past the length are visible"
    return out[:q_len, :kv_len].cpu()


TABLES = [
    # causal, as many keys as queries
    (4, 4, OPEN, 0, "x... xx.. xxx. xxxx"),
    # causal, two keys in a cache: the last query meets the last key
    (2, 4, OPEN, 0, "xxx. xxxx"),
    # causal, more queries than keys: the first queries see nothing
    (4, 2, OPEN, 0, ".. .. x. xx"),
    # window of two keys, causal
    (4, 4, 1, 0, "x... xx.. .xx. ..xx"),
    # only itself
    (3, 3, 0, 0, "x.. .x. ..x"),
    # one to the left, two to the right
    (4, 5, 1, 2, "xxxx. .xxxx ..xxx ...xx"),
    # look ahead only
    (3, 3, 0, OPEN, "xxx .xx ..x"),
    # a window and more queries than keys
    (5, 3, 1, 0, "... ... x.. xx. .xx"),
    (3, 2, OPEN, OPEN, "xx xx xx"),
]


@pytest.mark.parametrize("q_len, kv_len, left, right, picture", TABLES)
def test_band_looks_like_its_picture(device, q_len, kv_len, left, right, picture):
    seen = visible_elements(device, q_len, kv_len, left, right)
    drawn = " ".join("".join("x" if x else "." for x in row) for row in seen.tolist())
    assert drawn == picture


@triton.jit
def _column_probe(out_ptr, q_len, kv_len, left, right, Q: tl.constexpr, KV: tl.constexpr):
    kv_pos, q_index = tl.arange(0, KV), tl.arange(0, Q)
    first, last = masks.column_bounds(kv_pos, q_len, kv_len, left, right)
    seen = masks.within_bounds(q_index[None, :], first[:, None], last[:, None])
    tl.store(out_ptr + kv_pos[:, None] * Q + q_index[None, :], seen.to(tl.int32))


@pytest.mark.parametrize("q_len, kv_len, left, right, picture", TABLES)
def test_column_bounds_are_the_same_band(device, q_len, kv_len, left, right, picture):
    out = torch.full((32, 16), -1, dtype=torch.int32, device=device)
    _column_probe[(1,)](out, q_len, kv_len, left, right, Q=16, KV=32)
    assert not out[:kv_len, q_len:].any(), "queries past the length see keys"
    expected = visible_elements(device, q_len, kv_len, left, right)
    assert out[:kv_len, :q_len].T.cpu().equal(expected)


@triton.jit
def _range_probe(out_ptr, cases_ptr, num_cases, TRANSPOSED: tl.constexpr, N: tl.constexpr):
    offs = tl.program_id(0) * N + tl.arange(0, N)
    live = offs < num_cases
    ptrs = cases_ptr + offs * 8
    start = tl.load(ptrs, live, other=0)
    end = tl.load(ptrs + 1, live, other=0)
    kv_start = tl.load(ptrs + 2, live, other=0)
    kv_end = tl.load(ptrs + 3, live, other=0)
    q_len = tl.load(ptrs + 4, live, other=0)
    kv_len = tl.load(ptrs + 5, live, other=0)
    left = tl.load(ptrs + 6, live, other=0)
    right = tl.load(ptrs + 7, live, other=0)
    if TRANSPOSED:
        lo, hi = masks.q_range(kv_start, kv_end, q_len, kv_len, left, right)
        all_lo, all_hi = masks.q_range_of_all(kv_start, kv_end, q_len, kv_len, left, right)
    else:
        lo, hi = masks.kv_range(start, end, q_len, kv_len, left, right)
        all_lo, all_hi = masks.kv_range_of_all(start, end, q_len, kv_len, left, right)
    kind = masks.classify_tile(start, end, kv_start, kv_end, q_len, kv_len, left, right)
    tl.store(out_ptr + offs * 5, lo, live)
    tl.store(out_ptr + offs * 5 + 1, hi, live)
    tl.store(out_ptr + offs * 5 + 2, all_lo, live)
    tl.store(out_ptr + offs * 5 + 3, all_hi, live)
    tl.store(out_ptr + offs * 5 + 4, kind, live)


def probe_ranges(device, cases, transposed):
    table = torch.tensor(cases, dtype=torch.int32, device=device)
    out = torch.full((len(cases), 5), -7, dtype=torch.int32, device=device)
    grid = (triton.cdiv(len(cases), 1024),)
    _range_probe[grid](out, table, len(cases), TRANSPOSED=transposed, N=1024)
    return out.tolist()


def sees(q, kv, q_len, kv_len, left, right):
    p = q + kv_len - q_len
    return p - left <= kv <= p + right


def all_cases():
    sides = (0, 1, 2, 5, OPEN)
    lengths = (0, 1, 3, 6)
    tiles = ((0, 2), (2, 4), (4, 8))
    product = itertools.product(tiles, tiles, lengths, lengths, sides, sides)
    return [(*q, *kv, q_len, kv_len, lo, hi) for q, kv, q_len, kv_len, lo, hi in product]


@pytest.mark.parametrize("transposed", [False, True])
def test_ranges_and_classes_match_brute_force(device, transposed):
    cases = all_cases()
    for case, got in zip(cases, probe_ranges(device, cases, transposed), strict=True):
        q_start, q_end, kv_start, kv_end, q_len, kv_len, left, right = case
        queries = range(q_start, min(q_end, q_len))
        keys = range(kv_start, min(kv_end, kv_len))
        band = (q_len, kv_len, left, right)
        inner, outer = (keys, range(q_len)) if transposed else (queries, range(kv_len))

        def pair(i, o, transposed=transposed):
            return (o, i) if transposed else (i, o)

        any_of = [o for o in outer if any(sees(*pair(i, o), *band) for i in inner)]
        every = [o for o in outer if inner and all(sees(*pair(i, o), *band) for i in inner)]
        lo, hi, all_lo, all_hi, kind = got
        assert list(range(lo, hi)) == any_of, case
        assert list(range(all_lo, all_hi)) == every, case

        elements = [sees(q, k, *band) for q in queries for k in keys]
        expected = 0 if not any(elements) else 2 if all(elements) else 1
        assert kind == expected, case


def test_ranges_are_adjoint(device):
    """A query is in the range of a key exactly when the key is in the range of the query."""
    rng = random.Random(7)
    cases = []
    for _ in range(400):
        q_len, kv_len = rng.randint(1, 40), rng.randint(1, 40)
        q, kv = rng.randrange(q_len), rng.randrange(kv_len)
        sides = [rng.choice([0, 1, 3, rng.randint(0, 50), OPEN]) for _ in range(2)]
        cases.append((q, q + 1, kv, kv + 1, q_len, kv_len, *sides))
    forward, adjoint = (probe_ranges(device, cases, transposed) for transposed in (False, True))
    for case, (lo, hi, *_), (q_lo, q_hi, *_) in zip(cases, forward, adjoint, strict=True):
        assert (lo <= case[2] < hi) == (q_lo <= case[0] < q_hi), case


def test_positions_at_the_limits_do_not_overflow(device):
    longest = 2**30 - 1
    ends = (longest - 128, longest)
    cases = [
        (*q, *ends, longest, longest, left, right)
        for q in ((0, 128), ends)
        for left in (0, OPEN)
        for right in (0, OPEN)
    ]
    for case, (lo, hi, *_) in zip(cases, probe_ranges(device, cases, False), strict=True):
        q_start, q_end, *_, left, right = case
        assert lo == (0 if left == OPEN else q_start), case
        assert hi == (longest if right == OPEN else q_end), case


@triton.jit
def _bits_probe(out_ptr, words_ptr, N: tl.constexpr):
    kv = tl.arange(0, N)
    words = tl.load(words_ptr + kv // 32)
    tl.store(out_ptr + kv, masks.bit_visible(words, kv).to(tl.int32))


def test_bits_are_read_in_order(device):
    expected = torch.rand(128) < 0.5
    expected[31] = expected[127] = True  # the sign bits
    weights = expected.view(4, 32).long() << torch.arange(32)
    words = weights.sum(1).to(torch.int32).to(device)
    out = torch.empty(128, dtype=torch.int32, device=device)
    _bits_probe[(1,)](out, words, N=128)
    assert out.bool().cpu().equal(expected)
