"""Host time of attention and products without a GPU: python -m tests.tools.host_time [KIND ...]

CPU tensors count as a GPU's, and the driver's functions are some that do nothing, called through
ctypes as the driver's are. What is left is what a call costs in Python and in torch: calls of new
lengths, and of lengths whose launches were recorded; `thread` makes the backward pass in another
thread, as autograd makes that of a GPU. Medians over many lengths, with the Python functions that a
call enters.
"""

import argparse
import cProfile
import ctypes
import itertools
import pstats
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.calls import attention as calls
from blackwell_sparsek.core import torch_private
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.launch import driver, launcher, prepared, replay, variants, workspace
from blackwell_sparsek.launch.parameters import MapParameters, Parameters

H200 = Arch("cuda", 90, 132, 232448, False)
# of glibc's mallopt
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# the index that CPU tensors tell
DEVICE, STREAM = -1, 7
LENGTHS = 400
# Of a product; its tokens fit in the memory of queries.
FEATURES = 256
# Calls for learning what can be learned, spread over all lengths.
WARM_UP = 60
_METADATA = {
    "launch_pdl": False,
    "num_warps": 4,
    "shared": 0,
    "launch_cooperative_grid": False,
}


def pretend_gpu(monkeypatch):
    """Let everything that asks for a GPU find one whose driver does nothing."""
    import blackwell_sparsek.attention.sm90.launch
    import blackwell_sparsek.attention.sm90.resize
    import blackwell_sparsek.matmul.sm90.resize  # noqa: F401

    # memory comes from the heap, which keeps it, as a GPU's comes from torch's allocator
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(option, 2**25)
    nothing = ctypes.CDLL(None)["abs"]
    nothing.argtypes = [ctypes.c_void_p] * 4
    nothing.restype = None
    monkeypatch.setattr(driver, "_launch", nothing)
    encode = ctypes.PyDLL(None)["abs"]
    encode.restype = None
    monkeypatch.setattr(driver, "_encode_function", lambda: encode)
    monkeypatch.setattr(driver, "_fetches_past_small_tensors", lambda: True)
    empty = torch._C._dynamo.guards._empty_strided_cpu
    replaced = {
        id(torch_private.raw_device): partial(int, DEVICE),
        id(torch_private.raw_stream): {DEVICE: STREAM, None: STREAM}.get,
        id(torch_private.empty_on_gpu): empty,
        id(calls.arch_of): lambda device: H200,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("blackwell_sparsek"):
            for attribute, value in list(vars(module).items()):
                if id(value) in replaced:
                    monkeypatch.setattr(module, attribute, replaced[id(value)])
    monkeypatch.setattr(replay, "_is_in_gpu_memory", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", partial(bool, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(launcher, "find_variant", _find)
    words = torch.zeros(workspace.CAPTURED_WORDS, dtype=torch.int32)
    monkeypatch.setattr(workspace, "_of_streams", {(DEVICE, STREAM): words, (None, STREAM): words})


_made: dict = {}


def _find(kernel, args, cluster, options):
    """`find_variant` with a kernel that was never compiled, but has real parameters."""
    walk = variants._Walk()
    kinds = []
    for parameter, x in zip(kernel.params, args, strict=True):
        if not parameter.is_constexpr:
            walk.add(x, not parameter.do_not_specialize)
        else:
            kinds.append(x)
    key = (id(kernel), *walk.key, *map(str, kinds))
    if key not in _made:
        _made[key] = _variant(walk, args)
    return variants.Launchable(_made[key], walk.values, walk.descriptors)


def _variant(walk, args):
    formats = ["d" if isinstance(x, float) else "q" for x in walk.values]
    maps = [MapParameters(place, x.block, 3) for place, x in walk.descriptors]
    tensors = {x.data_ptr() for x in _tensors(args)}
    pointers = [i for i, x in enumerate(walk.values) if x in tensors]
    parameters = Parameters((*formats, "q", "q"), tuple(pointers), tuple(maps))
    compiled = SimpleNamespace(run=None, function=1, metadata=SimpleNamespace(**_METADATA))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "parameters_of", lambda compiled: parameters)
        dtypes = [x.base.dtype for _, x in walk.descriptors]
        return prepared.Variant(compiled, lambda made: made.function, dtypes, 1)


def _tensors(args):
    for x in args:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple) and not isinstance(x, variants.Descriptor):
            yield from _tensors(x)


