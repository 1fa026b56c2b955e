"""The backend for SGLang with SGLang's own classes, on the CPU, against SGLang's torch backend.

Needs an importable SGLang: `make sglang-test` unpacks its wheel beside what its classes import.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed: make sglang-test")

from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from blackwell_sparsek.integrations import sglang as integration
from blackwell_sparsek.integrations.sglang.backend import SparseKAttnBackend
from blackwell_sparsek.testing.inputs import normal

HEADS, KV_HEADS, DIM, SLOTS, CONTEXT = 4, 2, 16, 512, 128


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


class Engine:
    """What SGLang's runner does around a layer, for two backends over two caches."""

    def __init__(self, requests, page_size=1, dtype=torch.float32, stored=None):
        self.dtype = dtype
        pools = [
            MHATokenToKVPool(
                SLOTS, page_size, stored or dtype, KV_HEADS, DIM, 1, "cpu",
                enable_memory_saver=False, enable_alt_stream=False,
            )
            for _ in range(2)
        ]  # fmt: skip
        rows = ReqToTokenPool(requests, CONTEXT, "cpu", enable_memory_saver=False)
        # pages of a request in any order, their slots one after the other
        pages = torch.randperm(SLOTS // page_size, generator=torch.Generator().manual_seed(1)) + 1
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
        for b in range(requests):
            rows.req_to_token[b + 1] = slots[b * CONTEXT : (b + 1) * CONTEXT]
        self.rows, self.lengths = rows, torch.zeros(requests, dtype=torch.int64)
        self.runners = [runner_of(pool, rows, page_size) for pool in pools]
        self.backends = [
            SparseKAttnBackend(self.runners[0]),
            TorchNativeAttnBackend(self.runners[1]),
        ]
        self.seed = 0

    def batch(self, new, mode):
        """A batch with `new` tokens of each request."""
        before = self.lengths.clone()
        self.lengths = self.lengths + torch.tensor(new)
        indices = torch.arange(1, len(new) + 1)
        spans = zip(indices, before.tolist(), self.lengths.tolist(), strict=True)
        loc = torch.cat([self.rows.req_to_token[i, a:b] for i, a, b in spans]).long()
        return SimpleNamespace(
            forward_mode=mode, batch_size=len(new), req_pool_indices=indices, out_cache_loc=loc,
            seq_lens=self.lengths, seq_lens_cpu=self.lengths.cpu(), encoder_lens=None,
            extend_seq_lens=int32(new), extend_seq_lens_cpu=list(new),
            extend_prefix_lens=before.int(),
        )  # fmt: skip

    def step(self, layer, new, mode=ForwardMode.EXTEND, graph=False, **options):
        """The outputs of both backends for new tokens of each request."""
        batch = self.batch(new, mode)
        tokens = sum(new)
        q, k, v = (
            normal(tokens, heads, DIM, seed=self.seed + i, dtype=self.dtype)
            for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
        )
        self.seed += 3
        made = []
        for backend in self.backends:
            if graph and isinstance(backend, SparseKAttnBackend):
                backend.init_forward_metadata_out_graph(batch)
            else:
                backend.init_forward_metadata(batch)
            given = options if isinstance(backend, SparseKAttnBackend) else {}
            made.append(backend.forward(q.flatten(1), k, v, layer, batch, **given))
        return made


def runner_of(pool, rows, page_size, **changes):
    config = SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=False, head_dim=DIM)
    given = {
        "device": "cpu", "token_to_kv_pool": pool, "req_to_token_pool": rows,
        "model_config": config, "page_size": page_size, "use_mla_backend": False,
        "server_args": SimpleNamespace(speculative_algorithm=None),
    }  # fmt: skip
    return SimpleNamespace(**(given | changes))


def layer_of(**options):
    return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0, **options)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [-1, 7])
def test_prompts_chunks_and_decoding(page_size, window):
    engine, layer = Engine(3, page_size), layer_of(sliding_window_size=window)
    for new, mode in (
        ((20, 1, 33), ForwardMode.EXTEND), ((1, 9, 5), ForwardMode.MIXED),
        ((1, 1, 1), ForwardMode.DECODE), ((1, 1, 1), ForwardMode.DECODE),
    ):  # fmt: skip
        ours, theirs = engine.step(layer, new, mode)
        torch.testing.assert_close(ours, theirs)


def test_graphs_keep_their_tables():
    engine, layer = Engine(3, 16), layer_of()
    engine.step(layer, (20, 30, 40))
    ours = engine.backends[0]
    ours.init_cuda_graph_state(8, 8)
    places = []
    for _ in range(20):
        got, want = engine.step(layer, (1, 1, 1), ForwardMode.DECODE, graph=True)
        torch.testing.assert_close(got, want)
        step = ours.forward_metadata
        places.append((step.page_table.data_ptr(), step.seq_lens.data_ptr(), step.max_q))
    assert len(set(places)) == 1
    assert ours.get_cuda_graph_seq_len_fill_value() == 1
    with pytest.raises(NotImplementedError, match="for decoding steps"):
        ours.init_forward_metadata_out_graph(engine.batch((2, 2, 2), ForwardMode.EXTEND))


