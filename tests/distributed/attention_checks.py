"""What every rank checks of `bsk.distributed.attention`; run by test_ranks.py."""

import copy
import datetime
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import blackwell_sparsek as bsk
from blackwell_sparsek.distributed import (
    Band,
    Plan,
    Shapes,
    balance,
    count_bytes,
    schedule,
    sequence,
    traffic,
)
from blackwell_sparsek.distributed.visible import Visible
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

CHECKS = {}
METHODS = ("allgather", "needed", "ring", "ulysses")


def check(function):
    CHECKS[function.__name__] = function
    return function


def inputs(batch=2, heads=4, kv_heads=2, length=200, dim=16, dim_v=24, dtype=torch.float32, seed=0):
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, dim_v))
    return [normal(batch, h, length, d, seed=seed + i).to(dtype) for i, (h, d) in enumerate(shapes)]


def exact(q, k, v, dout, dlse, sinks=None, **options):
    """Output, lse and gradients of one process: the oracle in fp64, and plain PyTorch."""
    results = []
    for impl, dtype in (("reference", torch.float64), ("eager", q.dtype)):
        given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        own = None if sinks is None else sinks.detach().to(dtype).requires_grad_()
        out, lse = bsk.attention(*given, sinks=own, return_lse=True, impl=impl, **options)
        wanted = given if own is None else [*given, own]
        finite = torch.where(lse.isinf(), 0.0, lse)
        loss = (out * dout.to(dtype)).sum() + (finite * dlse.to(dtype)).sum()
        gradients = torch.autograd.grad(loss, wanted) if wanted[0].numel() else wanted
        results.append([out.detach(), lse.detach(), *gradients])
    return results


def compare(plan, methods, q, k, v, sinks=None, whole=None, **options):
    """Every rank's results against those of one process, by method; each output with its lse.

    `whole` are the options for one process, if they differ.
    """
    batch, heads, length, _ = q.shape
    dout = normal(batch, heads, length, v.shape[-1], seed=7).to(q.dtype)
    dlse = normal(batch, heads, length, seed=8)
    expected = exact(q, k, v, dout, dlse, sinks, **(whole or options))
    return [
        compare_one(plan, method, (q, k, v), (dout, dlse), sinks, expected, options)
        for method in methods
    ]


def compare_one(plan, method, given, upstream, sinks, expected, options):
    rank = dist.get_rank()
    local = [plan.shard(x, 2, rank=rank).requires_grad_() for x in given]
    own = None if sinks is None else sinks.detach().clone().requires_grad_()
    out, lse = bsk.distributed.attention(
        *local, plan=plan, method=method, sinks=own, return_lse=True, **options
    )
    finite = torch.where(lse.isinf(), 0.0, lse)
    dout, dlse = (plan.shard(x, 2, rank=rank) for x in upstream)
    ((out * dout).sum() + (finite * dlse).sum()).backward()
    found = [out, lse, *(x.grad for x in local)]
    fp64, plain = expected
    names, ranks = ("out", "lse", "dq", "dk", "dv"), plan.world_size
    for name, got, a, b in zip(names, found, fp64, plain, strict=False):
        part, same = plan.shard(a, 2, rank=rank), plan.shard(b, 2, rank=rank)
        assert got.dtype == (torch.float32 if name == "lse" else given[0].dtype)
        # the part of each rank is rounded once
        assert_within_budget(got, part, same, roundings=ranks, what=f"{method} {name}")
    if own is not None:
        total = own.grad.clone()
        dist.all_reduce(total)
        rounded = ranks * cancelled(fp64, upstream, sinks)
        assert_within_budget(total, fp64[-1], plain[-1], roundings=rounded, what=f"{method} dsinks")
    return out, lse


def cancelled(fp64, upstream, sinks):
    """How much larger the terms of the gradient of a sink are than their sum over all queries.

    A term is rounded by its own size, and plain PyTorch may have little error by luck in the few
    sums of this test.
    """
    out, lse, *_, dsinks = fp64
    dout, dlse = (x.double() for x in upstream)
    delta = (out * dout).sum(-1) - dlse
    terms = torch.exp(sinks.double()[:, None] - lse.double()) * delta
    assert_within_budget(-terms.sum((0, 2)), dsinks, dsinks, roundings=terms.shape[-1])
    return (terms.abs().sum((0, 2)).max() / dsinks.abs().max()).item()


