"""The Hopper forward on a Hopper GPU.

`PYTHONPATH=src python -m pytest -m gpu tests/gpu/test_attention_sm90.py` takes about two minutes,
most of it to compile. `BSK_RANDOM_CALLS=150` before it makes 2,250 random calls.
"""

import dataclasses
import os
import random
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.sm90 import launch as fwd_sm90_launch
from blackwell_sparsek.attention.sm90.config import make_forward_config, tile_width
from blackwell_sparsek.calls.attention import AttentionCall, AttnSpec, empty_lse, empty_out
from blackwell_sparsek.core.arch import arch_of
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.masks.order import longest_first
from blackwell_sparsek.testing.attention_cases import (
    AttnCase,
    check_attention,
    draw_case,
    in_structure,
)
from blackwell_sparsek.testing.poison import poisoned_empty

pytestmark = pytest.mark.sm90

HALF, BRAIN = torch.float16, torch.bfloat16
CALLS = int(os.environ.get("BSK_RANDOM_CALLS", "30"))
# Consumers, tiles of D and Dv, blocks of the mask, softcap, sinks: each is compiled once.
STRUCTURES = (
    (2, 128, 128, None, False, False, BRAIN),
    (1, 128, 128, None, False, False, HALF),
    (2, 128, 128, None, True, True, HALF),
    (3, 64, 64, None, False, False, BRAIN),
    (3, 64, 64, None, False, True, HALF),
    (2, 64, 64, None, True, False, BRAIN),
    (1, 64, 64, None, False, False, HALF),
    (2, 128, 64, None, False, False, BRAIN),
    (2, 64, 128, None, False, False, HALF),
    (2, 128, 128, (128, 128), False, False, BRAIN),
    (2, 128, 128, (256, 16), False, False, HALF),
    (1, 128, 128, (64, 64), False, True, BRAIN),
    (1, 64, 64, (64, 16), False, False, BRAIN),
    (2, 64, 64, (128, 256), True, False, HALF),
    (1, 128, 128, (64, 128), True, True, HALF),
    (2, 256, 256, None, False, False, BRAIN),
    (2, 256, 256, None, True, True, HALF),
    (2, 256, 256, (128, 128), False, False, HALF),
    (2, 192, 128, None, False, False, BRAIN),
    (2, 192, 128, (128, 64), False, True, BRAIN),
    (2, 192, 192, None, False, True, HALF),
    (1, 256, 256, (64, 64), False, False, BRAIN),
    (1, 192, 128, (64, 16), False, False, HALF),
    (2, 128, 256, (256, 256), False, False, BRAIN),
    (2, 256, 64, None, False, False, HALF),
)
# (structure, seed) pairs that ever failed stay here
CORPUS = ((6, 972), (7, 1169))


def run(q, k, v, spec, consumers=None, section=1, long=False):
    """Output and lse in poisoned memory; with `consumers`, past the choice of tiles."""
    with poisoned_empty():
        if consumers is None:
            return fwd_sm90_launch.forward(AttentionCall(q, k, v, spec))
        out, lse = empty_out(q, v.shape[-1]), empty_lse(q)
    tiles = [tile_width(x.shape[-1]) for x in (q, v)]
    mask, order, block_kv = spec.block_mask, None, None
    if mask is not None:
        block_kv = mask.block_size[1]
        order = longest_first(mask, *q.shape[:2], spec.band, section)
    config = make_forward_config(
        consumers, *tiles, block_kv, banded=spec.band != EVERYTHING, long=long
    )
    fwd_sm90_launch.launch_attn_fwd_sm90(
        AttentionCall(q, k, v, spec), out, lse, order, section, config
    )
    return out, lse


def draw(structure, seed):
    consumers, tile_d, tile_dv, blocks, softcap, sinks, dtype = STRUCTURES[structure]
    case = draw_case(seed, head_dims=(64,), longest=300, most_heads=14)
    rng = random.Random(seed)
    sq, sk = (max(n, 1) for n in case.lengths[0])
    if rng.random() < 0.3:
        sq, sk = rng.randint(1, 1300), rng.randint(1, 1300)
    given = {"dtype": dtype, "varlen": False, "lengths": ((sq, sk),), "sinks": sinks}
    return in_structure(case, rng, (tile_d, tile_dv), blocks, softcap, **given), consumers


def check_random_call(structure, seed, on_few_sms):
    case, consumers = draw(structure, seed)
    q, k, v, spec = case.build("cuda")
    if seed % 3 == 0:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    section = 1 + seed % 5
    with on_few_sms(seed):
        results = run(q, k, v, spec, consumers, section)
    check_attention(*results, q, k, v, spec, what=f"structure {structure}, {case}")