@pytest.mark.parametrize("rows", [0, 2])
def test_idle_batches_attend_to_nothing(rows):
    """A rank without requests, whose rows, if any, fill up what ranks run together."""
    engine, layer = Engine(2), layer_of()
    engine.step(layer, (20, 30))
    batch = engine.batch((0,) * rows, ForwardMode.IDLE) if rows else SimpleNamespace()
    batch.forward_mode, batch.seq_lens_cpu = ForwardMode.IDLE, None
    batch.extend_seq_lens = batch.extend_seq_lens_cpu = batch.extend_prefix_lens = None
    q, k, v = (torch.zeros(rows, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    for backend in engine.backends:
        before = [x.clone() for x in backend.token_to_kv_pool.get_kv_buffer(0)]
        backend.init_forward_metadata(batch)
        assert backend.forward_metadata is None
        assert backend.forward(q.flatten(1), k, v, layer, batch).shape == (rows, HEADS * DIM)
        after = backend.token_to_kv_pool.get_kv_buffer(0)
        assert all(a.equal(b) for a, b in zip(before, after, strict=True))


def bidirectional(engine, q, new, window):
    """The new tokens of each request in fp64, over the cache of SGLang's torch backend.

    That backend itself ignores windows of such layers and one of the types.
    """
    cache = engine.backends[1].token_to_kv_pool.get_kv_buffer(0)
    outs = []
    for b, own in enumerate(q.double().split(new)):
        slots = engine.rows.req_to_token[b + 1, : engine.lengths[b]].long()
        k, v = (x[slots].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in cache)
        keys = torch.arange(len(k))
        distance = (keys[-len(own) :, None] - keys).abs()
        scores = torch.einsum("qhd,khd->hqk", own, k) * DIM**-0.5
        if window > -1:
            scores = scores.masked_fill(distance > window, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outs).float().flatten(1)


@pytest.mark.parametrize("window", [-1, 7])
@pytest.mark.parametrize(
    "attn_type", [AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL]
)
def test_bidirectional_attention(attn_type, window):
    """As in SGLang's FlashAttention, windows of both types reach as far to the right."""
    engine, layer = Engine(2), layer_of(attn_type=attn_type, sliding_window_size=window)
    for new, mode in (
        ((20, 33), ForwardMode.EXTEND), ((12, 9), ForwardMode.EXTEND), ((1, 10), ForwardMode.MIXED),
        ((1, 1), ForwardMode.DECODE),
    ):  # fmt: skip
        q = normal(sum(new), HEADS, DIM, seed=engine.seed)
        ours, _ = engine.step(layer, new, mode)
        torch.testing.assert_close(ours, bidirectional(engine, q, new, window))


def test_softcap_and_sinks():
    """Against the formula; SGLang's torch backend has neither."""
    engine, layer = Engine(1), layer_of(logit_cap=3.0)
    sinks = torch.randn(HEADS)
    q, k, v = (
        normal(25, heads, DIM, seed=i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    ours, _ = engine.step(layer, (25,), sinks=sinks)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = 3.0 * torch.tanh(torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5 / 3.0)
    scores = scores.masked_fill(torch.ones(25, 25).triu(1).bool(), -torch.inf)
    weights = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, 25, 1)], -1).softmax(-1)
    want = torch.einsum("hqk,khd->qhd", weights[..., :-1], v).flatten(1)
    torch.testing.assert_close(ours, want)


def test_registration():
    for _ in range(2):
        integration.register()
    assert ATTENTION_BACKEND_CHOICES.count(integration.NAME) == 1
    engine = Engine(1)
    made = ATTENTION_BACKENDS[integration.NAME](engine.runners[0])
    assert isinstance(made, SparseKAttnBackend)


def test_refusals():
    engine = Engine(1)
    pool, rows = engine.runners[0].token_to_kv_pool, engine.rows
    speculative = SimpleNamespace(speculative_algorithm="EAGLE")
    wide = SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=False, head_dim=512)
    crossed = SimpleNamespace(context_len=CONTEXT, is_encoder_decoder=True, head_dim=DIM)
    for changes, why in (
        ({"use_mla_backend": True}, "MLA"), ({"server_args": speculative}, "speculative"),
        ({"model_config": wide}, "at most 256, got 512"), ({"model_config": crossed}, "cross"),
        ({"token_to_kv_pool": object()}, "MHATokenToKVPool, got object"),
        ({"server_args": SimpleNamespace(dcp_size=2)}, "context parallelism"),
        ({"server_args": SimpleNamespace(enable_prefill_cp=True)}, "context parallelism"),
        ({"prefill_aware_swa": True, "sliding_window_size": 9}, "prefill_aware_swa.*fa3"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=why):
            SparseKAttnBackend(runner_of(pool, rows, 1, **changes))
    with pytest.raises(NotImplementedError, match="TARGET_VERIFY"):
        engine.backends[0].init_forward_metadata(engine.batch((3,), ForwardMode.TARGET_VERIFY))
    for layer, options, why in (
        (layer_of(is_cross_attention=True), {}, "cross"),
        (layer_of(logit_cap=2.0, logit_capping_method="other"), {}, "tanh, not with other"),
        (layer_of(), {"k_rope": torch.zeros(1)}, "k_rope: not supported"),
        (layer_of(attn_type="encoder_decoder"), {}, "type encoder_decoder"),
    ):
        with pytest.raises(NotImplementedError, match=why):
            engine.step(layer, (3,), **options)


def test_layers_that_attend_within_chunks_are_refused():
    """Those of Llama 4 with rotary embeddings; without chunks they are like any other."""
    engine, layer = Engine(1), layer_of(use_irope=True)
    torch.testing.assert_close(*engine.step(layer, (20,)))
    runner = engine.runners[0]
    runner.attention_chunk_size = 8
    engine.backends[0] = SparseKAttnBackend(runner)
    torch.testing.assert_close(*engine.step(layer_of(), (9,)))
    with pytest.raises(NotImplementedError, match=r"chunks of 8 tokens.*fa3"):
        engine.step(layer, (3,))
