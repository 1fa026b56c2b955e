"""Generate text with a paged KV cache: many sequences, one pool of pages, a shared prefix.

A small transformer with random weights and grouped heads continues three prompts of different
lengths in one batch, greedily. Keys and values are stored in pages of 16 tokens. Halfway, one
sequence is forked and continues with a different token; both share the pages of their common
prefix. Every step is checked against a full recomputation.

    python examples/paged_generation.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import blackwell_sparsek as bsk

VOCABULARY, WIDTH, LAYERS, HEADS, HEADS_KV, HEAD_DIM = 101, 64, 2, 4, 2, 16
PAGE_SIZE, MAX_TOKENS = 16, 256


class Layer(nn.Module):
    """Attention with grouped heads, then an MLP, both with residual connections."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, attend):
        """Map [B, T, WIDTH] to the same; `attend` maps q, k, v [B, H, T, D] to [B, HEADS, T, D]."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        attended = attend(*heads.split((HEADS, HEADS_KV, HEADS_KV), dim=1))
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens and positions [B, T] to logits [B, T, VOCABULARY]."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(MAX_TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, positions, attend):
        """`attend(layer, q, k, v)` is asked for the attention of each layer."""
        x = self.tokens(tokens) + self.positions(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, lambda q, k, v, i=i: attend(i, q, k, v))
        return self.head(x)


def recomputed_next(model, tokens):
    """The next token after a list of tokens, from all of them."""
    device = model.head.weight.device
    row = torch.tensor([tokens], device=device)
    positions = torch.arange(len(tokens), device=device).unsqueeze(0)
    logits = model(row, positions, lambda _, q, k, v: bsk.attention(q, k, v, causal=True))
    return int(logits[0, -1].argmax())


def prefill(model, caches, ids, prompts):
    """Append the prompts, padded to one length, and return the next token of each."""
    device = model.head.weight.device
    counts = [len(prompt) for prompt in prompts]
    tokens = torch.zeros(len(prompts), max(counts), dtype=torch.long, device=device)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)

    def attend(layer, q, k, v):
        caches[layer].append(ids, k, v, counts)
        return bsk.attention(q, k, v, causal=True)

    positions = torch.arange(max(counts), device=device).expand_as(tokens)
    logits = model(tokens, positions, attend)
    last = torch.tensor(counts, device=device) - 1
    return logits[torch.arange(len(prompts), device=device), last].argmax(-1).tolist()


def decode(model, caches, ids, latest):
    """Append one token to each sequence and return the one after it."""
    device = model.head.weight.device
    positions = torch.tensor(caches[0].host_lengths(ids), device=device).unsqueeze(1)

    def attend(layer, q, k, v):
        cache = caches[layer]
        cache.append(ids, k, v)
        where = {"cache_seqlens": cache.lengths(ids), "page_table": cache.page_table(ids)}
        return bsk.attention_decode(q, cache.k, cache.v, **where)

    tokens = torch.tensor(latest, device=device).unsqueeze(1)
    return model(tokens, positions, attend)[:, -1].argmax(-1).tolist()


@torch.no_grad()
def main():
    """Generate, check, and print what the cache holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="tokens to generate (default 40)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer().to(arguments.device).eval()
    # one cache for each layer; ids are the same in all of them
    caches = [
        bsk.PagedKVCache(40, PAGE_SIZE, HEADS_KV, HEAD_DIM, device=arguments.device)
        for _ in range(LAYERS)
    ]
    texts = [torch.randint(VOCABULARY, (length,)).tolist() for length in (37, 5, 16)]
    (ids,) = {tuple(cache.add_sequences(len(texts))) for cache in caches}
    ids = list(ids)
    latest = prefill(model, caches, ids, texts)
    for step in range(arguments.steps):
        for text, token in zip(texts, latest, strict=True):
            assert token == recomputed_next(model, text), "cached and recomputed tokens differ"
            text.append(token)
        if step == arguments.steps // 2:
            (child,) = {cache.fork(ids[0]) for cache in caches}
            ids.append(child)
            texts.append([*texts[0][:-1], (latest[0] + 1) % VOCABULARY])
            latest.append(texts[-1][-1])
        latest = decode(model, caches, ids, latest)

    cache = caches[0]
    tokens = cache.host_lengths(ids)
    print(f"{len(ids)} sequences of {tokens} tokens, equal to recomputing all of them")
    apart = sum(-(-count // PAGE_SIZE) for count in tokens)
    print(f"{40 - cache.free_pages} pages in use, {apart} without sharing")
    for cache in caches:
        cache.release(ids)
    print(f"{caches[0].free_pages} pages free after release")


if __name__ == "__main__":
    main()
