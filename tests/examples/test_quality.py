"""The harness that measures what sparsity costs in quality, and the page that is made from it."""

import importlib
import json
import pathlib
import sys

import pytest
import torch

import blackwell_sparsek as bsk

transformers = pytest.importorskip("transformers", minversion="5.17")
ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "quality"
MODULES = ("tasks", "variants", "run", "page")


@pytest.fixture(scope="module")
def quality():
    """The modules of the example, by name."""
    sys.path.insert(0, str(FOLDER))
    threads = torch.get_num_threads()
    found = {name: importlib.import_module(name) for name in MODULES}
    yield found
    torch.set_num_threads(threads)
    sys.path.remove(str(FOLDER))
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture(scope="module")
def tiny(quality):
    return quality["run"].small_llama(256, 32).eval()


def test_the_page_is_up_to_date(quality):
    page = quality["page"]
    for name, content in page.files(json.loads(page.RESULTS.read_text())).items():
        assert (ROOT / name).read_text() == content, "run python examples/quality/page.py"


def test_the_results_are_those_of_the_ways_in_the_harness(quality):
    run = quality["run"]
    for model in json.loads(run.RESULTS.read_text())["models"]:
        names = [way().name for way in run.WAYS]
        names += [f"{sparsity:.0%} of the blocks pruned" for sparsity in run.SPARSITIES]
        assert [row["name"] for row in model["rows"]] == names
        tasks = {"recall": run.Recall, "text": run.Text}
        assert model["steps"] == sum(count for _, count in tasks[model["name"]].stages)


