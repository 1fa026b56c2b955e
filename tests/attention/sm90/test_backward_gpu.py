"""The Hopper backward on a Hopper GPU.

`PYTHONPATH=src python -m pytest -m gpu tests/gpu/test_attention_bwd_sm90.py` takes about three
minutes in one process, most of it to compile. `BSK_RANDOM_CALLS=60` before it makes 1320 random
calls, `BSK_REPEATS=1000` compares as many deterministic ones.
"""

import dataclasses
import os
import random

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.op import backward_dispatch
from blackwell_sparsek.attention.sm90 import launch as attention_bwd_sm90
from blackwell_sparsek.attention.sm90.tuning import why_not_backward
from blackwell_sparsek.attention.triton import forward as attention_triton
from blackwell_sparsek.calls.attention import (
    AttentionCall,
    AttnGradients,
    AttnProblem,
    AttnSpec,
    BackwardCall,
)
from blackwell_sparsek.masks.band import EVERYTHING, Band
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.testing.attention_cases import AttnCase, draw_case, in_structure
from blackwell_sparsek.testing.attention_gradients import check_gradients, upstream
from blackwell_sparsek.testing.poison import nan_like, poisoned_empty

pytestmark = pytest.mark.sm90

HALF, BRAIN = torch.float16, torch.bfloat16
CALLS = int(os.environ.get("BSK_RANDOM_CALLS", "12"))
REPEATS = int(os.environ.get("BSK_REPEATS", "20"))
# Tiles of D and Dv, blocks of the mask, softcap: each is compiled once.
STRUCTURES = (
    (128, 128, None, False, BRAIN),
    (128, 128, None, True, HALF),
    (64, 64, None, False, HALF),
    (64, 128, None, False, BRAIN),
    (128, 128, (128, 128), False, BRAIN),
    (64, 64, (64, 128), False, HALF),
    (128, 128, (64, 64), False, HALF),
    (64, 64, (256, 64), True, BRAIN),
    (128, 64, (64, 256), False, BRAIN),
    (64, 128, (128, 64), False, HALF),
    (128, 128, (64, 64), True, BRAIN),
    (256, 256, None, False, BRAIN),
    (256, 256, (128, 128), True, HALF),
    (192, 128, None, False, HALF),
    (192, 128, (64, 64), False, BRAIN),
    (192, 192, (64, 256), False, HALF),
    (128, 256, None, True, BRAIN),
    (256, 64, (256, 64), False, BRAIN),
)
# (structure, seed, queries) that ever failed stay here; None leaves the drawn number
CORPUS = (
    # two blocks of 64 queries in a tile, of which the second was missing: its copy of lse began
    # where a TMA copy may not
    *((structure, 0, queries) for structure in (5, 6, 8, 14) for queries in (1, 63, 65, 193, 333)),
    # narrow values, whose address in shared memory ptxas lost in the portable forward
    (7, 23, None),
    (8, 267, None),
    # one query, one key and a sink: delta is all that is left, and knows the rounded output
    (4, 25, None),
    (8, 25, None),
    # heads that share a mask with nothing in it
    (8, 265, None),
)


def forward(q, k, v, spec, seed=0):
    """Output and lse, and what came back for them."""
    out, lse = attention_triton.forward(AttentionCall(q, k, v, spec))
    return (out, lse), upstream(out, lse, seed)


def gradients_of(q, k, v, spec, results, came_back, deterministic=False):
    """Gradients in poisoned memory."""
    dsinks = None if spec.sinks is None else nan_like(spec.sinks)
    gradients = AttnGradients(*(nan_like(x) for x in (q, k, v)), dsinks)
    with poisoned_empty():
        call = AttentionCall(q, k, v, spec, deterministic)
        attention_bwd_sm90.backward(BackwardCall(call, *came_back, *results, gradients))
    return gradients


def check(q, k, v, spec, seed=0, what="", deterministic=False):
    problem = AttnProblem.of(q, k, v, spec, backward=True, deterministic=deterministic)
    assert why_not_backward(problem) is None
    results, came_back = forward(q, k, v, spec, seed)
    gradients = gradients_of(q, k, v, spec, results, came_back, deterministic=deterministic)
    check_gradients(gradients, *came_back, q, k, v, spec, what=what)


def causal_spec(q, mask=None):
    """Of the public call `attention(q, k, v, causal=True)`, with as many keys as queries."""
    tokens = q.shape[2]
    return AttnSpec(q.shape[3] ** -0.5, Band(None, 0), mask, max_q=tokens, max_k=tokens)


