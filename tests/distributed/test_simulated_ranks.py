"""Ranks as threads of one process that exchange tensors directly, so that one GPU will do."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.inputs import scale_or_default
from blackwell_sparsek.distributed import Band, balance, heads, schedule, sequence
from blackwell_sparsek.distributed.call import scheduled
from blackwell_sparsek.distributed.collectives import Pending
from blackwell_sparsek.distributed.group import Members
from blackwell_sparsek.distributed.visible import Visible
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

RANKS, LENGTH = 4, 400


class Exchange:
    """The collectives, between threads: each puts its tensors down, and takes what is for it."""

    def __init__(self):
        self.table = [None] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=120)

    def _taken(self, members, mine, take, finish=None):
        self.table[members.rank] = mine
        self.barrier.wait()
        taken = take(self.table)
        self.barrier.wait()
        return Pending([], taken, finish=finish)

    def all_to_all(self, rows, send, receive, members, *held, finish=None):
        def take(table):
            found = torch.cat([parts[members.rank] for parts in table])
            assert [parts[members.rank].shape[0] for parts in table] == list(receive)
            return found

        return self._taken(members, torch.split(rows, list(send)), take, finish)

    def all_gather(self, rows, length, members, *held, finish=None):
        padded = torch.cat([rows, rows.new_zeros(length - rows.shape[0], rows.shape[1])])
        return self._taken(members, padded, torch.stack, finish)

    def ring(self, data, count, members):
        def take(table):
            found = table[members.rank - 1].clone()
            assert found.numel() == count
            return found

        return self._taken(members, data, take)


@pytest.fixture
def exchange(monkeypatch):
    made = Exchange()
    monkeypatch.setattr(sequence, "start_all_to_all", made.all_to_all)
    monkeypatch.setattr(sequence, "start_all_gather", made.all_gather)
    monkeypatch.setattr(sequence, "start_ring", made.ring)
    monkeypatch.setattr(heads, "start_all_to_all", made.all_to_all)
    return made


def run_ranks(work):
    def one(rank):
        with torch.no_grad():
            return work(Members(None, rank, RANKS))

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def forward_and_backward(run, q, k, v, sinks, dout):
    """What autograd would do; its thread for a GPU is one for all ranks, which would wait."""
    ctx = SimpleNamespace(run=run, needs_input_grad=(True,) * 4, set_materialize_grads=bool)
    ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
    out, lse = sequence._SplitAttention.forward(ctx, q, k, v, sinks, run)
    dq, dk, dv, dsinks, _ = sequence._SplitAttention.backward(ctx, dout, None)
    return out, lse, dq, dk, dv, dsinks


def masks(device):
    offsets = torch.tensor([0, 50, 240, LENGTH], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    return {
        "causal": {"causal": True},
        "window": {"causal": True, "window": 90},
        "documents": {"block_mask": bsk.masks.documents(offsets, 64, causal=True).to(device)},
        "per head": {
            "block_mask": bsk.masks.random(
                LENGTH, 0.3, 64, heads=4, causal=True, generator=generator, device=device
            )
        },
    }


@pytest.mark.parametrize("method", ["allgather", "needed", "ring"])
@pytest.mark.parametrize("name", ["causal", "window", "documents", "per head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_give_what_one_call_gives(name, method, dtype, device, exchange, monkeypatch):
    if dtype == torch.float32:
        # several fetches, of which one is under way while another is computed
        monkeypatch.setattr(schedule, "FETCH_TOKENS", 100)
    options = masks(device)[name]
    mask, band = options.get("block_mask"), Band(None, None)
    if mask is None:
        band = Band(options.get("window", 2**30) - 1, 0)
    plan = balance(mask or band, RANKS, seq_length=LENGTH, tile=64)
    shapes = ((4, LENGTH, 64), (2, LENGTH, 64), (2, LENGTH, 32), (4, LENGTH, 32))
    given = [normal(1, *s, seed=i).to(device, dtype) for i, s in enumerate(shapes)]
    *qkv, dout = given
    sinks = normal(4, seed=9, device=device)
    visible = Visible("test", plan, band, mask)

    def work(members):
        rank = members.rank
        q, k, v, do = (plan.shard(x, 2, rank=rank) for x in given)
        planned = scheduled(visible, rank, 2, method, device)
        if method == "allgather" or (method, name) == ("needed", "causal"):
            assert len(planned.fetches) == (2 if dtype == torch.float32 else 1)
        scale = scale_or_default("test", None, 64)
        run = sequence.SequenceRun(members, plan.lengths, planned, scale, 0.0, True, "auto")
        return forward_and_backward(run, q, k, v, sinks, do)

    found = run_ranks(work)
    references = []
    for precision, impl in ((torch.float64, "reference"), (dtype, "eager")):
        inputs = [x.to(precision).requires_grad_() for x in qkv]
        own = sinks.to(precision).requires_grad_()
        out, lse = bsk.attention(*inputs, sinks=own, return_lse=True, impl=impl, **options)
        gradients = torch.autograd.grad(out, [*inputs, own], dout.to(precision))
        references.append((out, lse, *gradients))
    *parts, dsinks = zip(*found, strict=True)
    for what, shards, exact, plain in zip(
        ("out", "lse", "dq", "dk", "dv"), parts, *references, strict=False
    ):
        whole = plan.join(shards, 2)
        assert_within_budget(whole, exact, plain, roundings=RANKS, what=what)
    if dtype == torch.float32:
        # in half precision these few sums show the roundings of the output more than anything else
        (*_, exact), (*_, plain) = references
        assert_within_budget(sum(dsinks), exact, plain, roundings=RANKS, what="dsinks")


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_and_tokens_change_places(kv_heads, device, exchange):
    plan = balance(Band(None, 0), RANKS, seq_length=LENGTH, tile=64)
    x = normal(2, 8, LENGTH, 16, seed=0, device=device)
    y = normal(2, kv_heads, LENGTH, 16, seed=1, device=device)
    spans = heads.split_heads(8, kv_heads, RANKS)

    def work(members):
        exchanger = heads.Exchanger.of(members, plan, device)
        both = []
        for whole, own in ((x, spans.q), (y, spans.kv)):
            part = exchanger.start_to_heads(plan.shard(whole, 2, rank=members.rank), own)()
            assert torch.equal(part, whole[:, slice(*own[members.rank])])
            both.append(exchanger.start_to_sequence(part, own, whole.shape[1])())
        return both

    for rank, (q, kv) in enumerate(run_ranks(work)):
        assert torch.equal(q, plan.shard(x, 2, rank=rank))
        # a KV head that several ranks hold comes back from each of them
        holders = torch.tensor([sum(a <= h < b for a, b in spans.kv) for h in range(kv_heads)])
        expected = plan.shard(y, 2, rank=rank) * holders.to(device)[:, None, None]
        torch.testing.assert_close(kv, expected)
