"""Write docs/results/quality.md and its plots from results.json, without arguments."""

import json
import pathlib

from blackwell_sparsek.bench.report.charts import Line, Plot, line_chart
from blackwell_sparsek.bench.report.figures import Figure
from blackwell_sparsek.bench.report.page import STANDALONE, standalone
from blackwell_sparsek.bench.report.tables import table

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
PAGE = "docs/results/quality.md"
PRUNED = "pruned MLP"
COLOURS = {"dense": 6, "keys per token": 0, "blocks": 1, "window": 2, "SparseK": 3, PRUNED: 4}
MEANINGS = {
    "window": "the latest keys, including the query's own (`register(BlockSparse(window=...))`)",
    "blocks": "for each block of 16 queries, its own block of keys and the best earlier blocks of "
    "16, scored by mean query times mean key (`register(BlockSparse(top_k=..., block_size=16))`)",
    "keys per token": "for each query, the keys with the highest scores (`bsk.select_keys` and "
    "`bsk.sparse_attention`)",
    "SparseK": "learned token scores whose weights add up to the given number "
    "(`bsk.sparsek_causal` and `key_gate`); dense before training",
    "FP8": "all keys, with queries, keys and values in e4m3 (`register(fp8=True)`); inference only",
    PRUNED: "MLP weights without their 16 x 16 blocks of smallest norm (`bsk.prune.sparsify_`)",
}


def score(model, value):
    """A score as text."""
    if value is None:
        return ""
    return f"{value:.1%}" if model["measure"] == "accuracy" else f"{value:.2f}"


def table_of(model):
    """All rows of a model."""
    head = ("", "density", f"{model['measure']} without fine-tuning", "with fine-tuning")
    rows = [
        [
            row["name"],
            f"{row['density']:.3f}",
            score(model, row["before"]),
            score(model, row["after"]),
        ]
        for row in model["rows"]
    ]
    return table(head, rows)


def lines_of(model):
    """A curve for each family with more than one density: the better of both scores."""
    families = {}
    for row in model["rows"]:
        families.setdefault(row["family"], []).append((row["density"], best(model, row)))
    return [Line(name, points) for name, points in families.items() if len(points) > 1]


def best(model, row):
    """The better score of a row."""
    scores = [row[key] for key in ("before", "after") if row[key] is not None]
    return max(scores) if model["better"] == "higher" else min(scores)


def plot_of(model):
    """Scores over densities, with a dashed line for the dense model."""
    (dense,) = (row for row in model["rows"] if row["family"] == "dense")
    lines, level = lines_of(model), best(model, dense)
    legend = {line.name: COLOURS[line.name] for line in lines}
    title = f"{model['name']}: {model['measure']}"
    if model["measure"] == "perplexity":
        # they differ by factors
        plot = Plot(title, "density", "", lines, level=level)
    else:
        densities = [density for line in lines for density, _ in line.points]
        ends = [(min(densities), level), (max(densities), level)]
        plot = Plot(title, "density", "", [*lines, Line("dense", ends, is_dashed=True)])
    words = f"{model['measure'].capitalize()} of the {model['name']} model over density"
    return Figure(words, [line_chart(plot, COLOURS, width=STANDALONE)], legend)


def file_of(model):
    """The path of a model's plot from the root of the repository."""
    return f"docs/plots/quality_{model['name']}.svg"


