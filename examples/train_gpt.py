"""Train a small GPT with a sliding window and with a block mask, and compare with SDPA.

The text is synthetic: a Markov chain over a small alphabet, with occasional repeats of longer
stretches that reward looking back. Each model is trained twice, with the same weights and batches:
once with `bsk.attention`, which visits only visible blocks, and once with torch's
`scaled_dot_product_attention` and the same mask as a dense matrix. The losses agree to within the
effect of rounding on a training run, which a third run measures: SDPA with initial weights that
differ in the last bit.

    python examples/train_gpt.py            # in bf16 on a GPU if there is one, else on the CPU
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn

import blackwell_sparsek as bsk

LETTERS = 32


class Block(nn.Module):
    """A transformer block; `attend` maps q, k, v [B, H, S, D] to [B, H, S, D]."""

    def __init__(self, width, heads, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Map [B, S, width] to [B, S, width]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Letters [B, S] to logits [B, S, LETTERS]."""

    def __init__(self, length, width, heads, layers, attend):
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, attend) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, LETTERS)

    def forward(self, text):
        """Logits of the letter after each one."""
        x = self.letters(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def texts(steps, batch, length, seed):
    """Yield [batch, length + 1] letters: a Markov chain that repeats every other stretch."""
    generator = torch.Generator().manual_seed(seed)
    chain = torch.rand(LETTERS, LETTERS, generator=generator).pow(8)
    chain = chain / chain.sum(1, keepdim=True)
    stretch = max(length // 8, 1)
    for _ in range(steps):
        columns = [torch.randint(LETTERS, (batch,), generator=generator)]
        while len(columns) <= length:
            if len(columns) > stretch and len(columns) // stretch % 2:
                columns.append(columns[-stretch])
            else:
                rows = chain[columns[-1]]
                columns.append(torch.multinomial(rows, 1, generator=generator)[:, 0])
        yield torch.stack(columns, 1)


def train(name, attend, sizes, steps, batch, device, nudge=False):
    """Losses of a training run that starts from the same weights every time."""
    torch.manual_seed(0)
    model = GPT(sizes["length"], sizes["width"], sizes["heads"], sizes["layers"], attend).to(device)
    if nudge:
        with torch.no_grad():
            weight = model.head.weight
            weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step, text in enumerate(texts(steps, batch, sizes["length"], seed=1)):
        if step % max(steps // 4, 1) == 0:
            print(f"{name}: step {step} of {steps}", file=sys.stderr, flush=True)
        text = text.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def compare(name, ours, visible, sizes, steps, batch, device):
    """Train with `ours` and with SDPA under `visible`; print both curves and their distance."""

    def dense(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    rest = (sizes, steps, batch, device)
    runs = [train(f"{name}, bsk.attention", ours, *rest), train(f"{name}, SDPA", dense, *rest)]
    runs.append(train(f"{name}, SDPA, last bit changed", dense, *rest, nudge=True))
    print(f"{name}: {100 * visible.float().mean():.0f} % of the scores are computed", flush=True)
    print("  step   bsk.attention   SDPA    SDPA, last bit changed")
    for step in sorted({*range(0, steps, max(steps // 8, 1)), steps - 1}):
        a, b, c = (run[step].item() for run in runs)
        print(f"  {step:4d}   {a:13.4f}   {b:.4f}   {c:.4f}")
    ours_off, noise = ((run - runs[1]).abs().mean().item() for run in (runs[0], runs[2]))
    print(f"  mean distance from SDPA {ours_off:.2e}; of the nudged run {noise:.2e}", flush=True)


def main():
    """Both masks, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, help="training steps (default: 200 on a GPU, 40 on a CPU)"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    length, device = asked.length, asked.device
    steps = asked.steps or (200 if device == "cuda" else 40)
    sizes = {"length": length, "width": asked.width, "heads": 4, "layers": asked.layers}
    window = length // 4
    block_mask = bsk.masks.global_local(length, 16, local_blocks=2, causal=True, device=device)
    places = torch.arange(length, device=device)
    back = places[:, None] - places[None, :]

    def windowed(q, k, v):
        return bsk.attention(q, k, v, causal=True, window=window)

    def blockwise(q, k, v):
        return bsk.attention(q, k, v, causal=True, block_mask=block_mask)

    rest = (sizes, steps, asked.batch, device)
    compare("sliding window", windowed, (back >= 0) & (back < window), *rest)
    shown = block_mask.to_element_mask()[0, 0] & (back >= 0)
    compare("block mask", blockwise, shown, *rest)


if __name__ == "__main__":
    main()
