"""Prefill a long prompt with block-sparse attention, enabled by one line, and generate from it.

A random Llama stands in for a real one; pass a name or folder as `--model` to load another. The
same prompt is processed with dense attention, with a window and a sink block, and with the
best-scoring blocks of keys. For each, the script prints the fraction of causal blocks that are
read, the prefill time, the distance of the next-token probabilities from those of dense attention
(total variation, 0 to 1), and the generated tokens. The distance is large for random weights and
smaller for trained ones.

    python examples/sparse_long_context.py
    python examples/sparse_long_context.py --model meta-llama/Llama-3.1-8B --length 32768
"""

import argparse
import os
import time

import torch

from blackwell_sparsek.integrations.huggingface import BlockSparse, register

CHOICES = {
    "dense": None,
    "window + sinks": BlockSparse(window=256, global_blocks=1, block_size=64),
    "top-k blocks": BlockSparse(top_k=4, global_blocks=1, window=64, block_size=64),
    "all but layer 0": lambda layer: CHOICES["window + sinks"] if layer else None,
}


def load(name, device):
    """A model from the hub or a folder; without a name, a small one with random weights."""
    import transformers

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if name:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1 << 20,
        initializer_range=0.1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device, dtype)


def share(sparse, length, layers):
    """Blocks that the layers read, over those of dense causal attention."""
    if sparse is None:
        return 1.0
    if callable(sparse):
        return sum(share(sparse(layer), length, 1) for layer in range(layers)) / layers
    blocks = sparse.blocks(length, length)[0, 0]
    rows = torch.arange(1, blocks.shape[0] + 1)
    read = torch.minimum(blocks.sum(1) + (sparse.top_k or 0), rows)
    return float(read.sum() / rows.sum())


@torch.inference_mode()
def main():
    """Run all choices and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="model name or folder (default: a small random Llama)")
    parser.add_argument("--length", type=int, default=2048, help="prompt tokens (default 2048)")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    model = load(arguments.model, arguments.device).eval()
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 256, (1, arguments.length), generator=generator)
    prompt = prompt.to(arguments.device)
    dense = None
    for label, sparse in CHOICES.items():
        model.set_attn_implementation(register(sparse, name="example_attention"))
        model(prompt[:, :256], logits_to_keep=1)  # compiles kernels
        started = time.perf_counter()
        probabilities = model(prompt, logits_to_keep=1).logits[0, -1].float().softmax(-1).cpu()
        seconds = time.perf_counter() - started
        dense = probabilities if dense is None else dense
        part = share(sparse, arguments.length, model.config.num_hidden_layers)
        moved = (probabilities - dense).abs().sum() / 2
        out = model.generate(prompt, max_new_tokens=arguments.new_tokens, do_sample=False)
        print(
            f"{label:<15}  {part:6.1%} of the blocks  "
            f"{seconds * 1e3:8.1f} ms  moved {moved:.3f}  "
            f"then {out[0, arguments.length :].tolist()}",
            flush=True,
        )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "0")
    main()
