"""Calls with new lengths, launched as full calls are; CPU tensors in place of a GPU's."""

import dataclasses
import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import JITFunction

import blackwell_sparsek as bsk
from blackwell_sparsek.attention import api, autograd, replay, resize, resize_backward
from blackwell_sparsek.attention.sm90 import backward_preprocess
from blackwell_sparsek.attention.sm90 import launch as sm90_launch
from blackwell_sparsek.attention.sm90 import resize as sm90_resize
from blackwell_sparsek.calls import attention as calls
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.errors import InvalidInput
from blackwell_sparsek.launch import replay as launch_replay

from ..launch.fakes import noting_variants, resizing_on_the_cpu
from ..launch.test_replay import DEVICE, SEEN_BEFORE, pretend_gpu

H200 = Arch("cuda", 90, 132, 232448, False)
# Under one row of work tiles, up to several rounds with a split tail.
LENGTHS = (33, 64, 100, 513, 1000, 2049, 4100, 8200)


@pytest.fixture
def gpu(monkeypatch):
    """`launched` has what the GPU was given; `full` counts the calls that were made in full."""
    state = SimpleNamespace(launched=[], full=0)
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(launch_replay, "_seen", {})
    for module in (replay, autograd):
        monkeypatch.setattr(module, "seen_before", SEEN_BEFORE)
    for module in (resize, resize_backward):
        monkeypatch.setattr(module, "raw_device", lambda: DEVICE)
    resizing_on_the_cpu(monkeypatch, sm90_resize, sm90_launch)
    for module in (calls, sm90_launch):
        monkeypatch.setattr(module, "arch_of", lambda device: H200)
    monkeypatch.setattr(resize, "_FAMILIES", {})
    monkeypatch.setattr(resize_backward, "_FAMILIES", {})
    for name in ("_DENSE", "_PACKED", "_BACKWARD"):
        monkeypatch.setattr(replay, name, {})
    # compiled kernels know their parameters, interpreted ones do not
    for name in ("preprocess", "postprocess", "round_keys"):
        name = f"_attn_bwd_{name}_kernel"
        kernel = getattr(backward_preprocess, name)
        compiled = JITFunction(kernel.fn, **getattr(kernel, "kwargs", {}))
        monkeypatch.setattr(backward_preprocess, name, compiled)
    noting_variants(monkeypatch, state.launched)
    attend = api.attend

    def counting(*given, **options):
        state.full += 1
        return attend(*given, **options)

    monkeypatch.setattr(api, "attend", counting)
    return state


class Call:
    """Tensors of one call, and how to make it."""

    def __init__(self, sq, sk=None, batch=1, heads=(4, 2), dims=(64, 64), layout="bhsd", **options):
        self.options = options
        self.sinks = torch.zeros(heads[0]) if options.pop("sinks", False) else None
        sk = sq if sk is None else sk
        shapes = [(batch, heads[0], sq, dims[0]), (batch, heads[1], sk, dims[0])]
        shapes.append((batch, heads[1], sk, dims[1]))
        self.offsets = ()
        if layout == "packed":
            lengths = options.pop("lengths")
            self.offsets = [
                torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32)
                for x in zip(*lengths, strict=True)
            ]
            totals = [int(x[-1]) for x in self.offsets]
            maxima = [max(x) for x in zip(*lengths, strict=True)]
            self.options |= {"max_seqlen_q": maxima[0], "max_seqlen_k": maxima[1]}
            tokens = (totals[0], totals[1], totals[1])
            shapes = [(t, h, d) for t, (_, h, _, d) in zip(tokens, shapes, strict=True)]
        self.q, self.k, self.v = (self.tensor(shape, layout) for shape in shapes)

    @staticmethod
    def tensor(shape, layout):
        if layout == "bshd":
            b, h, s, d = shape
            return torch.zeros(b, s, h, d, dtype=torch.bfloat16).transpose(1, 2)
        if layout == "sliced":
            return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=torch.bfloat16)[..., : shape[-1]]
        return torch.zeros(shape, dtype=torch.bfloat16)

    def make(self, *tensors):
        """Output and lse, of these q, k and v if given."""
        attend = bsk.attention_varlen if self.offsets else bsk.attention
        tensors = tensors or (self.q, self.k, self.v)
        return attend(*tensors, *self.offsets, sinks=self.sinks, return_lse=True, **self.options)

    def launch(self, state):
        """What is launched, with names in place of addresses."""
        out, lse = self.make()
        kernel, grid, _, values, maps = state.launched[-1]
        given = {"q": self.q, "k": self.k, "v": self.v, "out": out, "lse": lse}
        given |= {"sinks": self.sinks, "cu": self.offsets[0] if self.offsets else None}
        names = {x.data_ptr(): name for name, x in given.items() if x is not None}
        sizes = [out.shape, out.stride(), lse.shape, lse.stride(), out.dtype, lse.dtype]
        for place, (address, shape, strides) in maps.items():
            # TMA ignores the stride of a dimension of size 1
            strides = [s if n > 1 else None for s, n in zip(strides, shape, strict=True)]
            values[place : place + 1 + 2 * len(shape)] = [names[address], *shape, *strides]
        return kernel, grid, [names.get(x, x) for x in values], sizes


