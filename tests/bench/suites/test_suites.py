import pytest
import torch

from blackwell_sparsek.bench.case import EAGER, GRAPH, MODES
from blackwell_sparsek.bench.run import failures, run_suite
from blackwell_sparsek.bench.suites import GROUPS, SUITES
from blackwell_sparsek.bench.suites import attention_peers as flash
from blackwell_sparsek.bench.suites import attention_peers as importing
from blackwell_sparsek.bench.suites.attention_peers import (
    FORWARD,
    block_lists,
    call_by_name,
    flex_mask,
    window_of,
)
from blackwell_sparsek.bench.suites.attention_problem import Attention

CPU = torch.device("cpu")
F32 = torch.float32


@pytest.mark.parametrize("name", SUITES)
def test_cases_have_names_of_their_own_and_peers_that_exist(name):
    suite = SUITES[name]
    assert suite.about and suite.about.endswith(".") and "\n" not in suite.about
    for tiny in (False, True):
        cases = list(suite.cases(tiny))
        assert len({case.name for case in cases}) == len(cases) > 0
        for case in cases:
            assert set(case.peers) <= set(suite.peers) and suite.ours in case.peers
            assert case.modes and set(case.modes) <= set(MODES)


def test_groups_hold_suites_and_all_holds_all():
    assert all(set(members) <= set(SUITES) for members in GROUPS.values())
    assert GROUPS["all"] == list(SUITES)
    kinds = ("dense", "wide", "window", "small", "varlen")
    assert GROUPS["attention"] == [f"attention_{kind}" for kind in kinds]


@pytest.mark.parametrize(
    "name",
    [
        "attention_small",
        "attention_wide",
        "backward_wide",
        "backward_small",
        "attention_window",
        "attention_varlen",
        "block_sparse",
        "mask_building",
        "training",
        "bsr_training",
        "decode",
        "distributed",
        "serving",
        "append",
        "fp8_attention",
        "fp8_matmul",
        "fp8_quantize",
        "mla",
        "sparse_attention",
        "selection",
        "sparsek",
        "gated_attention",
        "host",
        "new_sizes",
    ],
)
def test_small_suites_run_here_and_nothing_of_ours_fails(name):
    suite = SUITES[name]
    document = run_suite(suite, list(suite.cases(True))[-1:], CPU, seconds=0.0)
    assert failures(document) == []
    assert all("times" in case["peers"]["bsk"] for case in document["cases"])


def test_the_host_time_of_an_engine_is_measured():
    suite = SUITES["host"]
    names = ("step of an engine", "append with rotary")
    cases = [case for case in suite.cases(True) if case.name in names]
    document = run_suite(suite, cases, CPU, seconds=0.0)
    assert [case["name"] for case in document["cases"]] == [*names]
    assert failures(document) == []


def test_the_founding_shapes():
    small = list(SUITES["attention_small"].cases(False))
    assert [case.problem["heads"] for case in small] == [8, 16, 32, 64, 96, 128]
    for case in small:
        p = case.problem
        assert (p["batch"], p["length"], p["head_dim"], p["dtype"]) == (1, 512, 64, "float16")
        assert case.modes == (EAGER, GRAPH) and p["tiers_us_per_head"] == [3.82, 3.0, 2.0]
    dense = [case.problem for case in SUITES["attention_dense"].cases(False)]
    for p in dense[:-2]:
        assert p["batch"] * p["length"] == 16384 and p["heads"] * p["head_dim"] == 2048
    assert {(p["heads"], p["kv_heads"]) for p in dense[-2:]} == {(32, 8)}
    wide = [case.problem for case in SUITES["attention_wide"].cases(False)]
    assert {(p["head_dim"], p.get("head_dim_v"), p["heads"], p["kv_heads"]) for p in wide} == {
        (256, None, 16, 8),
        (192, 128, 16, 16),
        (192, 128, 128, 128),
    }
    window = [case.problem for case in SUITES["attention_window"].cases(False)]
    assert [p["length"] for p in window] == [32768, 131072, 524288]
    assert all(p["window"] == 2048 and p["causal"] for p in window)
    blocks = [case.problem for case in SUITES["block_sparse"].cases(False)]
    assert {tuple(p["block"]) for p in blocks} == {(128, 128), (64, 64), (128, 32), (128, 16)}
    decode = [case.problem for case in SUITES["decode"].cases(False)]
    assert {(p["batch"], p["length"]) for p in decode[:-24]} == {
        (1, 1024),
        (1, 8192),
        (1, 131072),
        (16, 8192),
        (64, 4096),
    }
    shared = {(p["heads"], p["kv_heads"], p["head_dim"], p["batch"]) for p in decode[-20:-11]}
    models = ((32, 1, 128), (64, 1, 128), (64, 8, 64))
    assert shared == {(*model, batch) for model in models for batch in (1, 4, 32)}
    assert {(p["head_dim"], p["batch"], p["page_size"]) for p in decode[-11:-8]} == {
        *((256, 1, 0), (256, 16, 0), (256, 16, 64)),
    }
    several = [(p["queries"], p["batch"], p["page_size"]) for p in decode[-8:]]
    assert several == [(q, b, size) for q in (4, 16) for b in (1, 16) for size in (0, 64)]
    assert {(p["heads"], p["kv_heads"], p["length"]) for p in decode[-8:]} == {(32, 8, 8192)}
    assert not any("queries" in p for p in decode[:-8])
    assert {p["page_size"] for p in decode} == {0, 16, 64, 256}
    ragged, equal = decode[-22:-20]
    assert (min(ragged["lengths"]), max(ragged["lengths"])) == (100, 32768)
    assert 0 <= sum(ragged["lengths"]) - 16 * equal["length"] < 16
    (varlen, *_) = [case.problem for case in SUITES["attention_varlen"].cases(False)]
    lengths = varlen["lengths"]
    assert len(lengths) == 16 and (min(lengths), max(lengths)) == (128, 4096)
    training = [case.problem for case in SUITES["training"].cases(False)]
    assert [(p["length"], p["heads"], p["kv_heads"]) for p in training] == [
        (8192, 32, 8),
        (32768, 32, 8),
    ]


