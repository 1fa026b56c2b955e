"""What sparsity costs in quality, for small models trained here or a Hugging Face checkpoint.

Two small Llamas are trained with dense attention, one to look up pairs of keys and values, one on
the text of a book. Each then runs with other kinds of attention, before and after a few steps of
training with them. Seeds are fixed, and one thread is used; each model takes minutes.

    python examples/quality/run.py                          # writes examples/quality/results.json
    python examples/quality/page.py                         # then the page and its plots
    python examples/quality/run.py --model FOLDER -o mine.json --length 4096

With `--model`, nothing is trained. The results are the perplexity on the book, and the fraction of
hidden numbers that the model finds in it.
"""

import argparse
import copy
import json
import pathlib
import time

import tasks
import torch
import variants
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import blackwell_sparsek as bsk

RESULTS = pathlib.Path(__file__).with_name("results.json")
# Steps of training under another way to attend; scores of SparseK begin at zero and learn faster
# than the rest.
TUNING_STEPS, SCORE_RATE = 40, 2e-2
PRUNED_BLOCK = 16
WAYS = [
    variants.dense,
    *(lambda n=n: variants.window(n) for n in (16, 32, 64, 128)),
    *(lambda n=n: variants.blocks(n) for n in (1, 3, 7)),
    *(lambda n=n: variants.tokens(n) for n in (4, 16, 64)),
    *(lambda n=n: variants.sparsek(n) for n in (16, 32, 64)),
    variants.fp8,
]
SPARSITIES = (0.25, 0.5, 0.75, 0.9)


