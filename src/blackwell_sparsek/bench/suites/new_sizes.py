"""What a call of sizes never seen before costs the host, once its kernels are compiled.

Ragged batches in training and prompts in serving have a new length in almost every call, for which
nothing is recorded yet. The figure is the median over the lengths: the first call that needs a
kernel loads it, which is not what this suite is about.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ... import attention, attention_varlen
from ...testing.tolerance import assert_within_budget
from ..case import REPORTED, Case, Contender, Peer, Suite
from .attention import dtype_of
from .attention_peers import OURS

SDPA, FUNCTION = "sdpa", "function"
FORWARD, PACKED = "forward", "packed"
# Kinds of calls that compute gradients. Autograd computes those of a GPU in a thread of its own;
# the second kind does it in the thread of the caller.
TRAINING, CALLING_THREAD = "training", "training, calling thread"
PACKED_TRAINING = "packed training"
# Lengths of one measurement.
LENGTHS = 500
_SHORTEST, _LONGEST = 129, 6144
# Lengths for compiling, spread over all.
_WARM_UP = 150
# Calls after which the host waits for the GPU. It holds back a host that is 1,024 launches ahead,
# and a step of training has five.
_AT_ONCE = 100
# Lengths for SDPA, both to measure and to compile: its cuDNN plans 45 ms for a new one.
_FEW = 20


class NewSizes(NamedTuple):
    """One kind of call, with a new number of tokens each time."""

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    lengths: int
    dtype: torch.dtype

    @property
    def trains(self) -> bool:
        """Whether gradients are computed."""
        return self.kind in (TRAINING, CALLING_THREAD, PACKED_TRAINING)

    @property
    def is_packed(self) -> bool:
        """Whether several sequences are packed."""
        return self.kind in (PACKED, PACKED_TRAINING)

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        found = {"kind": self.kind, "heads": self.heads, "kv_heads": self.kv_heads}
        return found | {"head_dim": self.head_dim, "lengths": self.lengths, "causal": True}

    def build(self, device: torch.device) -> "NewInputs":
        """Memory for the longest call, of which every call takes what it needs."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        sizes = (_LONGEST * h * self.head_dim for h in heads)
        memory = tuple(torch.randn(n, device=device).to(self.dtype) for n in sizes)
        return NewInputs(self, memory)


class NewInputs:
    """Tensors of any length."""

    def __init__(self, problem: NewSizes, memory: tuple[torch.Tensor, ...]):
        self.problem: NewSizes = problem
        self.memory: tuple[torch.Tensor, ...] = memory

    def take(self, lengths: Iterator[int], count: int) -> list[list[torch.Tensor]]:
        """q, k, v and the gradient of the output for the next `count` lengths."""
        taken = [self._tensors(length) for length in itertools.islice(lengths, count)]
        if len(taken) < count:
            raise RuntimeError("no new lengths are left: run new_sizes in a process of its own")
        return taken

    def _tensors(self, length: int) -> list[torch.Tensor]:
        problem = self.problem
        heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
        packed = problem.is_packed
        made = []
        for memory, h in zip(self.memory, heads, strict=True):
            shape = (length, h, problem.head_dim) if packed else (1, h, length, problem.head_dim)
            made.append(memory[: length * h * problem.head_dim].view(shape))
        if problem.trains:
            made[:3] = [x.detach().requires_grad_() for x in made[:3]]
        return made


Call = Callable[..., torch.Tensor]

_unseen: dict[tuple[str, bool, bool], Iterator[int]] = {}


def unseen_lengths(peer: str, problem: NewSizes) -> Iterator[int]:
    """Lengths that no such call of a peer in this process has had, any few spread over all.

    Both kinds of training share them: the calls of the second would not be new.
    """
    kind = (peer, problem.trains, problem.is_packed)
    if kind not in _unseen:
        mixed = sorted(range(_SHORTEST, _LONGEST), key=lambda n: n * 2654435761 % 2**32)
        _unseen[kind] = iter(mixed)
    return _unseen[kind]


def _ours(inputs: NewInputs) -> Contender:
    if inputs.problem.is_packed:
        return _contender(OURS, inputs, _packed)
    return _contender(OURS, inputs, _dense)


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = attention(q, k, v, causal=True)
    assert isinstance(out, torch.Tensor)
    return out


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    length = q.shape[0]
    offsets = _offsets(length, q.device)
    out = attention_varlen(
        q, k, v, offsets, offsets, max_seqlen_q=length, max_seqlen_k=length, causal=True
    )
    assert isinstance(out, torch.Tensor)
    return out


