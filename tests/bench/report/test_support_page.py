"""docs/support.md is what the functions that choose answer, and says what was run."""

import json
import pathlib

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.bench.report import support
from blackwell_sparsek.core.compat import LAUNCHER_TRITON, WARPS_TRITON
from blackwell_sparsek.testing.compile_cases import ALL_ARCHS

REPOSITORY = pathlib.Path(__file__).parents[3]
RESULTS = REPOSITORY / "benchmarks/results"


def test_the_committed_page_is_up_to_date():
    committed = (REPOSITORY / support.PAGE).read_text()
    assert committed == support.support_page(RESULTS), "run `make pages`"


def test_another_triton_or_implementation_does_not_change_it(monkeypatch):
    monkeypatch.setenv("BSK_IMPL", "eager")
    monkeypatch.setattr(support.compat, "triton_version", lambda: None)
    assert (REPOSITORY / support.PAGE).read_text() == support.support_page(RESULTS)


def test_a_changed_limit_changes_it(monkeypatch):
    from blackwell_sparsek.attention.sm90 import tuning

    monkeypatch.setattr(tuning, "LARGEST_HEAD_DIM", 120)
    page = support.support_page(RESULTS)
    assert "8 to 120 in steps of 8" in page and "8 to 128" not in page


def test_head_dims_that_are_refused_are_not_shown():
    """Attention takes no more than 256, decoding the latent caches of 576 and 512 besides."""
    page = support.support_page(RESULTS)
    assert "above 256 |" not in page and "Head dims above 256 raise an error" in page
    q = torch.randn(1, 1, 4, 257)
    with pytest.raises(bsk.InvalidInput, match="q has an unsupported head dim"):
        bsk.attention(q, q, q)
    latent = [line for line in page.splitlines() if "head dims 576 and 512" in line]
    assert latent[1] == (
        "| bfloat16, head dims 576 and 512 | triton | triton | sm90 | triton | triton | eager |"
    )
    cache = torch.randn(1, 1, 8, 576)
    options = {"cache_seqlens": torch.tensor([8], dtype=torch.int32)}
    out = bsk.attention_decode(torch.randn(1, 2, 1, 576), cache, cache[..., :512], **options)
    assert out.shape == (1, 2, 1, 512)


def test_every_known_release_and_architecture_is_shown():
    assert set(support.TORCH_WITH) == set(LAUNCHER_TRITON) == set(WARPS_TRITON)
    assert list(support.releases()) == [*LAUNCHER_TRITON, (3, 10)]
    assert tuple(support.GPUS) == ALL_ARCHS


def test_what_was_run_comes_from_all_results(tmp_path):
    name = "host.json"
    document = json.loads((RESULTS / name).read_text())
    for folder, triton in (("", "3.6.0"), ("3.9", "3.9.0")):
        document["environment"]["versions"]["triton"] = triton
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(json.dumps(document))
    torch = document["environment"]["versions"]["torch"]
    assert support.ran_on(tmp_path) == [
        f"NVIDIA H200, torch {torch}, Triton {triton}" for triton in ("3.6.0", "3.9.0")
    ]


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ([64], "64"),
        (list(range(1, 257)), "1 to 256"),
        (list(range(257, 513)), "257 to 512"),
        (list(range(8, 129, 8)), "8 to 128 in steps of 8"),
        ([64, 128, 256], "64, 128, 256"),
        ([16, 32, 48, 64], "16 to 64 in steps of 16"),
        ([d for d in range(1, 257) if d > 128 or d % 8], "up to 256, except where listed"),
    ],
)
def test_head_dims_in_words(dims, words):
    assert support.dims_in_words(dims) == words
