# mypy: disable-error-code="misc"
"""The classes that vLLM asks of a backend: what it supports, metadata of a step, the layer itself.

A step is one call over vLLM's pages: of `attention_decode` if all requests have the same few new
tokens, else of `attention_varlen`, whatever it mixes: decoding, chunks of prompts, whole prompts.
vLLM's cache of a layer is logically [blocks, Hkv, block_size, 2 D], keys before values, in any of
its memory layouts; here it is two views [blocks, block_size, Hkv, D].

Under `SparseReads`, layers without a sliding window keep a summary of each block, which every step
brings up to date. Decoding steps, and prompts cut into runs of a few queries, read the blocks that
these choose; a run is a sequence of its own to `attention_varlen`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from ...attention.inputs import MAX_HEAD_DIM
from ...decode.api import attention_decode
from ...kv_cache.append import kv_append
from ...kv_cache.selection import PageSummaries, empty_summaries, page_summaries, topk_pages
from ...ragged.api import attention_varlen

FP8 = torch.float8_e4m3fn
# What vLLM calls a cache of e4m3.
FP8_NAMES = ("fp8", "fp8_e4m3")
LEAST_CAPABILITY = (8, 0)
# New tokens of a request for which `attention_decode` is made.
MOST_DECODED = 16
# Tokens of the prompt of `_warm_up`, for which the kernels of all longer prompts are compiled.
WARM_UP_TOKENS = 128
# The name of this package in `additional_config`.
CONFIG = "blackwell_sparsek"


class SparseKBackend(AttentionBackend):
    """The capabilities of this package, as vLLM's attention layers query them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8_NAMES]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The name that vLLM looks up in its list of backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["SparseKImpl"]:
        """The layer."""
        return SparseKImpl

    @staticmethod
    def get_builder_cls() -> type["SparseKMetadataBuilder"]:
        """The class that builds the metadata of a step."""
        return SparseKMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """The cache of a layer, which vLLM 0.26 asks for and newer releases know."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Up to what the kernels take."""
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        """A logit per head in the denominator."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """The latest keys only."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Bidirectional attention over the cache."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Bits that do not depend on the other requests of a step."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Steps are planned from the lengths on the host, so the device must have the same."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """From sm_80 on, as all kernels of this package."""
        return (capability.major, capability.minor) >= LEAST_CAPABILITY

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why these do not go together, or None."""
        if kv_cache_dtype in FP8_NAMES:
            if dtype == torch.float32:
                return "an fp8 cache needs float16 or bfloat16 queries"
            if (device_capability.major, device_capability.minor) < (8, 9):
                return "an fp8 cache needs compute capability 8.9"
        return connector_problem(get_current_vllm_config_or_none())


@dataclass(frozen=True)
class SparseReads:
    """Which blocks of the cache are read; see `sparse_reads`."""

    decode_blocks: int | None = None
    prefill_blocks: int | None = None
    prefill_queries: int = 64
    keep_first: int = 1
    keep_last: int = 2
    summary: str = "minmax"

    def __post_init__(self) -> None:
        asked = {name: getattr(self, name) for name in ("decode_blocks", "prefill_blocks")}
        asked = {name: value for name, value in asked.items() if value is not None}
        for name in (*asked, "prefill_queries", "keep_first", "keep_last"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{CONFIG}.{name} is {value!r}; expected an int from 0 on")
        if self.keep_last < 1:
            raise ValueError(f"{CONFIG}.keep_last is 0; a new token lies in the last block")
        if self.prefill_queries < 1:
            raise ValueError(f"{CONFIG}.prefill_queries is 0; expected at least 1")
        kept = self.keep_first + self.keep_last
        for name, value in asked.items():
            if value < kept:
                raise ValueError(
                    f"{CONFIG}.{name} is {value}; expected at least {kept}, "
                    "the sum of keep_first and keep_last"
                )
        if self.summary not in ("minmax", "mean"):
            raise ValueError(f"{CONFIG}.summary is {self.summary!r}; expected minmax or mean")

    def kept_of_run(self, block_size: int) -> int:
        """Blocks at the end of a run that are always read; they include those of its queries."""
        most = (self.prefill_queries + block_size - 2) // block_size + 1
        kept = most + self.keep_last - 1
        if self.prefill_blocks is not None and self.prefill_blocks < self.keep_first + kept:
            raise ValueError(
                f"{CONFIG}.prefill_blocks is {self.prefill_blocks}; expected at least "
                f"{self.keep_first + kept}: keep_first, keep_last, and the {most} blocks of "
                f"{block_size} tokens that {self.prefill_queries} queries (prefill_queries) reach"
            )
        return kept


def sparse_reads(vllm_config: Any) -> SparseReads | None:
    """The options under this package's name in `additional_config` of vLLM, or None."""
    given = getattr(vllm_config, "additional_config", None)
    asked = given.get(CONFIG) if isinstance(given, Mapping) else None
    if asked is None:
        return None
    names = [field.name for field in fields(SparseReads)]
    if not isinstance(asked, Mapping) or not set(names[:2]) & set(asked) or set(asked) - set(names):
        raise ValueError(
            f"additional_config[{CONFIG!r}] is {asked!r}; expected decode_blocks, prefill_blocks "
            f"or both, and optionally {', '.join(names[2:])}"
        )
    return SparseReads(**asked)


