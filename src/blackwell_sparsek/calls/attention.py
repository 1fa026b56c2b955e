"""Attention calls: tensors and options, checked once, and the `AttnProblem` that they pose."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..core.arch import Arch, arch_of
from ..core.checks import check_choice, check_flag
from ..core.env import IMPLS
from ..masks.band import EVERYTHING, Band
from ..masks.block_mask import BlockMask
from ..masks.packed import check_cu_seqlens_values


class AttnSpec(NamedTuple):
    """The options of one attention call, after validation and defaults.

    `band`, `block_mask` and the lengths intersect. With `cu_seqlens_q` and `cu_seqlens_k` the
    tensors are packed, [T, H, D]; a block mask is then indexed by positions inside each sequence
    and covers `(max_q, max_k)`.
    """

    scale: float
    band: Band = EVERYTHING
    block_mask: BlockMask | None = None
    softcap: float = 0.0
    """`softcap * tanh(score / softcap)`; 0 leaves scores alone."""
    sinks: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_q: int = 0
    max_k: int = 0
    alibi_slopes: torch.Tensor | None = None
    """fp32 [Hq] or [B, Hq]: `slope * |position - key|` is subtracted from scores, after softcap."""
    bias: torch.Tensor | None = None
    """[B or 1, Hq or 1, Sq, Sk], any strides: added to scores, after softcap. Not when packed."""

    @property
    def is_biased(self) -> bool:
        """Whether anything is added to scores."""
        return self.alibi_slopes is not None or self.bias is not None

    def without_tensors(self) -> "AttnSpec":
        """The same options without the tensors that autograd saves."""
        return self._replace(
            sinks=None, cu_seqlens_q=None, cu_seqlens_k=None, alibi_slopes=None, bias=None
        )

    @property
    def is_varlen(self) -> bool:
        """Whether sequences are packed along one token axis."""
        return self.cu_seqlens_q is not None


class AttnGradients(NamedTuple):
    """The tensors that receive the gradients of a call; None if a gradient is not needed.

    Each has the shape and dtype of its input and a contiguous last dimension.
    """

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    dsinks: torch.Tensor | None


def fill_gradients(
    gradients: Iterable[torch.Tensor | None], computed: Iterable[torch.Tensor | None]
) -> None:
    """Copy computed gradients into the tensors of a call; None where one is not needed."""
    for gradient, value in zip(gradients, computed, strict=True):
        if gradient is not None:
            assert value is not None
            gradient.copy_(value)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and sums: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of `lse`: fp32, or fp64 for fp64 inputs, so that gradients stay exact."""
    return compute_dtype(dtype)


def heads_are_inner(q: torch.Tensor) -> bool:
    """Whether a [B, H, S, D] tensor lies in memory as [B, S, H, D]."""
    return bool(q.stride(1) < q.stride(2))


