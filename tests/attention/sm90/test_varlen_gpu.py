"""Packed sequences in the Hopper forward, on a Hopper GPU.

`PYTHONPATH=src python -m pytest -m gpu tests/gpu/test_attention_varlen_sm90.py`, and with
`BSK_RANDOM_CALLS=150` before it 1,650 random calls.
"""

import os
import random

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.sm90 import launch as fwd_sm90_launch
from blackwell_sparsek.attention.sm90.config import make_forward_config, tile_width
from blackwell_sparsek.calls.attention import AttentionCall, AttnSpec, empty_lse, empty_out
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.testing.attention_cases import (
    AttnCase,
    check_attention,
    draw_case,
    in_structure,
)
from blackwell_sparsek.testing.poison import poisoned_empty

pytestmark = pytest.mark.sm90

HALF, BRAIN = torch.float16, torch.bfloat16
CALLS = int(os.environ.get("BSK_RANDOM_CALLS", "20"))
# Consumers, tiles of D and Dv, blocks of the mask, softcap, sinks: each is compiled once.
STRUCTURES = (
    (2, 128, 128, None, False, False, BRAIN),
    (1, 128, 128, None, False, False, HALF),
    (2, 128, 128, None, True, True, HALF),
    (3, 64, 64, None, False, False, BRAIN),
    (2, 64, 64, None, False, True, BRAIN),
    (1, 64, 64, None, False, False, HALF),
    (2, 128, 64, None, False, False, BRAIN),
    (2, 128, 128, (128, 128), False, False, BRAIN),
    (2, 128, 128, (256, 16), False, False, HALF),
    (1, 64, 64, (64, 64), False, True, BRAIN),
    (1, 64, 64, (64, 16), False, False, BRAIN),
    (2, 256, 256, None, False, False, BRAIN),
    (2, 192, 128, None, False, True, HALF),
    (2, 256, 256, (128, 128), False, False, HALF),
    (2, 192, 192, None, True, False, BRAIN),
)


def launch(out, lse, q, k, v, spec, consumers):
    tiles = [tile_width(x.shape[-1]) for x in (q, v)]
    block_kv = None if spec.block_mask is None else spec.block_mask.block_size[1]
    config = make_forward_config(consumers, *tiles, block_kv, packed=True)
    fwd_sm90_launch.launch_attn_fwd_sm90(AttentionCall(q, k, v, spec), out, lse, None, 1, config)


def run(q, k, v, spec, consumers=None):
    """Output and lse in poisoned memory; with `consumers`, past the choice of tiles."""
    with poisoned_empty():
        if consumers is None:
            return fwd_sm90_launch.forward(AttentionCall(q, k, v, spec))
        out, lse = empty_out(q, v.shape[-1]), empty_lse(q)
    launch(out, lse, q, k, v, spec, consumers)
    return out, lse


def offsets(*lengths, first=0):
    cu = torch.tensor([first, *lengths], dtype=torch.int32).cumsum(0)
    return cu.to(torch.int32).cuda()


def draw(structure, seed):
    consumers, tile_d, tile_dv, blocks, softcap, sinks, dtype = STRUCTURES[structure]
    case = draw_case(seed, head_dims=(64,), longest=300, most_heads=14)
    rng = random.Random(seed)
    lengths = [0, 1, 15, 63, 64, 65, 127, 128, 129, 191, 193, 256, 300, 700]

    def pair():
        sq = rng.choice(lengths)
        return sq, rng.choice([sq, sq, rng.choice(lengths)])

    pairs = [pair() for _ in range(rng.randint(1, 7))]
    if not all(sum(x) for x in zip(*pairs, strict=True)):
        pairs.append((70, 70))
    given = {"dtype": dtype, "varlen": True, "lengths": tuple(pairs), "sinks": sinks}
    return in_structure(case, rng, (tile_d, tile_dv), blocks, softcap, **given), consumers


def check_random_call(structure, seed, on_few_sms):
    case, consumers = draw(structure, seed)
    q, k, v, spec = case.build("cuda")
    with on_few_sms(seed):
        results = run(q, k, v, spec, consumers)
    check_attention(*results, q, k, v, spec, what=f"structure {structure}, {case}")


@pytest.mark.parametrize("structure", range(len(STRUCTURES)))
def test_random_calls(structure, on_few_sms):
    for seed in range(structure * CALLS, (structure + 1) * CALLS):
        check_random_call(structure, seed, on_few_sms)