CASES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 70},
    "softcap, sinks": {"causal": True, "softcap": 20.0, "sinks": True},
    "one head": {"heads": (1, 1), "dims": (128, 128)},
    "uneven head dims": {"dims": (128, 64), "causal": True},
    "many heads": {"heads": (32, 8), "dims": (128, 128), "causal": True},
    "wide heads": {"heads": (4, 2), "dims": (192, 128), "causal": True},
    # without a softcap, gradients of wide heads have two kernels, which are not resized
    "capped wide heads": {"dims": (256, 256), "causal": True, "softcap": 20.0},
    "heads inside": {"layout": "bshd", "batch": 3, "causal": True},
    "sliced": {"layout": "sliced", "batch": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_launches_are_those_of_full_calls(case, gpu):
    options = CASES[case]
    for sq in LENGTHS:
        for sk in (sq, 65, 5000):
            Call(sq, sk, **options).make()
    learned = gpu.full
    assert learned == configurations() > 1
    compared = 0
    for sq, sk in ((40, 40), (700, 700), (701, 90), (34, 4999), (1999, 2050), (5000, 5001)):
        made = Call(sq, sk, **options)
        quick = made.launch(gpu)
        if gpu.full > learned:
            learned = gpu.full
            assert learned == configurations() + compared, "a configuration was not learned"
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resize, "_FAMILIES", {})
            slow = made.launch(gpu)
        compared += 1
        learned = gpu.full
        assert parts_aside(quick) == parts_aside(slow), (sq, sk)
    assert compared >= 4


def configurations():
    """How many have been learned."""
    return sum(len(family.launches._configs) for family in resize._FAMILIES.values())


def parts_aside(launch):
    """The launch without the address of the memory for a split tail, which is new in each call."""
    kernel, grid, values, sizes = launch
    return kernel, grid, ["parts" if isinstance(x, int) and x > 2**40 else x for x in values], sizes


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "sinks": True}])
def test_packed_sequences(options, gpu):
    def call(*lengths):
        return Call(1, layout="packed", lengths=lengths, dims=(128, 128), **options)

    for length in LENGTHS:
        call((length, length), (1, 0), (40, 90)).make()
    learned = gpu.full
    assert learned == configurations() > 1
    for lengths in ([(700, 700)], [(50, 60), (0, 0), (33, 1)], [(3000, 4000)] * 7):
        made = call(*lengths)
        quick = made.launch(gpu)
        assert gpu.full == learned, lengths
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resize, "_FAMILIES", {})
            slow = made.launch(gpu)
        learned = gpu.full
        assert quick == slow


def test_what_else_differs_is_made_in_full(gpu):
    """Each of these is another family, or none."""
    Call(100, causal=True).make()
    Call(101, causal=True).make()
    assert gpu.full == 1
    others = [
        {"causal": False}, {"causal": True, "window": 20}, {"causal": True, "softcap": 5.0},
        {"causal": True, "scale": 0.5}, {"causal": True, "sinks": True}, {"heads": (4, 4)},
        {"causal": True, "dims": (64, 128)}, {"causal": True, "impl": "sm90"},
        {"causal": True, "dims": (128, 64)},
    ]  # fmt: skip
    for i, options in enumerate(others):
        Call(102 + i, **options).make()
        assert gpu.full == 2 + i, options


def test_lengths_that_come_again_are_recorded_and_replayed(gpu):
    Call(100).make()
    made = Call(200)
    for _ in range(launch_replay.RESIZED_CALLS):
        made.make()
        assert gpu.full == 1 and not replay._DENSE
    made.make()
    assert gpu.full == 2 and len(replay._DENSE) == 1


def test_lengths_that_are_not_kept_are_seldom_recorded(gpu):
    """With more lengths than a cache holds, what one call records, others throw away."""
    made = Call(100)
    for _ in range(3 * launch_replay.RESIZED_CALLS):
        made.make()
        replay._DENSE.clear()
    assert gpu.full == 3


