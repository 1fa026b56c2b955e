"""The scenarios of the end-to-end benchmark on a two-layer Llama: what it measures is right."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blackwell_sparsek.bench.results import read
from blackwell_sparsek.integrations.huggingface.visible_keys import make_visible_keys

pytest.importorskip("transformers", minversion="5.17")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "llama_end_to_end.py"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def prompt(batch, length):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(length))


def test_single_token(make_model, both):
    theirs, ours = both(make_model(), lambda m: m(prompt(1, 1)).logits, theirs="sdpa")
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_batch(make_model, both):
    ids = prompt(5, 33)
    padding = torch.ones_like(ids)
    for row in range(5):
        padding[row, : 7 * row] = 0
    theirs, ours = both(make_model(), lambda m: m(ids, attention_mask=padding).logits, "sdpa")
    torch.testing.assert_close(ours[padding.bool()], theirs[padding.bool()], **TOLERANCE)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_long_sequence(family, make_model, both):
    model = make_model(family, **({"sliding_window": 200} if family == "Mistral" else {}))
    ids = prompt(1, 1000)
    theirs, ours = both(model, lambda m: m(ids, logits_to_keep=5).logits, theirs="sdpa")
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any result had."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        for x in results:
            # views cost nothing
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.most = max(self.most, x.numel())
        return result


@pytest.mark.parametrize("side", ["left", "right", "packed"])
def test_memory_of_masks(side):
    """Padding and packed sequences take no memory of Sq x Sk."""
    from transformers.masking_utils import (
        and_masks,
        causal_mask_function,
        packed_sequence_mask_function,
    )

    length = 2048
    padding, function = torch.ones(2, length, dtype=torch.bool), causal_mask_function
    if side == "packed":
        documents = (torch.arange(length) // 700).expand(2, -1)
        function, padding = and_masks(function, packed_sequence_mask_function(documents)), None
    else:
        padding[0, slice(None, 999) if side == "left" else slice(999, None)] = False
    with LargestTensor() as largest:
        plan = make_visible_keys(
            2, length, length, mask_function=function, attention_mask=padding, device="cpu"
        )
        mask = plan.mask_with(None, (128, 128))
    assert mask.density < 0.7
    assert largest.most < length * length / 4


def test_memory_of_the_cache(make_model):
    """Keys and values of the KV heads alone are stored, and none are repeated for queries."""
    import transformers

    model, ids = make_model(), prompt(2, 40)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with LargestTensor() as largest:
            model(ids[:, :1], past_key_values=cache)
    layer = cache.layers[0]
    assert layer.keys.numel() == 2 * 2 * 64 * 16
    repeated = layer.keys.numel() * model.config.num_attention_heads // 2
    assert largest.most < repeated


def test_generation(make_model, both):
    ids = prompt(2, 50)
    theirs, ours = both(
        make_model(),
        lambda m: m.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None),
        theirs="sdpa",
    )
    assert torch.equal(ours, theirs)


@pytest.mark.exhaustive
def test_the_benchmark(name, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    specification = importlib.util.spec_from_file_location("llama_end_to_end", SCRIPT)
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    found = script.measure(torch.device("cpu"), small=True)
    assert json.loads(json.dumps(found))["suite"] == "llama_end_to_end"
    results = found["results"]
    assert not [entry for entry in results if "failed" in entry]
    assert {entry["scenario"] for entry in results} == set(script.SCENARIOS)
    ours = [entry for entry in results if entry["implementation"] == "blackwell_sparsek"]
    assert all(e["equal_to_sdpa"] for e in ours if e["scenario"] == "generation")
    assert all(e["same_argmax"] for e in ours if e["scenario"] == "decode")
    table = script.kv_memory(script.LLAMA_31_8B)
    assert [row["bytes_per_token"] for row in table.values()] == [131072, 524288]

    path = tmp_path / "llama.json"
    path.write_text(json.dumps(script.results_document(found, "llama")))
    cases = {case["name"]: case for case in read(path)["cases"]}
    timed = [entry for entry in results if "median_s" in entry]
    assert sum(len(case["peers"]) for case in cases.values()) == len(timed)
    decode = next(case for name, case in cases.items() if name.startswith("decode"))
    assert {"bsk", "sdpa"} <= set(decode["peers"])
    assert decode["ratios"]["eager"]["over_best_peer"] > 0