def connector_problem(vllm_config: Any) -> str | None:
    """Why the KV connector of a configuration does not go with its sparse reads, or None.

    Summaries are made of the tokens that a step computes; blocks that are loaded have none.
    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None or not transfer.is_kv_transfer_instance:
        return None
    if sparse_reads(vllm_config) is None:
        return None
    return (
        f"the KV connector {transfer.kv_connector} loads blocks without the summaries by which "
        f"additional_config[{CONFIG!r}] chooses what is read: use only one of the two"
    )


class PromptRuns(NamedTuple):
    """The prompts of a step, cut into runs of at most `prefill_queries` queries."""

    decodes: int
    """Requests before the prompts, each with one new token."""
    starts: torch.Tensor
    """int32 [runs + 1]: offsets of their queries, from 0 at the first prompt."""
    request: torch.Tensor
    """int64 [runs]"""
    later: torch.Tensor
    """int32 [runs]: how many tokens of the request follow the run."""
    rows: torch.Tensor
    """int64 [runs, prefill_queries]: their queries; the last one again where there are fewer."""


def prompt_runs(offsets: torch.Tensor, most: int, device: torch.device) -> PromptRuns | None:
    """Cut the requests after those with one token each, from offsets on the CPU; None if none."""
    lengths = offsets.diff()
    longer = (lengths != 1).nonzero()
    if longer.numel() == 0:
        return None
    decodes = int(longer[0])
    lengths = lengths[decodes:].long()
    counts = (lengths + most - 1) // most
    request = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    nth = torch.arange(len(request)) - (counts.cumsum(0) - counts)[request]
    first = nth * most
    ends = torch.minimum(first + most, lengths[request])
    starts = torch.nn.functional.pad((ends - first).cumsum(0), (1, 0))
    rows = starts[:-1, None] + torch.arange(most)
    rows = torch.minimum(rows, starts[1:, None] - 1)
    later = lengths[request] - ends
    made = (starts.int(), request + decodes, later.int(), rows)
    return PromptRuns(decodes, *(x.to(device, non_blocking=True) for x in made))


def tokens_of_each(offsets: torch.Tensor, most: int, num_tokens: int) -> int | None:
    """How many new tokens every request has, from offsets on the CPU; None if they differ.

    Requests that pad a graph come last. They have rows among the tokens, but no tokens of their
    own; their lengths are 0, and so is their output.
    """
    # the last request before the padding must not have fewer
    if (len(offsets) - 1) * most != num_tokens or (most and int(offsets[-1]) % most):
        return None
    first = torch.arange(len(offsets), dtype=offsets.dtype) * most
    return most if torch.equal(offsets, first.clamp(max=int(offsets[-1]))) else None


@dataclass
class SparseKMetadata:
    """One step of the engine, the same for all layers of a cache group."""

    num_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    causal: bool
    tokens_of_each: int | None
    """New tokens of every request if all have the same number; None if not."""
    sparse: SparseReads | None = None
    runs: PromptRuns | None = None
    """Prompts of which part of the cache is read; None if all of it, or if there are none."""


class StepPart(NamedTuple):
    """Requests of a step that one call serves."""

    rows: slice
    """Which queries of the step are theirs."""
    offsets: torch.Tensor
    max_tokens: int
    tokens_of_each: int | None
    lengths: torch.Tensor
    block_table: torch.Tensor
    kv_blocks: torch.Tensor | None = None


class SparseKMetadataBuilder(AttentionMetadataBuilder[SparseKMetadata]):
    """Metadata of a step; holds vLLM's own tensors, which graphs read again at each replay."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.sparse: SparseReads | None = sparse_reads(vllm_config)
        if problem := connector_problem(vllm_config):
            raise NotImplementedError(problem)
        self.device = device
        if self.sparse is not None and self.sparse.prefill_blocks is not None:
            # vLLM then puts requests that decode before prompts
            self.reorder_batch_threshold = 1

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """A graph of several tokens a request would repeat how these were cut into runs."""
        sparse = sparse_reads(vllm_config)
        if sparse is not None and sparse.prefill_blocks is not None:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseKMetadata:
        """Take over what a step needs; `fast_build` has no faster way."""
        if common_prefix_len:
            raise NotImplementedError(
                f"cascade attention is not supported, got a common prefix of {common_prefix_len}"
            )
        given = common_attn_metadata
        if isinstance(given.causal, torch.Tensor):
            raise NotImplementedError("causal must be one bool for all requests, got a tensor")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(given, name) is not None:
                raise NotImplementedError(f"{name} is not supported by this backend")
        runs = None
        host_offsets = given.query_start_loc_cpu[: given.num_reqs + 1]
        if self.sparse is not None and self.sparse.prefill_blocks is not None:
            if not given.causal:
                raise NotImplementedError(
                    f"{CONFIG}.prefill_blocks reads part of the cache for causal attention only"
                )
            runs = prompt_runs(host_offsets, self.sparse.prefill_queries, self.device)
        return SparseKMetadata(
            given.num_actual_tokens,
            given.query_start_loc,
            given.seq_lens,
            given.block_table_tensor,
            given.slot_mapping,
            given.max_query_len,
            given.causal,
            tokens_of_each(host_offsets, given.max_query_len, given.num_actual_tokens),
            self.sparse,
            runs,
        )

    def update_block_table(
        self, metadata: SparseKMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> SparseKMetadata:
        """The same step for another cache group."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class SparseKImpl(AttentionImpl[SparseKMetadata]):
    """An attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"only decoder attention is supported, got {attn_type}")
        if self.dcp_world_size > 1:
            raise NotImplementedError("decode context parallelism is not supported")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale: float = float(scale)
        self.num_kv_heads: int = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window: int | None = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap: float | None = logits_soft_cap or None
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.summaries: PageSummaries | None = None
        self.is_warm = False
        self.slopes: torch.Tensor | None = None
        if alibi_slopes is not None:
            self.slopes = torch.tensor(alibi_slopes, dtype=torch.float32)

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as [blocks, block_size, Hkv, D], views of vLLM's cache."""
        if self.kv_cache_dtype in FP8_NAMES:
            kv_cache = kv_cache.view(FP8)
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return k, v

    def _scales(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Factors of keys and values in an fp8 cache."""
        if self.kv_cache_dtype not in FP8_NAMES:
            return None, None
        return layer._k_scale, layer._v_scale

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the keys and values of a step; those past the slots are padding."""
        tokens = slot_mapping.shape[0]
        k_scale, v_scale = self._scales(layer)
        kv_append(
            *self._pages(kv_cache),
            key[:tokens],
            value[:tokens],
            slot_mapping=slot_mapping,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def _window(self, causal: bool) -> tuple[int, int] | None:
        """Keys before and after a query's own; without causality vLLM's windows are symmetric."""
        if self.sliding_window is None:
            return None
        reach = self.sliding_window - 1
        return reach, 0 if causal else reach

    def _updated_summaries(self, keys: torch.Tensor, step: SparseKMetadata) -> PageSummaries | None:
        """Summaries with the new tokens of a step; None where all of the cache is read."""
        sparse = step.sparse
        if sparse is None or self.sliding_window is not None:
            return None
        if self.summaries is None or self.summaries.low.shape[0] != keys.shape[0]:
            size = keys.shape[1]
            self.summaries = empty_summaries(keys, sparse.summary, size, paged=True)
        page_summaries(
            keys,
            cache_seqlens=step.seq_lens,
            page_table=step.block_table,
            kind=sparse.summary,
            out=self.summaries,
            new_tokens=step.max_query_len,
        )
        return self.summaries

    def _parts(
        self, query: torch.Tensor, keys: torch.Tensor, step: SparseKMetadata
    ) -> Iterator[StepPart]:
        """The calls of a step: one, unless decoding and prompts read different blocks."""
        summaries, sparse, runs = self._updated_summaries(keys, step), step.sparse, step.runs
        if summaries is None or sparse is None or (runs is None and step.tokens_of_each != 1):
            yield StepPart(
                slice(0, step.num_tokens),
                step.query_start_loc,
                step.max_query_len,
                step.tokens_of_each,
                step.seq_lens,
                step.block_table,
            )
            return
        decodes = step.num_tokens if runs is None else runs.decodes
        if decodes:
            lengths, table = step.seq_lens[:decodes], step.block_table[:decodes]
            chosen = None
            if sparse.decode_blocks is not None:
                chosen = topk_pages(
                    query[:decodes, :, None],
                    summaries,
                    sparse.decode_blocks,
                    cache_seqlens=lengths,
                    page_table=table,
                    keep_first=sparse.keep_first,
                    keep_last=sparse.keep_last,
                )
            offsets = step.query_start_loc[: decodes + 1]
            yield StepPart(slice(0, decodes), offsets, 1, 1, lengths, table, chosen)
        if runs is None:
            return
        assert sparse.prefill_blocks is not None
        prompts = slice(decodes, step.num_tokens)
        lengths, table = step.seq_lens[runs.request] - runs.later, step.block_table[runs.request]
        chosen = topk_pages(
            query[prompts][runs.rows].transpose(1, 2),
            summaries,
            sparse.prefill_blocks,
            cache_seqlens=lengths,
            page_table=table,
            keep_first=sparse.keep_first,
            keep_last=sparse.kept_of_run(keys.shape[1]),
        )
        yield StepPart(prompts, runs.starts, sparse.prefill_queries, None, lengths, table, chosen)

    def _warm_up(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_table: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        """Compile what steps with prompts run: before it serves, vLLM only makes steps that decode.

        A short prompt and a request that decodes read the first page; what comes out is dropped.
        The page table has the row stride of `block_table`, since kernels are compiled for it.
        """
        self.is_warm = True
        prompt, device = WARM_UP_TOKENS, query.device
        q = query.new_zeros(prompt + 1, self.num_heads, self.head_size)
        offsets = torch.tensor([0, prompt, prompt + 1], dtype=torch.int32, device=device)
        pages = max(-(-prompt // keys.shape[1]), block_table.stride(0))
        part = StepPart(
            slice(0, prompt + 1),
            offsets,
            prompt,
            None,
            torch.tensor([prompt, 1], dtype=torch.int32, device=device),
            torch.zeros(2, pages, dtype=torch.int32, device=device),
        )
        _attend(q, keys, values, torch.empty_like(q), part, options)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SparseKMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the queries of a step [T, Hq, D] over their pages, into `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantized outputs are not supported by this backend")
        if attn_metadata is None:
            # vLLM measures memory
            return output.fill_(0)
        if self.slopes is not None and self.slopes.device != query.device:
            self.slopes = self.slopes.to(query.device)
        tokens = attn_metadata.num_tokens
        k_scale, v_scale = self._scales(layer)
        keys, values = self._pages(kv_cache)
        out = output[:tokens].view(tokens, self.num_heads, self.head_size)
        options: dict[str, Any] = {
            "causal": attn_metadata.causal,
            "window": self._window(attn_metadata.causal),
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "alibi_slopes": self.slopes,
            "k_scale": k_scale,
            "v_scale": v_scale,
        }
        if not self.is_warm and query.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._warm_up(query, keys, values, attn_metadata.block_table, options)
        for part in self._parts(query[:tokens], keys, attn_metadata):
            _attend(query[:tokens], keys, values, out, part, options)
        return output


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    part: StepPart,
    options: dict[str, Any],
) -> None:
    """Attention of a part of the queries of a step, into its rows of `out`."""
    q, o = query[part.rows], out[part.rows]
    options = {
        **options,
        "cache_seqlens": part.lengths,
        "page_table": part.block_table,
        "kv_blocks": part.kv_blocks,
    }
    each = part.tokens_of_each
    # decoding splits long sequences by what else is in the batch
    if each is None or not 1 <= each <= MOST_DECODED or envs.VLLM_BATCH_INVARIANT:
        attention_varlen(
            q,
            keys,
            values,
            part.offsets,
            max_seqlen_q=part.max_tokens,
            out=o,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            **options,
        )
        return
    q, o = (x.unflatten(0, (-1, each)).transpose(1, 2) for x in (q, o))
    attention_decode(q, keys, values, out=o, **options)