def empty_out(q: torch.Tensor, head_dim_v: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Output for queries `q`: contiguous, or in q's physical order when its heads are inner.

    `dtype` is by default that of q.

    A model that projects to [B, S, H * D] and transposes gets its output back in that order, so
    that the reshape after attention is a view.
    """
    if q.dim() == 3:
        return q.new_empty((q.shape[0], q.shape[1], head_dim_v), dtype=dtype)
    batch, heads, sq, head_dim = q.shape
    if head_dim == head_dim_v and q.is_contiguous():
        return torch.empty_like(q, memory_format=torch.contiguous_format, dtype=dtype)
    if heads_are_inner(q):
        return q.new_empty((batch, sq, heads, head_dim_v), dtype=dtype).transpose(1, 2)
    return q.new_empty((batch, heads, sq, head_dim_v), dtype=dtype)


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """`lse` for queries `q`: [B, Hq, Sq], or [Hq, Tq] for packed sequences."""
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:3]
    return q.new_empty(shape, dtype=lse_dtype(q.dtype))


def check_impl_and_lse(op: str, impl: Any, return_lse: Any) -> None:
    """Check two arguments that all attention functions have.

    A number is no flag, not even 0 or 1; recorded launches are found by the types of options too.
    """
    check_choice(op, "impl", impl, IMPLS)
    check_flag(op, "return_lse", return_lse)


def returned(
    results: tuple[torch.Tensor, ...], out: torch.Tensor | None, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The return value of a public function.

    `results` are output and lse, or lse alone if the output was given as `out`.
    """
    if out is not None:
        return (out, results[0]) if return_lse else out
    return (results[0], results[1]) if return_lse else results[0]


def empty_gradients(
    inputs: Sequence[torch.Tensor | None], needs: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Tensors for gradients, laid out as the inputs; without elements if not needed.

    The first input must not be None.
    """
    q = inputs[0]
    assert q is not None
    return tuple(
        torch.empty_like(x) if needed and x is not None else q.new_empty(0)
        for x, needed in zip(inputs, needs, strict=True)
    )


@dataclass(frozen=True)
class AttnProblem:
    """One attention call, forward or backward, without its data: dispatch depends on this."""

    arch: Arch
    dtype: torch.dtype
    batch: int
    heads_q: int
    heads_kv: int
    max_q: int
    max_k: int
    head_dim: int
    head_dim_v: int
    varlen: bool
    banded: bool
    """Whether causal or a window limits a side."""
    mask_block: tuple[int, int] | None
    """Block size of the block mask, None without one."""
    softcap: bool
    sinks: bool
    backward: bool = False
    deterministic: bool = False
    positive: bool = True
    """Whether scores are multiplied by a factor above zero before the softmax."""
    tma: bool = False
    """Whether TMA can copy q, k, v and a given out; see `tma_takes`."""
    tokens: tuple[int, int] | None = None
    """Queries and keys of all packed sequences together; None for dense batches."""
    alibi: bool = False
    bias: bool = False
    mask_per_kv_head: bool = False
    """Whether the query heads that share a KV head share a mask."""

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttnSpec,
        *,
        backward: bool = False,
        deterministic: bool = False,
        out: torch.Tensor | None = None,
    ) -> "AttnProblem":
        """Describe a call, dense or packed, whose output goes to `out` if that is given."""
        batch = q.shape[0]
        if spec.cu_seqlens_q is not None:
            batch = spec.cu_seqlens_q.numel() - 1
        mask = spec.block_mask
        return cls(
            arch=arch_of(q.device),
            dtype=q.dtype,
            batch=batch,
            heads_q=q.shape[1],
            heads_kv=k.shape[1],
            max_q=spec.max_q,
            max_k=spec.max_k,
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            varlen=spec.is_varlen,
            banded=spec.band != (None, None),
            mask_block=None if mask is None else mask.block_size,
            softcap=spec.softcap != 0.0,
            sinks=spec.sinks is not None,
            backward=backward,
            deterministic=deterministic,
            # under a softcap, the factor before the softmax is the softcap
            positive=spec.scale > 0 or spec.softcap > 0,
            tma=all(tma_takes(x) for x in (q, k, v, out) if x is not None),
            tokens=(q.shape[0], k.shape[0]) if spec.is_varlen else None,
            alibi=spec.alibi_slopes is not None,
            bias=spec.bias is not None,
            mask_per_kv_head=mask is not None and 1 < mask.heads < q.shape[1],
        )

    def with_lengths(
        self, batch: int, max_q: int, max_k: int, tokens: tuple[int, int] | None
    ) -> "AttnProblem":
        """The same problem with other lengths."""
        # dataclasses.replace takes four times as long
        made = object.__new__(AttnProblem)
        made.__dict__.update(self.__dict__, batch=batch, max_q=max_q, max_k=max_k, tokens=tokens)
        return made

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        flags = ("varlen", "softcap", "sinks", "alibi", "bias", "deterministic")
        extras = ["causal or window"] if self.banded else []
        extras += [name for name in flags if getattr(self, name)]
        if self.mask_block is not None:
            extras.append(f"blocks {self.mask_block[0]} x {self.mask_block[1]}")
        return (
            f"{direction} on {self.arch}, {self.dtype}, batch {self.batch}, heads {self.heads_q}:"
            f"{self.heads_kv}, queries {self.max_q}, keys {self.max_k}, head dim {self.head_dim}"
            f"/{self.head_dim_v}" + (f", {', '.join(extras)}" if extras else "")
        )


# Descriptors of packed sequences step back by strides between tokens, up to this many bytes.
FARTHEST_TOKENS = 2**34


def tma_takes(x: torch.Tensor) -> bool:
    """Whether TMA can copy tiles of `x`: address and strides must be multiples of 16 bytes."""
    if x.is_contiguous():
        # all strides are multiples of the last dimension
        taken = x.nbytes
        if 0 < taken < FARTHEST_TOKENS and x.shape[-1] * x.element_size() % 16 == 0:
            return x.data_ptr() % 16 == 0
    outer = [
        stride * x.element_size() if size > 1 else 16
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    no_gaps = x.shape[-1] <= 1 or x.stride(-1) == 1
    aligned = all(0 < stride < 2**40 and stride % 16 == 0 for stride in outer)
    if x.dim() == 3:
        aligned = aligned and outer[0] < FARTHEST_TOKENS
    return aligned and no_gaps and x.data_ptr() % 16 == 0 and x.numel() > 0


# Strides in elements, below which they fit in the parameters of every kernel; a power of two.
_MOST_STRIDE = 2**30


def tma_takes_strides(*tensors: tuple[int, ...], step: int = 8) -> bool:
    """Whether TMA takes 16-bit elements with these strides at addresses that 16 divides.

    Stricter than `tma_takes`, which forgives strides of dimensions of size 1. `step`, a power of
    two, must divide all strides but the last.
    """
    bits = 0
    for strides in tensors:
        *outer, last = strides
        if last != 1 or 0 in strides:
            return False
        for stride in outer:
            bits |= stride
    # what holds for all bits together holds for each stride, and none is negative
    return bits % step == 0 and bits < _MOST_STRIDE


@dataclass(eq=False)
class AttentionCall:
    """One checked attention call, the argument of every implementation of the forward pass.

    Dense q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv], or packed [T, H, D].
    `deterministic` concerns only the backward pass of this call.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spec: AttnSpec
    deterministic: bool = False
    out: torch.Tensor | None = None
    """Where the output goes; None for a new tensor."""

    @cached_property
    def problem(self) -> AttnProblem:
        """The properties that the choice of an implementation and of tiles depends on."""
        tensors = (self.q, self.k, self.v, self.spec)
        return AttnProblem.of(*tensors, deterministic=self.deterministic, out=self.out)

    def empty_out(self) -> torch.Tensor:
        """Where the output goes, given or new."""
        return empty_out(self.q, self.v.shape[-1]) if self.out is None else self.out

    def check_lengths(self) -> None:
        """Check the offsets of packed sequences, for implementations that read them on the host."""
        spec, op = self.spec, "attention_varlen"
        if spec.cu_seqlens_q is not None and spec.cu_seqlens_k is not None:
            tokens_q, tokens_k = self.q.shape[0], self.k.shape[0]
            check_cu_seqlens_values(op, "cu_seqlens_q", spec.cu_seqlens_q, tokens_q, spec.max_q)
            check_cu_seqlens_values(op, "cu_seqlens_k", spec.cu_seqlens_k, tokens_k, spec.max_k)


class ResizedCall(NamedTuple):
    """A call without a mask, as plain numbers: everything its launches depend on.

    The tensors are `launch.resize.MapSource` (address, shape and strides), which TMA accepts.
    """

    q: Any
    k: Any
    v: Any
    at_sinks: int
    """An address, 0 without sinks; likewise for the offsets of packed sequences."""
    at_cu_seqlens_q: int
    at_cu_seqlens_k: int
    batch: int
    max_q: int
    max_k: int


class ResizedGradients(NamedTuple):
    """Gradients of a call without a mask, as `ResizedCall` describes the call itself."""

    dout: Any
    q: Any
    k: Any
    v: Any
    out: Any
    at_lse: int
    """Of lse, which is contiguous."""
    at_cu_seqlens_q: int
    at_cu_seqlens_k: int
    batch: int
    max_q: int
    max_k: int


@dataclass(eq=False)
class BackwardCall:
    """The backward pass of a call, the argument of every implementation of it.

    `dout` and `dlse` are the gradients of `out` and `lse`, the results of `forward`; `dlse` is None
    if there is none. Implementations compute and fill only the `gradients` that are not None.
    """

    forward: AttentionCall
    dout: torch.Tensor
    dlse: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    gradients: AttnGradients

    @cached_property
    def problem(self) -> AttnProblem:
        """The properties that the choice of an implementation and of tiles depends on."""
        return replace(self.forward.problem, backward=True)


@dataclass(frozen=True)
class MergeProblem:
    """One merge of two partial attention results: the number of rows, and the length of each."""

    arch: Arch
    dtype: torch.dtype
    rows: int
    head_dim_v: int

    @classmethod
    def of(cls, o: torch.Tensor) -> "MergeProblem":
        """Describe a merge of tensors shaped like `o` [..., Dv]."""
        return cls(arch_of(o.device), o.dtype, o.shape[:-1].numel(), o.shape[-1])

    def __str__(self) -> str:
        return f"merge on {self.arch}, {self.dtype}, {self.rows} rows of {self.head_dim_v}"


class MergeCall(NamedTuple):
    """Two partial results [..., Dv] with lse [...], to be merged."""

    o_a: torch.Tensor
    lse_a: torch.Tensor
    o_b: torch.Tensor
    lse_b: torch.Tensor

    @property
    def problem(self) -> MergeProblem:
        """The properties that the choice of an implementation depends on."""
        return MergeProblem.of(self.o_a)
