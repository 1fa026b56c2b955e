"""Train each sparse attention layer to recall what it has read.

A sequence holds pairs of a key and a value among noise tokens. It ends with queries for keys, whose
answers are their values. One attention layer can learn this if it finds the pairs: by selecting
their blocks (`moba`, `nsa`) or single tokens (`indexer`), or by keeping the pairs and dropping the
rest before the queries come (`sparsek`). Seeds are fixed; each layer takes a minute or less on a
CPU.

    python examples/learn_recall.py
    python examples/learn_recall.py nsa sparsek
"""

import argparse
import time

import torch
from torch import nn

import blackwell_sparsek as bsk

KEYS, VALUES, HIDDEN, BATCH = 16, 8, 64, 8
READ, ASKED, PAIRS = 80, 16, 8
# Ids of what is no key and no value.
NO_KEY, UNKNOWN = KEYS, VALUES
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16}
LAYERS = {
    "moba": lambda: bsk.nn.MixtureOfBlockAttention(HIDDEN, **SIZES, block=16, top_k=4),
    "nsa": lambda: bsk.nn.NativeSparseAttention(HIDDEN, **SIZES, block=16, top_k=4, window=16),
    "indexer": lambda: bsk.nn.IndexerAttention(HIDDEN, **SIZES, index_dim=16, top_k=24),
    "sparsek": lambda: bsk.nn.SparsekAttention(HIDDEN, **SIZES, keep=2 * PAIRS),
}
STEPS = {"moba": 180, "nsa": 240, "indexer": 180, "sparsek": 160}
RATE = 4e-3


class Reader(nn.Module):
    """Embeddings, one attention layer and a readout."""

    def __init__(self, layer):
        super().__init__()
        self.keys = nn.Embedding(KEYS + 1, HIDDEN)
        self.values = nn.Embedding(VALUES + 1, HIDDEN)
        self.attention = layer
        self.norm = nn.LayerNorm(HIDDEN)
        self.readout = nn.Linear(HIDDEN, VALUES)

    def forward(self, keys, values):
        """Logits of the answers, and the loss of an indexer."""
        x = self.keys(keys) + self.values(values)
        loss = 0.0
        if isinstance(self.attention, bsk.nn.IndexerAttention):
            made, loss = self.attention(x, with_loss=True)
        else:
            made = self.attention(x)
        return self.readout(self.norm(made[:, READ:])), loss


def batch_of(generator):
    """Keys and values of each token, and the answers."""
    keys = torch.full((BATCH, READ + ASKED), NO_KEY)
    values = torch.randint(0, VALUES, (BATCH, READ + ASKED), generator=generator)
    values[:, READ:] = UNKNOWN
    places = torch.rand(BATCH, READ, generator=generator).argsort(-1)[:, :PAIRS]
    own = torch.rand(BATCH, KEYS, generator=generator).argsort(-1)[:, :PAIRS]
    keys.scatter_(1, places, own)
    asked = torch.randint(0, PAIRS, (BATCH, ASKED), generator=generator)
    keys[:, READ:] = own.gather(1, asked)
    return keys, values, values.gather(1, places.gather(1, asked))


def train(name, steps):
    """The model after training, and how many of the last answers were right."""
    torch.manual_seed(0)
    model = Reader(LAYERS[name]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    right = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / steps)
        keys, values, answers = batch_of(generator)
        logits, index_loss = model(keys, values)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten()) + index_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right.append((logits.argmax(-1) == answers).float().mean().item())
    return model, sum(right[-20:]) / 20


def main():
    """Train the layers that were named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layers", nargs="*", help=f"any of {', '.join(LAYERS)} (default: all)")
    parser.add_argument("--steps", type=int, help="training steps (default: what each layer needs)")
    arguments = parser.parse_args()
    if unknown := set(arguments.layers) - set(LAYERS):
        parser.error(f"unknown layer {unknown.pop()!r}; expected some of {', '.join(LAYERS)}")
    for name in arguments.layers or LAYERS:
        started = time.perf_counter()
        _, accuracy = train(name, arguments.steps or STEPS[name])
        seconds = time.perf_counter() - started
        print(f"{name:<8} {100 * accuracy:5.1f} % right  {seconds:5.1f} s", flush=True)
        if arguments.steps is None:
            assert accuracy > 0.9, f"{name} learned only {100 * accuracy:.1f} %"


if __name__ == "__main__":
    main()
