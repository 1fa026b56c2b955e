"""A serving loop: continuous batching over one pool of pages.

Requests arrive at different times. Every step processes up to BUDGET tokens: one for each running
sequence, and chunks of waiting prompts in the space that is left. They go through the model as one
packed batch: `bsk.kv_append` rotates keys and writes them to their slots, and
`bsk.attention_varlen` attends over decoding steps and prompts together. Finished sequences return
their pages. The loop itself (`schedule`, `run_step` and `serve`) has fewer than a hundred lines.

    python examples/continuous_batching.py
"""

import argparse
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

import blackwell_sparsek as bsk

VOCABULARY, WIDTH, LAYERS, HEADS, HEADS_KV, HEAD_DIM, LONGEST = 101, 64, 2, 4, 2, 16, 256
PAGE_SIZE, PAGES, BUDGET = 16, 24, 32


@dataclass
class Request:
    """A prompt, what was generated after it, its pages, and how many tokens they hold."""

    arrival: int
    prompt: list[int]
    new: int
    generated: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    def __post_init__(self):
        """Refuse what the loop would wait for without end: the last token is never fed back."""
        room = min(PAGES * PAGE_SIZE, LONGEST)
        total = len(self.prompt) + self.new - 1
        if not self.prompt or self.new < 1 or total > room:
            raise ValueError(
                f"a request needs a prompt, and at most {room} tokens with what is generated but "
                f"the last; got a prompt of {len(self.prompt)} and {self.new} to generate"
            )

    @property
    def needed(self):
        """Pages for all tokens that go through the model."""
        return -(-(len(self.prompt) + self.new - 1) // PAGE_SIZE)

    @property
    def tokens(self):
        """Prompt and generated tokens."""
        return self.prompt + self.generated

    @property
    def left(self):
        """Tokens that have not been through the model."""
        return len(self.tokens) - self.cached


class Model(nn.Module):
    """Packed tokens to logits; `attend(layer, q, k, v)` maps [T, H, D] to [T, HEADS, D]."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv = nn.ModuleList(
            nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM) for _ in range(LAYERS)
        )
        self.out = nn.ModuleList(nn.Linear(HEADS * HEAD_DIM, WIDTH) for _ in range(LAYERS))

    def forward(self, tokens, attend):
        """Logits [T, VOCABULARY]."""
        x = self.embedding(tokens)
        for i, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            heads = qkv(F.layer_norm(x, (WIDTH,))).unflatten(-1, (-1, HEAD_DIM))
            x = x + out(attend(i, *heads.split((HEADS, HEADS_KV, HEADS_KV), dim=1)).flatten(1))
        return self.head(x)


def schedule(running, waiting, free, step):
    """(request, tokens to process) of this step: first decoding, then prompts, cut to fit."""
    decoding = [request for request in running if request.left == 1]
    prompts = [request for request in running if request.left > 1]
    budget = BUDGET - len(decoding)
    # admit what has arrived, as long as earlier prompts leave something and pages are free
    while waiting and waiting[0].arrival <= step and sum(r.left for r in prompts) < budget:
        if waiting[0].needed > len(free):
            break
        request = waiting.pop(0)
        request.pages = [free.pop() for _ in range(request.needed)]
        running.append(request)
        prompts.append(request)
    batch = [(request, 1) for request in decoding]
    for request in prompts:
        count = min(budget, request.left)
        budget -= count
        if count:
            batch.append((request, count))
    return batch


def run_step(model, caches, rotary, batch):
    """Process a packed batch; returns the next token of each request."""
    int32 = lambda numbers: torch.tensor(numbers, dtype=torch.int32)  # noqa: E731
    counts = [count for _, count in batch]
    places = [range(r.cached, r.cached + count) for r, count in batch]
    slots = [r.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE
             for (r, _), place in zip(batch, places, strict=True) for p in place]  # fmt: skip
    tokens = [r.tokens[p] for (r, _), place in zip(batch, places, strict=True) for p in place]
    slots, positions = int32(slots), int32([p for place in places for p in place])
    offsets = int32([0, *torch.tensor(counts).cumsum(0).tolist()])
    lengths = int32([r.cached + count for r, count in batch])
    table = int32([(r.pages + [-1] * PAGES)[:PAGES] for r, _ in batch])

    def attend(layer, q, k, v):
        pages = caches[layer]
        q = bsk.kv_append(*pages, k, v, slot_mapping=slots, rotary=rotary, positions=positions, q=q)
        return bsk.attention_varlen(
            q, *pages, offsets, max_seqlen_q=max(counts), cache_seqlens=lengths, page_table=table,
            causal=True,
        )  # fmt: skip

    logits = model(torch.tensor(tokens), attend)
    return logits[offsets[1:].long() - 1].argmax(-1).tolist()


@torch.inference_mode()
def serve(model, requests, rotary):
    """Run until all requests are done; yields the batch of each step as token counts."""
    caches = torch.zeros(LAYERS, 2, PAGES, PAGE_SIZE, HEADS_KV, HEAD_DIM)
    free, running, step = list(range(PAGES)), [], 0
    waiting = sorted(requests, key=lambda request: request.arrival)
    while waiting or running:
        batch = schedule(running, waiting, free, step)
        if batch:
            for (request, count), token in zip(
                batch, run_step(model, caches, rotary, batch), strict=True
            ):
                request.cached += count
                if request.left == 0:
                    request.generated.append(token)
                if len(request.generated) == request.new:
                    running.remove(request)
                    free += request.pages
            yield [count for _, count in batch]
        step += 1
    assert sorted(free) == list(range(PAGES))


def rotations():
    """Angles of every position, for halves of a head."""
    frequencies = 10000.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    angles = torch.outer(torch.arange(LONGEST).float(), frequencies)
    return bsk.Rotary(angles.cos(), angles.sin())


def main():
    """Serve random requests and print each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=6, help="number of requests (default 6)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sizes = torch.randint(3, 60, (arguments.requests,)).tolist()
    requests = [
        Request(3 * i, torch.randint(VOCABULARY, (n,)).tolist(), new=8 + i)
        for i, n in enumerate(sizes)
    ]
    for step, counts in enumerate(serve(Model().eval(), requests, rotations())):
        print(f"step {step:2}: {sum(counts):2} tokens, by request {counts}")
    for request in requests:
        print(f"prompt of {len(request.prompt):2} tokens, generated {request.generated}")


if __name__ == "__main__":
    main()