def zigzag(length, world, tile=16):
    return balance(Band(None, 0), world, seq_length=length, tile=tile)


@check
def causal_gqa_uneven(rank, world, folder):
    compare(zigzag(200, world), METHODS, *inputs(), causal=True)


@check
def everything_visible(rank, world, folder):
    compare(Plan.contiguous(150, world), METHODS, *inputs(length=150))


@check
def windows_on_both_sides(rank, world, folder):
    for window in (20, (5, 40), (None, 3)):
        compare(zigzag(200, world), METHODS, *inputs(), window=window)


@check
def softcap_sinks_scale(rank, world, folder):
    sinks = normal(4, seed=3)
    options = {"causal": True, "window": 40, "softcap": 2.0, "scale": 0.4}
    compare(zigzag(200, world), METHODS, *inputs(), sinks=sinks, **options)


@check
def rows_that_see_nothing(rank, world, folder):
    keep = torch.zeros(13, 13, dtype=torch.bool)
    keep[3:, 2] = True
    mask = bsk.BlockMask.from_dense(keep, 16, 200)
    plan = balance(mask, world)
    compare(plan, METHODS, *inputs(), sinks=normal(4, seed=3), block_mask=mask)
    unseen = plan.positions(rank) < 48
    for out, lse in compare(plan, METHODS, *inputs(), block_mask=mask):
        assert (out[:, :, unseen] == 0).all() and (lse[:, :, unseen] == -torch.inf).all()


@check
def block_masks_per_batch_and_head(rank, world, folder):
    for batch, heads in ((1, 1), (2, 1), (1, 4), (2, 4)):
        generator = torch.Generator().manual_seed(batch + heads)
        mask = bsk.masks.random(200, 0.3, (16, 32), batch=batch, heads=heads, generator=generator)
        compare(balance(mask, world), METHODS, *inputs(), block_mask=mask)


@check
def block_mask_with_band(rank, world, folder):
    visible = torch.rand(200, 200, generator=torch.Generator().manual_seed(0)) < 0.4
    visible[64:96] = False
    mask = bsk.BlockMask.from_element_mask(visible, 16)
    options = {"causal": True, "window": (70, 0), "block_mask": mask}
    compare(balance(mask, world, tile=32), METHODS, *inputs(), **options)


@check
def documents(rank, world, folder):
    offsets = torch.tensor([0, 7, 7, 90, 131, 200], dtype=torch.int32)
    keep = torch.rand(13, 13, generator=torch.Generator().manual_seed(0)) < 0.6
    blocks = bsk.BlockMask.from_dense(keep, 16, 200)
    for window in (None, 12):
        own = bsk.masks.documents(offsets, 16, causal=True, window=window)
        options = {"causal": True, "window": window, "cu_seqlens": offsets}
        whole = {"block_mask": own}
        compare(balance(own, world), METHODS, *inputs(batch=1), whole=whole, **options)
        both = own.to_element_mask() & blocks.to_element_mask()
        whole = {"block_mask": bsk.BlockMask.from_element_mask(both, 16)}
        options["block_mask"] = blocks
        compare(balance(own, world), METHODS, *inputs(batch=1), whole=whole, **options)


@check
def empty_shards(rank, world, folder):
    # one rank has all tokens, or one has none
    alone = Plan(40, 16, ((0, 1, 2), *((),) * (world - 1)))
    last = Plan(40, 16, (*((),) * (world - 1), (0, 1, 2)))
    nothing = Plan(0, 16, ((),) * world)
    for plan in (alone, last, nothing):
        compare(plan, METHODS, *inputs(length=plan.seq_length), causal=True)


@check
def more_ranks_than_heads(rank, world, folder):
    for heads, kv_heads in ((2, 1), (6, 2), (3, 3), (1, 1)):
        q, k, v = inputs(heads=heads, kv_heads=kv_heads, length=100)
        sinks = normal(heads, seed=1)
        compare(zigzag(100, world), ("ulysses",), q, k, v, causal=True, sinks=sinks)


