"""Data travels while something is computed: the order of calls, and of streams on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.attention.inputs import scale_or_default
from blackwell_sparsek.distributed import Band, Plan, heads, schedule, sequence
from blackwell_sparsek.distributed.call import scheduled
from blackwell_sparsek.distributed.collectives import Pending
from blackwell_sparsek.distributed.group import Members
from blackwell_sparsek.distributed.visible import Visible
from blackwell_sparsek.testing.inputs import normal

RANKS, LENGTH = 4, 512


class Log:
    """One rank alone: what it starts, waits for and computes; arriving data is zero."""

    def __init__(self, monkeypatch):
        self.calls = []
        self.started = 0
        monkeypatch.setattr(sequence, "start_all_to_all", self.all_to_all)
        monkeypatch.setattr(heads, "start_all_to_all", self.all_to_all)
        monkeypatch.setattr(sequence, "start_all_gather", self.all_gather)
        monkeypatch.setattr(sequence, "start_ring", self.ring)
        for name in ("run_forward", "run_backward"):
            monkeypatch.setattr(sequence, name, self.logged(getattr(sequence, name)))

    def logged(self, function):
        def call(*args):
            self.calls.append("compute")
            return function(*args)

        return call

    def start(self, arriving, finish=None):
        name, self.started = self.started, self.started + 1
        self.calls.append(f"start {name}")

        class Work:
            @staticmethod
            def wait():
                self.calls.append(f"wait {name}")

        return Pending([Work], arriving, finish=finish)

    def all_to_all(self, rows, send, receive, members, *held, finish=None):
        return self.start(rows.new_zeros(sum(receive), *rows.shape[1:]), finish)

    def all_gather(self, rows, length, members, *held, finish=None):
        return self.start(rows.new_zeros(members.size, length, *rows.shape[1:]), finish)

    def ring(self, data, count, members):
        return self.start(data.new_zeros(count))


def run_of(method, monkeypatch, fetch_tokens):
    monkeypatch.setattr(schedule, "FETCH_TOKENS", fetch_tokens)
    plan = Plan.contiguous(LENGTH, RANKS, tile=16)
    visible = Visible("test", plan, Band(None, None))
    work = scheduled(visible, 1, 1, method, torch.device("cpu"))
    scale = scale_or_default("test", None, 16)
    members = Members(None, 1, RANKS)
    return sequence.SequenceRun(members, plan.lengths, work, scale, 0.0, False, "eager")


def qkv():
    return [normal(1, 2, LENGTH // RANKS, 16, seed=i).requires_grad_() for i in range(3)]


ONE, TWO = 2**20, 192
FORWARD = {
    ("needed", ONE): "start 0, compute, wait 0, compute",
    ("needed", TWO): "start 0, compute, wait 0, start 1, compute, wait 1, compute",
    ("allgather", TWO): "start 0, compute, wait 0, start 1, compute, wait 1, compute",
    ("ring", ONE): (
        "start 0, compute, wait 0, start 1, compute, wait 1, start 2, compute, wait 2, compute"
    ),
}
# gradients of keys leave as soon as they are known, and are waited for one part later
BACKWARD = {
    ("needed", ONE): "start 0, compute, wait 0, compute, start 1, wait 1",
    ("needed", TWO): (
        "start 0, compute, wait 0, start 1, compute, start 2, wait 1, compute, "
        "wait 2, start 3, wait 3"
    ),
    ("ring", ONE): (
        "start 0, compute, start 1, wait 0, start 2, compute, wait 1, start 3, wait 2, start 4, "
        "compute, wait 3, start 5, wait 4, compute, wait 5, start 6, wait 6"
    ),
}


@pytest.mark.parametrize(("method", "fetch_tokens"), FORWARD)
def test_the_next_keys_travel_while_one_part_is_computed(method, fetch_tokens, monkeypatch):
    log = Log(monkeypatch)
    run = run_of(method, monkeypatch, fetch_tokens)
    out, _ = sequence.attend_split(run, *qkv(), None)
    assert ", ".join(log.calls) == FORWARD[method, fetch_tokens]
    log.calls.clear()
    log.started = 0
    out.sum().backward()
    expected = BACKWARD.get((method, fetch_tokens), BACKWARD["needed", TWO])
    assert ", ".join(log.calls) == expected


def test_all_tensors_leave_before_the_first_has_to_be_there(monkeypatch):
    log = Log(monkeypatch)
    plan = Plan.contiguous(LENGTH, RANKS, tile=16)
    exchanger = heads.Exchanger.of(Members(None, 1, RANKS), plan, torch.device("cpu"))
    spans = heads.split_heads(4, 4, RANKS)
    inputs = [normal(1, 4, LENGTH // RANKS, 16, seed=i).requires_grad_() for i in range(3)]
    inputs[1].requires_grad_(False)
    moved = heads.to_heads(inputs, exchanger, (spans.q, spans.kv, spans.kv))
    assert ", ".join(log.calls) == "start 0, start 1, start 2, wait 0, wait 1, wait 2"
    log.calls.clear()
    sum(x.sum() for x in moved).backward()
    # nobody asked for the gradient of the second
    assert ", ".join(log.calls) == "start 3, start 4, wait 3, wait 4"


@pytest.mark.parametrize("tokens", [0, 40, 512, 700])
@pytest.mark.parametrize("fetch_tokens", [1, 100, 2**20])
def test_pieces_cut_every_shard_once(tokens, fetch_tokens, monkeypatch):
    monkeypatch.setattr(schedule, "FETCH_TOKENS", fetch_tokens)
    plan = Plan.contiguous(tokens, RANKS, tile=16)
    visible = Visible("test", plan, Band(None, None))
    wanted = schedule.needed_remote(visible, 1, everything=True)
    pieces = schedule.pieces(plan, 16, wanted)
    assert [token for piece in pieces for token in range(*piece)] == list(range(max(plan.lengths)))
    for rank in range(RANKS):
        made = schedule.gathered(visible, rank, 1, everything=True)
        columns = torch.cat([fetch.exchange.columns for fetch in made.fetches])
        own = set(plan.blocks(rank, 16).tolist())
        assert sorted(columns.tolist()) == [b for b in range(-(-tokens // 16)) if b not in own]


# Reads of host memory, of a microsecond or so each, after which a transfer arrives by itself.
MOST_READS = 2_000_000


@triton.jit
def _until_released(released_ptr, most):
    """Keep a stream busy until the host has written a 1."""
    reads = 0
    while (tl.load(released_ptr, volatile=True) == 0) & (reads < most):
        reads += 1


class SlowWork:
    """A transfer as NCCL makes it: on a stream of its own; `wait` is for the current stream.

    It arrives after `release`, so that what happens meanwhile does not depend on anybody's speed.
    """

    def __init__(self, arriving, source):
        self.released = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _until_released[(1,)](self.released, MOST_READS, num_warps=1)
            arriving.copy_(source)
        self.done = stream.record_event()

    def release(self):
        self.released.fill_(1)

    def wait(self):
        torch.cuda.current_stream().wait_event(self.done)


def load_kernels(source, order):
    """Load what a test launches and leave free memory: both may wait for all that is under way."""
    arriving, *_ = [torch.full_like(source, torch.nan) for _ in range(8)]
    work = SlowWork(arriving, source)
    work.release()
    bool((torch.empty_like(source).index_copy_(0, order, source) == arriving).all())
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("finished", [False, True])
def test_what_arrives_late_is_waited_for(finished):
    source = torch.arange(2**20, device="cuda", dtype=torch.float32)
    order = torch.randperm(2**20, device="cuda")
    expected = torch.empty_like(source).index_copy_(0, order, source) if finished else source
    load_kernels(source, order)
    for _ in range(3):
        arriving, ordered = torch.full((2, 2**20), torch.nan, device="cuda")
        torch.cuda.synchronize()
        work = SlowWork(arriving, source)

        def place(x, ordered=ordered):
            return ordered.index_copy_(0, order, x)

        held = (order, ordered) if finished else ()
        pending = Pending([work], arriving, *held, finish=place if finished else None)
        # the current stream is free meanwhile
        early = torch.cuda.Event()
        early.record()
        early.synchronize()
        assert not work.done.query()
        del arriving, ordered, place
        found = pending.wait()
        # memory that was given back must not be in use: what comes next would overwrite it
        junk = [torch.full((2**20,), -1.0, device="cuda") for _ in range(4)]
        right = (found == expected).all()
        # the host has not waited
        assert not work.done.query()
        work.release()
        assert right.item()
        del junk


@pytest.mark.gpu
def test_a_transfer_that_is_given_up_keeps_its_memory_for_the_other_stream():
    source = torch.ones(2**20, device="cuda")
    load_kernels(source, torch.arange(2**20, device="cuda"))
    arriving, ordered = (torch.zeros(2**20, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    work = SlowWork(arriving, source)
    addresses = {arriving.data_ptr(), ordered.data_ptr()}
    pending = Pending([work], arriving, ordered, finish=ordered.copy_)
    del arriving, ordered
    del pending
    assert not work.done.query()
    taken = [torch.empty(2**20, device="cuda") for _ in range(4)]
    assert addresses.isdisjoint(x.data_ptr() for x in taken)
    work.release()
    torch.cuda.synchronize()
