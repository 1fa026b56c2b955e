"""Calls that are repeated and calls that must not be, with CPU tensors in place of a GPU's."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.attention import api as functional_attention
from blackwell_sparsek.attention import autograd as attention_autograd
from blackwell_sparsek.attention import replay as attention_repeat
from blackwell_sparsek.core.torch_state import explaining
from blackwell_sparsek.decode import api as functional_decode
from blackwell_sparsek.launch import launcher as launching
from blackwell_sparsek.launch import replay as module
from blackwell_sparsek.launch import templates, workspace
from blackwell_sparsek.launch.recording import recording
from blackwell_sparsek.masks.block_mask import BlockMask

from .fakes import fake_variants

# the index that CPU tensors tell
DEVICE = -1
STREAM = 7
SEEN_BEFORE = module.seen_before
CHECKS = (
    *("check_qkv", "check_head_dims", "check_block_mask", "check_impl_and_lse", "band_of"),
    "check_packed",
)


def pretend_gpu(monkeypatch):
    """CPU tensors count as a GPU's; nothing is launched."""
    monkeypatch.setattr(module, "raw_device", lambda: DEVICE)
    for user in (module, templates):
        monkeypatch.setattr(user, "empty_on_gpu", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(module, "_is_in_gpu_memory", lambda x: True)
    # every call is recorded, also the first one of its sizes
    for user in (module, attention_repeat, attention_autograd):
        monkeypatch.setattr(user, "seen_before", lambda key: True)
    monkeypatch.setattr(templates, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(workspace, "_kept", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture
def gpu(monkeypatch):
    """`calls` counts the calls that were made in full, `repeated` has what the others launched."""
    state = SimpleNamespace(calls=0, repeated=[])

    def run(q, *others):
        state.calls += 1
        tensors = [x for x in others if isinstance(x, torch.Tensor)]
        results = torch.empty_like(q), torch.empty(q.shape[:-1])
        launching.launch(None, 1, (*results, q, *tensors))
        return results

    def run_decode(call, impl):
        return run(call.q, call.k_cache, call.v_cache, call.cache_seqlens, call.sinks)

    def call(op, q, k, v, *, sinks, block_mask, cu_seqlens_q=None, cu_seqlens_k=None, **options):
        spec = SimpleNamespace(block_mask=block_mask, is_varlen=cu_seqlens_q is not None)
        tensors = (q, k, v, sinks, cu_seqlens_q, cu_seqlens_k)
        return SimpleNamespace(spec=spec, tensors=tensors)

    pretend_gpu(monkeypatch)
    monkeypatch.setattr(attention_repeat, "stream_of", lambda x: STREAM)
    fake_variants(monkeypatch, lambda grid, stream, values: state.repeated.append(tuple(values)))
    # no checks: some of them refuse what keys have to tell apart
    for name in CHECKS:
        monkeypatch.setattr(functional_attention, name, lambda *args, **options: None)
    monkeypatch.setattr(functional_attention, "autocast_qkv", lambda op, *qkv: qkv)
    monkeypatch.setattr(functional_attention, "checked_call", call)
    monkeypatch.setattr(
        functional_attention, "attend", lambda call, impl, plain: run(*call.tensors)
    )
    monkeypatch.setattr(functional_decode, "decode", run_decode)
    for cache in ("_DENSE", "_PACKED", "_MASKED"):
        monkeypatch.setattr(attention_repeat, cache, {})
    monkeypatch.setattr(functional_decode, "_RECORDED", {})
    return state


def half(*shape):
    return torch.zeros(shape, dtype=torch.float16)


def qkv():
    return [half(1, 2, 32, 16) for _ in range(3)]


def attend(inputs=None, **options):
    return bsk.attention(*(qkv() if inputs is None else inputs), **options)


def decode(batch=2, **options):
    q, k, v = half(batch, 4, 1, 16), half(batch, 2, 32, 16), half(batch, 2, 32, 16)
    lengths = torch.ones(batch, dtype=torch.int32)
    return bsk.attention_decode(q, k, v, cache_seqlens=lengths, **options), (q, k, v, lengths)


def test_the_second_call_of_its_sizes_is_recorded(gpu, monkeypatch):
    for user in (module, attention_repeat):
        monkeypatch.setattr(user, "seen_before", SEEN_BEFORE)
    monkeypatch.setattr(module, "_seen", {})
    for call in (attend, decode):
        gpu.calls = 0
        for expected in (1, 2, 2, 2):
            call()
            assert gpu.calls == expected
    monkeypatch.setattr(module, "_seen", {})
    monkeypatch.setattr(module, "MAX_SEEN", 2)
    assert [SEEN_BEFORE((i,)) for i in (1, 2, 1, 3, 1, 1)] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert not SEEN_BEFORE(([],)) and not SEEN_BEFORE(([],))
    # a call that is recorded counts from the start: its recording may be thrown away
    assert [SEEN_BEFORE(("again",)) for _ in range(4)] == [False, True, False, True]


def test_a_second_call_launches_with_its_own_tensors(gpu):
    attend(return_lse=True)
    inputs = qkv()
    out, lse = attend(inputs, return_lse=True)
    assert gpu.calls == 1
    assert gpu.repeated == [tuple(x.data_ptr() for x in (out, lse, *inputs))]
    assert out.shape == (1, 2, 32, 16) and out.dtype == torch.float16 and out.is_contiguous()
    assert lse.shape == (1, 2, 32) and lse.dtype == torch.float32


def test_lse_that_nobody_asked_for_is_written_to_memory_of_the_stream(gpu):
    attend()
    inputs = qkv()
    out = attend(inputs)
    assert gpu.calls == 1 and isinstance(out, torch.Tensor)
    memory = workspace._kept[(None, STREAM)]
    expected = (out.data_ptr(), memory.data_ptr(), *(x.data_ptr() for x in inputs))
    assert gpu.repeated == [expected]
    # asked for, it is the caller's own
    attend(return_lse=True)
    _, lse = attend(return_lse=True)
    assert gpu.calls == 2 and gpu.repeated[-1][1] == lse.data_ptr() != memory.data_ptr()


def test_decode_calls(gpu):
    decode()
    out, inputs = decode()
    assert gpu.calls == 1 and gpu.repeated[0][2:] == tuple(x.data_ptr() for x in inputs)
    assert out.shape == (2, 4, 1, 16)
    for change in ({"batch": 3}, {"window": 4}, {"return_lse": True}, {"sinks": half(4)}):
        calls = gpu.calls
        decode(**change)
        decode(**change)
        assert gpu.calls == calls + 1, change


def packed(tokens=10, lengths=(3, 7), same=False, longest=(7, 7), **options):
    q, k, v = (half(tokens, 2, 16) for _ in range(3))
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    offsets = (cu, cu if same else cu.clone())
    maximum = {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    bsk.attention_varlen(q, k, v, *offsets, **maximum, **options)
    return offsets


def test_packed_calls(gpu):
    """Keys hold sizes and the longest lengths, but not the lengths: launches read those."""
    packed()
    offsets = packed(lengths=(5, 5))
    assert gpu.calls == 1
    assert gpu.repeated[0][-2:] == tuple(x.data_ptr() for x in offsets)
    changes = [{"tokens": 11}, {"lengths": (3, 3, 4)}, {"longest": (8, 7)}, {"longest": (7, 8)}]
    for change in changes:
        packed(**change)
    assert gpu.calls == 5 and len(gpu.repeated) == 1
    assert not attention_repeat._DENSE


@pytest.mark.parametrize(
    ("call", "name"),
    [("dense", "alibi_slopes"), ("dense", "bias"), ("dense", "out"), ("packed", "out")],
)
def test_added_scores_and_an_output_do_not_take_the_launches_of_other_calls(
    gpu, monkeypatch, call, name
):
    """Keys of plain calls do not hold these tensors, so that their launches would ignore them."""
    made = []

    def attend_extended(options, inputs, *others):
        made.append(inputs)
        q, *_ = inputs
        return torch.empty_like(q), torch.empty(q.shape[:-1])

    monkeypatch.setattr(functional_attention, "_attend_extended", attend_extended)
    run = attend if call == "dense" else packed
    for _ in range(2):
        run()
    assert (gpu.calls, len(gpu.repeated)) == (1, 1)
    added = {"alibi_slopes": torch.ones(2), "bias": half(1, 2, 32, 32), "out": half(1, 2, 32, 16)}
    run(**{name: added[name]})
    (inputs,) = made
    assert any(x is added[name] for x in inputs)
    assert (gpu.calls, len(gpu.repeated)) == (1, 1)


def test_offsets_that_serve_queries_and_keys_have_one_role(gpu):
    packed(same=True)
    cu, _ = packed(same=True)
    assert gpu.calls == 1 and gpu.repeated[0][-2:] == (cu.data_ptr(), cu.data_ptr())


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True},
        {"causal": 0},
        {"window": 4},
        {"scale": 0.5},
        {"softcap": 3.0},
        {"deterministic": True},
        {"impl": "triton"},
        {"return_lse": True},
    ],
)
def test_options_are_told_apart(gpu, change):
    """Also `0` and False, which compare equal: checks take one of them only."""
    attend()
    attend(**change)
    assert gpu.calls == 2 and not gpu.repeated
    attend(**change)
    assert gpu.calls == 2 and len(gpu.repeated) == 1


@pytest.mark.parametrize(
    "inputs",
    [
        [half(1, 2, 32, 16).float() for _ in range(3)],
        [half(1, 2, 33, 16) for _ in range(3)],
        [half(1, 32, 2, 16).transpose(1, 2) for _ in range(3)],
        [half(1, 2, 32, 16).bfloat16() for _ in range(3)],
        [half(1, 2, 32, 17)[..., 1:] for _ in range(3)],
    ],
    ids=["float32", "size", "strides", "dtype", "alignment"],
)
def test_other_tensors_are_other_calls(gpu, inputs):
    attend()
    attend(inputs)
    assert gpu.calls == 2 and not gpu.repeated


def unaligned(x):
    """The same sizes and strides at an address that is no multiple of 16 bytes."""
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype)
    moved = memory[1:].view(x.shape)
    assert moved.data_ptr() % 16 != 0 and moved.stride() == x.stride()
    return moved