@check
def half_precision(rank, world, folder):
    for dtype in (torch.float16, torch.bfloat16):
        compare(zigzag(200, world), METHODS, *inputs(dtype=dtype), causal=True)


@check
def double_precision(rank, world, folder):
    plan, (q, k, v) = zigzag(100, world), inputs(length=100, dtype=torch.float64)
    whole = bsk.attention(q, k, v, causal=True, impl="reference")
    for method in METHODS:
        local = (plan.shard(x, 2, rank=rank) for x in (q, k, v))
        out = bsk.distributed.attention(*local, plan=plan, method=method, causal=True)
        assert out.dtype == torch.float64
        torch.testing.assert_close(out, plan.shard(whole, 2, rank=rank), rtol=1e-13, atol=1e-13)


@check
def gradients_of_some_inputs(rank, world, folder):
    plan, (q, k, v) = zigzag(100, world), inputs(length=100)
    for method, wanted in itertools.product(METHODS, ((0,), (1,), (2,), (0, 2))):
        local = [plan.shard(x, 2, rank=rank) for x in (q, k, v)]
        whole = [x.clone() for x in (q, k, v)]
        for i in wanted:
            local[i].requires_grad_()
            whole[i].requires_grad_()
        bsk.distributed.attention(*local, plan=plan, method=method, causal=True).sum().backward()
        bsk.attention(*whole, causal=True).sum().backward()
        for mine, one in zip(local, whole, strict=True):
            assert (mine.grad is None) == (one.grad is None)
            if one.grad is not None:
                part = plan.shard(one.grad, 2, rank=rank)
                torch.testing.assert_close(mine.grad, part)


@check
def the_same_bits_in_every_run(rank, world, folder):
    plan = zigzag(200, world)
    for method in METHODS:
        runs = []
        for _ in range(2):
            local = [plan.shard(x, 2, rank=rank).requires_grad_() for x in inputs()]
            out = bsk.distributed.attention(
                *local, plan=plan, method=method, causal=True, deterministic=True
            )
            out.square().sum().backward()
            runs.append([out, *(x.grad for x in local)])
        assert all(map(torch.equal, *runs))


@check
def bytes_are_what_the_plan_says(rank, world, folder):
    mask = bsk.masks.random(
        208, 0.2, 16, heads=4, causal=True, generator=torch.Generator().manual_seed(0)
    )
    q, k, v = inputs(length=208)
    for method, options in itertools.product(
        METHODS, ({"causal": True}, {"window": 20}, {"block_mask": mask})
    ):
        plan = balance(mask, world)
        said = traffic(plan, method, Shapes.of(q, k, v), **options)
        local = [plan.shard(x, 2, rank=rank).requires_grad_() for x in (q, k, v)]
        with count_bytes() as sent:
            out = bsk.distributed.attention(*local, plan=plan, method=method, **options)
        assert sent.total == said.forward[rank], (method, options)
        with count_bytes() as sent:
            out.sum().backward()
        assert sent.total == said.backward[rank], (method, options)


@check
def long_sequences_are_fetched_in_pieces(rank, world, folder):
    """Schedules are kept between calls, so this has a length of its own."""
    plan, (q, k, v) = zigzag(217, world), inputs(length=217)
    mask = bsk.masks.random(217, 0.4, 16, heads=4, generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "FETCH_TOKENS", 30)
        for options in ({"causal": True}, {"block_mask": mask}):
            compare(plan, ("allgather", "needed"), q, k, v, **options)
            for method in ("allgather", "needed"):
                local = [plan.shard(x, 2, rank=rank) for x in (q, k, v)]
                with count_bytes() as sent:
                    bsk.distributed.attention(*local, plan=plan, method=method, **options)
                said = traffic(plan, method, Shapes.of(q, k, v), **options)
                assert sent.total == said.forward[rank]
    visible = Visible("test", plan, Band(None, 0))
    assert len(schedule.gathered(visible, rank, 2, everything=True).fetches) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "FETCH_TOKENS", 30)
        assert len(schedule.gathered(visible, rank, 2, everything=True).fetches) == 3 + (world > 2)


