"""Gradients by recorded launches, with a fake compiler and a fake GPU."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention import autograd as attention_autograd
from blackwell_sparsek.attention import op as attention
from blackwell_sparsek.attention import replay as attention_repeat
from blackwell_sparsek.attention.autograd import TrainingCall
from blackwell_sparsek.calls.attention import AttentionCall, AttnSpec
from blackwell_sparsek.launch import launcher as launching
from blackwell_sparsek.launch.recording import recording
from blackwell_sparsek.launch.workspace import scratch
from blackwell_sparsek.masks.band import EVERYTHING
from blackwell_sparsek.masks.block_mask import BlockMask

from ..launch.fakes import fake_variants
from ..launch.test_replay import pretend_gpu

NEEDS = [True, True, True, False]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that launches nothing; `calls` counts the calls that were not repeated."""
    state = SimpleNamespace(calls=0, stream=7, repeated=[], made=[])

    def run(impl, call):
        state.calls += 1
        q, k, v, mask = call.forward.q, call.forward.k, call.forward.v, call.forward.spec.block_mask
        sums = scratch(q.shape, torch.float32, q.device)
        table = torch.zeros(4)
        state.made.append(table)
        # a launch under a mask may have no tensor of its own
        last = table if mask is None else mask._listed.indptr
        sinks = None if call.gradients.dsinks is None else call.forward.spec.sinks
        launching.launch(None, 3, (*call.gradients, sums, q, k, v, call.dout, sinks, last))

    pretend_gpu(monkeypatch)
    for module in (attention_repeat, attention_autograd):
        monkeypatch.setattr(module, "stream_of", lambda x: state.stream)
    fake_variants(monkeypatch, lambda grid, stream, values: state.repeated.append(tuple(values)))
    monkeypatch.setattr(attention.backward_dispatch, "run", run)
    monkeypatch.setattr(attention_repeat, "_BACKWARD", {})
    return state


def call(needs=NEEDS, mask=None, deterministic=False, size=32, dout=None, sinks=None):
    """Gradients of new tensors, by the operator's implementation."""
    q, k, v, out = (torch.zeros(1, 2, size, 16, dtype=torch.float16) for _ in range(4))
    dout = torch.zeros_like(out) if dout is None else dout
    lists, shape = [], []
    if mask is not None:
        lists, shape = mask.tensors(), [1, 1, *mask.seq_lengths, *mask.block_size]
    options = (None, None, size, size, lists, shape, *EVERYTHING.scalars(), 0.25, 0.0)
    options = (*options, sinks, None, None)
    tensors = (dout, None, q, k, v, out, torch.zeros(1, 2, size))
    results = attention._attn_bwd(*tensors, *options, deterministic, needs, "triton")
    return results, (q, k, v, dout)


def test_a_second_call_launches_with_its_own_tensors(gpu):
    call()
    results, (q, k, v, dout) = call()
    assert gpu.calls == 1
    ((*got, sums, q_ptr, k_ptr, v_ptr, dout_ptr, _, table),) = gpu.repeated
    # kernels know nothing of a gradient that nobody asked for
    assert got == [*(x.data_ptr() for x in results[:3]), None]
    assert [x.numel() for x in results] == [1024, 1024, 1024, 0]
    assert [q_ptr, k_ptr, v_ptr, dout_ptr] == [x.data_ptr() for x in (q, k, v, dout)]
    assert table == gpu.made[0].data_ptr() and sums not in (table, q_ptr, 0)


@pytest.mark.parametrize(
    "change",
    [{"needs": [True, False, True, False]}, {"deterministic": True}, {"size": 48}],
)
def test_what_changes_launches_is_another_recording(gpu, change):
    call()
    call(**change)
    assert gpu.calls == 2 and not gpu.repeated
    call(**change)
    assert gpu.calls == 2 and len(gpu.repeated) == 1


def test_what_copies_is_not_repeated(gpu):
    for _ in range(2):
        call(dout=torch.zeros(1, 2, 1, 16, dtype=torch.float16).expand(1, 2, 32, 16))
        # one of two outputs that were stacked along a new last dimension
        call(dout=torch.zeros(1, 2, 32, 16, 2, dtype=torch.float16)[..., 0])
        # sinks with gaps
        call(needs=[True, True, True, True], sinks=torch.zeros(4)[::2])
    assert gpu.calls == 6 and not gpu.repeated


