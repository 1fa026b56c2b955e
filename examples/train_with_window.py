"""Train a small Llama with a sliding window that is not part of its configuration.

The task is to repeat: each token equals the one `--distance` tokens earlier. Dense attention and a
window that reaches that far can learn it; a shorter window cannot. The window comes from
`register(BlockSparse(window=...))`; gradients run through the same sparse kernels.

    python examples/train_with_window.py
"""

import argparse
import time

import torch
import transformers

from blackwell_sparsek.integrations.huggingface import BlockSparse, register

VOCABULARY, LENGTH, BATCH = 16, 32, 16


def make_model(device):
    """A Llama of two layers."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device)


def batches(steps, distance, device):
    """Yield sequences that repeat with period `distance`, the same ones in every call."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        period = torch.randint(0, VOCABULARY, (BATCH, distance), generator=generator)
        yield period.repeat(1, LENGTH // distance + 1)[:, :LENGTH].to(device)


def train(attention, steps, distance, device):
    """The loss over the repeated part, mean of the last ten steps."""
    model = make_model(device).train()
    model.set_attn_implementation(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for ids in batches(steps, distance, device):
        labels = ids.clone()
        # the first period cannot be foreseen
        labels[:, :distance] = -100
        loss = model(ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def main():
    """Train with windows that suffice and with one that does not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--distance", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    choices = {
        "dense": None,
        "window": BlockSparse(window=2 * arguments.distance),
        # two layers reach no further back than both windows together
        "too short": BlockSparse(window=3),
    }
    for label, sparse in choices.items():
        started = time.perf_counter()
        name = register(sparse, name="example_attention")
        loss = train(name, arguments.steps, arguments.distance, arguments.device)
        print(f"{label:<9}  loss {loss:.3f}  {time.perf_counter() - started:5.1f} s", flush=True)


if __name__ == "__main__":
    main()