@pytest.mark.parametrize("consumers, dim", [(1, 64), (3, 64), (1, 128), (2, 128)])
def test_nothing_crosses_the_ends_of_a_sequence(consumers, dim):
    """NaN everywhere but in the sequences of a call, whose results go to their own rows alone."""
    q, k, v, spec = AttnCase(
        1, BRAIN, heads=(4, 2), lengths=((90, 70), (200, 333)), head_dims=(dim, dim), varlen=True
    ).build("cuda")
    expected, expected_lse = run(q, k, v, spec, consumers)
    check_attention(expected, expected_lse, q, k, v, spec)
    before, after = 37, 300
    around = []
    for x in (q, k, v):
        wide = torch.full((before + len(x) + after, *x.shape[1:]), torch.nan, device="cuda")
        around.append(wide.to(BRAIN))
        around[-1][before:-after] = x
    cu_q, cu_k = offsets(90, 200, first=before), offsets(70, 333, first=before)
    spec = spec._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out = torch.full_like(around[0], 7.0)
    lse = torch.full((4, len(out)), 7.0, device="cuda")
    launch(out, lse, *around, spec, consumers)
    assert out[before:-after].equal(expected) and lse[:, before:-after].equal(expected_lse)
    assert (out[:before] == 7).all() and (out[-after:] == 7).all()
    assert (lse[:, :before] == 7).all() and (lse[:, -after:] == 7).all()


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_a_sequence_of_nan_keeps_to_itself(bad):
    lengths = (100, 65, 1, 190)
    q, k, v, spec = AttnCase(
        2, BRAIN, heads=(2, 2), lengths=tuple((n, n) for n in lengths), head_dims=(128, 128),
        varlen=True, band=Band(None, 0),
    ).build("cuda")  # fmt: skip
    expected, expected_lse = run(q, k, v, spec, 2)
    start = sum(lengths[:bad])
    mine = slice(start, start + lengths[bad])
    for x in (q, k, v):
        x[mine] = torch.nan
    out, lse = run(q, k, v, spec, 2)
    others = torch.ones(sum(lengths), dtype=torch.bool, device="cuda")
    others[mine] = False
    assert out[others].equal(expected[others]) and lse[:, others].equal(expected_lse[:, others])


