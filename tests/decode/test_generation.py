"""Greedy generation token by token equals computing all tokens anew, whatever holds the keys."""

import importlib.util
from pathlib import Path

import pytest
import torch

import blackwell_sparsek as bsk

_PATH = Path(__file__).parents[2] / "examples" / "paged_generation.py"
_spec = importlib.util.spec_from_file_location("paged_generation", _PATH)
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)

PROMPTS = (21, 1, 16)
STEPS = 20
SIZES = (example.HEADS_KV, example.HEAD_DIM)


@pytest.fixture(scope="module")
def texts():
    """Prompts, and the whole texts that recomputing makes of them in fp64."""
    torch.manual_seed(7)
    model = example.Transformer().double().eval()
    prompts = [torch.randint(example.VOCABULARY, (length,)).tolist() for length in PROMPTS]
    whole = [list(prompt) for prompt in prompts]
    with torch.no_grad():
        for text in whole:
            for _ in range(STEPS):
                text.append(example.recomputed_next(model, text))
    return model, prompts, whole


def continued(model, prompts, caches, ids):
    made = [list(prompt) for prompt in prompts]
    latest = example.prefill(model, caches, ids, prompts)
    for step in range(STEPS):
        for text, token in zip(made, latest, strict=True):
            text.append(token)
        if step < STEPS - 1:
            latest = example.decode(model, caches, ids, latest)
    return made


@pytest.mark.parametrize("page_size", [1, 16, 20])
def test_paged(texts, page_size):
    model, prompts, whole = texts
    pages = -(-sum(PROMPTS) // page_size) + 3 * (STEPS // page_size + 1)
    caches = [
        bsk.PagedKVCache(pages, page_size, *SIZES, dtype=torch.float64)
        for _ in range(example.LAYERS)
    ]
    # the table of pages is out of order: sequences come and go before
    for cache in caches:
        early = cache.add_sequences(2)
        cache.reserve(early, [page_size, 2 * page_size])
        cache.release(early[0])
        cache.release(early[1])
    (ids,) = {tuple(cache.add_sequences(3)) for cache in caches}
    with torch.no_grad():
        assert continued(model, prompts, caches, ids) == whole


def test_contiguous(texts):
    model, prompts, whole = texts
    length = max(PROMPTS) + STEPS
    caches = [
        bsk.KVCache(3, example.HEADS_KV, length, example.HEAD_DIM, dtype=torch.float64)
        for _ in range(example.LAYERS)
    ]
    made = [list(prompt) for prompt in prompts]
    tokens = torch.zeros(3, max(PROMPTS), dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)

    def attend_prompt(layer, q, k, v):
        caches[layer].append(k, v, PROMPTS)
        return bsk.attention(q, k, v, causal=True)

    def attend_step(layer, q, k, v):
        cache = caches[layer]
        cache.append(k, v)
        return bsk.attention_decode(q, cache.k, cache.v, cache_seqlens=cache.lengths)

    with torch.no_grad():
        logits = model(tokens, torch.arange(max(PROMPTS)).expand_as(tokens), attend_prompt)
        latest = logits[torch.arange(3), torch.tensor(PROMPTS) - 1].argmax(-1)
        for _ in range(STEPS):
            for text, token in zip(made, latest.tolist(), strict=True):
                text.append(token)
            positions = torch.tensor(caches[0].host_lengths).unsqueeze(1)
            latest = model(latest.unsqueeze(1), positions, attend_step)[:, -1].argmax(-1)
    assert made == whole


def test_sparse_decoding_that_keeps_all_pages(texts):
    """Full selection reads what dense decoding reads, so it generates the same text."""
    model, prompts, whole = texts
    caches = [bsk.PagedKVCache(60, 4, *SIZES, dtype=torch.float64) for _ in range(example.LAYERS)]
    (ids,) = {tuple(cache.add_sequences(3)) for cache in caches}
    summaries = [None] * example.LAYERS
    made = [list(prompt) for prompt in prompts]

    def attend(layer, q, k, v):
        cache = caches[layer]
        cache.append(ids, k, v)
        where = {"cache_seqlens": cache.lengths(ids), "page_table": cache.page_table(ids)}
        update = {} if summaries[layer] is None else {"out": summaries[layer], "new_tokens": 1}
        summaries[layer] = bsk.page_summaries(cache.k, **where, **update)
        blocks = bsk.topk_pages(q, summaries[layer], where["page_table"].shape[1], **where)
        return bsk.attention_decode(q, cache.k, cache.v, kv_blocks=blocks, **where)

    with torch.no_grad():
        latest = torch.tensor(example.prefill(model, caches, ids, prompts))
        for _ in range(STEPS):
            for text, token in zip(made, latest.tolist(), strict=True):
                text.append(token)
            positions = torch.tensor(caches[0].host_lengths(ids)).unsqueeze(1)
            latest = model(latest.unsqueeze(1), positions, attend)[:, -1].argmax(-1)
    assert made == whole