@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
def test_no_input_at_an_odd_address_is_repeated(gpu, which):
    """Recorded kernels may rely on the alignment of each of their inputs."""
    attend()
    inputs = qkv()
    inputs[which] = unaligned(inputs[which])
    for calls in (2, 3):
        attend(inputs)
        assert gpu.calls == calls and not gpu.repeated


def test_an_environment_that_asks_for_another_implementation_is_heard(gpu, monkeypatch):
    attend()
    monkeypatch.setenv("BSK_IMPL", "triton")
    attend()
    assert gpu.calls == 2
    monkeypatch.delenv("BSK_IMPL")
    attend()
    assert gpu.calls == 2


class Subclass(torch.Tensor):
    pass


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Overriding(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [
        Dispatching,
        Overriding,
        explaining,
        forward_ad.dual_level,
    ],
    ids=["dispatch mode", "function mode", "explain", "forward gradients"],
)
def test_modes_see_the_whole_call(gpu, mode):
    attend()
    with mode():
        attend()
        attend()
    assert gpu.calls == 3 and not gpu.repeated
    attend()
    assert gpu.calls == 3


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_autocast_sees_what_it_may_cast(gpu, monkeypatch):
    # without a GPU, autocast would turn itself off
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    with torch.autocast("cuda", torch.float16):
        attend()
        attend()
    attend()
    assert gpu.calls == 1 and len(gpu.repeated) == 2
    other = [x.bfloat16() for x in qkv()]
    attend(other)
    with torch.autocast("cuda", torch.float16):
        attend(other)
        attend([*qkv()[:2], other[2]])
    assert gpu.calls == 4 and len(gpu.repeated) == 2


