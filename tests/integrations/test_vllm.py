"""The backend for vLLM with vLLM's own classes, on the CPU, against a dense formula.

Needs an importable vLLM: `make vllm-test` unpacks its wheel, without its compiled parts.
"""

import dataclasses
import math
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_layout import KVCacheLayout

from blackwell_sparsek.integrations import vllm as integration
from blackwell_sparsek.integrations.vllm import backend
from blackwell_sparsek.integrations.vllm.backend import SparseKBackend, SparseKImpl
from blackwell_sparsek.ragged.api import attention_varlen
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 16, 8, 40
# one layer of a cache, [blocks, heads, slots, content], in the layouts of vLLM
LAYOUTS = [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.LHBNC]
SM90 = SimpleNamespace(major=9, minor=0)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def cache_of(layout, dtype):
    """A poisoned cache, logically [blocks, Hkv, block_size, 2 D]."""
    order = layout.layer_view_order
    shape = (BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
    memory = torch.full([shape[i] for i in order], torch.nan).to(dtype)
    return memory.permute([order.index(i) for i in range(4)])


class Engine:
    """What vLLM's runner does around a layer: lengths, blocks, slots, metadata of each step."""

    def __init__(
        self, requests, layout=LAYOUTS[0], dtype=torch.float32, stored=None, sparse=None, **options
    ):
        self.layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
        self.impl = SparseKBackend.get_impl_cls()(
            HEADS, DIM, DIM**-0.5, KV_HEADS, **{"alibi_slopes": None, **options}
        )
        self.cache = cache_of(layout, stored or dtype)
        builder = SparseKBackend.get_builder_cls()
        config = SimpleNamespace(additional_config={backend.CONFIG: sparse} if sparse else {})
        self.builder = builder(None, ["layer"], config, torch.device("cpu"))
        self.table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1))
        self.table = self.table.view(requests, -1).int()
        self.keys = [torch.zeros(0, KV_HEADS, DIM, dtype=dtype) for _ in range(requests)]
        self.values = list(self.keys)
        self.dtype = dtype
        self.seed = 0

    def step(self, lengths, padding=0, causal=True):
        """New tokens for each request; returns queries and outputs of each."""
        tokens = sum(lengths)
        q, k, v = (
            normal(tokens + padding, heads, DIM, seed=self.seed + i, dtype=self.dtype)
            for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
        )
        self.seed += 3
        slots, starts = [], [0]
        for b, n in enumerate(lengths):
            first, own = len(self.keys[b]), slice(starts[-1], starts[-1] + n)
            at = torch.arange(first, first + n)
            slots.append(self.table[b].long()[at // BLOCK] * BLOCK + at % BLOCK)
            self.keys[b] = torch.cat([self.keys[b], k[own]])
            self.values[b] = torch.cat([self.values[b], v[own]])
            starts.append(starts[-1] + n)
        mapping = torch.cat([*slots, torch.full((padding,), -1)])
        common = CommonAttentionMetadata(
            query_start_loc=int32(*starts),
            query_start_loc_cpu=int32(*starts),
            seq_lens=int32(*map(len, self.keys)),
            num_reqs=len(lengths),
            num_actual_tokens=tokens,
            max_query_len=max(lengths),
            max_seq_len=max(map(len, self.keys)),
            block_table_tensor=self.table,
            slot_mapping=mapping,
            causal=causal,
        )
        metadata = self.builder.build(0, common)
        self.impl.do_kv_cache_update(self.layer, k, v, self.cache, metadata.slot_mapping)
        output = torch.full((tokens + padding, HEADS * DIM), 7.0, dtype=self.dtype)
        got = self.impl.forward(self.layer, q, k, v, self.cache, metadata, output)
        assert got is output and output[tokens:].eq(7.0).all()
        output = output[:tokens].view(tokens, HEADS, DIM)
        ranges = [slice(a, b) for a, b in pairwise(starts)]
        return [(q[own], output[own]) for own in ranges]

    def check(self, results, **options):
        for b, (q, out) in enumerate(results):
            kv = (self.keys[b], self.values[b])
            exact = formula(q.double(), *(x.double() for x in kv), **options)
            assert_within_budget(out, exact, formula(q, *kv, **options), what=f"request {b}")


def formula(q, k, v, *, window=None, softcap=None, sinks=None, slopes=None, causal=True):
    """One request, [S, H, D]; its queries are the last ones."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    p = torch.arange(len(q))[:, None] + len(k) - len(q)
    j = torch.arange(len(k))[None, :]
    if slopes is not None:
        scores = scores - torch.tensor(slopes, dtype=q.dtype)[:, None, None] * (p - j).abs()
    seen = j <= p if causal else j >= 0
    if window:
        seen = seen & ((p - j).abs() < window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(q.dtype).view(-1, 1, 1).expand(-1, len(q), 1)
        scores = torch.cat([scores, column], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_chunks_and_decoding(layout, dtype):
    """Whole prompts, decoding, then all kinds in one step, with padding as in a graph."""
    engine = Engine(4, layout, dtype)
    engine.check(engine.step((9, 20, 1, 33)))
    engine.check(engine.step((1, 1, 1, 1), padding=3))
    engine.check(engine.step((1, 17, 7, 1)))


@pytest.fixture
def calls(monkeypatch):
    """The names of the public functions that layers call."""
    names = []
    for function in (backend.attention_decode, backend.attention_varlen):

        def spy(*args, function=function, **options):
            names.append(function.__name__)
            return function(*args, **options)

        monkeypatch.setattr(backend, function.__name__, spy)
    return names


@pytest.mark.parametrize("lengths, called", [
    ((1, 1, 1, 1), "attention_decode"), ((3, 3, 3, 3), "attention_decode"),
    ((16, 16, 16, 16), "attention_decode"), ((17, 17, 17, 17), "attention_varlen"),
    ((2, 1, 2, 2), "attention_varlen"), ((1, 2, 2, 2), "attention_varlen"),
], ids=str)  # fmt: skip
def test_requests_with_as_many_tokens_each_are_decoded(lengths, called, calls):
    engine = Engine(4)
    engine.check(engine.step((9, 20, 5, 33)))
    calls.clear()
    engine.check(engine.step(lengths))
    assert calls == [called]


def test_requests_that_pad_a_graph_get_zeros():
    """A graph of four requests replayed for two: the others have neither tokens nor keys."""
    engine = Engine(4)
    engine.check(engine.step((9, 20, 0, 0))[:2])
    starts, q = int32(0, 1, 2, 2, 2), normal(4, HEADS, DIM, seed=5, dtype=torch.float32)
    common = CommonAttentionMetadata(
        starts, starts, int32(9, 20, 0, 0), 4, 4, 1, 20, engine.table, torch.full((4,), -1)
    )
    metadata = engine.builder.build(0, common)
    assert metadata.tokens_of_each == 1
    # two requests have tokens, the second of them fewer
    shorter = int32(0, 2, 3, 3, 3)
    changes = {"query_start_loc_cpu": shorter, "num_actual_tokens": 8, "max_query_len": 2}
    changed = common.replace(query_start_loc=shorter, **changes)
    assert engine.builder.build(0, changed).tokens_of_each is None
    # four rows, but one and two tokens
    uneven = int32(0, 1, 3)
    changes = {"query_start_loc_cpu": uneven, "num_reqs": 2, "max_query_len": 2}
    changed = common.replace(query_start_loc=uneven, **changes)
    assert engine.builder.build(0, changed).tokens_of_each is None
    out = torch.full((4, HEADS * DIM), torch.nan)
    engine.impl.forward(engine.layer, q, q, q, engine.cache, metadata, out)
    out = out.view(4, HEADS, DIM)
    engine.check([(q[b : b + 1], out[b : b + 1]) for b in range(2)])
    assert out[2:].eq(0).all()


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize("options, meaning", [
    ({"sliding_window": 8}, {"window": 8}), ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    ({"sinks": SINKS}, {"sinks": SINKS}),
    ({"alibi_slopes": [0.5, 0.25, 0.1, 0.0]}, {"slopes": [0.5, 0.25, 0.1, 0.0]}),
    ({"sliding_window": 5, "sinks": SINKS, "logits_soft_cap": 3.0},
     {"window": 5, "sinks": SINKS, "softcap": 3.0}),
], ids=str)  # fmt: skip
def test_options(options, meaning):
    engine = Engine(2, **options)
    engine.check(engine.step((20, 13)), **meaning)
    engine.check(engine.step((1, 9)), **meaning)
    engine.check(engine.step((2, 2)), **meaning)


def test_the_shape_of_a_cache_that_older_releases_ask_for():
    """It is the one that newer releases hand over."""
    shape = SparseKBackend.get_kv_cache_shape(7, BLOCK, KV_HEADS, DIM)
    keys, values = Engine(1).impl._pages(torch.empty(shape))
    assert keys.shape == values.shape == (7, BLOCK, KV_HEADS, DIM)


@pytest.mark.parametrize("window", [None, 5])
def test_bidirectional_attention(window):
    """Windows then reach as far to the right, as in vLLM's own backends; steps can alternate."""
    engine = Engine(2, sliding_window=window)
    for lengths in ((20, 13), (1, 9), (8, 8), (1, 1)):
        engine.check(engine.step(lengths, causal=False), causal=False, window=window)
        engine.check(engine.step(lengths), window=window)


def test_fp8_cache():
    """Keys and values as they come back from e4m3."""
    engine = Engine(2, dtype=torch.bfloat16, stored=torch.uint8, kv_cache_dtype="fp8")
    results = engine.step((20, 13))
    for kept, scale in ((engine.keys, 0.5), (engine.values, 0.25)):
        for b, x in enumerate(kept):
            stored = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            kept[b] = (stored.float() * scale).bfloat16()
    engine.check(results)


@pytest.mark.parametrize("asked", [False, True])
def test_batch_invariance_is_passed_on(asked, monkeypatch):
    """`tests/ragged` shows what it means; decoding has no such option."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(asked)))
    seen = []

    def spy(*args, **options):
        seen.append(options["batch_invariant"])
        return attention_varlen(*args, **options)

    monkeypatch.setattr(backend, "attention_varlen", spy)
    engine = Engine(1)
    engine.check(engine.step((20,)))
    engine.check(engine.step((1,)))
    assert seen == ([True, True] if asked else [False])


def test_profiling_writes_zeros():
    engine = Engine(1)
    output = torch.ones(3, HEADS * DIM)
    none = torch.zeros(3, HEADS, DIM)
    assert engine.impl.forward(engine.layer, none, none, none, None, None, output).eq(0).all()


def test_registration():
    """Twice, as every process of vLLM may."""
    integration.register()
    integration.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is SparseKBackend
    assert AttentionBackendEnum[SparseKBackend.get_name()] is AttentionBackendEnum.CUSTOM


def reasons(**changes):
    given = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": SM90, "attn_type": "decoder",
    }  # fmt: skip
    return SparseKBackend.validate_configuration(**{**given, **changes})


@pytest.mark.parametrize("changes", [
    {}, {"has_sliding_window": True}, {"has_sink": True}, {"use_non_causal": True},
    {"use_batch_invariant": True}, {"kv_cache_dtype": "fp8"}, {"head_size": 80}, {"block_size": 48},
])  # fmt: skip
def test_accepted_configurations(changes):
    assert reasons(**changes) == []


@pytest.mark.parametrize("changes, why", [
    ({"head_size": 512}, "head_size"), ({"use_mla": True}, "MLA"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"), ({"attn_type": "encoder"}, "encoder"),
    ({"device_capability": SimpleNamespace(major=7, minor=5)}, "compute capability"),
    ({"kv_cache_dtype": "fp8", "device_capability": SimpleNamespace(major=8, minor=6)}, "8.9"),
    ({"kv_cache_dtype": "fp8", "dtype": torch.float32}, "float16 or bfloat16"),
    ({"use_mm_prefix": True}, "multimodal"), ({"use_sparse": True}, "sparse"),
    ({"use_dcp": True}, "DCP"), ({"use_pcp": True}, "PCP"),
])  # fmt: skip
def test_refused_configurations_say_why(changes, why):
    assert any(why in reason for reason in reasons(**changes))


def test_query_lengths_must_be_known_on_the_host():
    """They choose the kernel of a step; adaptive verification changes them on the device only."""
    assert not SparseKBackend.supports_device_cpu_query_lens_mismatch()


def test_metadata_of_graphs_holds_the_tensors_of_the_runner():
    """A graph reads them again at each replay, so they must not be copies."""
    builder = SparseKBackend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) == AttentionCGSupport.UNIFORM_BATCH
    made = builder(None, [], SimpleNamespace(), torch.device("cpu"))
    common = CommonAttentionMetadata(
        int32(0, 1, 2), int32(0, 1, 2), int32(5, 6), 2, 2, 1, 6, int32(0, 1).view(2, 1),
        torch.tensor([5, 14]),
    )  # fmt: skip
    got = made.build_for_cudagraph_capture(common)
    assert got.seq_lens is common.seq_lens and got.block_table is common.block_table_tensor
    assert got.query_start_loc is common.query_start_loc
    other = made.update_block_table(got, int32(3, 4).view(2, 1), torch.tensor([1, 2]))
    assert other.seq_lens is got.seq_lens and other.block_table.tolist() == [[3], [4]]
    assert dataclasses.replace(other, block_table=got.block_table).max_query_len == 1
    for change, why in (
        ({"causal": torch.ones(2, dtype=torch.bool)}, "one bool"),
        ({"mm_req_doc_ranges": {0: [(0, 1)]}}, "mm_req_doc_ranges"),
        ({"rswa_prefix_lens": int32(1, 1)}, "rswa_prefix_lens"),
    ):
        with pytest.raises(NotImplementedError, match=why):
            made.build(0, common.replace(**change))
    with pytest.raises(NotImplementedError, match="cascade"):
        made.build(4, common)


def test_layers_that_are_refused():
    with pytest.raises(NotImplementedError, match="only decoder attention"):
        SparseKImpl(HEADS, DIM, 1.0, attn_type="encoder_only")
    with pytest.raises(TypeError, match="use_alibi_sqrt"):
        SparseKImpl(HEADS, DIM, 1.0, use_alibi_sqrt=True)
    engine = Engine(1)
    q = torch.zeros(1, HEADS, DIM)
    with pytest.raises(NotImplementedError, match="quantized outputs"):
        engine.impl.forward(engine.layer, q, q, q, None, None, q, output_scale=torch.ones(1))


def best_blocks(q, keys, count, first, last):
    """The blocks of one request that one query [Hq, D] reads in each KV head, by the definition."""
    blocks = -(-len(keys) // BLOCK)
    chosen = []
    for head in range(KV_HEADS):
        scores = []
        for block in range(blocks):
            rows = keys[block * BLOCK : (block + 1) * BLOCK, head].double()
            own = q.double()[head * HEADS // KV_HEADS : (head + 1) * HEADS // KV_HEADS]
            bounds = torch.maximum(own * rows.amin(0), own * rows.amax(0)).sum(-1)
            scores.append(bounds.max().item())
        always = {*range(min(first, blocks)), *range(max(blocks - last, 0), blocks)}
        ranked = sorted(set(range(blocks)) - always, key=lambda block: -scores[block])
        chosen.append(sorted([*always, *ranked][: max(count, len(always))]))
    return chosen


def masked_formula(q, k, v, blocks):
    """One query over the listed blocks of each KV head."""
    parts = []
    for head, own in enumerate(blocks):
        rows = torch.cat([torch.arange(b * BLOCK, min((b + 1) * BLOCK, len(k))) for b in own])
        heads = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
        parts.append(formula(q[:, heads], k[rows, head : head + 1], v[rows, head : head + 1]))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
def test_decoding_reads_the_blocks_that_matter(stored):
    """Prompts whole, then tokens over four blocks; the last block grows from step to step."""
    sparse = {"decode_blocks": 4, "keep_first": 1, "keep_last": 1}
    options = {"kv_cache_dtype": "fp8"} if stored else {}
    dtype = torch.bfloat16 if stored else torch.float32
    engine = Engine(2, dtype=dtype, stored=stored, sparse=sparse, **options)
    prompts = engine.step((61, 75))
    if stored is None:
        engine.check(prompts)
    for _ in range(5):
        results = engine.step((1, 1))
        # longer than four blocks: reading all of them gives other numbers
        for b, (q, out) in enumerate(results):
            k, v = engine.keys[b], engine.values[b]
            if stored:
                k = (k.float() / 0.5).to(stored).to(dtype) * 0.5
                v = (v.float() / 0.25).to(stored).to(dtype) * 0.25
            chosen = best_blocks(q[0], k, 4, 1, 1)
            exact = masked_formula(q.double(), k.double(), v.double(), chosen)
            assert_within_budget(out, exact, masked_formula(q, k, v, chosen), what=f"request {b}")
            assert (formula(q.double(), k.double(), v.double()) - exact).abs().max() > 0.01
    if stored is None:
        # a step with a prompt reads everything
        engine.check(engine.step((1, 9)))


def test_windows_are_not_thinned_out():
    engine = Engine(2, sparse={"decode_blocks": 3}, sliding_window=30)
    engine.step((61, 75))
    engine.check(engine.step((1, 1)), window=30)
    assert engine.impl.summaries is None


def runs_formula(q, k, v, first, queries, chosen_of):
    """The queries of one request over the blocks of their runs; `first` is the first's position."""
    outs = []
    for start in range(0, len(q), queries):
        end = min(start + queries, len(q))
        own_k, own_v = k[: first + end], v[: first + end]
        blocks = chosen_of(q[start:end], own_k)
        parts = []
        for head, kept in enumerate(blocks):
            rows = torch.cat(
                [torch.arange(b * BLOCK, min((b + 1) * BLOCK, len(own_k))) for b in kept]
            )
            heads = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
            scores = torch.einsum(
                "qhd,kd->hqk", q[start:end, heads], own_k[rows, head]
            ) / math.sqrt(DIM)
            position = first + torch.arange(start, end)[:, None]
            scores = scores.masked_fill(rows[None, :] > position, -torch.inf)
            parts.append(torch.einsum("hqk,kd->qhd", scores.softmax(-1), own_v[rows, head]))
        outs.append(torch.cat(parts, 1))
    return torch.cat(outs)


def best_blocks_of_run(q, keys, count, first, last):
    """As `best_blocks`, by the best of the queries [n, Hq, D]."""
    blocks = -(-len(keys) // BLOCK)
    chosen = []
    for head in range(KV_HEADS):
        own = q.double()[:, head * HEADS // KV_HEADS : (head + 1) * HEADS // KV_HEADS]
        scores = []
        for block in range(blocks):
            rows = keys[block * BLOCK : (block + 1) * BLOCK, head].double()
            scores.append(
                torch.maximum(own * rows.amin(0), own * rows.amax(0)).sum(-1).max().item()
            )
        always = {*range(min(first, blocks)), *range(max(blocks - last, 0), blocks)}
        ranked = sorted(set(range(blocks)) - always, key=lambda block: -scores[block])
        chosen.append(sorted([*always, *ranked][: max(count, len(always))]))
    return chosen


@pytest.mark.parametrize("decode_blocks", [None, 5])
def test_prompts_read_the_blocks_that_matter(decode_blocks):
    """Whole prompts, then a step that decodes one request and goes on with the other's prompt."""
    sparse = {"prefill_blocks": 5, "prefill_queries": 10, "keep_first": 1, "keep_last": 1}
    sparse |= {"decode_blocks": decode_blocks} if decode_blocks else {}
    engine = Engine(2, sparse=sparse)

    def check(results, requests, reached):
        for b in requests:
            q, out = results[b]
            k, v = engine.keys[b], engine.values[b]
            # a run of ten queries reaches three blocks of eight
            chosen_of = partial(best_blocks_of_run, count=5, first=1, last=1 if len(q) == 1 else 3)
            first = len(k) - len(q)
            exact = runs_formula(q.double(), k.double(), v.double(), first, 10, chosen_of)
            plain = runs_formula(q, k, v, first, 10, chosen_of)
            assert_within_budget(out, exact, plain, what=f"request {b}")
            if reached:
                assert (formula(q.double(), k.double(), v.double()) - exact).abs().max() > 0.01

    check(engine.step((61, 75)), (0, 1), reached=True)
    results = engine.step((1, 23))
    check(results, (1,), reached=True)
    if decode_blocks:
        check(results, (0,), reached=True)
    else:
        engine.check(results[:1])
    results = engine.step((1, 1))
    if decode_blocks:
        check(results, (0, 1), reached=True)
    else:
        engine.check(results)


def test_few_blocks_are_read_whole():
    """Prompts no longer than the blocks that are read give what dense attention gives."""
    engine = Engine(4, sparse={"prefill_blocks": 12, "prefill_queries": 16})
    engine.check(engine.step((70, 1, 9, 33)))


def test_graphs_under_sparse_prefill():
    builder = SparseKBackend.get_builder_cls()
    for asked, expected in (
        ({"prefill_blocks": 9}, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ({"decode_blocks": 9}, AttentionCGSupport.UNIFORM_BATCH),
    ):
        config = SimpleNamespace(additional_config={backend.CONFIG: asked})
        assert builder.get_cudagraph_support(config, None) is expected
    assert Engine(2, sparse={"prefill_blocks": 9}).builder.reorder_batch_threshold == 1


def test_sparse_prefill_refusals():
    with pytest.raises(NotImplementedError, match="causal attention only"):
        Engine(2, sparse={"prefill_blocks": 30}).step((9, 9), causal=False)
    engine = Engine(2, sparse={"prefill_blocks": 8, "prefill_queries": 64})
    with pytest.raises(
        ValueError, match=r"prefill_blocks is 8; expected at least 11: .*64 queries"
    ):
        engine.step((9, 9))


@pytest.mark.parametrize("asked", [None, {"decode_blocks": 9}, {"prefill_blocks": 9}], ids=str)
@pytest.mark.parametrize("connector", [None, "OffloadingConnector"])
def test_blocks_of_connectors_have_no_summaries(asked, connector):
    """Refused when vLLM selects a backend, and again when it makes the metadata of steps."""
    transfer = connector and KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    config = SimpleNamespace(
        additional_config={backend.CONFIG: asked} if asked else {}, kv_transfer_config=transfer
    )
    builder = partial(SparseKBackend.get_builder_cls(), None, [], config, torch.device("cpu"))
    with set_current_vllm_config(config):
        given = reasons()
    if asked and connector:
        (reason,) = given
        assert "OffloadingConnector" in reason and "summaries" in reason
        with pytest.raises(NotImplementedError, match="OffloadingConnector"):
            builder()
    else:
        assert given == []
        builder()


@pytest.mark.parametrize("asked, why", [
    ({"decode_blocks": 2}, "at least 3"), ({"decode_blocks": True}, "expected an int"),
    ({"decode_blocks": 9, "keep_last": 0}, "last block"), ({"keep_first": 1}, "decode_blocks"),
    ({"decode_blocks": 9, "summary": "max"}, "minmax or mean"), ([9], "expected decode_blocks"),
    ({"decode_blocks": 9, "keep_frist": 1}, "keep_first"), ({"prefill_blocks": 2}, "at least 3"),
    ({"prefill_blocks": 9, "prefill_queries": 0}, "at least 1"),
    ({"prefill_blocks": 9, "prefill_queries": "all"}, "expected an int"),
])  # fmt: skip
def test_what_cannot_be_asked_for(asked, why):
    with pytest.raises(ValueError, match=why):
        Engine(2, sparse=asked)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"logits_soft_cap": 5.0}])
def test_a_warm_up_makes_a_step_with_a_prompt_and_changes_nothing(options, monkeypatch):
    engine = Engine(2, **options)
    engine.step([3, 5])
    kept, calls = engine.cache.clone(), []
    varlen = backend.attention_varlen
    monkeypatch.setattr(
        backend, "attention_varlen", lambda *a, **kw: calls.append(kw) or varlen(*a, **kw)
    )
    impl = engine.impl
    keys, values = impl._pages(engine.cache)
    window = impl._window(causal=True)
    given = {"causal": True, "window": window, "softcap": impl.softcap, "scale": impl.scale}
    table = torch.zeros(4, 1000, dtype=torch.int32)
    impl._warm_up(torch.zeros(1, HEADS, DIM), keys, values, table, given)
    (call,) = calls
    assert impl.is_warm and call["max_seqlen_q"] == backend.WARM_UP_TOKENS
    assert call["page_table"].stride() == table.stride()
    assert torch.equal(engine.cache.nan_to_num(7.0), kept.nan_to_num(7.0))
