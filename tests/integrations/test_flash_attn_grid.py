"""The parameters of flash-attn's own tests through the front end, under its own kind of bound.

Errors against fp64 are at most twice those of plain PyTorch in the same dtype, three times for
gradients. A few combinations run on the CPU; on a GPU each test draws CALLS of the combinations
that flash-attn walks through, seeded by the parameters that make a kernel compile again.
"""

import itertools
import math
import random

import pytest
import torch

from blackwell_sparsek.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

HALF, BRAIN = torch.float16, torch.bfloat16
DIMS = (32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256)
KV_HEADS = {"mha": 6, "mqa": 1, "gqa": 2}
HEADS, BATCH, CALLS = 6, 3, 4
LENGTHS = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024),
    (1023, 1024), (1024, 1023),
)  # fmt: skip
CACHED = ((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (16, 1023), (128, 128))


def attend(
    q, k, v, *, causal=False, window=(-1, -1), softcap=0.0, slopes=None, keys=None, first=None
):
    """Plain PyTorch in the dtype of q, [B, S, H, D]; `keys` and `first` [B] bound the keys."""
    sq, sk = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q / math.sqrt(q.shape[-1]), k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    count = torch.full((len(q),), sk, device=q.device) if keys is None else keys.long()
    p = torch.arange(sq, device=q.device)[None, :, None] + (count - sq)[:, None, None]
    j = torch.arange(sk, device=q.device)[None, None, :]
    seen = j < count[:, None, None]
    if first is not None:
        seen = seen & (j >= first.long()[:, None, None])
    left, right = window
    if causal or right >= 0:
        seen = seen & (j <= p + (0 if causal else right))
    if left >= 0:
        seen = seen & (j >= p - left)
    if slopes is not None:
        distance = (p - j).abs()[:, None].to(scores.dtype)
        scores = scores - slopes.view(-1, q.shape[2], 1, 1).to(scores.dtype) * distance
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1).masked_fill(~seen.any(-1)[:, None, :, None], 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def draw_options(rng, lengths, device, alibi=None):
    """The masks and scores of flash-attn's tests: their meaning, and its arguments for it."""
    local, causal = rng.random() < 0.4, rng.random() < 0.5
    window = tuple(rng.randrange(lengths[1]) for _ in range(2)) if local else (-1, -1)
    softcap = rng.choice([0.0, 0.0, 50.0])
    slopes = None
    if rng.random() < 0.3 if alibi is None else alibi:
        slopes = torch.rand(BATCH, HEADS, generator=torch.Generator().manual_seed(rng.randrange(9)))
        slopes = (slopes * 0.3).to(device)
    meaning = {"causal": causal, "window": window, "softcap": softcap, "slopes": slopes}
    asked = {"causal": causal, "window_size": window, "softcap": softcap, "alibi_slopes": slopes}
    return meaning, asked


def check(made, run, tensors, what, factor=2.0):
    """Compare results with `run` in fp64 and in the dtype of the tensors."""
    exact, plain = run(*(x.double() for x in tensors)), run(*tensors)
    for name, got, want, low in zip(what, made, exact, plain, strict=True):
        assert_within_budget(got, want, low, factor=factor, what=name)


def check_output(dim, heads, lengths, dtype, device, rng, alibi=None):
    """`flash_attn_func` with its gradients."""
    sq, sk = lengths
    shapes = ((sq, HEADS), (sk, KV_HEADS[heads]), (sk, KV_HEADS[heads]))
    q, k, v = (
        normal(BATCH, *shape, dim, seed=i, dtype=dtype, device=device)
        for i, shape in enumerate(shapes)
    )
    dout = normal(BATCH, sq, HEADS, dim, seed=4, dtype=dtype, device=device)
    meaning, asked = draw_options(rng, lengths, device, alibi)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, **asked)
    what = f"{dim} {heads} {lengths} {dtype} {asked}"
    check([out.detach()], lambda *x: [attend(*x, **meaning)], (q, k, v), [what])

    def gradients(*tensors):
        given = [x.clone().requires_grad_() for x in tensors]
        return torch.autograd.grad(attend(*given, **meaning), given, dout.to(given[0].dtype))

    made = torch.autograd.grad(out, leaves, dout)
    check(made, gradients, (q, k, v), [f"d{name} {what}" for name in "qkv"], factor=3.0)


