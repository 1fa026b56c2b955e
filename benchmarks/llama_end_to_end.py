"""Llama 3.1 8B end to end: prefill, decode, memory, and logits against SDPA.

The real configuration with random weights, made on the device. "ours" is
`attn_implementation="blackwell_sparsek"`; "sdpa" and "eager" are transformers' own. The window is
that of a Mistral model of the same sizes which shares the weights.

    python benchmarks/llama_end_to_end.py --output benchmarks/results/llama.json
    python benchmarks/llama_end_to_end.py --small        # two layers, also on a CPU
"""

import argparse
import gc
import json
import os
import pathlib
import statistics
import time
from contextlib import nullcontext

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from llama_model import (
    LLAMA_31_8B,
    SMALL,
    build,
    cropped_sdpa,
    filled_cache,
    kv_memory,
    rewind,
    tokens,
    wide_attention,
)
from llama_results import results_document
from torch.nn.attention import SDPBackend, sdpa_kernel

from blackwell_sparsek.bench.machine import describe_environment, source_commit
from blackwell_sparsek.bench.measure import captured
from blackwell_sparsek.integrations.huggingface import BlockSparse, register
from blackwell_sparsek.testing.tolerance import assert_within_budget

WINDOW = 4096


class Sizes:
    """Lengths and batches of the scenarios."""

    def __init__(self, small):
        self.window = 64 if small else WINDOW
        self.prefill = (128, 256) if small else (8192, 32768)
        self.eager_up_to = 256 if small else 8192
        self.logits = 96 if small else 4096
        self.decode = ((1, 128), (2, 128)) if small else ((1, 8192), (32, 8192))
        block = 16 if small else 128
        parts = {"window": self.window, "global_blocks": 1, "block_size": block}
        self.sparse = {
            "dense": None,
            "window and a global block": BlockSparse(**parts),
            "window, global and 16 chosen blocks": BlockSparse(top_k=16, **parts),
        }
        self.prompt, self.generated = (2 * self.window, 8) if small else (self.window + 512, 40)


def backend(implementation, device, flash=False):
    """cuDNN for SDPA where it has a kernel, the next best elsewhere."""
    if not implementation.startswith("sdpa") or device.type != "cuda":
        return nullcontext()
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order[1:] if flash else order, set_priority=True)


class Clock:
    """Seconds of a run and the most memory it held, on either kind of device."""

    def __init__(self, device):
        self.device, self.cuda = device, device.type == "cuda"

    def __call__(self, run, repeats):
        run()
        if not self.cuda:
            started = time.perf_counter()
            run()
            return {"median_s": time.perf_counter() - started, "peak_gib": None}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started, samples = time.monotonic(), []
        while len(samples) < repeats and (not samples or time.monotonic() - started < 4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e-3)
        peak = torch.cuda.max_memory_allocated() / 2**30
        return {"median_s": statistics.median(samples), "samples_s": samples, "peak_gib": peak}


def prefill(models, settings, sizes, clock, report):
    for length in sizes.prefill:
        ids = tokens(settings, 1, length, clock.device)
        for window, model in models.items():
            for name in ("sdpa", "blackwell_sparsek", "eager"):
                if name == "eager" and length > sizes.eager_up_to:
                    continue
                model.set_attn_implementation(name)

                def run(model=model, ids=ids):
                    model(ids, logits_to_keep=1, use_cache=False)

                with backend(name, clock.device):
                    found = report.attempt(lambda run=run: clock(run, 3))
                if "median_s" in found:
                    found["tokens_per_s"] = length / found["median_s"]
                report.add("prefill", name, found, length=length, window=window)


def sparse(models, settings, sizes, clock, report):
    """The longest prompt with sparse attention by configuration, against dense attention."""
    model, length = models[None], sizes.prefill[-1]
    ids = tokens(settings, 1, length, clock.device)
    for label, chosen in sizes.sparse.items():
        model.set_attn_implementation(register(chosen, name="sparse_attention"))

        def run(model=model, ids=ids):
            model(ids, logits_to_keep=1, use_cache=False)

        found = report.attempt(lambda run=run: clock(run, 3))
        if "median_s" in found:
            found["tokens_per_s"] = length / found["median_s"]
        report.add("sparse", "blackwell_sparsek", found, length=length, choice=label)


def decode(models, settings, sizes, clock, report):
    device, room = clock.device, 64
    for batch, length in sizes.decode:
        for window, model in models.items():
            if window is not None and length <= window:
                continue
            # a window over a cache that keeps all tokens, so that both see the same memory
            config, sliding = model.config, getattr(model.config, "sliding_window", None)
            config.sliding_window = None
            cache = filled_cache(model, batch, length, room, device, model.dtype)
            config.sliding_window = sliding
            ids = tokens(settings, batch, 1, device)
            outputs = {}
            cropped_sdpa(length + 1)
            names = ("sdpa", "blackwell_sparsek", *(("sdpa_cropped",) if window is None else ()))
            for name in names:
                model.set_attn_implementation(name)
                position = torch.full((batch, 1), length, device=device)

                def step(model=model, ids=ids, cache=cache, position=position):
                    return model(ids, past_key_values=cache, position_ids=position).logits

                def timed(name=name, step=step, cache=cache, length=length, outputs=outputs):
                    rewind(cache, length)
                    outputs[name] = step().float()
                    rewind(cache, length)
                    run = captured((step,)) if clock.cuda else step
                    rewind(cache, length)
                    return clock(run, min(20, room - 4))

                with backend(name, device):
                    found = report.attempt(timed)
                if "median_s" in found:
                    found["tokens_per_s"] = batch / found["median_s"]
                if name != "sdpa" and len(outputs) > 1:
                    theirs, ours = outputs["sdpa"], outputs[name]
                    found["logits_differ_from_sdpa_by"] = (theirs - ours).abs().max().item()
                    found["same_argmax"] = bool((theirs.argmax(-1) == ours.argmax(-1)).all())
                found["mode"] = "CUDA graph" if clock.cuda else "eager"
                report.add("decode", name, found, batch=batch, length=length, window=window)
            del cache
            collect(clock)