@pytest.mark.parametrize(
    ("problem", "reasons"),
    [
        (
            Attention(1, 2, 64, 16, dtype=F32),
            {"sdpa": None, "sdpa_cudnn": "needs a CUDA GPU", "sdpa_dense": "is the case itself"},
        ),
        (
            Attention(1, 2, 64, 16, dtype=F32, window=9),
            {"sdpa": "has no window mask", "sdpa_dense": None},
        ),
        (
            Attention(1, 2, 64, 16, dtype=F32, block=(16, 16), density=0.5),
            {
                "sdpa": "has no blocks mask",
                "fa4": "has no tile for blocks of 16x16",
                "cudnn_blocks": "takes blocks of 64x64 and 128x128, not 16x16",
                "flashinfer": "needs a CUDA GPU",
                "fa3": "needs a CUDA GPU",
            },
        ),
    ],
)
def test_peers_say_why_they_do_not_take_part(problem, reasons):
    inputs = problem.build(CPU)
    assert {name: FORWARD[name].supports(inputs) for name in reasons} == reasons


def test_what_is_not_installed_is_named():
    assert importing.why_missing("no_such_thing", "f") == "no_such_thing is not installed"
    assert importing.why_missing("json", "no_such_name") == "json has no no_such_name"
    assert importing.why_missing("json", "dumps") is None
    assert importing.why_missing("json.nothing", "f") == "json.nothing is not installed"


def test_a_module_that_breaks_on_import_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "breaks_bsk.py").write_text("raise OSError('libcudart.so.9: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    assert importing.why_missing("breaks_bsk", "f") == (
        "breaks_bsk does not import: OSError: libcudart.so.9: not found"
    )


def test_libraries_are_found_on_the_path(tmp_path, monkeypatch):
    assert importing.library_on_path("lib_bsk.so") is None
    (tmp_path / "lib_bsk.so").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    assert importing.library_on_path("lib_bsk.so") == tmp_path / "lib_bsk.so"


def test_operators_are_called_by_name_whatever_stands_between():
    found = call_by_name(
        torch.ops.aten.addmm,
        {"self": torch.zeros(2, 2), "mat1": torch.ones(2, 3), "mat2": torch.ones(3, 2)},
    )
    assert torch.equal(found, torch.full((2, 2), 3.0))


@pytest.mark.parametrize(
    ("causal", "window", "unbounded", "expected"),
    [
        (False, None, -1, (-1, -1)),
        (True, None, -1, (-1, -1)),
        (True, None, None, (None, 0)),
        (True, 8, -1, (7, 0)),
        (False, 8, None, (7, 7)),
    ],
)
def test_windows_in_the_way_of_flash_attention(causal, window, unbounded, expected):
    inputs = Attention(1, 1, 16, 8, dtype=F32, causal=causal, window=window).build(CPU)
    assert window_of(inputs, unbounded) == expected


def test_flash_attention_3_is_a_package_or_a_library(monkeypatch, tmp_path):
    assert flash.fa3_available() == "flash_attn_interface is not installed"
    (tmp_path / "_vllm_fa3_C.abi3.so").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    assert flash.fa3_available() is None


def test_the_mask_for_flex_shows_the_same_blocks():
    inputs = Attention(1, 2, 256, 16, dtype=F32, block=(64, 32), density=0.4).build(CPU)
    counts, order = block_lists(inputs.keep)
    mask = flex_mask(inputs)
    assert mask.kv_num_blocks.sum() == 0
    assert torch.equal(mask.full_kv_num_blocks[0], counts)
    assert torch.equal(mask.to_dense()[0].bool(), inputs.keep)
    for h in range(2):
        for row in range(4):
            kept = order[h, row, : counts[h, row]].tolist()
            assert kept == inputs.keep[h, row].nonzero().flatten().tolist()