def check_varlen(dim, heads, lengths, dtype, device, rng):
    """`flash_attn_varlen_func` over sequences with padding taken out, as flash-attn's tests do."""
    used = [[rng.randrange(1, n + 1) for _ in range(BATCH)] for n in lengths]
    meaning, asked = draw_options(rng, lengths, device, alibi=False)
    packed = [
        normal(sum(own), count, dim, seed=5 + i, dtype=dtype, device=device)
        for i, (own, count) in enumerate(
            zip((used[0], used[1], used[1]), (HEADS, KV_HEADS[heads], KV_HEADS[heads]), strict=True)
        )
    ]
    ends = [[0, *itertools.accumulate(own)] for own in used]
    offsets = [torch.tensor(own, dtype=torch.int32, device=device) for own in ends]
    out = flash_attn_varlen_func(*packed, *offsets, *map(max, used), **asked)
    for b in range(BATCH):
        rows, keys = (slice(own[b], own[b + 1]) for own in ends)
        q, k, v = (x[span][None] for x, span in zip(packed, (rows, keys, keys), strict=True))
        what = f"{dim} {heads} {used} {dtype} {asked} sequence {b}"
        check([out[rows][None]], lambda *x: [attend(*x, **meaning)], (q, k, v), [what])


def rotate(x, cos, sin, at, interleaved):
    """Rotary embedding of x [B, S, H, D] at positions [B, S]."""
    half = cos.shape[1]
    cos, sin = (t[at][:, :, None].to(x.dtype) for t in (cos, sin))
    turned = x.clone()
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (
        slice(0, half), slice(half, 2 * half)
    )  # fmt: skip
    turned[..., a] = x[..., a] * cos - x[..., b] * sin
    turned[..., b] = x[..., a] * sin + x[..., b] * cos
    return turned


