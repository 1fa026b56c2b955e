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
    "window": "the latest keys, the query's own among them (`register(BlockSparse(window=...))`)",
    "blocks": "for each block of 16 queries the best blocks of 16 keys before it, by products of "
    "mean queries and mean keys, and its own (`register(BlockSparse(top_k=..., block_size=16))`)",
    "keys per token": "for each query the keys with the highest scores (`bsk.select_keys` and "
    "`bsk.sparse_attention`)",
    "SparseK": "learned scores of tokens, whose weights add up to the number that is named "
    "(`bsk.sparsek_causal` and `key_gate`); before training it is dense",
    "FP8": "queries, keys and values in e4m3, all keys (`register(fp8=True)`); for inference only",
    PRUNED: "blocks of 16 x 16 of the MLPs dropped by their norms (`bsk.prune.sparsify_`)",
}


def score(model, value):
    """A score as text."""
    if value is None:
        return ""
    return f"{value:.1%}" if model["measure"] == "accuracy" else f"{value:.2f}"


def table_of(model):
    """All rows of a model."""
    head = ("", "density", f"{model['measure']}, as it is", "after training with it")
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
- **Choosing keys for each token keeps what matters.** With {few_density:.1%} of the pairs, recall
  is {few} as it is and {tuned_few} after {steps} steps of training; dense it is {dense}.
- **A window loses what lies before it,** and training does not bring that back: with
  {half_density:.0%} of the pairs, {half} of the answers are right. Pairs lie anywhere in the
  sequence, and a window sees only those that are near.
- **Blocks chosen by means are a poor way to find single tokens:** {block} with
  {block_density:.0%} of the pairs. A mean of 16 keys hides one that matters. Choose for each token,
  or by the largest score.
- **SparseK put into a trained model loses much in {steps} steps:** recall {kept} with
  {kept_density:.0%} of the pairs, and a perplexity of {at(text, "SparseK 64", "after")[0]} instead
  of {text_dense}. It has to learn which tokens to drop, and here nothing keeps the latest ones for
  it. `examples/learn_recall.py` trains such a layer from the start, and more than nine in ten
  answers are right.
- **Perplexity does not see what recall sees:** {near} with a window of 32 tokens and
  {near_density:.0%} of the pairs, {text_dense} dense. The next letter depends on the latest ones.
  Do not judge sparse attention by perplexity alone.
- **FP8 costs almost nothing:** recall {at(recall, "FP8")[0]}, perplexity {at(text, "FP8")[0]}.
- **Pruned MLPs need training, and more than this:** without half of their blocks, perplexity is
  {at(text, pruned)[0]} and then {at(text, pruned, "after")[0]}, recall {at(recall, pruned)[0]} and
  then {at(recall, pruned, "after")[0]}. MLPs this small have little to spare."""


def page(document):
    """The page as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    parts = [
        "# What sparsity costs in quality",
        "Generated from `examples/quality/results.json` by `examples/quality/page.py`; "
        "do not edit.",
        "Two small Llamas of two layers, trained with dense attention on a CPU and then run with "
        "other attention, as they are and after a few more steps of training. One seed each, so "
        "small differences mean nothing; the dense row shows what the additional steps do alone. "
        f"{versions}.",
        "*Density* is the share of the causal (query, key) pairs that attention computes; for "
        "pruned MLPs, of the blocks of their weights that are stored. What choosing costs is not "
        "in it: for keys per token, all pairs are scored first.",
        "## What it shows\n\n" + findings(document["models"]),
        "These models are tiny and their sequences short: the figures say how the methods differ, "
        "not what a large model loses. For that, run the same on your own checkpoint, see below.",
        "## What was compared\n\n"
        + "\n".join(f"- *{name}*: {words}" for name, words in MEANINGS.items()),
    ]
    tasks = {
        "recall": "Eight tokens that name a key and a value each lie among {read} others; then "
        "the model is asked for 32 keys and must answer with the right token. Guessing among the "
        "eight is right in one of eight cases.",
        "text": "Bytes of *Alice's Adventures in Wonderland* (Lewis Carroll, 1865, in the public "
        "domain); the last tenth is held out, and tokens with at least 128 others before them are "
        "scored.",
    }
    for model in document["models"]:
        sizes = (
            f"{model['parameters']:,} parameters, sequences of {model['length']} tokens, "
            f"{model['steps']} steps of training, {model['tuning_steps']} more with each variant."
        )
        figure = plot_of(model)
        link = f"![{figure.caption}](../plots/{pathlib.Path(file_of(model)).name})"
        words = tasks[model["name"]].format(read=model["length"] - 40)
        title = f"## {model['name'].capitalize()}"
        better = f"{model['measure'].capitalize()}: {model['better']} is better."
        shown = "Points are the better of both columns, the dashed line is the dense model."
        parts += [title, f"{words} {sizes}", f"{better} {shown}", link]
        parts.append(table_of(model))
    parts.append(
        "## Your own checkpoint\n\n"
        "The same harness takes a folder with a checkpoint of Hugging Face. It trains nothing, and "
        "measures perplexity over the book and how often the model finds a number that was told "
        "somewhere in it.\n\n"
        "```bash\n"
        "python examples/quality/run.py --model my-model --length 4096 -o my-model.json\n"
        "```\n\n"
        "`python examples/quality/run.py` trains and judges all of this again, "
        "`python examples/quality/page.py` writes the page."
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
