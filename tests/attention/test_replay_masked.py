"""Calls with a mask, recorded for all masks of its kind; CPU tensors in place of a GPU's."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.attention import autograd as attention_autograd
from blackwell_sparsek.attention import op as attention
from blackwell_sparsek.attention import replay as attention_repeat
from blackwell_sparsek.launch import launcher as launching
from blackwell_sparsek.masks import derived_lists
from blackwell_sparsek.masks.band import EVERYTHING
from blackwell_sparsek.masks.block_mask import BlockMask

from ..launch.fakes import fake_variants
from ..launch.test_replay import STREAM, half, pretend_gpu, qkv, unaligned


def order_of(mask, batch):
    """Stands for an order of rows."""
    return torch.full((16,), batch, dtype=torch.int32)


@pytest.fixture
def gpu(monkeypatch):
    """`calls` counts the calls that were made in full, `repeated` has what the others launched."""
    state = SimpleNamespace(calls=0, repeated=[], stream=STREAM, capturing=False)

    def forward(impl, call):
        state.calls += 1
        q, mask = call.q, call.spec.block_mask
        results = torch.empty_like(q), torch.empty(q.shape[:-1])
        lists, order = (), None
        if mask is not None:
            order = derived_lists.derived_list(mask, order_of, q.shape[0])
            lists = (*mask._listed, mask.bits)
        launching.launch(None, 1, (*results, q, call.k, call.v, order, lists))
        return results

    def backward(impl, call):
        state.calls += 1
        given, mask = call.forward, call.forward.spec.block_mask
        lists, order = (), None
        if mask is not None:
            order = derived_lists.derived_list(mask, order_of, 7)
            lists = (*mask._listed_transposed, mask.bits)
        inputs = (call.dout, given.q, given.k, given.v, call.out, call.lse)
        launching.launch(None, 1, (*call.gradients, *inputs, order, lists))

    pretend_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    for module in (attention_repeat, attention_autograd):
        monkeypatch.setattr(module, "stream_of", lambda x: state.stream)
    monkeypatch.setattr(derived_lists, "raw_device", lambda: None)
    monkeypatch.setattr(derived_lists, "raw_stream", lambda device: state.stream)
    fake_variants(monkeypatch, lambda grid, stream, values: state.repeated.append(tuple(values)))
    monkeypatch.setattr(attention.forward_dispatch, "run", forward)
    monkeypatch.setattr(attention.backward_dispatch, "run", backward)
    for cache in ("_DENSE", "_MASKED", "_FORWARD", "_BACKWARD"):
        monkeypatch.setattr(attention_repeat, cache, {})
    return state


def mask_of(blocks=2, block=16, heads=1):
    return BlockMask.from_dense(torch.eye(blocks).bool().expand(1, heads, blocks, blocks), block)


def attend(mask, inputs=None, **options):
    return bsk.attention(*(qkv() if inputs is None else inputs), block_mask=mask, **options)


def addresses(*tensors):
    return tuple(x.data_ptr() for x in tensors)


def test_another_mask_of_the_kind_is_no_new_call(gpu):
    attend(mask_of())
    for mask in (mask_of(), mask_of()):
        inputs = qkv()
        for _ in range(2):
            out = attend(mask, inputs, return_lse=False)
            ((*start, order, lists),) = gpu.repeated
            assert start[0] == out.data_ptr() and tuple(start[2:]) == addresses(*inputs)
            assert lists == addresses(*mask._listed, mask.bits)
            (of_streams,) = mask._derived.values()
            assert order == of_streams[STREAM].data_ptr()
            gpu.repeated.clear()
    assert gpu.calls == 1


@pytest.mark.parametrize(
    "other",
    [{"heads": 2}, {"blocks": 1, "block": 32}, {"block": 32, "blocks": 1, "heads": 2}],
)
def test_kinds_of_masks_are_told_apart(gpu, other):
    attend(mask_of())
    attend(mask_of(**other))
    assert gpu.calls == 2 and not gpu.repeated
    attend(mask_of(**other))
    assert gpu.calls == 2 and len(gpu.repeated) == 1


def test_a_mask_with_bits_is_another_kind(gpu):
    attend(mask_of())
    attend(BlockMask.from_element_mask(torch.ones(32, 32).tril().bool(), 16))
    assert gpu.calls == 2 and not gpu.repeated


def test_a_mask_without_blocks_is_another_kind(gpu):
    attend(mask_of())
    attend(BlockMask.from_dense(torch.zeros(2, 2).bool(), 16))
    assert gpu.calls == 2 and not gpu.repeated


@pytest.mark.parametrize("which", range(4), ids=["indptr", "indices", "bits_id", "bits"])
def test_lists_at_odd_addresses_are_not_repeated(gpu, which):
    """Recorded kernels may rely on the alignment of each list."""
    visible = torch.ones(32, 32).tril().bool()
    attend(BlockMask.from_element_mask(visible, 16))
    mask = BlockMask.from_element_mask(visible, 16)
    lists = list(attention_repeat.forward_lists(mask))
    assert attention_repeat.mask_kind(mask, lists) is not None
    lists[which] = unaligned(lists[which])
    assert attention_repeat.mask_kind(mask, lists) is None
    *mask_lists, bits = lists
    moved = copy.copy(mask)
    moved._forward, moved._bits = type(mask._forward)(*mask_lists), bits
    for calls in (2, 3):
        attend(moved)
        assert gpu.calls == calls and not gpu.repeated


def test_sinks_with_gaps_are_not_repeated(gpu):
    """They are copied, and a replay does not repeat the copy."""
    wide = half(2, 4).float()
    for sinks, calls in ((wide[0, :2], 1), (wide[:, 0], 2)):
        for _ in range(2):
            tensors = (*qkv(), None, None, 32, 32, [], [], *EVERYTHING.scalars(), 0.25, 0.0, sinks)
            attention._attn_fwd(*tensors, None, None, False, "triton")
            if calls == 1:
                assert gpu.calls == 1
    assert gpu.calls == 3 and len(gpu.repeated) == 1


def test_errors_of_masks_still_come(gpu):
    attend(mask_of())
    with pytest.raises(bsk.InvalidInput, match="was made for"):
        attend(mask_of(blocks=3))
    with pytest.raises(bsk.InvalidType, match="is not a block mask"):
        attend("mask")
    assert gpu.calls == 1


def test_each_stream_has_its_own_order(gpu):
    mask = mask_of()
    attend(mask)
    gpu.stream = STREAM + 1
    attend(mask)
    assert gpu.calls == 2 and not gpu.repeated
    (of_streams,) = mask._derived.values()
    assert len({x.data_ptr() for x in of_streams.values()}) == 2


def test_a_capture_keeps_nothing_and_takes_what_is_known(gpu):
    known = mask_of()
    attend(known)
    gpu.capturing = True
    new = mask_of()
    for mask in (known, new):
        attend(mask)
    assert gpu.calls == 1 and len(gpu.repeated) == 2
    assert not new._launches and not new._derived
    (of_streams,) = known._derived.values()
    assert gpu.repeated[0][-2] == of_streams[STREAM].data_ptr()


def test_a_mask_ends_with_its_launches(gpu):
    attend(mask_of())
    mask = mask_of()
    attend(mask)
    attend(mask, [x.requires_grad_() for x in qkv()])
    ended = weakref.ref(mask._listed.indptr)
    # without the collector: a mask's memory is needed by the next one
    gc.disable()
    try:
        del mask
        assert ended() is None
    finally:
        gc.enable()


def test_launches_with_tensors_of_one_mask_are_not_repeated_with_another(gpu, monkeypatch):
    table = torch.zeros(4)

    def forward(impl, call):
        gpu.calls += 1
        results = torch.empty_like(call.q), torch.empty(call.q.shape[:-1])
        launching.launch(None, 1, (*results, call.q, call.k, call.v, table))
        return results

    monkeypatch.setattr(attention.forward_dispatch, "run", forward)
    mask = mask_of()
    for _ in range(2):
        attend(mask)
    assert gpu.calls == 2 and not gpu.repeated


def step(mask, **options):
    inputs = [x.requires_grad_() for x in qkv()]
    out = bsk.attention(*inputs, block_mask=mask, **options)
    dout = half(1, 2, 32, 16)
    return out, torch.autograd.grad(out, inputs, dout), inputs, dout


@pytest.mark.parametrize("masked", [False, True])
def test_a_training_step_is_repeated(gpu, masked):
    step(mask_of() if masked else None)
    assert gpu.calls == 2
    # the first repetition looks its gradients up, the second knows them
    mask = mask_of() if masked else None
    for _ in range(2):
        gpu.repeated.clear()
        out, gradients, inputs, dout = step(mask)
        forward, backward = gpu.repeated
        assert forward[0] == out.data_ptr() and forward[2:5] == addresses(*inputs)
        assert backward[:4] == (*addresses(*gradients), None)
        assert backward[4:8] == addresses(dout, *inputs)
        if masked:
            assert forward[-1] == addresses(*mask._listed, mask.bits)
            assert backward[-1] == addresses(*mask._listed_transposed, mask.bits)
    assert gpu.calls == 2 and out.requires_grad


def test_training_calls_are_told_apart(gpu):
    inputs = [x.requires_grad_() for x in qkv()]
    bsk.attention(*inputs)
    for change in (inputs[:2] + qkv()[:1], qkv()[:1] + inputs[1:], qkv()):
        calls = gpu.calls
        bsk.attention(*change)
        assert gpu.calls == calls + 1
    torch.use_deterministic_algorithms(True)
    try:
        bsk.attention(*inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert gpu.calls == 5 and not gpu.repeated
    with torch.no_grad():
        assert not bsk.attention(*inputs).requires_grad
    assert gpu.calls == 5


def test_lse_of_a_repeated_call_has_gradients(gpu):
    inputs = [x.requires_grad_() for x in qkv()]
    for _ in range(2):
        _, lse = bsk.attention(*inputs, return_lse=True)
        assert all(x.shape == (1, 2, 32, 16) for x in torch.autograd.grad(lse.sum(), inputs))
    assert gpu.calls == 2 and len(gpu.repeated) == 2


def test_saved_tensors_are_the_same_in_both_ways(gpu):
    counts = []
    for _ in range(3):
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, packed=packed: packed.append(x) or x, lambda x: x
        ):
            attend(mask_of(), [x.requires_grad_() for x in qkv()])
        counts.append([x.shape for x in packed])
    assert counts[0] == counts[1] == counts[2] and gpu.calls == 1


def test_a_second_derivative_of_a_repeated_call_is_refused(gpu):
    for _ in range(2):
        inputs = [x.requires_grad_() for x in qkv()]
        out = bsk.attention(*inputs)
        gradients = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        with pytest.raises(bsk.Unsupported, match="no backward of the backward"):
            gradients[0].sum().backward()