@check
def needed_fetches_what_the_mask_demands(rank, world, folder):
    """Bytes that arrive, from the element mask alone: every block with a visible key, once."""
    mask = bsk.masks.random(
        208, 0.2, 16, heads=4, causal=True, generator=torch.Generator().manual_seed(0)
    )
    q, k, v = inputs(length=208)
    plan = balance(mask, world)
    seen = mask.to_element_mask()[0].view(2, 2, 13, 16, 13, 16).any(5).any(3).any(1)
    demanded = 0
    for other in range(world):
        mine = torch.zeros(13, dtype=torch.bool)
        mine[list(plan.tiles[other])] = True
        demanded += int(seen[:, mine].any(1)[:, ~mine].sum()) * 16
    width = q.shape[0] * (q.shape[-1] + v.shape[-1]) * 4
    local = [plan.shard(x, 2, rank=rank) for x in (q, k, v)]
    with count_bytes() as sent:
        bsk.distributed.attention(*local, plan=plan, method="needed", block_mask=mask)
    total = torch.tensor(sent.total)
    dist.all_reduce(total)
    assert int(total) == demanded * width


@check
def auto_chooses_by_bytes(rank, world, folder):
    plan = Plan.contiguous(256, world)
    many, few = inputs(heads=8, kv_heads=8, length=256), inputs(heads=8, kv_heads=1, length=256)
    for given, options in ((many, {}), (few, {"causal": True}), (few, {"window": 8})):
        local = [plan.shard(x, 2, rank=rank) for x in given]
        sent = {}
        for method in ("auto", "needed", "allgather", "ulysses"):
            with count_bytes() as counter:
                bsk.distributed.attention(*local, plan=plan, method=method, **options)
            most = torch.tensor(counter.total)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            sent[method] = int(most)
        assert sent["auto"] <= min(sent.values()) / 0.9
        compare(plan, ("auto",), *given, **options)


@check
def runs_of_tokens_need_no_plan(rank, world, folder):
    q, k, v = inputs(length=16 * world + 40)
    lengths = [16] * (world - 1) + [56]
    whole = bsk.attention(q, k, v, causal=True)
    start = 16 * rank
    part = slice(start, start + lengths[rank])
    for method in METHODS:
        local = (x[:, :, part] for x in (q, k, v))
        out = bsk.distributed.attention(*local, method=method, causal=True)
        torch.testing.assert_close(out, whole[:, :, part])


@check
def heads_already_split(rank, world, folder):
    q, k, v = inputs(heads=8, kv_heads=4, length=100)
    mask = bsk.masks.random(
        100, 0.5, 16, heads=8, causal=True, generator=torch.Generator().manual_seed(0)
    )
    sinks = normal(8, seed=1)
    expected = bsk.attention(q, k, v, block_mask=mask, sinks=sinks)
    each = 4 // world
    part = slice(rank * each, (rank + 1) * each)
    own = slice(2 * rank * each, 2 * (rank + 1) * each)
    with count_bytes() as sent:
        out = bsk.distributed.attention(
            q[:, own], k[:, part], v[:, part], method="heads", block_mask=mask, sinks=sinks
        )
    torch.testing.assert_close(out, expected[:, own])
    assert sent.total == 0
    wider = bsk.BlockMask.from_dense(torch.ones(1, 16, 7, 7, dtype=torch.bool), 16, (100, 100))
    with pytest.raises(bsk.InvalidInput, match=r"block_mask was made for .*\[1, 16, 100, 100\]"):
        bsk.distributed.attention(
            q[:, own], k[:, part], v[:, part], method="heads", block_mask=wider
        )