def small_llama(vocabulary, hidden):
    """Two layers, four heads that share two KV heads, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * tasks.LENGTH,
        initializer_range=hidden**-0.5,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


class Recall:
    """Looking up pairs; judged by the share of right answers."""

    name, measure, better = "recall", "accuracy", "higher"
    hidden, vocabulary, rate, tuning_rate = 64, tasks.RECALL_VOCABULARY, 3e-3, 1e-3
    # short sequences first: what to look for is learned there in a fraction of the time
    stages = ((32, 250), (96, 60), (224, 90))

    def losses(self, model, steps):
        """Losses of training, one after the other; the model is trained between them."""
        generator = torch.Generator().manual_seed(1)
        for read, count in self.stages:
            for _ in range(min(count, steps)):
                yield tasks.recall_loss(model, generator, 16, read)

    def tuning_losses(self, logits_of, steps):
        """The same for a model that attends in another way."""
        generator = torch.Generator().manual_seed(2)
        for _ in range(steps):
            yield tasks.recall_loss(logits_of, generator, 4)

    def score(self, logits_of, small):
        """Judge a model."""
        return tasks.recall_accuracy(logits_of, **({"batches": 1, "batch": 2} if small else {}))


class Text:
    """Predicting the bytes of a book; judged by the perplexity of what was held out."""

    name, measure, better = "text", "perplexity", "lower"
    hidden, vocabulary, rate, tuning_rate = 128, 256, 3e-3, 3e-4
    stages = ((64, 500), (128, 200), (tasks.LENGTH, 200))

    def __init__(self):
        self.seen, self.held_out = tasks.book()

    def losses(self, model, steps):
        """Losses of training, as above."""
        generator = torch.Generator().manual_seed(1)
        for length, count in self.stages:
            # as many tokens in every step
            batch = 8 * tasks.LENGTH // length
            for _ in range(min(count, steps)):
                yield tasks.text_loss(model, self.seen, generator, batch, length)

    def tuning_losses(self, logits_of, steps):
        """The same for a model that attends in another way."""
        generator = torch.Generator().manual_seed(2)
        for _ in range(steps):
            yield tasks.text_loss(logits_of, self.seen, generator, 4)

    def score(self, logits_of, small):
        """Judge a model."""
        return tasks.perplexity(logits_of, self.held_out, most=2 if small else 64)


def train(losses, groups, total):
    """Take a step for each loss; the learning rate falls to zero in a straight line."""
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, loss in enumerate(losses):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * max(1 - step / total, 0.02)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], 1.0)
        optimizer.step()


def groups_of(model, rate):
    """Parameters with their learning rates."""
    named = list(model.named_parameters())
    scores = [p for name, p in named if ".sparsek." in name]
    others = [p for name, p in named if ".sparsek." not in name and p.requires_grad]
    groups = ((others, rate), (scores, SCORE_RATE))
    return [{"params": parameters, "lr": rate} for parameters, rate in groups if parameters]


def judged(task, model, variant, small):
    """The score of a model under a variant, without gradients."""
    with torch.no_grad():
        return task.score(variant.logits_of(model.eval()), small)


def tuned(task, model, variant, small):
    """The score after a few steps of training."""
    logits_of = variant.logits_of(model.train())
    steps = 1 if small else TUNING_STEPS
    train(task.tuning_losses(logits_of, steps), groups_of(model, task.tuning_rate), steps)
    return judged(task, model, variant, small)


def row_of(task, trained, make, small):
    """One way to attend: its density, and scores before and after training with it."""
    variant, model = make(), copy.deepcopy(trained)
    if variant.prepare is not None:
        variant.prepare(model)
    model.set_attn_implementation(variant.register())
    row = {"family": variant.family, "name": variant.name}
    # scores of SparseK that were not learned keep everything
    row["before"] = None if variant.prepare else judged(task, model, variant, small)
    row["after"] = tuned(task, model, variant, small) if variant.learns else None
    return row | {"density": variants.density(variant, model, tasks.LENGTH)}


def pruned_row(task, trained, sparsity, small):
    """The MLPs in blocks, the weakest dropped; attention is dense."""
    variant, model = variants.dense(), copy.deepcopy(trained)
    bsk.prune.sparsify_(model, PRUNED_BLOCK, sparsity, include="*.mlp.*")
    before = judged(task, model, variant, small)
    row = {"family": "pruned MLP", "name": f"{sparsity:.0%} of the blocks pruned", "before": before}
    row["after"] = tuned(task, model, variant, small)
    sparse = [layer for layer in bsk.sparsity_report(model).layers if layer.is_sparse]
    kept, total = (sum(getattr(x, name) for x in sparse) for name in ("kept", "total"))
    return row | {"density": kept / total}


def study(task, ways, small=False):
    """Train the model of a task, then judge it under every way to attend and with pruned MLPs."""
    started = time.perf_counter()
    model = small_llama(task.vocabulary, task.hidden)
    steps = 1 if small else max(count for _, count in task.stages)
    total = sum(min(count, steps) for _, count in task.stages)
    dense = variants.dense().logits_of(model.train())
    train(task.losses(dense, steps), groups_of(model, task.rate), total)
    trained_in = time.perf_counter() - started
    rows = []
    shares = SPARSITIES[-1:] if small else SPARSITIES
    jobs = [*((row_of, way) for way in ways), *((pruned_row, share) for share in shares)]
    for make, what in jobs:
        rows.append(make(task, model, what, small))
        print(f"{task.name}: {show(rows[-1])}", flush=True)
    return {
        "name": task.name,
        "measure": task.measure,
        "better": task.better,
        "parameters": sum(p.numel() for p in model.parameters()),
        "length": tasks.LENGTH,
        "steps": total,
        "tuning_steps": TUNING_STEPS,
        "training_seconds": round(trained_in),
        "rows": rows,
    }


def show(row):
    """A row as a line of text."""
    scores = ", ".join(
        f"{key} {row[key]:.3f}" for key in row if isinstance(row[key], float) and key != "density"
    )
    return f"{row['name']:<28} density {row['density']:.3f}  {scores}"


# A checkpoint of Hugging Face: nothing is trained.


def ways_of_a_checkpoint(length):
    """Ways to attend that need no training, with a sixteenth to a half of the keys."""
    shares = [length // part for part in (16, 8, 4, 2)]
    block = max(size for size in (16, 32, 64, 128) if size <= max(16, length // 32))
    few = [max(share // block, 2) for share in shares]
    return [
        variants.dense,
        *(lambda n=n: variants.window(n) for n in shares),
        *(lambda n=n: variants.blocks_and_window(n, block) for n in few),
        *(lambda n=n: variants.tokens(n) for n in shares),
        variants.fp8,
    ]


def judge_checkpoint(folder, length, as_bytes):
    """Perplexity and found numbers of a checkpoint, under every way that needs no training."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    if as_bytes:

        def encode(text):
            return list(text.encode())
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

        def encode(text):
            return tokenizer.encode(text, add_special_tokens=False)

    data = torch.tensor(encode(tasks.TEXT.read_text()))
    if int(data.max()) >= model.config.vocab_size:
        vocabulary = model.config.vocab_size
        raise SystemExit(f"{folder}: {vocabulary} tokens in the vocabulary, got {int(data.max())}")
    rows = []
    for make in ways_of_a_checkpoint(length):
        variant = make()
        model.set_attn_implementation(variant.register())
        logits_of = variant.logits_of(model)
        row = {"family": variant.family, "name": variant.name}
        with torch.no_grad():
            row["density"] = variants.density(variant, model, length)
            row["perplexity"] = tasks.perplexity(logits_of, data, length, batch=1, most=8)
            row["needle"] = tasks.needle_accuracy(logits_of, encode, data, length)
        rows.append(row)
        print(show(row), flush=True)
    return {"model": pathlib.Path(folder).name, "length": length, "rows": rows}


def write(path, document):
    """Write a results file whole, or leave what was there."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def main(arguments=None):
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=pathlib.Path, help="folder of a Hugging Face checkpoint; trains nothing"
    )
    parser.add_argument(
        "--length", type=int, default=1024, help="tokens per sequence, with --model"
    )
    parser.add_argument("--bytes", action="store_true", help="use bytes as tokens, with --model")
    parser.add_argument(
        "--small", action="store_true", help="run one step of everything, as a check"
    )
    parser.add_argument("-o", "--output", type=pathlib.Path)
    asked = parser.parse_args(arguments)
    if asked.model is not None:
        if asked.output is None:
            parser.error("--model needs -o: results.json holds those of the trained models")
        write(asked.output, judge_checkpoint(asked.model, asked.length, asked.bytes))
        return
    if asked.small and asked.output is None:
        parser.error("--small needs -o: results.json holds those of the whole run")
    # sums in one order, so that a second run gives the same figures
    torch.set_num_threads(1)
    ways = WAYS[::7] if asked.small else WAYS
    models = [study(task, ways, asked.small) for task in (Recall(), Text())]
    versions = {"torch": torch.__version__, "blackwell_sparsek": bsk.__version__}
    write(asked.output or RESULTS, {"versions": versions, "models": models})


if __name__ == "__main__":
    main()