@pytest.mark.filterwarnings("ignore")
def test_traces_see_the_whole_call(gpu):
    attend()
    torch.jit.trace(lambda q: attend([q, *qkv()[1:]]), half(1, 2, 32, 16), check_trace=False)
    assert gpu.calls == 2 and not gpu.repeated


def test_transforms_see_the_whole_call(gpu):
    inputs = qkv()
    attend(inputs)
    torch.func.vmap(lambda q: attend([q, *inputs[1:]]))(half(2, 1, 2, 32, 16))
    assert gpu.calls == 2 and not gpu.repeated


def test_subclasses_are_not_looked_through(gpu):
    q, k, v = qkv()
    attend([q, k, v])
    for inputs in ([q.as_subclass(Subclass), k, v], [q, k, v.as_subclass(Subclass)]):
        attend(inputs)
    assert gpu.calls == 3 and not gpu.repeated
    attend([torch.nn.Parameter(q, requires_grad=False), k, v])
    assert gpu.calls == 3


def test_gradients_need_the_operator(gpu):
    q, k, v = qkv()
    attend([q, k, v])
    v.requires_grad_()
    attend([q, k, v])
    assert gpu.calls == 2 and not gpu.repeated
    with torch.no_grad():
        attend([q, k, v])
    with torch.inference_mode():
        assert attend([q, k, v]).is_inference()
    assert gpu.calls == 2


