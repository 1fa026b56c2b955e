"""vLLM's engine with its FlashAttention and with the backend here: tokens, and time.

    python tests/integrations/vllm_engine.py [--dtype float16] [--folder FOLDER]

Needs a GPU and vLLM. A Llama with random weights generates greedily: by FlashAttention, by
FlashAttention with prompts in smaller chunks, and by `CUSTOM`. Without training the two likeliest
tokens are often nearly tied, so sequences part where rounding differs. The second run shows how far
that goes by itself: ours may part no earlier than it does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

LENGTHS = [37, 512, 1000, 4096, 8192, 129, 64, 3000] * 4
NEW_TOKENS = 128
VOCABULARY = 32000
RUNS = {
    "FlashAttention": ("FLASH_ATTN", 8192),
    "FlashAttention, smaller chunks": ("FLASH_ATTN", 3000),
    "CUSTOM": ("CUSTOM", 8192),
}
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def make_model(folder: Path) -> None:
    """Four layers of the size of Llama 3.1 8B."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        rope_theta=5e5,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        LlamaForCausalLM(config).save_pretrained(folder)


def generate(folder: Path, run: str, dtype: str) -> dict:
    """Tokens, their log probabilities, and seconds of three batches."""
    import torch

    backend, chunk = RUNS[run]
    if backend == "CUSTOM":
        from blackwell_sparsek.integrations import vllm as ours

        ours.register()
    from vllm import LLM, SamplingParams

    # graphs for steps that only decode; without Inductor, whose compilation takes minutes
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        attention_backend=backend,
        dtype=dtype,
        max_model_len=16384,
        max_num_batched_tokens=chunk,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        compilation_config=graphs | {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32]},
    )
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randint(3, VOCABULARY, (n,), generator=generator) for n in LENGTHS)
    prompts = [{"prompt_token_ids": tokens.tolist()} for tokens in drawn]
    options = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 1}
    params = SamplingParams(max_tokens=NEW_TOKENS, **options)
    llm.generate(prompts[:8], params, use_tqdm=False)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        made = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    tokens = [list(m.outputs[0].token_ids) for m in made]
    logprobs = [[max(x.logprob for x in d.values()) for d in m.outputs[0].logprobs] for m in made]
    return {"seconds": seconds, "tokens": tokens, "logprobs": logprobs}


def compared(exact: dict, other: dict) -> str:
    """Where sequences part, and how far log probabilities are apart until then."""
    parted, gaps = [], []
    for a, b, p, q in zip(
        exact["tokens"], other["tokens"], exact["logprobs"], other["logprobs"], strict=True
    ):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        parted.append(same)
        gaps += [abs(x - y) for x, y in zip(p[:same], q[:same], strict=True)]
    equal = sum(same == NEW_TOKENS for same in parted)
    middle = statistics.median(parted)
    return (
        f"{equal} of {len(parted)} sequences equal, median {middle:g} tokens; log probabilities "
        f"{statistics.mean(gaps):.4f} apart on average, {max(gaps):.4f} at most"
    )


def main() -> None:
    """Run all three, each in a process of its own, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--folder", type=Path, default=Path("vllm-engine"))
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ |= SETTINGS
    model = given.folder / "model"
    if given.run:
        found = generate(model, given.run, given.dtype)
        (given.folder / f"{given.run}.json").write_text(json.dumps(found))
        return
    if not (model / "config.json").exists():
        make_model(model)
    found = {}
    for run in RUNS:
        command = [sys.executable, __file__, "--dtype", given.dtype, "--folder", given.folder]
        subprocess.run([*command, "--run", run], check=True)
        found[run] = json.loads((given.folder / f"{run}.json").read_text())
        print(f"{run}: {min(found[run]['seconds']):.3f} s", flush=True)
    exact, *others = found
    for run in others:
        print(f"{run} beside {exact}: {compared(found[exact], found[run])}")


if __name__ == "__main__":
    main()