@pytest.mark.parametrize("structure", range(len(STRUCTURES)))
def test_random_calls(structure, on_few_sms):
    for seed in range(structure * CALLS, (structure + 1) * CALLS):
        check_random_call(structure, seed, on_few_sms)


@pytest.mark.parametrize("structure, seed", CORPUS)
def test_calls_that_failed(structure, seed, on_few_sms):
    check_random_call(structure, seed, on_few_sms)


@pytest.mark.parametrize("blocks", [None, (128, 128)])
@pytest.mark.parametrize("dims", [(128, 128), (160, 160), (192, 128), (256, 256)])
def test_many_work_tiles(blocks, dims):
    case = AttnCase(
        1, BRAIN, batch=2, heads=(8, 2), lengths=((1000, 1500),), head_dims=dims,
        band=Band(700, 0), mask="blocks" if blocks else "none", block_size=blocks or (64, 64),
    )  # fmt: skip
    q, k, v, spec = case.build("cuda")
    check_attention(*run(q, k, v, spec), q, k, v, spec)


@pytest.mark.parametrize("broadcast", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("banded", [False, True])
def test_skewed_masks(broadcast, banded):
    """Some rows see everything, some nothing; more rows than programs."""
    planes = [1 if any_plane else n for any_plane, n in zip(broadcast, (2, 16), strict=True)]
    keep = torch.rand(*planes, 20, 20, device="cuda") < torch.rand(*planes, 20, 1, device="cuda")
    keep[..., 3, :], keep[..., 0, :], keep[..., 7, :] = True, True, False
    mask = BlockMask.from_dense(keep, 128, (2500, 2500))
    q, k, v, spec = AttnCase(
        3, BRAIN, batch=2, heads=(16, 4), lengths=((2500, 2500),), head_dims=(128, 128),
        band=Band(None, 0) if banded else EVERYTHING,
    ).build("cuda")  # fmt: skip
    spec = spec._replace(block_mask=mask)
    out, lse = run(q, k, v, spec)
    assert (out[:, :, 7 * 128 : 8 * 128] == 0).all()
    assert (lse[:, :, 7 * 128 : 8 * 128] == -torch.inf).all()
    check_attention(out, lse, q, k, v, spec)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("block_kv", [16, 128])
def test_absent_blocks_are_not_read(block_kv, dims):
    """Also where blocks are packed several to a tile, and the last tile is not full."""
    keep = torch.rand(1, 1, 4, 512 // block_kv, device="cuda") < 0.6
    keep[..., 1] = False
    keep[..., 0] = True
    mask = BlockMask.from_dense(keep, (128, block_kv))
    q, k, v, spec = AttnCase(10, BRAIN, heads=(2, 2), lengths=((512, 512),), head_dims=dims).build(
        "cuda"
    )
    spec = spec._replace(block_mask=mask)
    expected = run(q, k, v, spec)
    check_attention(*expected, q, k, v, spec)
    for x in (k, v):
        x[:, :, block_kv : 2 * block_kv] = torch.nan
    out, lse = run(q, k, v, spec)
    assert out.equal(expected[0]) and lse.equal(expected[1])


@pytest.mark.parametrize("consumers, dim", [(1, 128), (2, 128), (2, 192), (2, 256)])
def test_huge_logits(consumers, dim):
    case = AttnCase(11, BRAIN, heads=(2, 1), lengths=((130, 300),), head_dims=(dim, dim))
    q, k, v, spec = dataclasses.replace(case, spread=1e6, band=Band(None, 0)).build("cuda")
    out, lse = run(q, k, v, spec, consumers)
    assert lse.abs().max() > 1e5
    check_attention(out, lse, q, k, v, spec)


@pytest.mark.parametrize("kind", ["contiguous", "heads inner", "packed qkv", "size one"])
def test_layouts(kind):
    shape = (1, 1, 200, 64) if kind == "size one" else (2, 4, 200, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=BRAIN) for _ in range(3))
    spec = AttnSpec(0.125, max_q=200, max_k=200)
    expected = run(q, k, v, spec)
    if kind == "heads inner":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if kind == "packed qkv":
        packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
        q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    if kind == "size one":
        q, k, v = (x.as_strided(x.shape, (3, 7, 64, 1)) for x in (q, k, v))
    out, lse = run(q, k, v, spec)
    assert out.equal(expected[0]) and lse.equal(expected[1])
    assert (out.stride(1) < out.stride(2)) == (kind in ("heads inner", "packed qkv"))


def test_what_tma_cannot_take_goes_elsewhere():
    q, k, v, spec = AttnCase(
        12, BRAIN, heads=(4, 2), lengths=((200, 200),), head_dims=(64, 64)
    ).build("cuda")
    odd = torch.empty(1, 2, 200, 68, device="cuda", dtype=BRAIN)[..., :64].copy_(k)
    decision = bsk.explain(bsk.attention, q, odd, v)
    assert decision.chosen == "triton"
    assert "multiples of 16 bytes" in decision.reasons["sm90"]
    check_attention(*bsk.attention(q, odd, v, return_lse=True), q, k, v, spec)
    with pytest.raises(bsk.Unsupported, match="multiples of 16 bytes"):
        bsk.attention(q, odd, v, impl="sm90")


def test_explain():
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=BRAIN)
    assert bsk.explain(bsk.attention, q, q, q).chosen == "sm90"
    for reason, args, options in (
        ("no 16-bit WGMMA", (q.float(),) * 3, {}),
        ("needs a scale above zero", (q, q, q), {"scale": -1.0}),
        ("up to 256 in steps of 8", (torch.cat([q, q[..., :4]], -1),) * 3, {}),
        ("31 queries fill too little", (q[:, :, :31], q, q), {}),
    ):
        decision = bsk.explain(bsk.attention, *args, **options)
        assert decision.chosen == "triton" and reason in decision.reasons["sm90"]


