"""Prune the MLPs of a Llama in blocks, and generate with block-sparse products and attention.

The weights are random; as in trained models, some blocks matter and many hardly do. `sparsify_`
replaces each linear layer of the MLPs with a `BSRLinear`; nothing else in the model changes. The
script prints memory, the time of a forward pass, and how well the pruned model predicts the output
of the dense one.

    python examples/pruned_llama_mlp.py --sparsity 0.8
"""

import argparse
import copy
import time

import torch
import transformers

from blackwell_sparsek.integrations.huggingface import register
from blackwell_sparsek.prune import sparsify_

BLOCK = (32, 32)


def make_model(device, dtype):
    """A two-layer Llama in whose MLPs one block in seven carries most of the weight."""
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.05,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=register())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".mlp." in name:
                rows, columns = (
                    size // side for size, side in zip(weight.shape, BLOCK, strict=True)
                )
                scale = torch.where(torch.rand(rows, columns) < 0.15, 2.0, 0.01)
                weight *= scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return model.eval().to(device, dtype)


def size_of(model):
    """Bytes of parameters and of buffers, which hold the patterns."""
    return sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))


@torch.inference_mode()
def report(name, model, dense, ids):
    """Print one line about `model`."""
    model(ids)  # compiles kernels
    started = time.perf_counter()
    logits = model(ids).logits.float().cpu()
    seconds = time.perf_counter() - started
    expected = dense(ids).logits.float().cpu()
    same = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
    print(
        f"{name:<7}  {size_of(model):>10,} bytes  {seconds * 1e3:7.1f} ms  "
        f"same next token {same:6.1%}",
        flush=True,
    )


def main():
    """Prune and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    dense = make_model(arguments.device, dtype)
    pruned = copy.deepcopy(dense)
    summary = sparsify_(pruned, BLOCK, arguments.sparsity, include="*.mlp.*")

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 512, (2, 256), generator=generator).to(arguments.device)
    report("dense", dense, dense, ids)
    report("pruned", pruned, dense, ids)
    out = pruned.generate(ids[:, :16], max_new_tokens=8, do_sample=False)
    print(f"\n{pruned.model.layers[0].mlp.gate_proj}")
    print(f"generated {out[0, 16:].tolist()}\n{summary}")


if __name__ == "__main__":
    main()