_made_offsets: dict[int, torch.Tensor] = {}


def _offsets(length: int, device: torch.device) -> torch.Tensor:
    """Three sequences; made before the clock starts, by the first call with this length."""
    if length not in _made_offsets:
        cuts = [0, length // 3, length // 2, length]
        _made_offsets[length] = torch.tensor(cuts, dtype=torch.int32, device=device)
    return _made_offsets[length]


def _sdpa(inputs: NewInputs) -> Contender:
    grouped = inputs.problem.heads != inputs.problem.kv_heads

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return _contender(SDPA, inputs, call, most=_FEW)


def _why_not_sdpa(inputs: NewInputs) -> str | None:
    return "no packed sequences" if inputs.problem.is_packed else None


class _Nothing(torch.autograd.Function):
    """Computes nothing: what a step costs whose forward and backward are functions in Python."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        return ctx.saved_tensors


def _function(inputs: NewInputs) -> Contender:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Nothing.apply(q, k, v)  # type: ignore[no-untyped-call]
        return made

    return _contender(FUNCTION, inputs, call, checked=False)


def _why_no_function(inputs: NewInputs) -> str | None:
    return None if inputs.problem.trains else "about gradients"


def _contender(
    peer: str, inputs: NewInputs, call: Call, *, checked: bool = True, most: int = LENGTHS
) -> Contender:
    problem, lengths = inputs.problem, unseen_lengths(peer, inputs.problem)

    def once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Any:
        if not problem.trains:
            return call(q, k, v)
        with torch.enable_grad():
            # gradients that stayed in q, k and v would make each call allocate memory from CUDA
            return torch.autograd.grad(call(q, k, v), (q, k, v), dout)

    def measured() -> float:
        tensors = inputs.take(lengths, min(most, problem.lengths))
        if problem.is_packed:
            for q, *_ in tensors:
                _offsets(q.shape[0], q.device)
        memory, *_ = inputs.memory
        times = []
        with torch.autograd.set_multithreading_enabled(problem.kind != CALLING_THREAD):
            for i, made in enumerate(tensors):
                if i % _AT_ONCE == 0:
                    _wait(memory)
                begin = time.perf_counter()
                once(*made)
                times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def check(seconds: float) -> None:
        if checked:
            _check(call, inputs, lengths)

    for made in inputs.take(lengths, min(_WARM_UP, most, problem.lengths)):
        once(*made)
    return Contender(measured, check)


def _wait(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def _check(call: Call, inputs: NewInputs, lengths: Iterator[int]) -> None:
    """One more length, against fp64; packed sequences are checked by their first one."""
    ((q, k, v, _),) = inputs.take(lengths, 1)
    with torch.no_grad():
        got = call(q, k, v)
        if inputs.problem.is_packed:
            first = q.shape[0] // 3
            q, k, v, got = (x[:first].transpose(0, 1)[None] for x in (q, k, v, got))
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert_within_budget(got, exact, plain, what=f"length {q.shape[2]}")


PEERS = {
    OURS: Peer(OURS, "blackwell_sparsek, impl auto", _ours),
    SDPA: Peer(SDPA, "SDPA of the same shapes", _sdpa, supports=_why_not_sdpa, rival=True),
    FUNCTION: Peer(
        FUNCTION,
        "an autograd.Function that computes nothing",
        _function,
        supports=_why_no_function,
    ),
}


def new_sizes(tiny: bool = False) -> Iterator[Case]:
    """Host time of a call with a new sequence length, with kernels already compiled."""
    # so few heads that the GPU is never behind, and no launch waits for it
    sizes = (2, 1, 16) if tiny else (2, 1, 128)
    names = {
        FORWARD: "attention, new lengths",
        TRAINING: "attention and gradients, new lengths",
        CALLING_THREAD: "attention and gradients, new lengths, backward on the calling thread",
        PACKED: "packed sequences, new lengths",
        PACKED_TRAINING: "packed sequences and gradients, new lengths",
    }
    for kind, name in names.items():
        problem = NewSizes(kind, *sizes, 3 if tiny else LENGTHS, dtype_of(tiny))
        yield Case(name, problem.describe(), problem.build, tuple(PEERS), modes=(REPORTED,))


SUITES = [Suite("new_sizes", new_sizes.__doc__ or "", new_sizes, PEERS, OURS, unit="us")]