def test_wrong_shapes_reach_the_checks(gpu):
    Call(100).make()
    made = Call(101)
    made.k = made.k[:, :, :50]
    with pytest.raises(InvalidInput, match="v"):
        made.make()
    made = Call(102, batch=2)
    made.k, made.v = made.k[:1], made.v[:1]
    with pytest.raises(InvalidInput, match="batch"):
        made.make()


def test_few_queries_are_left_to_another_kernel(gpu, monkeypatch):
    Call(100).make()
    asked = []

    def attend(call, impl, plain):
        asked.append(call.problem.max_q)
        return torch.empty(1), torch.empty(1)

    monkeypatch.setattr(api, "attend", attend)
    for length in (31, 32):
        Call(length).make()
    assert asked == [31]


def test_training_keeps_nothing_alive(gpu):
    def call(length):
        made = Call(length, causal=True)
        for x in (made.q, made.k, made.v):
            x.requires_grad_()
        return made

    call(100).make()
    made = call(150)
    out, lse = made.make()
    assert gpu.full == 1 and out.requires_grad and lse.requires_grad
    assert out.grad_fn.training._lengths == (150, 150)
    gc.disable()
    try:
        kept = weakref.ref(out)
        del out, lse
        assert kept() is None, "a cycle keeps the output alive"
    finally:
        gc.enable()


def gradients(made, state, dout=None):
    """Everything that the backward pass of a call launches, with names in place of addresses."""
    inputs = [x.detach().requires_grad_() for x in (made.q, made.k, made.v)]
    out, _ = made.make(*inputs)
    dout = torch.zeros_like(out) if dout is None else dout
    lse = out.grad_fn.saved_tensors[4]
    del state.launched[:]
    got = torch.autograd.grad(out, inputs, dout)
    given = dict(zip(("q", "k", "v", "dq", "dk", "dv"), (*inputs, *got), strict=True))
    given |= {"out": out, "dout": dout, "lse": lse}
    given |= dict(zip(("cu_q", "cu_k"), made.offsets, strict=False))
    names = {x.data_ptr(): name for name, x in given.items()}
    noted = [[x.shape, x.stride(), x.dtype] for x in got]
    for kernel, grid, _, values, maps in state.launched:
        for place, (address, shape, strides) in maps.items():
            strides = [s if n > 1 else None for s, n in zip(strides, shape, strict=True)]
            values[place : place + 1 + 2 * len(shape)] = [address, *shape, *strides]
        # the others are workspaces, told apart by when they first come
        for i, x in enumerate(values):
            if isinstance(x, int) and x > 2**40:
                values[i] = names.setdefault(x, f"workspace {len(names)}")
        noted.append((kernel.fn.__name__, grid, values))
    return noted


def counted_gradients(monkeypatch):
    """A list with an item for each backward pass that is computed in full."""
    compute, full = autograd.compute_backward, []

    def counting(*given):
        full.append(0)
        return compute(*given)

    monkeypatch.setattr(autograd, "compute_backward", counting)
    return full


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "case",
    ["full", "causal", "one head", "many heads", "capped wide heads", "heads inside", "sliced"],
)
def test_gradients_are_launched_as_in_full_calls(case, deterministic, gpu, monkeypatch):
    options = {**CASES[case], "deterministic": deterministic}
    full = counted_gradients(monkeypatch)
    # work tiles with all query heads of a KV head and, if there are several, such that share them
    for tokens in (50, 100, 600):
        gradients(Call(tokens, **options), gpu)
    known = len(full)
    for sq, sk in ((40, 40), (700, 701), (1999, 130), (3000, 4900)):
        made = Call(sq, sk, **options)
        quick = gradients(made, gpu)
        assert len(full) == known, (sq, sk)
        monkeypatch.setattr(launch_replay, "_seen", {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resize_backward, "_FAMILIES", {})
            slow = gradients(made, gpu)
        assert full.pop() == 0 and len(full) == known
        # gradients, and the kernels: one more where heads are shared
        assert len(quick) in (6, 7) and quick == slow, (sq, sk)


def test_gradients_that_differ_in_more_are_computed_in_full(gpu, monkeypatch):
    full = counted_gradients(monkeypatch)
    gradients(Call(100), gpu)
    # another option, strides that 16 does not divide, a gradient that is expanded
    gradients(Call(101, causal=True), gpu)
    gradients(Call(102, dims=(72, 72)), gpu)
    gradients(Call(103), gpu, torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, 4, 103, 64))
    assert len(full) == 4
    gradients(Call(104), gpu)
    assert len(full) == 4