@check
def dtensors(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world,))
    q, k, v = inputs(heads=4, kv_heads=4, length=128)
    expected, lse = bsk.attention(q, k, v, causal=True, return_lse=True)
    for dim in (1, 2):
        local = [distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for x in (q, k, v)]
        out, found = bsk.distributed.attention(*local, causal=True, return_lse=True)
        assert isinstance(out, DTensor) and out.placements == (Shard(dim),)
        torch.testing.assert_close(out.full_tensor(), expected)
        torch.testing.assert_close(found.full_tensor(), lse)
        out.full_tensor().square().sum().backward()
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        bsk.attention(*whole, causal=True).square().sum().backward()
        for mine, one in zip(local, whole, strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), one.grad)
    replicated = [distribute_tensor(x, mesh, [Replicate()]) for x in (q, k, v)]
    with pytest.raises(bsk.Unsupported, match=r"are placed otherwise; expected Shard\(2\)"):
        bsk.distributed.attention(*replicated)
    same = bsk.distributed.attention(*local, mesh=mesh, causal=True)
    torch.testing.assert_close(same.full_tensor(), expected)
    other = dist.init_device_mesh("cpu", (world // 2, 2))
    text = "mesh/group does not apply to DTensors, which have a mesh; expected None, got another"
    for where in ({"group": dist.group.WORLD}, {"group": mesh.get_group()}, {"mesh": other}):
        with pytest.raises(bsk.InvalidInput, match=text):
            bsk.distributed.attention(*local, **where)


@check
def a_mesh_or_a_subgroup(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
    own = mesh["cp"]
    plan, given = zigzag(100, 2), inputs(length=100, seed=rank // 2)
    expected = bsk.attention(*given, causal=True)
    at = own.get_local_rank()
    for method in METHODS:
        local = [plan.shard(x, 2, rank=at) for x in given]
        for where in ({"mesh": own}, {"group": own.get_group()}):
            out = bsk.distributed.attention(*local, plan=plan, method=method, causal=True, **where)
            torch.testing.assert_close(out, plan.shard(expected, 2, rank=at))
            torch.testing.assert_close(plan.unshard(out, 2, **where), expected)
    with pytest.raises(bsk.InvalidInput, match="mesh has several dimensions"):
        bsk.distributed.attention(*given, mesh=mesh)
    others = dist.new_group([0])
    if rank != 0:
        with pytest.raises(bsk.InvalidInput, match="group does not contain this process; expected"):
            bsk.distributed.attention(*given, group=others)
    with pytest.raises(bsk.InvalidInput, match="mesh/group are both given"):
        bsk.distributed.attention(*given, mesh=own, group=own.get_group())


@check
def unshard_is_differentiable(rank, world, folder):
    plan = zigzag(100, world)
    x = normal(2, 100, 3, seed=0)
    mine = plan.shard(x, rank=rank).requires_grad_()
    whole = plan.unshard(mine)
    assert torch.equal(whole, x)
    factor = normal(2, 100, 3, seed=1)
    # each rank uses the whole tensor its own way
    (whole * factor * (rank + 1)).sum().backward()
    total = world * (world + 1) // 2
    torch.testing.assert_close(mine.grad, plan.shard(factor * total, rank=rank))
    ids = torch.arange(100)[None]
    assert torch.equal(plan.unshard(plan.shard(ids)), ids)
    # twice: a penalty on gradients
    (slope,) = torch.autograd.grad((plan.unshard(mine) ** 3).sum(), mine, create_graph=True)
    torch.testing.assert_close(slope, 3 * world * mine**2)
    (curvature,) = torch.autograd.grad(slope.sum(), mine)
    torch.testing.assert_close(curvature, 6 * world * mine)


@check
def transforms_are_refused(rank, world, folder):
    plan = zigzag(100, world)
    q, k, v = (plan.shard(x, 2, rank=rank) for x in inputs(length=100))

    def call(q):
        return bsk.distributed.attention(q, k, v, plan=plan)

    with pytest.raises(bsk.Unsupported, match=r"q is differentiated by torch\.func"):
        torch.func.grad(lambda q: call(q).sum())(q)
    with pytest.raises(bsk.Unsupported, match=r"q is mapped over by torch\.vmap"):
        torch.vmap(call)(q[None])


@check
def compiled_code_calls_it_as_it_is(rank, world, folder):
    plan = zigzag(100, world)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v):
        return bsk.distributed.attention(q * 2, k, v, plan=plan, causal=True) + 1

    local = [plan.shard(x, 2, rank=rank) for x in inputs(length=100)]
    made = torch.compile(step, backend=backend)(*local)
    torch.testing.assert_close(made, step(*local))
    assert len(graphs) == 2


@check
def a_second_derivative_is_refused(rank, world, folder):
    plan = zigzag(100, world)
    for method in METHODS:
        local = [plan.shard(x, 2, rank=rank).requires_grad_() for x in inputs(length=100)]
        out = bsk.distributed.attention(*local, plan=plan, method=method)
        (dq,) = torch.autograd.grad((out**2).sum(), local[0], create_graph=True)
        with pytest.raises(bsk.Unsupported, match="no backward of the backward"):
            dq.sum().backward()


@check
def an_error_on_one_rank_is_an_error_on_all(rank, world, folder):
    plan, given = zigzag(100, world), inputs(length=100)
    local = [plan.shard(x, 2, rank=rank) for x in given]
    broken = list(local)
    if rank == 1:
        broken[0] = broken[0].int()
    expected = (
        "q has an unsupported dtype" if rank == 1 else r"rank 1 has failed; .*unsupported dtype"
    )
    with pytest.raises(bsk.InvalidInput, match=expected):
        bsk.distributed.attention(*broken, plan=plan, method="ring")
    # a plain programming error too
    with pytest.raises(Exception, match="is not a tensor"):
        bsk.distributed.attention(None if rank == 1 else local[0], *local[1:], plan=plan)
    for different in ({"causal": rank == 1}, {"scale": 1.0 + rank}, {"return_lse": rank == 1}):
        with pytest.raises(bsk.InvalidInput, match="rank 1 has other arguments; expected the arg"):
            bsk.distributed.attention(*local, plan=plan, **different)
    masks = bsk.masks.random(100, 0.5, 16, generator=torch.Generator().manual_seed(rank))
    with pytest.raises(bsk.InvalidInput, match="rank 1 has other arguments"):
        bsk.distributed.attention(*local, plan=plan, block_mask=masks)
    batch = [x[: 1 + (rank != 1)] for x in local]
    with pytest.raises(bsk.InvalidInput, match="rank 1 has other arguments"):
        bsk.distributed.attention(*batch, plan=plan)
    mesh = dist.init_device_mesh("cpu", (world,))
    side = 1 if rank == 1 else 2
    placed = [DTensor.from_local(x, mesh, [Shard(side)], run_check=False) for x in local]
    expected = "are placed otherwise" if rank == 1 else "rank 1 has failed; .* placed otherwise"
    with pytest.raises(bsk.BskError, match=expected):
        bsk.distributed.attention(*placed, plan=plan, method="needed")
    shorter = [x[:, :, : x.shape[2] - (rank == 1)] for x in local]
    with pytest.raises(bsk.InvalidInput, match="tokens on rank 1, as the plan says"):
        bsk.distributed.attention(*shorter, plan=plan)
    # and the group still works
    compare(plan, ("needed",), *given, causal=True)


@check
def errors_name_the_argument(rank, world, folder):
    plan, given = zigzag(128, world, tile=16), inputs(length=128)
    local = [plan.shard(x, 2, rank=rank) for x in given]
    mask = bsk.masks.causal(128, 64)
    call = bsk.distributed.attention
    cases = (
        ({"method": "rings"}, "method is unknown; expected one of 'auto'"),
        ({"plan": Plan.contiguous(128, world + 1)}, "plan is for another world"),
        ({"plan": 3}, "plan is not a plan; expected Plan, got int"),
        ({"method": "heads"}, "plan does not apply to the method heads"),
        ({"block_mask": mask}, "tiles that do not hold whole blocks; expected a multiple of 64"),
        ({"block_mask": bsk.masks.causal(64, 16)}, "block_mask was made for"),
        ({"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, "do not end with the sequence"),
        ({"sinks": torch.zeros(3)}, "sinks has a wrong shape"),
        ({"impl": "reference", "method": "ring"}, "impl recomputes the softmax"),
    )
    for options, match in cases:
        with pytest.raises(bsk.BskError, match=match):
            call(*local, **{"plan": plan, **options})
    with pytest.raises(bsk.InvalidInput, match="q is cut inside of blocks"):
        call(*(x[:, :, :9] for x in local))
    with pytest.raises(bsk.InvalidInput, match="q/k have different lengths"):
        call(local[0][:, :, :0], *local[1:], plan=plan)


@check
def nan_in_keys_that_nobody_sees_stays_there(rank, world, folder):
    keep = torch.eye(13, dtype=torch.bool)[None].repeat(4, 1, 1)
    keep[1, :, 3] = True
    mask = bsk.BlockMask.from_dense(keep, 16, 208)
    q, k, v = inputs(length=208, kv_heads=4)
    expected = bsk.attention(q, k, v, block_mask=mask)
    k[:, 0, 48:64] = v[:, 0, 48:64] = torch.nan
    plan = balance(mask, world)
    local = (plan.shard(x, 2, rank=rank) for x in (q, k, v))
    out = bsk.distributed.attention(*local, plan=plan, method="needed", block_mask=mask)
    others = plan.shard(expected, 2, rank=rank)
    torch.testing.assert_close(out[:, 1:], others[:, 1:])


@check
def changed_offsets_are_followed(rank, world, folder):
    plan, given = Plan.contiguous(128, world), inputs(batch=1, length=128)
    local = [plan.shard(x, 2, rank=rank) for x in given]
    offsets = torch.tensor([0, 40, 128], dtype=torch.int32)
    for middle in (40, 90):
        offsets[1] = middle
        out = bsk.distributed.attention(*local, plan=plan, cu_seqlens=offsets)
        mask = bsk.masks.documents(copy.deepcopy(offsets), 16)
        expected = bsk.attention(*given, block_mask=mask)
        torch.testing.assert_close(out, plan.shard(expected, 2, rank=rank))


@check
def inference_mode_and_autocast(rank, world, folder):
    plan, given = Plan.contiguous(128, world), inputs(batch=1, length=128)
    with torch.inference_mode():
        offsets = torch.tensor([0, 40, 128], dtype=torch.int32)
        for method, middle in itertools.product(METHODS, (40, 90)):
            offsets[1] = middle
            local = [plan.shard(x, 2, rank=rank) for x in given]
            out = bsk.distributed.attention(*local, plan=plan, cu_seqlens=offsets, method=method)
            mask = bsk.masks.documents(offsets.clone(), 16)
            expected = bsk.attention(*given, block_mask=mask)
            torch.testing.assert_close(out, plan.shard(expected, 2, rank=rank))
    half = [x.bfloat16() for x in given]
    for method in METHODS:
        local = [plan.shard(x, 2, rank=rank).requires_grad_() for x in given]
        with torch.autocast("cpu", torch.bfloat16):
            out = bsk.distributed.attention(*local, plan=plan, causal=True, method=method)
        assert out.dtype == torch.bfloat16
        rounded = [plan.shard(x, 2, rank=rank) for x in half]
        same = bsk.distributed.attention(*rounded, plan=plan, causal=True, method=method)
        assert torch.equal(out, same)
        out.float().sum().backward()
        assert all(x.grad.dtype == torch.float32 for x in local)


@check
def a_rank_that_does_not_call_ends_the_others(rank, world, folder):
    # long enough to connect on a busy machine; what comes then waits for seconds only
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    dist.barrier(group)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=4), group)
    plan = zigzag(100, world)
    local = [plan.shard(x, 2, rank=rank) for x in inputs(length=100)]
    if rank != 1:
        with pytest.raises(RuntimeError, match=r"(?i)time|closed"):
            bsk.distributed.attention(*local, group=group, plan=plan, method="ring")
    # the default group is not concerned
    dist.barrier()
    compare(plan, ("ring",), *inputs(length=100), causal=True)


@check
def a_rank_that_fails_between_transfers_ends_the_others(rank, world, folder):
    """After the comparison of arguments: only the timeout of the group is left."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=20))
    plan = zigzag(100, world)
    local = [plan.shard(x, 2, rank=rank).requires_grad_() for x in inputs(length=100)]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(sequence, "run_forward", _out_of_memory)
        error = torch.OutOfMemoryError if rank == 1 else RuntimeError
        with pytest.raises(error, match=r"(?i)no memory|time|closed"):
            # on two ranks the forward of the other has all its keys by then
            bsk.distributed.attention(
                *local, group=group, plan=plan, method="ring"
            ).sum().backward()
    dist.barrier()
    compare(plan, ("ring",), *inputs(length=100), causal=True)


def _out_of_memory(*_):
    raise torch.OutOfMemoryError("no memory left")