def test_a_call_that_is_captured_first_is_not_recorded(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attend()
    attend()
    assert gpu.calls == 2 and not attention_repeat._DENSE


def test_launches_are_repeated_on_the_device_of_their_tensors(gpu, monkeypatch):
    current, entered = [3], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)
            current.append(self.index)

        def __exit__(self, *args):
            current.pop()

    attend()
    monkeypatch.setattr(module, "raw_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Device)
    attend()
    assert entered == [DEVICE] and len(gpu.repeated) == 1 and current == [3]


def test_few_recordings_are_kept(gpu, monkeypatch):
    monkeypatch.setattr(module, "MAX_RECORDINGS", 2)
    for size in (8, 16, 24):
        attend([half(1, 2, size, 16) for _ in range(3)])
    assert len(attention_repeat._DENSE) == 1


@pytest.mark.parametrize("wrong", [[1.0], None, 3, half(4, 4).to_sparse()])
def test_wrong_tensors_reach_the_checks(wrong):
    q = torch.randn(1, 2, 64, 64)
    mask = BlockMask.from_dense(torch.eye(2, dtype=torch.bool), 32)
    for inputs, options in (
        ((wrong, q, q), {}),
        ((q, q, wrong), {}),
        ((wrong, q, q), {"block_mask": mask}),
    ):
        with pytest.raises(bsk.BskError):
            bsk.attention(*inputs, **options)


@pytest.mark.parametrize("window", [{}, torch.zeros(2), (3, [0])])
def test_options_that_no_key_holds_reach_the_checks(monkeypatch, window):
    pretend_gpu(monkeypatch)
    with pytest.raises(bsk.BskError, match="window"):
        bsk.attention(*qkv(), window=window)


def test_a_tensor_without_sizes_reaches_the_checks(gpu):
    nested = torch.nested.nested_tensor([half(2, 32, 16)])
    # without checks, asking for its sizes fails
    with pytest.raises(RuntimeError, match="sizes"):
        attend([nested, *qkv()[1:]])
    assert gpu.calls == 0 and not attention_repeat._DENSE


def test_offsets_that_are_no_tensors_reach_the_checks():
    q = torch.randn(4, 2, 16)
    for wrong in ([0, 4], None):
        with pytest.raises(bsk.BskError, match="cu_seqlens_"):
            bsk.attention_varlen(q, q, q, wrong, wrong, max_seqlen_q=4, max_seqlen_k=4)


def test_calls_on_the_cpu_are_not_recorded(monkeypatch):
    monkeypatch.setattr(attention_repeat, "_DENSE", {})
    q = torch.randn(1, 2, 64, 64).half()
    assert not module.may_record((), [q, q], [None])
    bsk.attention(q, q, q)
    assert attention_repeat._DENSE == {}


class InGpuMemory(torch.Tensor):
    """A tensor on the CPU that says it is on a GPU."""

    is_cuda = True


@pytest.fixture
def build(gpu, monkeypatch):
    """Builds with two tensors, and says what that returned and whether it was made in full."""
    monkeypatch.setattr(module, "_BUILDING", {})
    monkeypatch.setattr(launching, "raw_device", lambda: DEVICE)

    def call(key, *tensors):
        full = []

        def launches():
            full.append(True)
            launching.launch(None, 1, tuple(x.as_subclass(torch.Tensor) for x in tensors))

        return module.launch_recorded(key, tensors, launches), bool(full)

    return call


def built_tensors(first=0):
    return [half(24).as_subclass(InGpuMemory)[first:] for _ in range(2)]


def test_what_is_built_once_and_kept_is_recorded_by_itself(gpu, build):
    with recording() as outer:
        recorded, full = build("lists", *built_tensors())
        assert recorded is not None and full and not gpu.repeated
        others = built_tensors()
        assert build("lists", *others) == (recorded, False)
        assert gpu.repeated == [tuple(x.data_ptr() for x in others)]
        assert build("other lists", *others)[1]
    assert not outer.launches and len(gpu.repeated) == 1


def test_what_is_built_at_odd_addresses_is_recorded_as_such(gpu, build):
    build("lists", *built_tensors())
    odd = built_tensors(first=1)
    assert build("lists", *odd) == (None, True)
    assert build("lists", *odd) == (None, False) and len(gpu.repeated) == 1


def test_what_is_built_in_a_capture_is_built_again(gpu, build, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        with recording() as outer:
            assert build("lists", *built_tensors()) == (None, True)
        assert not outer.launches
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    recorded, full = build("lists", *built_tensors())
    assert recorded is not None and full and not gpu.repeated