@pytest.mark.parametrize("masked", [False, True])
def test_graphs_replay_with_changed_inputs(masked):
    case = AttnCase(
        4, BRAIN, heads=(4, 2), lengths=((200, 333),), head_dims=(64, 64), band=Band(None, 0),
        mask="elements" if masked else "none", block_size=(64, 64),
    )  # fmt: skip
    q, k, v, spec = case.build("cuda")

    def step():
        return bsk.attention(
            q, k, v, causal=True, block_mask=spec.block_mask, return_lse=True, impl="sm90"
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for seed in (5, 6):
        torch.manual_seed(seed)
        for x in (q, k, v):
            x.normal_()
        out.fill_(torch.nan), lse.fill_(torch.nan)
        for _ in range(3):
            graph.replay()
        expected = step()
        assert out.equal(expected[0]) and lse.equal(expected[1])
        check_attention(out, lse, q, k, v, spec)


def test_a_graph_of_a_mask_that_was_never_used():
    """The order of its rows is then made inside of the graph, and stays there."""
    q, k, v, spec = AttnCase(
        5, BRAIN, heads=(4, 2), lengths=((300, 300),), head_dims=(64, 64), mask="blocks",
        block_size=(128, 64),
    ).build("cuda")  # fmt: skip
    mask = spec.block_mask
    mask.tensors()
    other = BlockMask._from_tensors(
        [x.clone() for x in mask.tensors()], 1, 1, mask.seq_lengths, mask.block_size
    )
    bsk.attention(q, k, v, block_mask=mask, impl="sm90")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = bsk.attention(q, k, v, block_mask=other, return_lse=True, impl="sm90")
    graph.replay()
    check_attention(out, lse, q, k, v, spec)


@pytest.mark.usefixtures("recorded_at_once")
def test_repeated_calls_read_what_they_are_given():
    """The second call on is a recorded launch: new tensors, new addresses, new masks."""
    torch.manual_seed(0)
    masks = [None] + [
        BlockMask.from_dense(torch.rand(1, 4, 3, 3, device="cuda") < 0.7, 128, 300) for _ in "ab"
    ]
    kept = []
    for _ in range(4):
        for mask in masks:
            for causal in (False, True):
                q, k, v = (torch.randn(1, 4, 300, 64, device="cuda", dtype=BRAIN) for _ in "qkv")
                sinks = torch.randn(4, device="cuda")
                band = Band(None, 0) if causal else EVERYTHING
                spec = AttnSpec(0.2, band, mask, sinks=sinks, max_q=300, max_k=300)
                with torch.no_grad(), poisoned_empty():
                    results = bsk.attention(
                        q, k, v, causal=causal, block_mask=mask, scale=0.2, sinks=sinks,
                        return_lse=True, impl="sm90",
                    )  # fmt: skip
                check_attention(*results, q, k, v, spec)
                kept.append(q)


def test_gradients_go_through_the_operator():
    q, k, v = (torch.randn(1, 4, 100, 64, device="cuda", dtype=BRAIN) for _ in "qkv")
    with torch.no_grad():
        for _ in range(2):
            expected = bsk.attention(q, k, v, causal=True)
    q.requires_grad_()
    out = bsk.attention(q, k, v, causal=True)
    assert out.requires_grad and out.equal(expected)
    out.float().sum().backward()
    assert q.grad.isfinite().all()


def test_two_streams_share_a_mask():
    """The order of its rows is made on one stream and used on the other at once."""
    q, k, v, spec = AttnCase(
        7, BRAIN, heads=(8, 8), lengths=((2048, 2048),), head_dims=(128, 128), mask="blocks",
        block_size=(128, 128),
    ).build("cuda")  # fmt: skip
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    mask, results = spec.block_mask, []
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            if i == 0:
                torch.cuda._sleep(20_000_000)
            results.append(bsk.attention(q, k, v, block_mask=mask, return_lse=True, impl="sm90"))
    torch.cuda.synchronize()
    for out, lse in results:
        assert out.equal(results[0][0]) and lse.equal(results[0][1])
    check_attention(*results[0], q, k, v, spec)


@pytest.mark.parametrize("consumers, dim", [(1, 64), (2, 64), (3, 64), (1, 128), (2, 128)])
def test_maxima_that_grow(consumers, dim):
    """By less than rows let pass before they scale their sums, and by more."""
    q, k, v, spec = AttnCase(
        15, BRAIN, heads=(3, 3), lengths=((300, 1400),), head_dims=(dim, dim)
    ).build("cuda")
    ramp = torch.linspace(0.2, 12, 1400, device="cuda")
    for growth in (ramp, ramp.flip(0), (3 * ramp) ** 2 / 12):
        grown = (k.float() * growth[:, None]).to(BRAIN)
        check_attention(*run(q, grown, v, spec, consumers), q, grown, v, spec)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "sms, heads, sq, sk", [(3, 5, 100, 1700), (5, 7, 120, 900), (132, 170, 128, 999)]
)
def test_programs_split_the_tail(sinks, sms, heads, sq, sk):
    """The bits are those of every other run, whoever comes last."""
    assert make_forward_config(2, 128, 128, long=True).tail_share(heads, sms, -(-sk // 128)) > 0
    q, k, v, spec = AttnCase(
        16, BRAIN, heads=(heads, heads), lengths=((sq, sk),), head_dims=(128, 128), sinks=sinks
    ).build("cuda")
    arch = dataclasses.replace(arch_of(q.device), num_sms=sms)
    with mock.patch.object(fwd_sm90_launch, "arch_of", lambda device: arch):
        expected = run(q, k, v, spec, 2, long=True)
        check_attention(*expected, q, k, v, spec)
        for _ in range(5):
            out, lse = run(q, k, v, spec, 2, long=True)
            assert out.equal(expected[0]) and lse.equal(expected[1])


def test_calls_that_start_early_read_what_the_one_before_wrote():
    q, k, v, spec = AttnCase(
        17, BRAIN, batch=2, heads=(100, 100), lengths=((700, 700),), head_dims=(64, 64)
    ).build("cuda")
    assert make_forward_config(1, 64, 64).PDL

    def chain(wait):
        x = q
        for _ in range(8):
            x, _ = run(x, k, v, spec, 1)
            if wait:
                torch.cuda.synchronize()
        return x

    expected = chain(wait=True)
    for _ in range(4):
        assert chain(wait=False).equal(expected)


BANDS = (EVERYTHING, Band(None, 0), Band(100, 0), Band(70, 30), Band(300, 0), Band(300, 50))


@pytest.mark.parametrize("consumers, dim", [(1, 64), (2, 64), (3, 64), (1, 128), (2, 128)])
@pytest.mark.parametrize("band", BANDS)
def test_a_work_tile_leaves_nothing_to_the_next(consumers, dim, band, on_few_sms):
    """Whether a program takes one work tile or all of them, the bits are the same."""
    spec = AttnSpec(scale=dim**-0.5, band=band)
    for sq, sk in ((1, 1), (63, 65), (200, 333), (333, 200), (512, 512), (896, 900)):
        torch.manual_seed(sq)
        q, k, v = (torch.randn(2, 3, s, dim, device="cuda", dtype=BRAIN) for s in (sq, sk, sk))
        expected = run(q, k, v, spec, consumers)
        check_attention(*expected, q, k, v, spec)
        for seed in (1, 3):
            with on_few_sms(seed):
                out, lse = run(q, k, v, spec, consumers, section=seed)
            assert out.equal(expected[0]) and lse.equal(expected[1])
