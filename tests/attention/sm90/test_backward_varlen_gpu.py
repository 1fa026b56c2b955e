"""The Hopper backward of packed sequences, on a Hopper GPU."""

import random

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.attention import AttnGradients, AttnSpec
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.testing.attention_cases import AttnCase
from blackwell_sparsek.testing.attention_gradients import check_gradients

from .test_backward_gpu import (
    BRAIN,
    HALF,
    REPEATS,
    check,
    forward,
    gradients_of,
)

pytestmark = pytest.mark.sm90

BANDS = (EVERYTHING, Band(None, 0), Band(100, 0), Band(0, None), Band(70, 30))
HEADS = ((2, 2), (4, 1), (7, 1), (6, 2))


def packed_case(seed, dtype, lengths, dims, band, heads=(4, 2), **options):
    return AttnCase(
        seed, dtype, heads=heads, lengths=tuple(lengths), head_dims=dims, band=band, varlen=True,
        **options,
    )  # fmt: skip


def causal_spec(dim, offsets, longest):
    """Of the public call `attention_varlen(..., causal=True)` with as many keys as queries."""
    return AttnSpec(
        dim**-0.5, Band(None, 0), max_q=longest, max_k=longest, cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
    )  # fmt: skip


# narrow heads with a softcap, which have no kernel for gradients in order, and the others
CAPPED = ((64, 64), HALF, 15.0)
KINDS = (
    ((128, 128), BRAIN, 0.0),
    ((64, 64), BRAIN, 0.0),
    ((96, 96), HALF, 0.0),
    ((128, 64), HALF, 0.0),
    ((128, 128), HALF, 15.0),
    ((192, 128), BRAIN, 0.0),
    ((256, 256), BRAIN, 0.0),
    ((160, 160), HALF, 0.0),
    ((64, 256), HALF, 0.0),
    ((192, 128), HALF, 15.0),
)


@pytest.mark.parametrize(
    "dims, dtype, softcap, deterministic",
    [(*CAPPED, False), *((*kind, ordered) for kind in KINDS for ordered in (False, True))],
)
@pytest.mark.parametrize("seed", range(6))
def test_random_sequences(dims, dtype, softcap, seed, deterministic):
    """Lengths of queries and keys drawn apart, none, one, and more than a tile of either."""
    rng = random.Random(seed)
    some = (0, 1, 63, 64, 65, 128, 129, 200, 333, rng.randint(1, 900))
    lengths = [(rng.choice(some), rng.choice(some)) for _ in range(rng.choice([1, 2, 5, 20]))]
    lengths.append((77, 150))
    case = packed_case(
        seed, dtype, lengths, dims, rng.choice(BANDS), rng.choice(HEADS), softcap=softcap,
        sinks=seed % 2 == 0,
    )  # fmt: skip
    check(*case.build("cuda"), seed, str(case), deterministic)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (96, 96)])
def test_every_band(dims, band):
    """Queries and keys of different lengths, some that see nothing, some that nothing sees."""
    lengths = ((300, 130), (1, 1), (0, 77), (77, 0), (64, 500), (129, 128), (1, 300), (200, 1))
    case = packed_case(3, BRAIN, lengths, dims, band, (4, 1))
    check(*case.build("cuda"), 3, str(case))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128)])
def test_more_sequences_than_are_searched_at_a_time(dims, deterministic):
    lengths = tuple((1 + i % 5, 1 + i % 7) for i in range(300))
    case = packed_case(1, BRAIN, lengths, dims, Band(None, 0), (2, 1))
    check(*case.build("cuda"), 1, str(case), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("band", [EVERYTHING, Band(None, 0), Band(500, 0)])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128)])
def test_more_work_tiles_than_programs(dims, band, deterministic):
    """In order, the same bits in every run."""
    lengths = tuple((n, n) for n in (1024, 128, 700, 1, 2048, 512, 0, 1500, 333, 256))
    q, k, v, spec = packed_case(2, BRAIN, lengths, dims, band, (16, 4)).build("cuda")
    call = (q, k, v, spec, *forward(q, k, v, spec))
    got = gradients_of(*call, deterministic=deterministic)
    check_gradients(got, *call[5], q, k, v, spec)
    for _ in range(REPEATS if deterministic else 0):
        again = gradients_of(*call, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(got[:3], again[:3], strict=True))


@pytest.mark.parametrize("dim", [64, 96, 128, 192])
def test_repeated_calls(dim):
    """Recorded launches with other tensors and other lengths of the same sums."""
    torch.manual_seed(1)
    for lengths in ((200, 56, 256),) * 3 + ((256, 100, 156),) * 2 + ((40, 216, 256),):
        offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        q, k, v = (
            torch.randn(512, 2, dim, device="cuda", dtype=BRAIN, requires_grad=True) for _ in "qkv"
        )
        weight = torch.randn_like(q)
        out = bsk.attention_varlen(
            q, k, v, offsets, offsets, max_seqlen_q=256, max_seqlen_k=256, causal=True, impl="sm90"
        )
        made = torch.autograd.grad((out * weight).sum(), (q, k, v))
        spec = causal_spec(dim, offsets, 256)
        check_gradients(AttnGradients(*made, None), weight, None, q, k, v, spec)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 192])
def test_lengths_never_seen(dim, deterministic):
    """Launches of an earlier call with another number of sequences, of tokens and of keys."""
    torch.manual_seed(2)
    batches = ((200, 56, 256), (100,), (700, 3, 0, 333), (64,) * 20, (1500, 129))
    for i, lengths in enumerate(batches):
        of_keys = [n + 30 * (i % 2) for n in lengths]
        cu_q, cu_k = (
            torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (lengths, of_keys)
        )
        tokens, keys, longest = sum(lengths), sum(of_keys), max(of_keys)
        q, dout = (torch.randn(tokens, 4, dim, device="cuda", dtype=BRAIN) for _ in "qd")
        k, v = (torch.randn(keys, 2, dim, device="cuda", dtype=BRAIN) for _ in "kv")
        given = [x.requires_grad_() for x in (q, k, v)]
        options = {"max_seqlen_q": max(lengths), "max_seqlen_k": longest, "causal": True}
        out = bsk.attention_varlen(*given, cu_q, cu_k, **options, deterministic=deterministic)
        made = torch.autograd.grad(out, given, dout)
        spec = AttnSpec(
            dim**-0.5, Band(None, 0), max_q=max(lengths), max_k=longest, cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
        )  # fmt: skip
        check_gradients(AttnGradients(*made, None), dout, None, q, k, v, spec)


@pytest.mark.parametrize("dim", [64, 96, 128, 192])
def test_neighbouring_sequences_do_not_count(dim):
    """NaN in the sequence before and behind reaches none of the gradients of one between."""
    torch.manual_seed(0)
    lengths = (100, 130, 70)
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (torch.randn(300, 2, dim, device="cuda", dtype=BRAIN) for _ in "qkv")
    for x in (q, k, v):
        x[:100], x[230:] = torch.nan, torch.nan
    inside = slice(100, 230)
    given = [x.requires_grad_() for x in (q, k, v)]
    out = bsk.attention_varlen(
        *given, offsets, offsets, max_seqlen_q=130, max_seqlen_k=130, causal=True, impl="sm90"
    )[inside]
    made = torch.autograd.grad(out.float().sum(), given)
    # as the only sequence of a call
    alone = causal_spec(dim, torch.tensor([0, 130], device="cuda").int(), 130)
    own = AttnGradients(*(x[inside] for x in made), None)
    check_gradients(own, torch.ones_like(out), None, *(x[inside] for x in given), alone)