def findings(models):
    """What the figures say, from the figures."""
    by_name = {model["name"]: model for model in models}
    recall, text = by_name["recall"], by_name["text"]

    def at(model, name, key="before"):
        (row,) = (row for row in model["rows"] if row["name"] == name)
        return score(model, row[key]), row["density"]

    dense, _ = at(recall, "dense")
    few, few_density = at(recall, "best 4 keys")
    tuned_few, _ = at(recall, "best 4 keys", "after")
    half, half_density = at(recall, "window 128")
    block, block_density = at(recall, "best 7 blocks of 16")
    kept, kept_density = at(recall, "SparseK 64", "after")
    text_dense, _ = at(text, "dense")
    near, near_density = at(text, "window 32")
    pruned = "50% of the blocks pruned"
    steps = recall["tuning_steps"]
    return f"""\
- **Selecting keys per token keeps what matters.** With {few_density:.1%} of the pairs, recall is
  {few} without fine-tuning and {tuned_few} after {steps} steps of it. Dense attention reaches
  {dense}.
- **A window loses everything outside of it,** and fine-tuning does not recover it: with
  {half_density:.0%} of the pairs, {half} of the answers are correct. The pairs to recall are
  anywhere in the sequence, and a window sees only the nearby ones.
- **Block means are a poor way to find single tokens:** recall is {block} with {block_density:.0%}
  of the pairs, because a mean of 16 keys hides the one that matters. Select per token, or score
  blocks by their largest key.
- **SparseK in a model trained without it needs more than {steps} steps of fine-tuning:** recall is
  {kept} with {kept_density:.0%} of the pairs, and perplexity is
  {at(text, "SparseK 64", "after")[0]} instead of {text_dense}. It has to learn which tokens to
  drop, and here it has no window that keeps the latest tokens. `examples/learn_recall.py` trains
  such a layer from scratch to more than 90 % correct answers.
- **Perplexity hides what recall shows:** it is {near} with a window of 32 tokens and
  {near_density:.0%} of the pairs, and {text_dense} with dense attention, because the next letter
  depends on the latest ones. Do not judge sparse attention by perplexity alone.
- **FP8 costs almost nothing:** recall {at(recall, "FP8")[0]}, perplexity {at(text, "FP8")[0]}.
- **Pruned MLPs need more fine-tuning than this.** Without half of their blocks, perplexity is
  {at(text, pruned)[0]} before and {at(text, pruned, "after")[0]} after {steps} steps, and recall
  {at(recall, pruned)[0]} and {at(recall, pruned, "after")[0]}. MLPs this small have little
  redundancy."""


def page(document):
    """The page as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    parts = [
        "# What sparsity costs in quality",
        "Generated from `examples/quality/results.json` by `examples/quality/page.py`; "
        "do not edit.",
        "Two small two-layer Llamas are trained with dense attention on a CPU, and then run with "
        "sparse attention, with and without a few steps of fine-tuning. Each has one seed, "
        "so small differences mean nothing. The dense row shows the effect of fine-tuning alone. "
        f"{versions}.",
        "*Density* is the fraction of causal (query, key) pairs that attention computes or, for "
        "pruned MLPs, of weight blocks that are stored. It excludes the cost of selection: for "
        "keys per token, all pairs are scored first.",
        "## What it shows\n\n" + findings(document["models"]),
        "These models are tiny and their sequences short. The figures show how the methods differ, "
        "not what a large model loses. To find that out, run the harness on your own checkpoint "
        "(see below).",
        "## What was compared\n\n"
        + "\n".join(f"- *{name}*: {words}" for name, words in MEANINGS.items()),
    ]
    tasks = {
        "recall": "Eight tokens, each of which encodes a key and a value, are placed among {read} "
        "others. The model is then asked for 32 keys and must answer with the right token. A "
        "random guess among the eight is correct in one of eight cases.",
        "text": "Bytes of *Alice's Adventures in Wonderland* (Lewis Carroll, 1865, in the public "
        "domain). The last tenth is held out, and only tokens with at least 128 predecessors are "
        "scored.",
    }
    for model in document["models"]:
        sizes = (
            f"{model['parameters']:,} parameters, sequences of {model['length']} tokens, "
            f"{model['steps']} training steps, {model['tuning_steps']} more with each variant."
        )
        figure = plot_of(model)
        link = f"![{figure.caption}](../plots/{pathlib.Path(file_of(model)).name})"
        words = tasks[model["name"]].format(read=model["length"] - 40)
        title = f"## {model['name'].capitalize()}"
        better = f"{model['measure'].capitalize()}: {model['better']} is better."
        shown = "Points show the better of both columns; the dashed line is the dense model."
        parts += [title, f"{words} {sizes}", f"{better} {shown}", link]
        parts.append(table_of(model))
    parts.append(
        "## Your own checkpoint\n\n"
        "The same harness accepts a folder with a Hugging Face checkpoint. It trains nothing; it "
        "measures perplexity on the book, and how often the model finds a number hidden in "
        "it.\n\n"
        "```bash\n"
        "python examples/quality/run.py --model my-model --length 4096 -o my-model.json\n"
        "```\n\n"
        "`python examples/quality/run.py` repeats all training and evaluation, and "
        "`python examples/quality/page.py` writes this page."
    )
    return "\n\n".join(parts) + "\n"


def files(document):
    """Everything that is generated, by its path from the root of the repository."""
    plots = {file_of(model): standalone(plot_of(model)) for model in document["models"]}
    return {PAGE: page(document)} | plots


def main():
    """Write the files."""
    for name, content in files(json.loads(RESULTS.read_text())).items():
        (ROOT / name).write_text(content)
        print(name)


if __name__ == "__main__":
    main()
