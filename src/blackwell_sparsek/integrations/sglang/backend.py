# mypy: disable-error-code="misc"
"""The class that SGLang asks of a backend: the tables of a step, and attention over them.

SGLang's cache of a layer is [slots, Hkv, D], and `req_to_token` names the slot of each token of a
request. Slots of a page follow each other, so the cache is read as pages, whose table is every
`page_size`-th entry of `req_to_token`. A step is one call: of `attention_decode` if it decodes, of
`attention_varlen` if it extends. Tables for CUDA graphs keep their addresses and are filled before
each replay.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

from ...attention.inputs import MAX_HEAD_DIM
from ...decode.api import attention_decode
from ...ragged.api import attention_varlen

FP8 = torch.float8_e4m3fn
# What SGLang fills in for requests that only pad a graph.
PADDED_LENGTH = 1
# Types of layers whose queries also see the keys after them.
BIDIRECTIONAL = (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)


@dataclass
class StepTables:
    """One step of the engine, the same for all layers."""

    cu_seqlens_q: torch.Tensor
    """int32 [B + 1]"""
    seq_lens: torch.Tensor
    """int32 [B]: keys of each request, including its new tokens."""
    page_table: torch.Tensor
    """int32 [B, pages]"""
    max_q: int


class SparseKAttnBackend(AttentionBackend):
    """SGLang's attention layers by this package: dense, sliding windows, softcap, sinks, fp8."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        refuse_runner(model_runner, pool)
        self.device: torch.device = torch.device(model_runner.device)
        self.req_to_token_pool: Any = model_runner.req_to_token_pool
        self.token_to_kv_pool = pool
        self.page_size: int = model_runner.page_size
        self.context_len: int = model_runner.model_config.context_len
        self.chunk_size: int | None = getattr(model_runner, "attention_chunk_size", None)
        self.forward_metadata: StepTables | None = None
        self.graph_tables: StepTables | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Tables that graphs of up to `max_bs` requests read at each replay."""
        int32: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        pages = -(-self.context_len // self.page_size)
        self.graph_tables = StepTables(
            torch.arange(max_bs + 1, **int32),
            torch.full((max_bs,), PADDED_LENGTH, **int32),
            torch.zeros((max_bs, pages), **int32),
            1,
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that only pad a graph."""
        return PADDED_LENGTH

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The tables of a step that no graph is made of."""
        refuse_mode(forward_batch.forward_mode)
        if forward_batch.forward_mode.is_idle():
            # `forward` of SGLang then calls no layer of this backend
            self.forward_metadata = None
            return
        lengths = forward_batch.seq_lens.to(torch.int32)
        table = self._page_table(forward_batch, _longest(forward_batch))
        if forward_batch.forward_mode.is_decode():
            offsets = torch.arange(len(lengths) + 1, dtype=torch.int32, device=self.device)
            self.forward_metadata = StepTables(offsets, lengths, table, 1)
            return
        new = forward_batch.extend_seq_lens
        offsets = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
        longest = max(map(int, forward_batch.extend_seq_lens_cpu), default=0)
        self.forward_metadata = StepTables(offsets, lengths, table, longest)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the tables that a graph reads; it is captured over whole contexts."""
        refuse_mode(forward_batch.forward_mode)
        if not forward_batch.forward_mode.is_decode():
            raise NotImplementedError("CUDA graphs of this backend are for decoding steps")
        kept, batch = self.graph_tables, forward_batch.batch_size
        assert kept is not None, "init_cuda_graph_state comes first"
        kept.seq_lens[:batch].copy_(forward_batch.seq_lens[:batch])
        table = self._page_table(forward_batch, _longest(forward_batch))
        kept.page_table[:batch, : table.shape[1]].copy_(table[:batch])
        self.forward_metadata = StepTables(
            kept.cu_seqlens_q[: batch + 1], kept.seq_lens[:batch], kept.page_table[:batch], 1
        )

    def _page_table(self, forward_batch: Any, longest: int) -> torch.Tensor:
        """Which pages hold the first `longest` tokens of each request, int32 [B, pages]."""
        slots = self.req_to_token_pool.req_to_token[:, : max(longest, 1) : self.page_size]
        rows = slots[forward_batch.req_pool_indices]
        return rows if self.page_size == 1 else rows // self.page_size

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """One new token of each request."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, options)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Prompts, chunks of them, and requests that decode among them."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, options)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        options: dict[str, Any],
    ) -> torch.Tensor:
        step = self.forward_metadata
        assert step is not None, "init_forward_metadata comes first"
        sinks = options.pop("sinks", None)
        refuse_layer(layer, options, self.chunk_size)
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            loc = KVWriteLoc(forward_batch.out_cache_loc, None)
            pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)
        keys, values = (
            x.unflatten(0, (-1, self.page_size)) for x in pool.get_kv_buffer(layer.layer_id)
        )
        is_fp8 = keys.dtype == FP8
        causal, window = visible(layer, forward_batch.forward_mode)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = queries.new_empty((*queries.shape[:2], layer.v_head_dim))
        arguments: dict[str, Any] = {
            "cache_seqlens": step.seq_lens,
            "page_table": step.page_table,
            "causal": causal,
            "window": window,
            "scale": layer.scaling,
            "softcap": layer.logit_cap or None,
            "sinks": sinks,
            "k_scale": layer.k_scale if is_fp8 else None,
            "v_scale": layer.v_scale if is_fp8 else None,
        }
        # rows past the requests, which pad a step, are for `attention_varlen` to clear
        if forward_batch.forward_mode.is_decode() and len(queries) == len(step.seq_lens):
            q_each, out_each = queries[:, :, None], out[:, :, None]
            attention_decode(q_each, keys, values, out=out_each, **arguments)
        else:
            offsets, most = step.cu_seqlens_q, step.max_q
            attention_varlen(
                queries, keys, values, offsets, max_seqlen_q=most, out=out, **arguments
            )
        return out.flatten(1)


def visible(layer: Any, mode: Any) -> tuple[bool, tuple[int, int] | None]:
    """`causal`, and the window: how many keys before and after its own a query sees.

    As in SGLang's FlashAttention, windows without causality are symmetric. The new token of a
    request that decodes is its last, so no key follows it.
    """
    causal = mode.is_decode() or layer.attn_type not in BIDIRECTIONAL
    reach = layer.sliding_window_size
    return causal, (reach, 0 if causal else reach) if reach > -1 else None


def _longest(forward_batch: Any) -> int:
    """The most keys of a request, from the lengths that SGLang keeps on the host."""
    return int(forward_batch.seq_lens_cpu.max()) if len(forward_batch.seq_lens_cpu) else 0


def refuse_runner(runner: Any, pool: Any) -> None:
    """Raise for models and pools that this backend cannot serve."""
    if runner.use_mla_backend:
        raise NotImplementedError("multi-head latent attention (MLA) is not supported")
    if runner.model_config.is_encoder_decoder:
        raise NotImplementedError("cross attention of encoder-decoder models is not supported")
    args = runner.server_args
    if getattr(args, "speculative_algorithm", None) is not None:
        raise NotImplementedError("speculative decoding is not supported")
    if getattr(args, "dcp_size", 1) > 1 or getattr(args, "enable_prefill_cp", False):
        raise NotImplementedError(
            "context parallelism (--dcp-size, --enable-prefill-cp) is not supported"
        )
    # models whose new tokens see all of the prompt, and a window of what follows it
    if getattr(runner, "prefill_aware_swa", False) and (runner.sliding_window_size or -1) > -1:
        raise NotImplementedError(
            "sliding windows beside the whole prompt (prefill_aware_swa) are not supported: "
            "use --attention-backend fa3"
        )
    if type(pool) is not MHATokenToKVPool:
        raise NotImplementedError(
            f"needs keys and values in one MHATokenToKVPool, got {type(pool).__name__}: hybrid "
            "sliding-window, FP4 and latent pools are not supported"
        )
    if runner.model_config.head_dim > MAX_HEAD_DIM:
        got = runner.model_config.head_dim
        raise NotImplementedError(f"needs heads of at most {MAX_HEAD_DIM}, got {got}")


def refuse_mode(mode: Any) -> None:
    """Raise for steps of speculative decoding."""
    if not (mode.is_decode() or mode.name in ("EXTEND", "MIXED", "IDLE")):
        raise NotImplementedError(f"steps of the kind {mode.name} are not supported")


def refuse_layer(layer: Any, options: dict[str, Any], chunk_size: int | None) -> None:
    """Raise for layers and arguments that this backend would have to ignore."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise NotImplementedError(f"{', '.join(given)}: not supported by this backend")
    if layer.is_cross_attention:
        raise NotImplementedError("cross attention is not supported")
    if layer.attn_type not in (AttentionType.DECODER, *BIDIRECTIONAL):
        raise NotImplementedError(f"attention of the type {layer.attn_type} is not supported")
    if layer.use_irope and chunk_size is not None:
        raise NotImplementedError(
            f"attention within chunks of {chunk_size} tokens (use_irope, attention_chunk_size) is "
            "not supported: use --attention-backend fa3"
        )
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise NotImplementedError(
            f"logits are capped with tanh, not with {layer.logit_capping_method}"
        )
    if layer.xai_temperature_len > 0:
        raise NotImplementedError("temperatures by length (xai_temperature_len) are not supported")
