"""Decoding one or a few tokens per sequence over a contiguous or paged cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import attention_decode, explain
from ...testing.tolerance import assert_within_budget
from ..case import EAGER, GRAPH, Case, Contender, Peer, Suite
from .attention_peers import (
    OURS,
    OURS_DENSE,
    call_by_name,
    fa3_available,
    fa3_operator,
    fa3_options,
    load,
    needs,
    why_missing,
    workspace,
)
from .attention_problem import attend

_CACHES_BYTES = 160 * 2**20
_MOST_REPLICAS = 64
_CHECKED = 16


@dataclass(frozen=True)
class Decode:
    """`batch` sequences of `length` cached tokens; `page_size` 0 is a contiguous cache."""

    batch: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 0
    dtype: torch.dtype = torch.bfloat16
    kept: float = 1.0
    """Share of the pages that are read; the selection differs between sequences and KV heads."""
    is_fp8: bool = False
    """Whether the cache stores float8_e4m3fn."""
    shortest: int = 0
    """If not 0, lengths grow geometrically from this to `length`."""
    queries: int = 1
    """New tokens of each sequence, the last of the cached ones; each sees those up to itself."""

    @property
    def title(self) -> str:
        """A name for tables."""
        length = f"{self.length // 1024}k" if self.length % 1024 == 0 else str(self.length)
        length = f"{self.shortest}..{length}" if self.shortest else length
        where = f"pages of {self.page_size}" if self.page_size else "contiguous"
        where += f", {self.kept:.0%} of them" if self.kept < 1 else ""
        where += ", fp8" if self.is_fp8 else ""
        queries = f" Q{self.queries}" if self.queries > 1 else ""
        heads = f"H{self.heads}:{self.kv_heads} D{self.head_dim}"
        return f"B{self.batch}{queries} S{length} {heads}, {where}"

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        found = {
            "batch": self.batch,
            "length": self.length,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "page_size": self.page_size,
            "dtype": str(self.dtype).split(".")[-1],
            "kept": self.kept,
            "cache_dtype": str(self.cache_dtype).split(".")[-1],
        }
        found |= {"queries": self.queries} if self.queries > 1 else {}
        return found | {"lengths": self.lengths} if self.shortest else found

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each sequence, in an order that is not sorted.

        Examples
        --------
        >>> Decode(4, 800, shortest=100).lengths
        [100, 400, 200, 800]
        """
        if not self.shortest:
            return [self.length] * self.batch
        grown = self.length / self.shortest
        steps = [index / max(1, self.batch - 1) for index in range(self.batch)]
        lengths = [round(self.shortest * grown**step) for step in steps]
        return lengths[::2] + lengths[1::2]

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the cache."""
        return torch.float8_e4m3fn if self.is_fp8 else self.dtype

    @property
    def flops(self) -> float:
        """FLOPs: two products over the query-key pairs that are read."""
        hidden = self.queries * (self.queries - 1) // 2
        pairs = self.queries * sum(self.lengths) - self.batch * hidden
        return 4.0 * self.kept * self.heads * pairs * self.head_dim

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that a call must read."""
        elements = 2 * self.kv_heads * sum(self.lengths) * self.head_dim
        return round(elements * self.cache_dtype.itemsize * self.kept)

    def build(self, device: torch.device) -> "DecodeInputs":
        """Random values, the same at each call; pages in random order."""
        generator = torch.Generator(device).manual_seed(0)

        def values(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)
            return made.to(self.cache_dtype)

        # token by token in memory, as a projection leaves them
        q = values(self.batch, self.queries, self.heads, self.head_dim).to(self.dtype)
        q = q.transpose(1, 2)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        if not self.page_size:
            shape = (self.batch, self.kv_heads, self.length, self.head_dim)
            return DecodeInputs(self, q, values(*shape), values(*shape), lengths)
        each = -(-self.length // self.page_size)
        order = torch.randperm(self.batch * each, generator=generator, device=device)
        table = order.to(torch.int32).view(self.batch, each)
        shape = (self.batch * each, self.page_size, self.kv_heads, self.head_dim)
        blocks = None
        if self.kept < 1:
            scores = torch.rand(self.batch, self.kv_heads, each, generator=generator, device=device)
            blocks = scores.topk(max(1, round(self.kept * each))).indices.to(torch.int32)
        return DecodeInputs(self, q, values(*shape), values(*shape), lengths, table, blocks)


@dataclass(frozen=True)
class DecodeInputs:
    """q `[B, H, Q, D]`, caches and page table as `bsk.attention_decode` takes them."""

    problem: Decode
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    """Pages of each sequence and KV head that are read, int32 `[B, Hkv, n]`; None for all."""

    @cached_property
    def others(self) -> list["DecodeInputs"]:
        """These inputs and copies that outgrow the caches; empty if one alone outgrows them."""
        size = self.problem.cache_bytes
        if size > _CACHES_BYTES or self.q.device.type != "cuda":
            return []
        count = max(2, min(_MOST_REPLICAS, -(-_CACHES_BYTES // size)))
        fixed = (self.lengths, self.table, self.blocks)
        copies = (
            DecodeInputs(self.problem, self.q.clone(), self.k.clone(), self.v.clone(), *fixed)
            for _ in range(count - 1)
        )
        return [self, *copies]

    def sequence(self, cache: torch.Tensor, b: int, kv_head: int) -> torch.Tensor:
        """The keys or values `[keys, D]` that are read for one sequence and head."""
        dtype, length = self.problem.dtype, self.problem.lengths[b]
        if self.table is None:
            return cache[b, kv_head, :length].to(dtype)
        if self.blocks is None:
            pages = cache[self.table[b].long(), :, kv_head]
            return pages.flatten(0, 1)[:length].to(dtype)
        listed = self.blocks[b, kv_head].long()
        size = self.problem.page_size
        position = (listed[:, None] * size + torch.arange(size, device=cache.device)).flatten()
        values = cache[self.table[b][listed].long(), :, kv_head].flatten(0, 1)
        return values[position < length].to(dtype)

    def seen(self, keys: int) -> torch.Tensor:
        """Which of the keys each query sees, `[Q, keys]`; the last query sees all."""
        queries = self.problem.queries
        every = torch.ones(queries, keys, dtype=torch.bool, device=self.k.device)
        return every.tril(keys - queries)

    def check(self, out: torch.Tensor) -> None:
        """Compare `[B, H, Q, D]` with fp64 on the queries of sampled KV heads."""
        if out.shape != self.q.shape:
            raise AssertionError(f"expected {list(self.q.shape)}, got {list(out.shape)}")
        heads, exact, plain = self._expected
        group = self.problem.heads // self.problem.kv_heads
        got = torch.cat([out[b, kv * group : (kv + 1) * group].flatten(0, 1) for b, kv in heads])
        assert_within_budget(got, exact, plain, what="queries of sampled key heads")

    @cached_property
    def _expected(self) -> tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]:
        """Sampled KV heads, and the results of their queries in fp64 and by plain PyTorch."""
        p = self.problem
        total, group = p.batch * p.kv_heads, p.heads // p.kv_heads
        numbers = range(0, total, max(1, total // _CHECKED))
        heads = [divmod(number, p.kv_heads) for number in numbers]
        exact, plain = [], []
        for b, kv in heads:
            q = self.q[b, kv * group : (kv + 1) * group].flatten(0, 1)
            k, v = (self.sequence(x, b, kv) for x in (self.k, self.v))
            seen = self.seen(len(k)).repeat(group, 1)
            exact.append(attend(q.double(), k.double(), v.double(), seen))
            plain.append(attend(q, k, v, seen))
        return heads, torch.cat(exact), torch.cat(plain)


Call = Callable[[DecodeInputs], torch.Tensor]


# Peers: this package, SDPA on a contiguous cache, FlashAttention 3, FlashInfer.


def _contender(inputs: DecodeInputs, call: Call, notes: dict[str, Any] | None = None) -> Contender:
    p = inputs.problem
    replicas = tuple(partial(call, x) for x in inputs.others)
    bound = float(p.cache_bytes)
    return Contender(partial(call, inputs), inputs.check, p.flops, replicas, notes, bound)


def _ours(inputs: DecodeInputs) -> Contender:
    def call(x: DecodeInputs) -> torch.Tensor:
        out = attention_decode(
            x.q, x.k, x.v, cache_seqlens=x.lengths, page_table=x.table, kv_blocks=x.blocks
        )
        assert isinstance(out, torch.Tensor)  # a pair only with return_lse
        return out

    decision = explain(call, inputs)
    notes = {"implementation": decision.chosen, "why_not": dict(decision.reasons)}
    return _contender(inputs, call, notes)


def _ours_dense(inputs: DecodeInputs) -> Contender:
    """Ours on the whole cache."""
    return _ours(replace(inputs, problem=replace(inputs.problem, kept=1.0), blocks=None))


def _sdpa(inputs: DecodeInputs, backends: list[SDPBackend]) -> Contender:
    p = inputs.problem
    # SDPA's own causal mask is aligned at the first key
    mask = inputs.seen(p.length) if p.queries > 1 else None

    def call(x: DecodeInputs) -> torch.Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(x.q, x.k, x.v, mask, enable_gqa=True)

    return _contender(inputs, call)


def _fa3(inputs: DecodeInputs) -> Contender:
    if why_missing("flash_attn_interface", "flash_attn_with_kvcache") is None:
        function = load("flash_attn_interface", "flash_attn_with_kvcache")

        def call(x: DecodeInputs) -> torch.Tensor:
            k, v = _token_major(x)
            q = x.q.transpose(1, 2)
            out: Any = function(q, k, v, cache_seqlens=x.lengths, page_table=x.table, causal=True)
            first: torch.Tensor = out[0] if isinstance(out, tuple) else out
            return first.transpose(1, 2)

        return _contender(inputs, call)
    operator, p = fa3_operator(), inputs.problem
    options = fa3_options(p.head_dim, causal=True) | {
        "cu_seqlens_q": torch.arange(p.batch + 1, device=inputs.q.device, dtype=torch.int32)
        * p.queries,
        "max_seqlen_q": p.queries,
        "max_seqlen_k": p.length,
    }

    def call_library(x: DecodeInputs) -> torch.Tensor:
        k, v = _token_major(x)
        q = x.q.transpose(1, 2).flatten(0, 1)
        values = {"q": q, "k": k, "v": v, "seqused_k": x.lengths, "page_table": x.table}
        out: torch.Tensor = call_by_name(operator, values | options)[0]
        return out.view(p.batch, p.queries, *out.shape[1:]).transpose(1, 2)

    return _contender(inputs, call_library, {"build": "vLLM's library"})


def _token_major(x: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages unchanged; a contiguous cache as a `[B, S, Hkv, D]` view."""
    return (x.k, x.v) if x.table is not None else (x.k.transpose(1, 2), x.v.transpose(1, 2))


def _flashinfer(inputs: DecodeInputs) -> Contender:
    p, table, device = inputs.problem, inputs.table, inputs.q.device
    assert table is not None
    used = [-(-length // p.page_size) for length in p.lengths]
    starts = torch.tensor([0, *used]).cumsum(0).to(device, torch.int32)
    full = (n - 1 for n in used)
    last = [n - pages * p.page_size for n, pages in zip(p.lengths, full, strict=True)]
    make = load("flashinfer", "BatchDecodeWithPagedKVCacheWrapper")
    indices = torch.cat([row[:n] for row, n in zip(table, used, strict=True)])
    wrapper = make(
        workspace(device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty_like(starts),
        paged_kv_indices_buffer=torch.empty_like(indices),
        paged_kv_last_page_len_buffer=torch.empty(p.batch, dtype=torch.int32, device=device),
    )
    wrapper.plan(
        starts,
        indices,
        torch.tensor(last, dtype=torch.int32, device=device),
        p.heads,
        p.kv_heads,
        p.head_dim,
        p.page_size,
        q_data_type=p.dtype,
        kv_data_type=p.dtype,
    )

    def call(x: DecodeInputs) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(x.q[:, :, 0], (x.k, x.v))
        return out[:, :, None]

    return _contender(inputs, call)


_ONE_QUERY = "measured with one query a sequence"


def _contiguous(inputs: DecodeInputs) -> str | None:
    if inputs.problem.shortest:
        return "takes equal lengths"
    return _plain(inputs) or (None if inputs.table is None else "has no paged cache")


def _plain(inputs: DecodeInputs) -> str | None:
    """The reason why peers that read a whole cache in the queries' dtype do not run, or None."""
    if inputs.blocks is not None:
        return "reads all pages"
    return "measured without fp8" if inputs.problem.is_fp8 else None


def _contiguous_on_gpu(inputs: DecodeInputs) -> str | None:
    reason = _on_gpu(inputs) or _contiguous(inputs)
    # cuDNN through SDPA aligns its causal mask at the first key
    return reason or (_ONE_QUERY if inputs.problem.queries > 1 else None)


def _contiguous_on_cpu(inputs: DecodeInputs) -> str | None:
    on_gpu = "measured as cuDNN" if inputs.problem.queries == 1 else _ONE_QUERY
    return _contiguous(inputs) or (on_gpu if inputs.q.is_cuda else None)


def _on_gpu(inputs: DecodeInputs) -> str | None:
    return None if inputs.q.is_cuda else "needs a CUDA GPU"


def _paged_on_gpu(inputs: DecodeInputs) -> str | None:
    reason = _whole_on_gpu(inputs) or (_ONE_QUERY if inputs.problem.queries > 1 else None)
    return reason or ("measured with a paged cache" if inputs.table is None else None)


def _whole_on_gpu(inputs: DecodeInputs) -> str | None:
    return _on_gpu(inputs) or _plain(inputs)


DECODE = {
    peer.name: peer
    for peer in (
        Peer(OURS, "blackwell_sparsek, impl auto", _ours),
        Peer(
            OURS_DENSE,
            "blackwell_sparsek, all pages",
            _ours_dense,
            supports=lambda x: "is the case itself" if x.blocks is None else None,
        ),
        Peer(
            "sdpa",
            "SDPA, torch's choice",
            partial(_sdpa, backends=[SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
            supports=_contiguous_on_cpu,
            rival=True,
        ),
        Peer(
            "sdpa_cudnn",
            "SDPA, cuDNN",
            partial(_sdpa, backends=[SDPBackend.CUDNN_ATTENTION]),
            supports=_contiguous_on_gpu,
            rival=True,
        ),
        Peer(
            "fa3",
            "FlashAttention 3",
            _fa3,
            available=fa3_available,
            supports=_whole_on_gpu,
            rival=True,
        ),
        Peer(
            "flashinfer",
            "FlashInfer, tensor cores",
            _flashinfer,
            available=needs("flashinfer", "BatchDecodeWithPagedKVCacheWrapper"),
            supports=_paged_on_gpu,
            rival=True,
        ),
    )
}


# The suite; decoding one token is bound by reading the cache.

SHAPES = ((1, 1024), (1, 8192), (1, 131072), (16, 8192), (64, 4096))
PAGE_SIZES = (0, 16, 64, 256)


def decode(tiny: bool = False) -> Iterator[Case]:
    """Contiguous and paged, few pages, fp8, unequal lengths, several queries; MQA; D64 to D256."""
    for page_size in (0, 16) if tiny else PAGE_SIZES:
        for batch, length in ((1, 100), (3, 64)) if tiny else SHAPES:
            problem = Decode(batch, length, page_size=page_size)
            if tiny:
                problem = Decode(batch, length, 4, 2, 64, page_size, torch.float32)
            yield _case(problem)
    if tiny:
        yield _case(Decode(2, 128, 4, 2, 64, 16, torch.float32, kept=0.5))
        yield _case(Decode(3, 64, 4, 2, 64, 16, torch.float32, shortest=8))
        yield _case(Decode(2, 100, 4, 2, 64, 0, torch.float32, queries=4))
        return
    for kept in (0.1, 0.25):
        yield _case(Decode(1, 131072, page_size=64, kept=kept))
    for page_size in (0, 64):
        yield _case(Decode(16, 8192, page_size=page_size, is_fp8=True))
    # unequal lengths, then equal lengths with the same number of bytes
    for page_size in (0, 64):
        ragged = Decode(16, 32768, page_size=page_size, shortest=100)
        yield _case(ragged)
        yield _case(replace(ragged, length=sum(ragged.lengths) // 16, shortest=0))
    for heads, kv_heads, dim in ((32, 1, 128), (64, 1, 128), (64, 8, 64)):
        for batch in (1, 4, 32):
            yield _case(Decode(batch, 8192, heads, kv_heads, dim))
    for batch, page_size in ((1, 0), (16, 0), (16, 64)):
        yield _case(Decode(batch, 8192, 16, 8, 256, page_size))
    # drafts of speculative decoding, and short chunks of prompts
    for queries in (4, 16):
        for batch in (1, 16):
            for page_size in (0, 64):
                yield _case(Decode(batch, 8192, page_size=page_size, queries=queries))


def _case(problem: Decode) -> Case:
    peers = tuple(DECODE)
    return Case(
        problem.title, problem.describe(), problem.build, peers, problem.flops, (EAGER, GRAPH)
    )


SUITES = [Suite("decode", decode.__doc__ or "", decode, DECODE, OURS, OURS_DENSE, unit="us")]