@pytest.mark.parametrize("consumers, dim", [(1, 64), (2, 64), (3, 64), (2, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_bits_of_dense_batches(consumers, dim, causal):
    batch, heads, tokens = 3, 4, 333
    q, k, v = (torch.randn(batch * tokens, heads, dim, device="cuda").to(BRAIN) for _ in "qkv")
    cu = offsets(*[tokens] * batch)
    band = Band(None, 0) if causal else EVERYTHING
    spec = AttnSpec(0.1, band, max_q=tokens, max_k=tokens)
    out, lse = run(q, k, v, spec._replace(cu_seqlens_q=cu, cu_seqlens_k=cu), consumers)
    dense = [x.view(batch, tokens, heads, dim).transpose(1, 2) for x in (q, k, v)]
    other, other_lse = empty_out(dense[0], dim), empty_lse(dense[0])
    config = make_forward_config(consumers, dim, dim)
    fwd_sm90_launch.launch_attn_fwd_sm90(
        AttentionCall(*dense, spec), other, other_lse, None, 2, config
    )
    assert out.equal(other.transpose(1, 2).reshape(out.shape))
    assert lse.equal(other_lse.transpose(0, 1).reshape(lse.shape))


@pytest.mark.parametrize("kind", ["fused qkv", "heads outer", "one head", "one token"])
def test_layouts(kind):
    heads, tokens = (1 if kind == "one head" else 4), (1 if kind == "one token" else 400)
    q, k, v = (torch.randn(tokens, heads, 64, device="cuda", dtype=BRAIN) for _ in "qkv")
    cu = offsets(1) if kind == "one token" else offsets(100, 0, 299, 1)
    spec = AttnSpec(0.125, max_q=300, max_k=300, cu_seqlens_q=cu, cu_seqlens_k=cu)
    expected = run(q, k, v, spec, 2)
    check_attention(*expected, q, k, v, spec)
    if kind == "fused qkv":
        q, k, v = torch.cat([q, k, v], 1).split(heads, 1)
    if kind == "heads outer":
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    if kind in ("one head", "one token"):
        dim = 1 if kind == "one head" else 0
        strides = [tuple(7 if d == dim else s for d, s in enumerate(x.stride())) for x in (q, k, v)]
        q, k, v = (x.as_strided(x.shape, s) for x, s in zip((q, k, v), strides, strict=True))
    out, lse = run(q, k, v, spec, 2)
    assert out.equal(expected[0]) and lse.equal(expected[1])


@pytest.mark.parametrize("count", [130, 700])
def test_many_short_sequences(count):
    """More than are looked through at once, many of them empty."""
    rng = random.Random(count)
    lengths = [rng.choice([0, 0, 1, 5, 64, 65, 128, 130]) for _ in range(count)]
    lengths[-1] = 3
    q, k, v = (torch.randn(sum(lengths), 2, 64, device="cuda", dtype=BRAIN) for _ in "qkv")
    cu = offsets(*lengths)
    spec = AttnSpec(0.125, Band(None, 0), max_q=130, max_k=130, cu_seqlens_q=cu, cu_seqlens_k=cu)
    for consumers in (1, 3):
        check_attention(*run(q, k, v, spec, consumers), q, k, v, spec)


def test_long_and_short_sequences():
    """Uneven lengths, more pieces of work than programs."""
    lengths = (3000, 10, 0, 777, 5000, 128)
    for heads_kv, band in ((8, EVERYTHING), (2, Band(None, 0)), (2, Band(500, 0))):
        q, k, v, spec = AttnCase(
            3, BRAIN, heads=(8, heads_kv), lengths=tuple((n, n) for n in lengths),
            head_dims=(128, 128), band=band, varlen=True,
        ).build("cuda")  # fmt: skip
        check_attention(*run(q, k, v, spec), q, k, v, spec)


def varlen(q, k, v, cu_q, cu_k, longest=300, **options):
    return bsk.attention_varlen(
        q, k, v, cu_q, cu_k, max_seqlen_q=longest, max_seqlen_k=longest, return_lse=True, **options
    )


def test_explain():
    q = torch.randn(300, 2, 64, device="cuda", dtype=BRAIN)
    cu = offsets(100, 200)
    lengths = {"max_seqlen_q": 200, "max_seqlen_k": 200}
    decision = bsk.explain(bsk.attention_varlen, q, q, q, cu, cu, **lengths)
    assert decision.chosen == "sm90"
    decision = bsk.explain(bsk.attention_varlen, q, q, q, cu, cu, scale=-1.0, **lengths)
    assert decision.chosen == "triton" and "above zero" in decision.reasons["sm90"]


@pytest.mark.usefixtures("recorded_at_once")
def test_repeated_calls_read_what_they_are_given():
    """The second call on is a recorded launch: new tensors, addresses and lengths."""
    torch.manual_seed(0)
    kept = []
    splits = ((100, 200, 0), (300, 0, 0), (1, 1, 298), (0, 290, 10))
    for _ in range(3):
        for split in splits:
            for other in (None, splits[0]):
                q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=BRAIN) for _ in "qkv")
                cu_q = offsets(*split)
                cu_k = cu_q if other is None else offsets(*other)
                spec = AttnSpec(
                    0.2, Band(None, 0), max_q=300, max_k=300, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k
                )
                with torch.no_grad(), poisoned_empty():
                    results = varlen(q, k, v, cu_q, cu_k, causal=True, scale=0.2, impl="sm90")
                check_attention(*results, q, k, v, spec)
                kept.append((q, cu_q, cu_k))


@pytest.mark.usefixtures("recorded_at_once")
@pytest.mark.parametrize("same", [False, True])
def test_a_call_is_recorded(same):
    from blackwell_sparsek.attention.replay import _PACKED

    q, k, v = (torch.randn(333, 4, 64, device="cuda", dtype=BRAIN) for _ in "qkv")
    cu = offsets(33, 300)
    _PACKED.clear()
    with torch.no_grad():
        first = varlen(q, k, v, cu, cu if same else cu.clone())
        assert not _PACKED, "a call that may never come again was recorded"
        varlen(q, k, v, cu, cu if same else cu.clone())
        (recorded,) = _PACKED.values()
        assert recorded is not None
        again = varlen(q, k, v, cu, cu if same else cu.clone())
    assert first[0].equal(again[0]) and first[1].equal(again[1])


def test_graphs_replay_with_changed_lengths():
    q, k, v = (torch.randn(300, 4, 128, device="cuda", dtype=BRAIN) for _ in "qkv")
    cu = offsets(100, 50, 150)
    with torch.no_grad():
        varlen(q, k, v, cu, cu, causal=True, impl="sm90")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = varlen(q, k, v, cu, cu, causal=True, impl="sm90")
    for split in ((300, 0, 0), (1, 298, 1), (0, 0, 300)):
        cu.copy_(offsets(*split))
        out.fill_(torch.nan), lse.fill_(torch.nan)
        for _ in range(2):
            graph.replay()
        spec = AttnSpec(
            128**-0.5, Band(None, 0), max_q=300, max_k=300, cu_seqlens_q=cu, cu_seqlens_k=cu
        )
        check_attention(out, lse, q, k, v, spec)


def test_gradients_go_through_the_operator():
    q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=BRAIN) for _ in "qkv")
    cu = offsets(100, 200)
    with torch.no_grad():
        for _ in range(2):
            expected, _ = varlen(q, k, v, cu, cu, causal=True)
    q.requires_grad_()
    out, _ = varlen(q, k, v, cu, cu, causal=True)
    assert out.requires_grad and out.equal(expected)
    out.float().sum().backward()
    assert q.grad.isfinite().all()