def test_only_described_gradients_without_a_mask_are_learned(gpu, monkeypatch):
    given = []

    def noted(*call):
        given.append(call)
        return resize_backward.gradient_recorder(*call)

    monkeypatch.setattr(autograd, "gradient_recorder", noted)
    gradients(Call(100), gpu)
    ((found, options, call, tensors),) = given
    monkeypatch.setattr(resize_backward, "_FAMILIES", {})
    record = partial(resize_backward.gradient_recorder, options=options, tensors=tensors)
    mask = bsk.masks.causal(100, 64)
    masked = dataclasses.replace(call, spec=call.spec._replace(block_mask=mask))
    assert record(found, call=call) is not launch_replay.NO_RECORDER
    assert record(None, call=call) is launch_replay.NO_RECORDER
    assert record(found, call=masked) is launch_replay.NO_RECORDER


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "case", ["full", "causal", "one head", "many heads", "wide heads", "softcap, sinks"]
)
def test_gradients_of_packed_sequences(case, deterministic, gpu, monkeypatch):
    """Learned from one call; the others differ in sequences, lengths and tokens."""
    options = {**CASES[case], "deterministic": deterministic}
    if "softcap" in options:
        options["dims"] = (128, 128)
    full = counted_gradients(monkeypatch)

    def call(*lengths):
        made = Call(1, layout="packed", lengths=lengths, **options)
        if all(of_q == of_k for of_q, of_k in lengths):
            made.offsets = made.offsets[:1] * 2
        return made

    gradients(call((100, 100), (40, 90)), gpu)
    assert len(full) == 1
    others = [
        [(700, 700)],
        [(50, 60), (0, 0), (33, 1)],
        [(3000, 4000)] * 7,
        # pairs of which the forward makes no difference: the longest query, all keys together
        [(2000, 3000), (2000, 3000)],
        [(3900, 3000), (100, 3000)],
        list(zip([100] * 7, [160, 160, 160, 160, 100, 100, 60], strict=True)),
        list(zip([100] * 7, [160, 160, 160, 160, 160, 160, 70], strict=True)),
    ]
    for lengths in others:
        made = call(*lengths)
        quick = gradients(made, gpu)
        assert len(full) == 1, lengths
        monkeypatch.setattr(launch_replay, "_seen", {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resize_backward, "_FAMILIES", {})
            slow = gradients(made, gpu)
        assert full.pop() == 0 and len(full) == 1
        assert len(quick) == 6 and quick == slow, lengths


def test_training_on_packed_sequences_is_resized_and_replayed(gpu):
    def call(*lengths, **options):
        made = Call(1, layout="packed", lengths=lengths, causal=True, **options)
        for x in (made.q, made.k, made.v):
            x.requires_grad_()
        return made

    call((100, 100), (40, 90)).make()
    made = call((150, 150), (30, 60))
    out, lse = made.make()
    assert gpu.full == 1 and out.requires_grad and lse.requires_grad
    assert out.grad_fn.training._lengths == (150, 150)
    *_, cu_q, cu_k, slopes, bias = out.grad_fn.saved_tensors
    assert (cu_q is made.offsets[0], cu_k is made.offsets[1]) == (True, True)
    assert slopes is bias is None
    # offsets that queries and keys share are passed once
    made.offsets = [made.offsets[0]] * 2
    made.k, made.v = made.k[:180], made.v[:180]
    made.options["max_seqlen_k"] = 150
    for _ in range(launch_replay.RESIZED_CALLS + 1):
        out, _ = made.make()
        assert out.grad_fn.saved_tensors[6] is out.grad_fn.saved_tensors[7] is made.offsets[0]
    assert gpu.full == 2 and len(replay._PACKED) == 1
    out, _ = made.make()
    assert gpu.full == 2
    assert out.grad_fn.saved_tensors[6] is out.grad_fn.saved_tensors[7] is made.offsets[0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_with_shared_heads(deterministic, gpu, monkeypatch):
    """Lengths decide whether work tiles share query heads: each kind is computed in full once."""
    full = counted_gradients(monkeypatch)
    options = {"heads": (28, 4), "dims": (128, 64), "deterministic": deterministic}
    # the last two have kernels of the first two
    lengths = ((100, 100), (300, 4090), (700, 701), (301, 4030))
    for i, (sq, sk) in enumerate(lengths):
        made = Call(sq, sk, **options)
        quick = gradients(made, gpu)
        assert len(full) == min(i + 1, 2)
        monkeypatch.setattr(launch_replay, "_seen", {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resize_backward, "_FAMILIES", {})
            slow = gradients(made, gpu)
        full.pop()
        names = [kernel for kernel, *_ in quick[3:]]
        assert ("_attn_bwd_round_keys_kernel" in names) == (sk < 4000)
        assert quick == slow, (sq, sk)
