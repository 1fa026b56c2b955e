"""What a call of sizes never seen before costs the host, once its kernels are compiled.

Ragged batches in training and prompts in serving have a new length in almost every call, for which
nothing is recorded yet. The figure is the median over the lengths: the first call that needs a
kernel loads it, which is not what this suite is about.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ... import BSRMatrix, attention, attention_varlen, matmul
from ...testing.tolerance import assert_within_budget
from ..case import REPORTED, Case, Contender, Peer, Suite
from .attention import dtype_of
from .attention_peers import OURS

SDPA, FUNCTION, DENSE = "sdpa", "function", "dense"
FORWARD, PACKED, PRODUCT = "forward", "packed", "product"
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

    @property
    def calls(self) -> str:
        """What its calls are; both kinds of training would not be new to each other."""
        kind = TRAINING if self.trains else FORWARD
        return f"packed {kind}" if self.is_packed else kind

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
        return [self._tensors(length) for length in _next(lengths, count)]

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


class NewRows(NamedTuple):
    """Products with a sparse weight, with a new number of tokens each time."""

    features: int
    inner: int
    block: int
    density: float
    lengths: int
    dtype: torch.dtype

    kind: str = PRODUCT
    calls: str = PRODUCT
    trains: bool = False
    is_packed: bool = False

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        found = {"kind": self.kind, "weight": [self.features, self.inner]}
        block = {"block": [self.block, self.block], "density": self.density}
        return found | block | {"lengths": self.lengths}

    def build(self, device: torch.device) -> "NewTokens":
        """The weight, and memory for the most tokens, of which every call takes what it needs."""
        grid = (self.features // self.block, self.inner // self.block)
        keep = torch.rand(grid, device=device) < self.density
        weight = torch.randn(self.features, self.inner, device=device).to(self.dtype)
        memory = torch.randn(_LONGEST * self.inner, device=device).to(self.dtype)
        matrix = BSRMatrix.from_mask(weight, keep, (self.block, self.block))
        return NewTokens(self, matrix, matrix.to_dense().mT, (memory,))


class NewTokens(NamedTuple):
    """Tokens of any number, and the weight that they are multiplied with."""

    problem: NewRows
    weight: BSRMatrix
    dense: torch.Tensor
    """The transpose of the weight."""
    memory: tuple[torch.Tensor, ...]

    def take(self, lengths: Iterator[int], count: int) -> list[list[torch.Tensor]]:
        """x for the next `count` numbers of tokens."""
        (memory,), inner = self.memory, self.problem.inner
        return [[memory[: n * inner].view(n, inner)] for n in _next(lengths, count)]


Call = Callable[..., torch.Tensor]

_unseen: dict[tuple[str, str], Iterator[int]] = {}


def _next(lengths: Iterator[int], count: int) -> list[int]:
    taken = list(itertools.islice(lengths, count))
    if len(taken) < count:
        raise RuntimeError("no new lengths are left: run new_sizes in a process of its own")
    return taken


def unseen_lengths(peer: str, problem: NewSizes | NewRows) -> Iterator[int]:
    """Lengths that no such call of a peer in this process has had, any few spread over all."""
    kind = (peer, problem.calls)
    if kind not in _unseen:
        mixed = sorted(range(_SHORTEST, _LONGEST), key=lambda n: n * 2654435761 % 2**32)
        _unseen[kind] = iter(mixed)
    return _unseen[kind]


def _ours(inputs: NewInputs | NewTokens) -> Contender:
    if isinstance(inputs, NewTokens):
        return _product(OURS, inputs, partial(_sparse_product, inputs.weight.T))
    if inputs.problem.is_packed:
        return _attention(OURS, inputs, _packed)
    return _attention(OURS, inputs, _dense)


def _sparse_product(weight: BSRMatrix, x: torch.Tensor) -> torch.Tensor:
    out = matmul(x, weight)
    assert isinstance(out, torch.Tensor)
    return out


def _dense_product(inputs: NewTokens) -> Contender:
    return _product(DENSE, inputs, lambda x: x @ inputs.dense)


def _product(peer: str, inputs: NewTokens, call: Call) -> Contender:
    def check(lengths: Iterator[int]) -> None:
        ((x,),) = inputs.take(lengths, 1)
        exact = x.double() @ inputs.dense.double()
        assert_within_budget(call(x), exact, x @ inputs.dense, what=f"{x.shape[0]} tokens")

    return _contender(peer, inputs, call, check)


def _attention(peer: str, inputs: NewInputs, call: Call, most: int = LENGTHS) -> Contender:
    return _contender(peer, inputs, call, partial(_check, call, inputs), most=most)


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

    return _attention(SDPA, inputs, call, most=_FEW)


def _why_not_sdpa(inputs: NewInputs | NewTokens) -> str | None:
    if isinstance(inputs, NewTokens):
        return "about attention"
    return "no packed sequences" if inputs.problem.is_packed else None


def _why_not_dense(inputs: NewInputs | NewTokens) -> str | None:
    return None if isinstance(inputs, NewTokens) else "about products"


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

    return _contender(FUNCTION, inputs, call, None)


def _why_no_function(inputs: NewInputs | NewTokens) -> str | None:
    return None if inputs.problem.trains else "about gradients"


def _contender(
    peer: str,
    inputs: NewInputs | NewTokens,
    call: Call,
    checks: Callable[[Iterator[int]], None] | None,
    *,
    most: int = LENGTHS,
) -> Contender:
    problem, lengths = inputs.problem, unseen_lengths(peer, inputs.problem)

    def once(*tensors: torch.Tensor) -> Any:
        if not problem.trains:
            # q, k and v, or x
            return call(*tensors[:3])
        q, k, v, dout = tensors
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
        if checks is not None:
            checks(lengths)

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
    DENSE: Peer(
        DENSE,
        "torch's product with the dense weight",
        _dense_product,
        supports=_why_not_dense,
        rival=True,
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
    weight = (32, 32, 16, 0.2) if tiny else (512, 512, 64, 0.2)
    products = NewRows(*weight, 3 if tiny else LENGTHS, dtype_of(tiny))
    name = "x @ W.T, new numbers of tokens"
    yield Case(name, products.describe(), products.build, tuple(PEERS), modes=(REPORTED,))


SUITES = [Suite("new_sizes", new_sizes.__doc__ or "", new_sizes, PEERS, OURS, unit="us")]