class Shape:
    """Heads of calls, and memory for the longest."""

    def __init__(self, heads=2, kv_heads=1, head_dim=128, longest=4096):
        self.heads, self.kv_heads, self.dim = heads, kv_heads, head_dim
        all_heads = (heads, kv_heads, kv_heads, heads)
        self.all_heads = all_heads
        self.memory = [torch.zeros(longest * h * head_dim, dtype=torch.bfloat16) for h in all_heads]
        self.order = sorted(range(129, longest), key=lambda n: n * 2654435761 % 2**32)

    def tensors(self, length, packed, trains, product):
        if product:
            return [self.memory[0][: length * FEATURES].view(length, FEATURES)]
        made = []
        for memory, h in zip(self.memory, self.all_heads, strict=True):
            shape = (length, h, self.dim) if packed else (1, h, length, self.dim)
            made.append(memory[: length * h * self.dim].view(shape))
        if trains:
            made[:3] = [x.detach().requires_grad_() for x in made[:3]]
        if packed:
            cuts = [0, length // 3, length // 2, length]
            made.append(torch.tensor(cuts, dtype=torch.int32))
        return made


def forward(q, k, v, dout):
    return bsk.attention(q, k, v, causal=True)


def training(q, k, v, dout):
    return torch.autograd.grad(bsk.attention(q, k, v, causal=True), (q, k, v), dout)


def packed(q, k, v, dout, offsets):
    return bsk.attention_varlen(
        q, k, v, offsets, offsets, max_seqlen_q=q.shape[0], max_seqlen_k=q.shape[0], causal=True
    )


def packed_training(q, k, v, dout, offsets):
    out = packed(q, k, v, dout, offsets)
    return torch.autograd.grad(out, (q, k, v), dout)


@cache
def sparse_weight():
    """A weight with a fifth of its blocks."""
    keep = torch.rand(8 * FEATURES // 64, FEATURES // 64) < 0.2
    dense = keep.repeat_interleave(64, 0).repeat_interleave(64, 1)
    return bsk.BSRMatrix.from_dense(dense.to(torch.bfloat16), (64, 64)).T


def product(x):
    return bsk.matmul(x, sparse_weight())


class _Nothing(torch.autograd.Function):
    """What any function of one's own costs, forward and backward."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx, dout):
        return ctx.saved_tensors


def trivial_forward(q, k, v, dout):
    return _Nothing.apply(q, k, v)


def trivial(q, k, v, dout):
    return torch.autograd.grad(_Nothing.apply(q, k, v), (q, k, v), dout)


class Threaded:
    """Makes the gradients in a second thread, for which the first waits without the GIL."""

    def __init__(self, function):
        self._function = function
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._work = None
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            self._go.acquire()
            self._result = torch.autograd.grad(*self._work)
            self._done.release()

    def __call__(self, q, k, v, dout):
        self._work = (self._function(q, k, v, dout), (q, k, v), dout)
        self._go.release()
        self._done.acquire()
        return self._result


class Kind(NamedTuple):
    function: Callable[..., Any]
    packed: bool = False
    trains: bool = False
    product: bool = False


KINDS = {
    "forward": Kind(forward),
    "packed": Kind(packed, packed=True),
    "product": Kind(product, product=True),
    "training": Kind(training, trains=True),
    "packed training": Kind(packed_training, packed=True, trains=True),
    "training, thread": Kind(Threaded(forward), trains=True),
    "trivial function": Kind(trivial, trains=True),
    "trivial function, thread": Kind(Threaded(trivial_forward), trains=True),
}


def measured(function, tensors):
    """Seconds of the processor that each call took, whatever else ran meanwhile."""
    times = []
    for made in tensors:
        begin = time.process_time_ns()
        function(*made)
        times.append(1e-9 * (time.process_time_ns() - begin))
    return times


def entered(function, tensors):
    """Python functions entered, and C functions called, by one call."""
    counts = {"call": 0, "c_call": 0}

    def note(frame, event, arg):
        if event in counts:
            counts[event] += 1

    sys.setprofile(note)
    try:
        for made in tensors:
            function(*made)
    finally:
        sys.setprofile(None)
    return {name: round(count / len(tensors)) for name, count in counts.items()}


def take(shape, kind, lengths, count):
    """Tensors of the next lengths."""
    options = (kind.packed, kind.trains, kind.product)
    return [shape.tensors(n, *options) for n in itertools.islice(lengths, count)]


def repeated(shape, kind, lengths, count):
    """Tensors of one length, whose launches are recorded."""
    batch = take(shape, kind, lengths, 1) * count
    for made in batch[:10]:
        kind.function(*made)
    return batch


def report(name, kind, shape, rounds):
    """Print a line: medians of the best round, lowest of all, functions called."""
    lengths = iter(shape.order)
    for made in take(shape, kind, lengths, WARM_UP):
        kind.function(*made)
    again = repeated(shape, kind, lengths, LENGTHS)
    parts = []
    for title, batches in (
        ("new lengths", [take(shape, kind, lengths, LENGTHS) for _ in range(rounds)]),
        ("replayed", [again] * rounds),
    ):
        times = [measured(kind.function, batch) for batch in batches]
        best = 1e6 * min(map(statistics.median, times))
        lowest = 1e6 * min(map(min, times))
        few = take(shape, kind, lengths, 20) if title == "new lengths" else again[:20]
        count = entered(kind.function, few)
        functions = f"{count['call']} Python and {count['c_call']} C functions"
        parts.append(f"{title} {best:.1f} us (lowest {lowest:.1f}), {functions}")
    print(f"{name:26} {'; '.join(parts)}", flush=True)


def profile(kind, shape, replayed):
    """Print where the time of a call goes."""
    lengths = iter(shape.order)
    for made in take(shape, kind, lengths, WARM_UP):
        kind.function(*made)
    make = repeated if replayed else take
    batch = make(shape, kind, lengths, LENGTHS)
    with cProfile.Profile() as found:
        for made in batch:
            kind.function(*made)
    pstats.Stats(found).sort_stats("tottime").print_stats(45)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    parser.add_argument("--replayed", action="store_true", help="of calls whose sizes are known")
    parser.add_argument("--heads", type=int, nargs=3, default=(2, 1, 128), help="Hq Hkv D")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend_gpu(monkeypatch)
        shape = Shape(*given.heads)
        for name in given.kinds or KINDS:
            kind = KINDS[name]
            with torch.set_grad_enabled(kind.trains):
                if given.profile:
                    profile(kind, shape, given.replayed)
                else:
                    report(name, kind, shape, given.rounds)


if __name__ == "__main__":
    main()