def logits(models, settings, sizes, clock, report):
    """Logits of the last tokens of a prompt: within twice the error of SDPA."""
    transformers.AttentionInterface.register("wide_attention", wide_attention)
    model, kept = models[None], min(64, sizes.logits)
    ids = tokens(settings, 1, sizes.logits, clock.device)
    found = {}
    for name in ("wide_attention", "sdpa", "blackwell_sparsek"):
        model.set_attn_implementation(name)
        with backend(name, clock.device):
            found[name] = model(ids, logits_to_keep=kept, use_cache=False).logits[0]
    exact = found["wide_attention"].double()
    errors = {
        name: {
            "max": (found[name].double() - exact).abs().max().item(),
            "mean": (found[name].double() - exact).abs().mean().item(),
        }
        for name in ("sdpa", "blackwell_sparsek")
    }

    def judge():
        assert_within_budget(found["blackwell_sparsek"], exact, found["sdpa"])
        return {"within_budget": True}

    verdict = report.attempt(judge)
    same = (found["sdpa"].argmax(-1) == found["blackwell_sparsek"].argmax(-1)).float().mean()
    report.add(
        "logits",
        "blackwell_sparsek",
        verdict | {"errors": errors, "same_argmax": same.item()},
        length=sizes.logits,
        window=None,
    )


def generation(models, settings, sizes, clock, report):
    """Greedy tokens of SDPA and ours, in fp32 where rounding does not decide between tokens.

    In bf16 two kernels of torch itself part after a few tokens of a random model, whose best
    logits lie close together; that is reported beside ours.
    """
    for window, model in models.items():
        ids = tokens(settings, 2, sizes.prompt, clock.device)
        for dtype in dict.fromkeys((model.dtype, torch.float32)):
            model.to(dtype)
            choices = [("sdpa", "cudnn"), ("blackwell_sparsek", None)]
            if dtype == torch.bfloat16 and window is None:
                choices.append(("sdpa", "flash"))
            found = []
            for name, kind in choices:
                model.set_attn_implementation(name)
                with backend(name, clock.device, flash=kind == "flash"):
                    out = model.generate(
                        ids,
                        max_new_tokens=sizes.generated,
                        do_sample=False,
                        eos_token_id=None,
                        pad_token_id=0,
                    )
                found.append(out[:, ids.shape[1] :])
            for (name, kind), ours in list(zip(choices, found, strict=True))[1:]:
                differ = (found[0] != ours).any(0).nonzero().flatten()
                entry = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "tokens": sizes.generated,
                    "equal_to_sdpa": not differ.numel(),
                    "first_difference": int(differ[0]) if differ.numel() else None,
                    "backend": kind,
                }
                report.add("generation", name, entry, length=ids.shape[1], window=window)
        collect(clock)


class Report:
    """Collects results and prints them as they come."""

    def __init__(self):
        self.results, self.started = [], time.monotonic()

    def attempt(self, run):
        try:
            return run()
        except Exception as error:  # such as memory: the other cases still run
            return {"failed": f"{type(error).__name__}: {error}"[:300]}

    def add(self, scenario, implementation, found, **case):
        entry = {"scenario": scenario, **case, "implementation": implementation, **found}
        self.results.append(entry)
        shown = {k: v for k, v in entry.items() if k != "samples_s"}
        print(f"[{time.monotonic() - self.started:5.1f} s] {json.dumps(shown)}", flush=True)


def collect(clock):
    gc.collect()
    if clock.cuda:
        torch.cuda.empty_cache()


SCENARIOS = {
    "logits": logits,
    "prefill": prefill,
    "sparse": sparse,
    "decode": decode,
    "generation": generation,
}


@torch.inference_mode()
def measure(device, *, small=False, scenarios=tuple(SCENARIOS), layers=None):
    """Run scenarios and return the contents of a results file."""
    register()
    settings = dict(SMALL if small else LLAMA_31_8B)
    settings["num_hidden_layers"] = layers or settings["num_hidden_layers"]
    sizes, report = Sizes(small), Report()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    models, clock = build(settings, device, dtype, sizes.window), Clock(device)
    for name in scenarios:
        SCENARIOS[name](models, settings, sizes, clock, report)
        collect(clock)
    return {
        "schema": 1,
        "suite": "llama_end_to_end",
        "commit": source_commit(),
        "environment": describe_environment(device) | {"transformers": transformers.__version__},
        "configuration": settings,
        "weights": "random, normal with standard deviation 0.02",
        "kv_memory": kv_memory(settings),
        "results": report.results,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="two layers and short prompts")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    found = measure(
        torch.device(arguments.device),
        small=arguments.small,
        scenarios=arguments.scenarios,
        layers=arguments.layers,
    )
    if arguments.output:
        output = pathlib.Path(arguments.output)
        output.write_text(json.dumps(results_document(found, output.stem), indent=1) + "\n")


if __name__ == "__main__":
    main()