def draw(structure, seed, queries=None):
    tile_d, tile_dv, blocks, softcap, dtype = STRUCTURES[structure]
    case = draw_case(seed, head_dims=(64,), longest=300, most_heads=14)
    rng = random.Random(seed)
    sq, sk = (max(n, 1) for n in case.lengths[0])
    if rng.random() < 0.2:
        sq, sk = rng.randint(1, 1300), rng.randint(1, 1300)
    sq = queries or sq
    given = {"dtype": dtype, "varlen": False, "lengths": ((sq, sk),)}
    return in_structure(case, rng, (tile_d, tile_dv), blocks, softcap, **given)


def check_random_call(structure, seed, queries=None, deterministic=False):
    case = draw(structure, seed, queries)
    q, k, v, spec = case.build("cuda")
    if seed % 3 == 0:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    check(q, k, v, spec, seed, f"structure {structure}, {case}", deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("structure", range(len(STRUCTURES)))
def test_random_calls(structure, deterministic):
    for seed in range(structure * CALLS, (structure + 1) * CALLS):
        check_random_call(structure, seed, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("structure, seed, queries", CORPUS)
def test_calls_that_failed(structure, seed, queries, deterministic):
    check_random_call(structure, seed, queries, deterministic)


def repeated(call):
    """Deterministic gradients of a call, which have the same bits each time.

    They are computed beside another kernel, which takes SMs away.
    """
    first = gradients_of(*call, deterministic=True)
    side, x = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=BRAIN)
    differ = torch.zeros(REPEATS, 3, dtype=torch.bool, device="cuda")
    for i in range(REPEATS):
        if i % 4 == 0:
            with torch.cuda.stream(side):
                x @ x
        again = gradients_of(*call, deterministic=True)
        for j in range(3):
            torch.any(again[j] != first[j], out=differ[i, j])
    assert not differ.any(), differ.nonzero().tolist()
    return first


def capture(step):
    """A graph of `step` after two runs on another stream, and the results that it writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


@pytest.mark.parametrize("blocks", [None, (128, 128), (64, 64), (64, 256)])
@pytest.mark.parametrize("band", [EVERYTHING, Band(None, 0), Band(500, 0)])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)])
def test_the_same_bits_in_every_run(blocks, band, dims):
    """More work tiles than programs, beside another kernel that takes SMs away."""
    case = AttnCase(
        2, BRAIN, batch=2, heads=(24, 12), lengths=((1500, 2100),), head_dims=dims, band=band
    )  # fmt: skip
    q, k, v, spec = case.build("cuda")
    if blocks is not None:
        shape = (1, 24, -(-1500 // blocks[0]), -(-2100 // blocks[1]))
        keep = torch.rand(shape, device="cuda") < 0.4
        spec = spec._replace(block_mask=BlockMask.from_dense(keep, blocks, (1500, 2100)))
    call = (q, k, v, spec, *forward(q, k, v, spec))
    first = repeated(call)
    check_gradients(first, *call[5], q, k, v, spec)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("impl", ["sm90", "triton"])
def test_repeated_calls(impl, masked):
    """Recorded launches with other tensors, on two streams, with gradients of some inputs only."""
    torch.manual_seed(1)
    mask = None
    if masked:
        mask = BlockMask.from_dense(torch.rand(1, 4, 5, 5, device="cuda") < 0.7, 64, 300)
    side = torch.cuda.Stream()
    for i in range(6):
        q, k, v = (torch.randn(1, 4, 300, 64, device="cuda", dtype=BRAIN) for _ in "qkv")
        wanted = [x.requires_grad_() for x in ((q, k, v) if i % 2 else (q, v))]
        weight = torch.randn_like(q)
        stream = torch.cuda.current_stream() if i < 3 else side
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = bsk.attention(q, k, v, causal=True, block_mask=mask, impl=impl)
            got = torch.autograd.grad((out * weight).sum(), wanted)
        torch.cuda.current_stream().wait_stream(stream)
        made = AttnGradients(got[0], got[1] if i % 2 else None, got[-1], None)
        check_gradients(made, weight, None, q, k, v, causal_spec(q, mask))


@pytest.mark.parametrize("blocks", [None, (128, 128), (64, 64)])
@pytest.mark.parametrize("banded", [False, True])
@pytest.mark.parametrize("dims", [(128, 128), (160, 160), (192, 128), (256, 256)])
def test_more_work_tiles_than_programs(blocks, banded, dims):
    """Among them some KV tiles that no query sees."""
    case = AttnCase(
        1, BRAIN, batch=2, heads=(24, 12), lengths=((1500, 2100),), head_dims=dims,
        band=Band(500, 0) if banded else EVERYTHING,
    )  # fmt: skip
    q, k, v, spec = case.build("cuda")
    if blocks is not None:
        keep = torch.rand(1, 24, -(-1500 // blocks[0]), -(-2100 // blocks[1]), device="cuda")
        keep = keep < torch.rand(1, 24, 1, keep.shape[3], device="cuda")
        keep[..., 2], keep[..., 3] = False, True
        spec = spec._replace(block_mask=BlockMask.from_dense(keep, blocks, (1500, 2100)))
    call = (q, k, v, spec, *forward(q, k, v, spec))
    gradients = gradients_of(*call)
    check_gradients(gradients, *call[5], q, k, v, spec)
    if blocks is not None:
        assert (gradients.dk[:, :, 2 * blocks[1] : 3 * blocks[1]] == 0).all()


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, True), (False, False, True)]
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dim", [64, 256])
def test_only_what_was_asked_for(wanted, masked, dim):
    q, k, v, spec = AttnCase(
        3, BRAIN, heads=(4, 2), lengths=((300, 200),), head_dims=(dim, dim)
    ).build("cuda")
    if masked:
        keep = torch.rand(1, 4, 5, 4, device="cuda") < 0.7
        spec = spec._replace(block_mask=BlockMask.from_dense(keep, 64, (300, 200)))
    out, lse = attention_triton.forward(AttentionCall(q, k, v, spec))
    dout, dlse = upstream(out, lse, 0)
    given = (nan_like(x) if need else None for x, need in zip((q, k, v), wanted, strict=True))
    gradients = AttnGradients(*given, None)
    call = AttentionCall(q, k, v, spec)
    attention_bwd_sm90.backward(BackwardCall(call, dout, dlse, out, lse, gradients))
    check_gradients(gradients, dout, dlse, q, k, v, spec)


@pytest.mark.parametrize("dim", [128, 192])
def test_rows_that_see_nothing(dim):
    """Queries before the first key: no gradient, and none of their own for the others."""
    q, k, v, spec = AttnCase(
        4, BRAIN, heads=(2, 1), lengths=((400, 150),), head_dims=(dim, dim), band=Band(None, 0)
    ).build("cuda")
    results, came_back = forward(q, k, v, spec)
    gradients = gradients_of(q, k, v, spec, results, came_back)
    assert (gradients.dq[:, :, :250] == 0).all()
    check_gradients(gradients, *came_back, q, k, v, spec)


@pytest.mark.parametrize("dim", [128, 192, 256])
def test_memory_around_the_inputs_is_not_read(dim):
    """NaN in the rows behind the last query and key of a larger tensor."""
    lengths = (130, 190)
    q, k, v, spec = AttnCase(
        5, BRAIN, heads=(2, 2), lengths=(lengths,), head_dims=(dim, dim)
    ).build("cuda")
    padded = []
    for x in (q, k, v):
        wide = x.new_full((*x.shape[:2], 256, dim), torch.nan)
        wide[:, :, : x.shape[2]] = x
        padded.append(wide[:, :, : x.shape[2]])
    check(*padded, spec)


def test_auto_takes_it():
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=BRAIN)
    spec = AttnSpec(0.125, max_q=64, max_k=64)
    problem = AttnProblem.of(q, q, q, spec, backward=True)
    assert backward_dispatch.decide("auto", problem).chosen == "sm90"
    ordered = dataclasses.replace(problem, deterministic=True)
    assert backward_dispatch.decide("auto", ordered).chosen == "sm90"
    for reason, changes in (
        ("key blocks of 64, 128 or 256", {"mask_block": (64, 32)}),
        ("31 queries", {"max_q": 31}),
    ):
        decision = backward_dispatch.decide("auto", dataclasses.replace(problem, **changes))
        assert decision.chosen == "triton" and reason in decision.reasons["sm90"]


@pytest.mark.parametrize("masked", [False, True])
def test_a_graph_of_a_training_step(masked):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 333, 64, device="cuda", dtype=BRAIN) for _ in "qkv")
    weight = torch.randn_like(q)
    mask = None
    if masked:
        mask = BlockMask.from_dense(torch.rand(1, 4, 6, 6, device="cuda") < 0.7, 64, 333)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def step():
        out = bsk.attention(q, k, v, causal=True, block_mask=mask)
        return torch.autograd.grad((out * weight).sum(), inputs)

    graph, captured = capture(step)
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for x in (q, k, v):
                x.normal_()
        for _ in range(3):
            graph.replay()
        made = AttnGradients(*captured, None)
        check_gradients(made, weight, None, q, k, v, causal_spec(q, mask))


def test_under_compile():
    q, k, v = (
        torch.randn(1, 4, 200, 128, device="cuda", dtype=BRAIN, requires_grad=True) for _ in "qkv"
    )

    def loss(q, k, v):
        return bsk.attention(q, k, v, causal=True).float().square().sum()

    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(q, k, v), (q, k, v))
    # the gradient of the squares, which bf16 holds exactly
    dout = 2 * bsk.attention(q, k, v, causal=True).detach()
    check_gradients(AttnGradients(*got, None), dout, None, q, k, v, causal_spec(q))