def test_gradients_of_sinks_are_repeated(gpu):
    for sinks in (torch.zeros(2), torch.zeros(2)):
        results, _ = call(needs=[True, True, True, True], sinks=sinks)
        assert [x.numel() for x in results] == [1024, 1024, 1024, 2]
    assert gpu.calls == 1
    ((*got, _, _, _, _, _, read, _),) = gpu.repeated
    assert got == [x.data_ptr() for x in results]
    assert read == sinks.data_ptr()
    # sinks whose gradient nobody asked for are not read
    for _ in range(2):
        call(sinks=sinks)
    assert gpu.calls == 2 and gpu.repeated[-1][-2] is None


@pytest.mark.parametrize("masked", [False, True])
def test_a_new_training_call_takes_recorded_gradients_without_checking_it(gpu, monkeypatch, masked):
    mask = BlockMask.from_dense(torch.eye(2, dtype=torch.bool), 16) if masked else None
    q, k, v, out, dout = (torch.zeros(1, 2, 32, 16, dtype=torch.float16) for _ in range(5))
    spec = AttnSpec(0.25, EVERYTHING, mask, max_q=32, max_k=32)
    checked = []

    def run_backward(*given):
        checked.append(given)
        return attention.run_backward(*given)

    monkeypatch.setattr(attention_autograd, "run_backward", run_backward)
    saved = (q, k, v, out, torch.zeros(1, 2, 32), *[None] * 5)
    with torch.no_grad():
        for again in range(3):
            training = TrainingCall.of(AttentionCall(q, k, v, spec), "triton")
            training.gradients(dout, None, saved, tuple(NEEDS))
            assert (gpu.calls, len(checked), len(gpu.repeated)) == (1, 1, again)


@pytest.mark.parametrize("added", ["alibi_slopes", "bias"])
def test_gradients_with_added_scores_do_not_take_the_launches_of_others(gpu, added):
    q, k, v, out, dout = (torch.zeros(1, 2, 32, 16, dtype=torch.float16) for _ in range(5))
    lse = torch.zeros(1, 2, 32)
    given = {"alibi_slopes": torch.ones(2), "bias": torch.zeros(1, 2, 32, 32)}

    def train(**scores):
        spec = AttnSpec(0.25, EVERYTHING, max_q=32, max_k=32, **scores)
        training = TrainingCall.of(AttentionCall(q, k, v, spec), "triton")
        scores = [scores.get(name) for name in given]
        saved = (q, k, v, out, lse, None, None, None, *scores)
        training.gradients(dout, None, saved, tuple(NEEDS))

    with torch.no_grad():
        for _ in range(3):
            train()
        assert gpu.repeated
        calls, repeated = gpu.calls, len(gpu.repeated)
        train(**{added: given[added]})
    assert gpu.calls == calls + 1 and len(gpu.repeated) == repeated


def test_a_recording_sees_all_launches(gpu):
    call()
    with recording() as record:
        call()
    assert gpu.calls == 2 and len(record.launches) == 1


def test_launches_are_for_all_masks_of_a_size_and_belong_to_a_stream(gpu):
    masks = [BlockMask.from_dense(torch.eye(2, dtype=torch.bool), 16) for _ in range(2)]
    for mask in (*masks, *masks):
        call(mask=mask)
    assert gpu.calls == 1
    expected = [masks[i].forward.indptr.data_ptr() for i in (1, 0, 1)]
    assert [args[-1] for args in gpu.repeated] == expected
    gpu.stream = 8
    call(mask=masks[0])
    assert gpu.calls == 2
    # the number of blocks is data, which launches read from the lists
    fuller = BlockMask.from_dense(torch.ones(2, 2, dtype=torch.bool), 16)
    call(mask=fuller)
    assert gpu.calls == 2 and gpu.repeated[-1][-1] == fuller.forward.indptr.data_ptr()
    call(mask=BlockMask.from_dense(torch.zeros(2, 2, dtype=torch.bool), 16))
    assert gpu.calls == 3


@pytest.mark.parametrize("given", ["out", "packed", "alibi_slopes", "bias"])
def test_forward_calls_that_launches_alone_cannot_repeat(given):
    """One of these is enough: recordings know neither offsets, added scores nor another output."""

    def found(out=None, **options):
        spec = AttnSpec(0.25, EVERYTHING, max_q=32, max_k=32, **options)
        return attention_repeat.CheckedCall.forward(AttentionCall(*qkv, spec, out=out), "triton")

    qkv = [torch.zeros(1, 2, 32, 16) for _ in range(3)]
    assert found() is not None
    with recording():
        assert found() is None
    offsets = torch.tensor([0, 32], dtype=torch.int32)
    changes = {
        "out": {"out": torch.zeros(1, 2, 32, 16)},
        "packed": {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets},
        "alibi_slopes": {"alibi_slopes": torch.ones(2)},
        "bias": {"bias": torch.zeros(1, 2, 32, 32)},
    }
    assert found(**changes[given]) is None