def test_recall_asks_for_pairs_that_were_told(quality):
    tasks = quality["tasks"]
    tokens, answers = tasks.recall_batch(torch.Generator().manual_seed(0), 5)
    assert tokens.shape == (5, tasks.LENGTH) and answers.shape == (5, tasks.ASKED)
    for told, asked, answer in zip(*tokens.split([224, 32], 1), answers, strict=True):
        pairs = told[told < tasks.ASK]
        assert len(pairs) == tasks.PAIRS and len(set((pairs // tasks.VALUES).tolist())) == 8
        value_of = {int(pair) // tasks.VALUES: int(pair) for pair in pairs}
        assert [value_of[int(key) - tasks.ASK] for key in asked] == answer.tolist()


def test_scores_tell_the_right_from_the_wrong(quality):
    tasks = quality["tasks"]

    def perfect(tokens):
        """Looks up the pairs by itself."""
        logits = torch.zeros(*tokens.shape, tasks.RECALL_VOCABULARY)
        for row, line in enumerate(tokens.tolist()):
            pairs = {token // tasks.VALUES: token for token in line if token < tasks.ASK}
            for place in range(224, 256):
                logits[row, place, pairs[line[place] - tasks.ASK]] = 1
        return logits

    assert tasks.recall_accuracy(perfect, 1, 4) == 1.0
    assert tasks.recall_accuracy(lambda t: -perfect(t), 1, 4) == 0.0
    data = tasks.book()[1]
    uniform = tasks.perplexity(lambda t: torch.zeros(*t.shape, 256), data, most=3)
    assert uniform == pytest.approx(256, rel=1e-5)

    def knows_it(tokens):
        """Predicts what follows in the text."""
        places = [bytes(row.tolist()) for row in tokens]
        text = bytes(data.tolist())
        nexts = [text[text.index(p) + 1 : text.index(p) + 1 + len(p)] for p in places]
        return 50.0 * torch.nn.functional.one_hot(torch.tensor([[*n] for n in nexts]), 256)

    assert tasks.perplexity(knows_it, data, most=3) == pytest.approx(1, rel=1e-5)


def test_a_needle_is_found_by_who_reads_it(quality):
    tasks = quality["tasks"]
    _, data = tasks.book()

    def encode(text):
        return list(text.encode())

    def reader(tokens):
        """Looks for the first mention of the number."""
        (line,) = tokens.tolist()
        told = bytes(line).index(b"The pass key is ") + 16
        logits = torch.zeros(1, len(line), 256)
        for place, digit in enumerate(line[told : told + 5]):
            logits[0, len(line) - 6 + place, digit] = 1.0
        return logits

    assert tasks.needle_accuracy(reader, encode, data, 512) == 1.0
    assert tasks.needle_accuracy(lambda t: reader(t).roll(1, 1), encode, data, 512) == 0.0
    with pytest.raises(SystemExit, match="--length 50 leaves -"):
        tasks.needle_accuracy(reader, encode, data, 50)


@pytest.mark.parametrize("length", [48, 75])
def test_ways_that_see_everything_are_dense(quality, tiny, length):
    variants = quality["variants"]
    tokens = torch.randint(256, (2, length), generator=torch.Generator().manual_seed(0))
    everything = [
        variants.window(length),
        variants.blocks(length),
        variants.tokens(length),
        variants.blocks_and_window(2 * length, 16),
    ]
    with torch.no_grad():
        tiny.set_attn_implementation("sdpa")
        expected = variants.dense().logits_of(tiny)(tokens)
        for variant in everything:
            tiny.set_attn_implementation(variant.register())
            torch.testing.assert_close(variant.logits_of(tiny)(tokens), expected)
            assert variants.density(variant, tiny, length) == 1.0
        tiny.set_attn_implementation(variants.window(8).register())
        few = variants.window(8).logits_of(tiny)(tokens)
    assert not torch.allclose(few, expected, atol=1e-2)


def test_densities_count_pairs(quality, tiny):
    variants = quality["variants"]
    pairs = 64 * 65 / 2
    assert variants.density(variants.dense(), tiny, 64) == 1.0
    # windows of 8: 64 rows of 8 keys, less those that the first rows lack
    assert variants.density(variants.window(8), tiny, 64) == pytest.approx((64 * 8 - 28) / pairs)
    assert variants.density(variants.tokens(8), tiny, 64) == pytest.approx((64 * 8 - 28) / pairs)
    # four triangles of 16 on the diagonal and one block before each but the first
    expected = (4 * 136 + 3 * 256) / pairs
    assert variants.density(variants.blocks(1), tiny, 64) == pytest.approx(expected)


def test_sparsek_begins_dense_and_learns_its_scores(quality):
    variants, run = quality["variants"], quality["run"]
    model = run.small_llama(256, 32)
    tokens = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=tokens).logits
    variant = variants.sparsek(8)
    variant.prepare(model)
    model.set_attn_implementation(variant.register())
    logits = variant.logits_of(model)(tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert variants.density(variant, model, 64) == 1.0
    logits.square().mean().backward()
    scores = [layer.sparsek.weight for layer in variants.attention_layers(model)]
    assert all(weight.grad.abs().max() > 0 for weight in scores)
    groups = run.groups_of(model, 1e-3)
    assert groups[1]["params"] == scores and groups[1]["lr"] == run.SCORE_RATE
    with torch.no_grad():
        for weight in scores:
            weight.normal_(std=2.0)
        variant.logits_of(model)(tokens)
    assert variants.density(variant, model, 64) < 0.8


def test_a_small_run_from_training_to_the_file(quality, tmp_path, capsys):
    run, path = quality["run"], tmp_path / "results.json"
    run.main(["--small", "-o", str(path)])
    found = json.loads(path.read_text())
    assert found["versions"]["blackwell_sparsek"] == bsk.__version__
    assert [model["name"] for model in found["models"]] == ["recall", "text"]
    for model in found["models"]:
        families = [row["family"] for row in model["rows"]]
        assert families == ["dense", "blocks", "FP8", "pruned MLP"]
        dense, blocks, fp8, pruned = model["rows"]
        assert dense["density"] == fp8["density"] == 1.0 > blocks["density"]
        assert fp8["after"] is None and all(row["before"] is not None for row in model["rows"])
        assert pruned["density"] == pytest.approx(0.1, abs=0.01)
    assert "text: dense" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_of_hugging_face(quality, tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "model")
    path = tmp_path / "mine.json"
    arguments = ["--model", str(tmp_path / "model"), "--length", "128", "-o", str(path)]
    quality["run"].main([*arguments, "--bytes"])
    found = json.loads(path.read_text())
    assert (found["model"], found["length"]) == ("model", 128)
    families = dict.fromkeys(row["family"] for row in found["rows"])
    assert list(families) == ["dense", "window", "window and blocks", "keys per token", "FP8"]
    dense = found["rows"][0]
    # random weights: near the 256 of a uniform guess, and no number is found
    assert 200 < dense["perplexity"] < 1000 and dense["needle"] == 0
    by_family = {}
    for row in found["rows"]:
        by_family.setdefault(row["family"], []).append(row["density"])
    assert all(values == sorted(values) for values in by_family.values())
    assert by_family["window"] == pytest.approx([0.12, 0.24, 0.44, 0.75], abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "x"], "--model needs -o"),
        (["--small"], "--small needs -o"),
    ],
)
def test_results_of_the_page_are_not_overwritten_by_accident(quality, arguments, message, capsys):
    with pytest.raises(SystemExit):
        quality["run"].main(arguments)
    assert message in capsys.readouterr().err