def check_kvcache(dim, heads, lengths, dtype, device, rng, page_size):
    """`flash_attn_with_kvcache`: appending, rotary, pages or rows to choose from, left padding."""
    (sq, capacity), kv = lengths, KV_HEADS[heads]
    new, append = sq if rng.random() < 0.5 else rng.randrange(1, sq + 1), rng.random() < 0.7
    causal = rng.random() < 0.5
    if page_size is not None:
        capacity = -(-capacity // page_size) * page_size
    k, v = (
        normal(BATCH, capacity, kv, dim, seed=9 + i, dtype=dtype, device=device) for i in (0, 1)
    )
    q = normal(BATCH, sq, HEADS, dim, seed=11, dtype=dtype, device=device)
    fresh = [normal(BATCH, new, kv, dim, seed=12 + i, dtype=dtype, device=device) for i in (0, 1)]
    room = capacity - (new if append else 0)
    held = torch.tensor([rng.randrange(not append, room + 1) for _ in range(BATCH)])
    held = held.int().to(device)
    options = {"cache_seqlens": held, "causal": causal}
    queries, keys_now, first = q, held, None
    if append:
        options |= {"k": fresh[0], "v": fresh[1]}
        keys_now = held + new
    else:
        first = torch.tensor([rng.randrange(int(n)) for n in held], device=device).int()
        options["cache_leftpad"] = first
    stored = fresh[0]
    if append and rng.random() < 0.6:
        half = max(8, rng.choice([dim // 4, dim // 2]) // 8 * 8 // 2)
        angle = normal(capacity + sq, half, seed=14, device=device)
        cos, sin = (f(angle).to(dtype) for f in (torch.cos, torch.sin))
        interleaved = rng.random() < 0.5
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        at = held.long()[:, None] + torch.arange(new, device=device)
        stored = rotate(stored, cos, sin, at, interleaved)
        steps = torch.arange(sq, device=device) * int(causal)
        queries = rotate(q, cos, sin, held.long()[:, None] + steps, interleaved)
    full_k, full_v = k.clone(), v.clone()
    if append:
        for b, n in enumerate(held.tolist()):
            full_k[b, n : n + new], full_v[b, n : n + new] = stored[b], fresh[1][b]
    if page_size is None:
        rows = torch.randperm(BATCH + 2, generator=torch.Generator().manual_seed(1))[:BATCH]
        caches = [x.new_zeros((BATCH + 2, *x.shape[1:])) for x in (k, v)]
        for cache, x in zip(caches, (k, v), strict=True):
            cache[rows.to(device)] = x
        options["cache_batch_idx"] = rows.int().to(device)
    else:
        pages = capacity // page_size
        table = torch.randperm(BATCH * pages, generator=torch.Generator().manual_seed(1))
        table = table.view(BATCH, pages).to(device)
        caches = [x.new_zeros((BATCH * pages, page_size, *x.shape[2:])) for x in (k, v)]
        for cache, x in zip(caches, (k, v), strict=True):
            cache[table] = x.unflatten(1, (pages, page_size))
        options["block_table"] = table.int()
    out = flash_attn_with_kvcache(q, *caches, **options)
    given = [name for name in options if name not in ("k", "v")]
    what = f"{dim} {heads} {lengths} {dtype} pages {page_size} new {new} {given}"
    check(
        [out],
        lambda *x: [attend(*x, causal=causal, keys=keys_now, first=first)],
        (queries, full_k, full_v),
        [what],
        # queries and new keys are rounded after they were rotated
        factor=3.0 if "rotary_cos" in options else 2.0,
    )


def test_a_sample_on_the_cpu():
    rng = random.Random(0)
    for dim, heads, lengths in ((40, "gqa", (33, 50)), (59, "mqa", (20, 20)), (32, "mha", (25, 9))):
        check_output(dim, heads, lengths, BRAIN, "cpu", rng)
        check_varlen(dim, heads, lengths, HALF, "cpu", rng)
    for page_size, lengths in itertools.product((None, 16), ((1, 40), (5, 64))):
        for heads in KV_HEADS:
            check_kvcache(32, heads, lengths, HALF, "cpu", rng, page_size)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", KV_HEADS)
@pytest.mark.parametrize("dim", DIMS)
def test_output(dim, heads):
    rng = random.Random(f"{dim} {heads}")
    for _ in range(CALLS):
        dtype = rng.choice([HALF, BRAIN])
        check_output(dim, heads, rng.choice(LENGTHS), dtype, "cuda", rng, alibi=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
def test_output_with_slopes(dim, monkeypatch):
    """By the portable kernels, whatever `auto` would take."""
    monkeypatch.setenv("BSK_IMPL", "triton")
    rng = random.Random(f"slopes {dim}")
    for _ in range(CALLS):
        check_output(dim, "gqa", rng.choice(LENGTHS), BRAIN, "cuda", rng, alibi=True)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", KV_HEADS)
@pytest.mark.parametrize("dim", DIMS)
def test_varlen(dim, heads):
    rng = random.Random(f"varlen {dim} {heads}")
    for _ in range(CALLS):
        check_varlen(dim, heads, rng.choice(LENGTHS), rng.choice([HALF, BRAIN]), "cuda", rng)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16, 256])
@pytest.mark.parametrize("dim", [59, 64, 96, 128, 160, 256])
def test_kvcache(dim, page_size):
    rng = random.Random(f"cache {dim} {page_size}")
    for heads in KV_HEADS:
        for _ in range(CALLS):
            check_kvcache(dim, heads, rng.choice(CACHED), HALF, "cuda", rng, page_size)
