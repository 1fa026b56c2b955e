"""The grid of sizes that FlashAttention is tested with, against fp64 under the error budget.

Sizes and options are those of its published tests of `flash_attn_func`, its variants for packed
sequences and for KV caches; results are judged by this project's budget, which is stricter. Without
a GPU a part of the grid runs, with plain PyTorch.
"""

import itertools
import random

import pytest
import torch

from blackwell_sparsek.attention.api import attention, attention_packed
from blackwell_sparsek.calls.attention import AttnGradients, AttnSpec
from blackwell_sparsek.decode.api import attention_decode
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.reference.attention import attention as oracle
from blackwell_sparsek.testing import inputs
from blackwell_sparsek.testing.attention_cases import check_attention
from blackwell_sparsek.testing.attention_gradients import check_gradients, upstream

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024),
    (1023, 1024), (1024, 1023), (2048, 2048),
)  # fmt: skip
HEADS = {"mha": (4, 4), "mqa": (4, 1), "gqa": (6, 2)}
ON_GPU = torch.cuda.is_available()
SHORT = 300
GRID = [
    (dtype, dim, lengths, kind, causal, local, softcap)
    for dtype, dim, lengths, kind, causal, local, softcap in itertools.product(
        DTYPES, HEAD_DIMS, LENGTHS, HEADS, (False, True), (False, True), (0.0, 50.0)
    )
]
# A sample that is the same in every run; all of it would take hours.
SAMPLE = random.Random(1).sample(
    [x for x in GRID if ON_GPU or max(x[2]) < SHORT], 120 if ON_GPU else 12
)
pytestmark = [pytest.mark.gpu] if ON_GPU else [pytest.mark.exhaustive]


def name_of(case):
    dtype, dim, lengths, kind, causal, local, softcap = case
    flags = [x for x, on in (("causal", causal), ("local", local), ("cap", softcap)) if on]
    return "-".join([str(dtype)[6:], f"d{dim}", f"{lengths[0]}x{lengths[1]}", kind, *flags])


def built(case, device, batch):
    """Inputs, options and what they mean to the oracle."""
    dtype, dim, (sq, sk), kind, causal, local, softcap = case
    hq, hkv = HEADS[kind]
    made = inputs.qkv(batch, hq, hkv, sq, sk, dim, seed=dim + sq, dtype=dtype, device=device)
    window = tuple(random.Random(sq * dim).randint(0, sk) for _ in range(2)) if local else None
    left, right = window or (None, None)
    band = Band(left, 0 if causal else right)
    options = {"causal": causal, "window": window, "softcap": softcap or None}
    return made, options, AttnSpec(dim**-0.5, band=band, softcap=softcap)


@pytest.mark.parametrize("case", SAMPLE, ids=name_of)
def test_dense(case):
    device = "cuda" if ON_GPU else "cpu"
    (q, k, v), options, spec = built(case, device, batch=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, **options, return_lse=True)
    q, k, v = (x.detach() for x in leaves)
    check_attention(out.detach(), lse.detach(), q, k, v, spec)
    if case[1] <= 128 and max(case[2]) <= 1024:
        dout, dlse = upstream(*oracle(q, k, v, spec), seed=1)
        got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        check_gradients(AttnGradients(*got, None), dout, dlse, q, k, v, spec)


@pytest.mark.parametrize("case", SAMPLE[::4], ids=name_of)
def test_packed(case):
    device = "cuda" if ON_GPU else "cpu"
    (q, k, v), options, spec = built(case, device, batch=3)
    sq, sk = q.shape[2], k.shape[2]
    rng = random.Random(sq)
    q_lens = [rng.randint(1, sq) for _ in range(3)]
    k_lens = [rng.randint(1, sk) for _ in range(3)]
    packed = [
        torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])
        for x, lengths in ((q, q_lens), (k, k_lens), (v, k_lens))
    ]
    offsets = [torch.tensor([0, *x], device=device).cumsum(0).int() for x in (q_lens, k_lens)]
    longest = {"max_seqlen_q": sq, "max_seqlen_k": sk}
    out, lse = attention_packed(*packed, *offsets, **longest, **options, return_lse=True)
    spec = spec._replace(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_q=sq, max_k=sk)
    check_attention(out, lse, *packed, spec)


@pytest.mark.parametrize("case", SAMPLE[::4], ids=name_of)
@pytest.mark.parametrize("page_size", [None, 16, 256])
def test_cache(case, page_size):
    device = "cuda" if ON_GPU else "cpu"
    (_, k, v), options, spec = built(case, device, batch=2)
    dim, slots = k.shape[-1], k.shape[2]
    length = slots - slots // 3
    q = inputs.normal(2, HEADS[case[3]][0], 1, dim, seed=3, dtype=k.dtype, device=device)
    lengths = torch.full((2,), length, dtype=torch.int32, device=device)
    caches, table = [k, v], {}
    if page_size is not None:
        width = -(-slots // page_size)
        pages = torch.randperm(2 * width, generator=torch.Generator().manual_seed(1))
        table["page_table"] = pages.view(2, width).int().to(device)
        caches = [_paged(x, pages.view(2, width).to(device), page_size) for x in (k, v)]
    out, lse = attention_decode(
        q, *caches, cache_seqlens=lengths, **table, **options, return_lse=True
    )
    check_attention(out, lse, q, k[:, :, :length], v[:, :, :length], spec)


def _paged(x, table, page_size):
    batch, heads, slots, dim = x.shape
    width = table.shape[1]
    whole = x.new_zeros(batch, heads, width * page_size, dim)
    whole[:, :, :slots] = x
    pool = x.new_empty(batch * width, page_size, heads, dim)
    pool[table.flatten()] = (
        whole.view(batch, heads, width, page_size, dim).permute(0, 2, 3, 1, 4).flatten(0, 1)
    )
    return pool
