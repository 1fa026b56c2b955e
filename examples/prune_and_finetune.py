"""Prune a small transformer block to 80 % block sparsity and fine-tune it back.

The task is synthetic: predict the outputs of a random network ("teacher") on random sequences. A
dense student starts near the teacher, as a pretrained model would, and learns the task. It then
loses 80 % of its weight blocks at once, and is fine-tuned with the remaining ones. For comparison,
a copy is pruned gradually. Losses are relative to predicting the input itself.

    python examples/prune_and_finetune.py
"""

import argparse
import copy
import time

import torch
import torch.nn.functional as F
from torch import nn

from blackwell_sparsek.prune import CubicSchedule, GradualPruner, sparsify_

WIDTH, HEADS, LENGTH, BATCH = 64, 4, 16, 16
BLOCK = (8, 8)


class Block(nn.Module):
    """A transformer block: attention, then an MLP, both with residual connections."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Map [B, S, WIDTH] to [B, S, WIDTH]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def make_teacher():
    """A block whose weights matter in some places only, as those of trained networks do."""
    teacher = Block()
    with torch.no_grad():
        for module in teacher.modules():
            if isinstance(module, nn.Linear):
                rows, cols = module.out_features // BLOCK[0], module.in_features // BLOCK[1]
                scale = torch.where(torch.rand(rows, cols) < 0.15, 3.0, 0.2)
                module.weight *= scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return teacher


def batches(teacher, steps, seed):
    """Yield (inputs, targets), the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        with torch.no_grad():
            y = teacher(x)
        yield x, y


def train(model, teacher, steps, seed, lr, schedule=None):
    """Train `model`, and prune it on the way if there is a schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    pruner = GradualPruner(model, schedule, optimizer=optimizer, every=10) if schedule else None
    for step, (x, y) in enumerate(batches(teacher, steps, seed)):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if pruner:
            pruner.step()


def evaluate(model, teacher):
    """Mean squared error over that of answering with the input."""
    with torch.no_grad():
        pairs = list(batches(teacher, 8, seed=999))
        error = sum(F.mse_loss(model(x), y).item() for x, y in pairs)
        return error / sum(F.mse_loss(x, y).item() for x, y in pairs)


def report(name, model, teacher):
    """Print the loss and the memory of parameters and buffers, which hold the patterns."""
    tensors = [*model.parameters(), *model.buffers()]
    size = sum(x.numel() * x.element_size() for x in tensors)
    print(f"{name:<10}  loss {evaluate(model, teacher):.4f}  {size:>8,} bytes", flush=True)


def main():
    """Run the whole story and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument(
        "--steps", type=int, default=100, help="steps of training, and of fine-tuning (default 100)"
    )
    arguments = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    teacher = make_teacher()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for p in student.parameters():
            p += 0.02 * torch.randn_like(p)
    train(student, teacher, arguments.steps, seed=1, lr=1e-3)
    report("dense", student, teacher)

    pruned = copy.deepcopy(student)
    summary = sparsify_(pruned, BLOCK, arguments.sparsity)
    report("pruned", pruned, teacher)

    train(pruned, teacher, arguments.steps, seed=2, lr=2e-3)
    report("fine-tuned", pruned, teacher)

    gradual = copy.deepcopy(student)
    sparsify_(gradual, BLOCK, 0.0)
    schedule = CubicSchedule(final=arguments.sparsity, end=arguments.steps // 2)
    train(gradual, teacher, arguments.steps, seed=2, lr=2e-3, schedule=schedule)
    report("gradual", gradual, teacher)

    print(f"\n{summary}\n{time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
