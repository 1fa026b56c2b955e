import json
import pathlib
import xml.etree.ElementTree as ET

import pytest

from blackwell_sparsek import InvalidInput
from blackwell_sparsek.bench import results
from blackwell_sparsek.bench.report import markdown as tables
from blackwell_sparsek.bench.report import pages
from blackwell_sparsek.bench.report import tables as peer_tables
from blackwell_sparsek.bench.report.pages import (
    HEADLINES,
    RESULTS,
    committed,
    headlines,
    losses,
    summary,
)
from blackwell_sparsek.bench.report.releases import releases_page
from blackwell_sparsek.bench.suites import SUITES

REPOSITORY = pathlib.Path(__file__).parents[3]


def _entry(ms, **more):
    times = {
        "quantiles_s": {"p50": ms / 1e3},
        "executed_tflops": 561.2,
        "dense_equivalent_tflops": 2551.0,
    }
    return {"label": "", "times": {"eager": times}, **more}


def _document(**more):
    peers = {
        "bsk": _entry(0.4312, implementation="sm90"),
        "dense": _entry(1.5),
        "torch_bsr": _entry(0.9),
        "cusparse_csr": {"label": "", "n/a": "needs a CUDA GPU"},
    }
    ratio = {"over_dense": 3.4786, "best_peer": "torch_bsr", "over_best_peer": 2.087}
    case = {"name": "8192^3", "problem": {}, "peers": peers, "ratios": {"eager": ratio}}
    environment = {"device_name": "H200", "versions": {"torch": "2.11", "triton": "3.6"}}
    return {
        "schema": 2,
        "suite": "matmul_founding",
        "commit": "0123456789abcdef",
        "environment": environment,
        "cases": [case],
        **more,
    }


def test_a_document_as_tables():
    assert tables.matmul_tables(_document()).splitlines() == [
        "**matmul founding** (H200, torch 2.11, triton 3.6, commit 0123456789)",
        "",
        "| case, single calls, cold L2 | implementation | bsk ms | dense ms "
        "| speedup over dense | best sparse peer ms "
        "| speedup over peer | executed TFLOP/s | dense-equivalent TFLOP/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 8192^3 | sm90 | 0.431 | 1.5 | 3.48x | 0.9 (torch_bsr) | 2.09x | 561 | 2551 |",
        "",
        "- cusparse_csr: n/a: needs a CUDA GPU",
    ]


def test_graph_times_have_a_table_of_their_own():
    document = _document()
    ours = document["cases"][0]["peers"]["bsk"]
    ours["times"]["graph"] = ours["times"]["eager"]
    text = tables.matmul_tables(document)
    assert text.count("| 8192^3 |") == 2 and "case, CUDA graph, cold weights" in text


def test_crossovers():
    curve = [
        {"block": [128, 128], "density": 0.8125, "speedups": [(0.5, 1.9), (0.9, 0.9)]},
        {"block": [64, 64], "density": None, "speedups": [(0.1, 6.0), (0.9, 1.1)]},
        {"block": [16, 16], "density": None, "speedups": [(0.1, 0.9), (0.9, 0.2)]},
    ]
    text = tables.matmul_tables(_document(crossover=curve))
    assert "| 128x128 | 81% | 1.90x at 50%, 0.90x at 90% |" in text
    assert "| 64x64 | above 90% |" in text and "| 16x16 | below 10% |" in text


def test_a_sweep_is_one_table_over_the_sparsity():
    cases = []
    for size in (8192, 4096):
        for density in (0.1, 0.5, 0.22):
            (case,) = _document()["cases"]
            block = [16, 16] if density != 0.22 else [128, 16]
            problem = {"weight": [size, size], "n": size, "block": block, "density": density}
            cases.append(case | {"name": f"{size} {density}", "problem": problem})
    cases[1]["peers"]["bsk"]["implementation"] = "dense"
    del cases[3]["peers"]["bsk"]["times"]
    other = _document()["cases"][0] | {"name": "another"}
    text = tables.matmul_tables(_document(suite="matmul_square") | {"cases": [*cases, other]})
    assert text.splitlines()[2:11] == [
        "| speedup over dense (bsk ms), single calls, cold L2 "
        "| 50% sparse | 78% sparse | 90% sparse |",
        "| --- | ---: | ---: | ---: |",
        "| 4096 x 4096 x 4096, blocks 128x16 |  | 3.48x (0.431 ms) |  |",
        "| 4096 x 4096 x 4096, blocks 16x16 | 3.48x (0.431 ms) |  | n/a |",
        "| 8192 x 8192 x 8192, blocks 128x16 |  | 3.48x (0.431 ms) |  |",
        "| 8192 x 8192 x 8192, blocks 16x16 | 3.48x (0.431 ms, dense) |  | 3.48x (0.431 ms) |",
        "",
        "*dense* marks cases in which `auto` ran the dense product.",
        "",
    ]
    assert "| another | sm90 | 0.431 |" in text and "8192 0.1" not in text


def test_of_many_cases_without_time_a_few_are_named():
    text = tables.matmul_tables(_document(left_out=["a", "b"]))
    assert text.endswith("Skipped for lack of time: a, b.")
    text = tables.matmul_tables(_document(left_out=[f"c{i}" for i in range(99)]))
    assert text.endswith("c6, c7 and 91 more.")


def test_whatever_a_file_says_is_text_in_markdown():
    hostile = "<img src=x onerror=alert(1)>\n# big | [a](b)"
    document = _document(suite=f"matmul_{hostile}", commit=hostile, left_out=[hostile])
    document["environment"]["device_name"] = hostile
    (case,) = document["cases"]
    case |= {"name": hostile, "unsteady": hostile, "error": hostile}
    case["peers"]["bsk"]["implementation"] = hostile
    case["peers"][hostile] = {"label": hostile, "crashed": hostile}
    for text in (tables.matmul_tables(document), peer_tables.peer_tables(document)):
        assert "<" not in text and "\n#" not in text
    assert "<" not in summary([document])


def test_a_failed_check_is_named():
    document = _document()
    document["cases"][0]["peers"]["bsk"] = {"label": "", "failed": "AssertionError: over"}
    text = tables.matmul_tables(document)
    assert "- bsk: failed its check (8192^3): AssertionError: over" in text
    assert "| 8192^3 | n/a | n/a | 1.5 |" in text


def _readme(inside):
    return f"# Title\n\n{pages.BEGIN}{inside}{pages.END}\n\nmore\n"


def test_the_section_is_replaced_and_nothing_else(tmp_path):
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "docs/results").mkdir(parents=True)
    readme, docs = tmp_path / "README.md", tmp_path / "docs/results/index.md"
    for page in (readme, docs):
        page.write_text(_readme("\nold\n"))
    pages.write_pages(tmp_path)
    assert readme.read_text() == docs.read_text() == _readme("\n")
    for suite in ("founding", "square"):
        path = tmp_path / f"benchmarks/results/matmul_{suite}.json"
        path.write_text(json.dumps(_document() | {"suite": f"matmul_{suite}"}))
    pages.write_pages(tmp_path)
    caption = (
        "Speedup over the same computation without sparsity, single calls; "
        "below 1, dense is faster."
    )
    link = f"![{caption}](docs/plots/matmul_founding.svg)"
    assert readme.read_text() == _readme(f"\n\n{link}\n\n")  # 8192^3 is no headline
    lines = summary([_document(), _document() | {"suite": "matmul_square"}])
    links = "[matmul founding](matmul_founding.md) · [matmul square](matmul_square.md)"
    assert docs.read_text() == _readme(f"\n\n{links}\n\n{lines}\n\n")
    heading, rest = tables.matmul_tables(_document()).split("\n\n", 1)
    founding, square = (docs.with_name(f"matmul_{name}.md") for name in ("founding", "square"))
    assert founding.read_text().startswith("# Matmul founding\n\nGenerated from `benchmarks/")
    assert founding.read_text().endswith(
        f"{heading}\n\n![{caption}](../plots/matmul_founding.svg)\n\n{rest}\n"
    )
    assert "(../plots/matmul_square.svg)" in square.read_text()
    assert len(list((tmp_path / "docs/plots").iterdir())) == 2
    written = {page: page.read_text() for page in docs.parent.iterdir()}
    pages.write_pages(tmp_path)
    assert len(written) == 3
    assert written == {page: page.read_text() for page in docs.parent.iterdir()}


@pytest.mark.parametrize("text", ["no markers", _readme("\n") + pages.BEGIN])
def test_markers_must_stand_once(text):
    with pytest.raises(ValueError, match="once each"):
        pages.with_section(text, "")


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_figures_of_a_page_are_those_of_the_committed_results(page):
    text = (REPOSITORY / page).read_text()
    section = pages.section_of(page, REPOSITORY / pages.RESULTS)
    assert text == pages.with_section(text, section), "run `make pages`"


def _texts_but_of_quality(folder):
    """Texts by path; those of examples/quality have another writer, and a test beside it."""
    files = (path for path in folder.iterdir() if not path.name.startswith("quality"))
    return {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in files}


def test_the_pages_of_suites_are_those_of_the_committed_results():
    folder = REPOSITORY / pages.INDEX.parent
    there = _texts_but_of_quality(folder)
    del there[pages.INDEX.as_posix()]
    results = REPOSITORY / pages.RESULTS
    releases = {page.as_posix(): text for page, text in releases_page(results).items()}
    assert there == pages.suite_pages(results) | releases, "run `make pages`"


def test_the_plots_of_the_pages_are_those_of_the_committed_results():
    folder = REPOSITORY / pages.PLOTS
    there = _texts_but_of_quality(folder)
    assert there == pages.plot_files(REPOSITORY / pages.RESULTS), "run `make pages`"


def test_a_plot_is_a_file_of_its_own():
    (text,) = [pages.standalone(figure) for _, figure in pages.headline(_document())]
    root = ET.fromstring(text)
    assert root.tag.endswith("svg") and "prefers-color-scheme" in text and "var(--c0)" in text
    assert [x.text for x in root if x.tag.endswith("text")] == ["bsk", "torch_bsr"]


SUITE, NAME, MODE = HEADLINES[0]


def _times(seconds, **more):
    return {"times": {MODE: {"quantiles_s": {"p50": seconds}, **more}}}


def _headline_document(ours, ratio):
    peers = {"bsk": ours, "torch|bsr": _times(2e-3)}
    case = {"name": NAME, "problem": {}, "peers": peers, "ratios": {MODE: ratio}}
    return {"suite": SUITE, "cases": [case, case | {"name": "another"}]}


@pytest.mark.parametrize("suite", sorted({suite for suite, _, _ in HEADLINES}))
def test_headlines_are_cases_of_their_suites(suite):
    named = {(name, mode) for s, name, mode in HEADLINES if s == suite}
    assert named <= {(c.name, mode) for c in SUITES[suite].cases(False) for mode in c.modes}


def test_all_headlines_are_recorded():
    lines = headlines(committed(REPOSITORY / RESULTS)).splitlines()
    assert len(lines) == 2 + len(HEADLINES)


def test_a_headline_has_times_rates_and_ratios():
    ratio = {"best_peer": "torch|bsr", "over_best_peer": 2.0, "over_dense": 4.0}
    row = headlines([_headline_document(_times(1e-3, executed_tflops=671.2), ratio)]).splitlines()[
        2
    ]
    assert row.startswith("| matmul founding: 8192^3, blocks 128x128")
    assert row.endswith("| 1 ms, 671 TFLOP/s | 2 ms (torch\\|bsr) | 2.00x | 4.00x |")


def test_what_was_not_compared_is_empty_and_slow_arithmetic_has_no_rate():
    (row,) = headlines([_headline_document(_times(5e-6, executed_tflops=12.0), {})]).splitlines()[
        2:
    ]
    assert row.endswith("| 5 us |  |  |  |")


def test_cases_without_a_time_of_ours_have_no_row():
    assert headlines([_headline_document({"failed": "over the budget"}, {})]) == ""
    assert headlines([]) == ""


def test_a_headline_that_lost_is_no_win():
    ratio = {"best_peer": "torch|bsr", "over_best_peer": 0.994, "over_dense": 4.0}
    assert headlines([_headline_document(_times(1e-3), ratio)]) == ""
    ratio["over_best_peer"] = 0.996  # printed as 1.00x
    assert "1.00x" in headlines([_headline_document(_times(1e-3), ratio)])


def _timed(name, mode, **seconds):
    """A case with times by peer and the ratios of ours, `bsk`, to `dense` and to the best peer."""
    ours = seconds["bsk"]
    peers = {p: {"times": {mode: {"quantiles_s": {"p50": s}}}} for p, s in seconds.items()}
    others = {s: p for p, s in seconds.items() if p not in ("bsk", "dense")}
    ratio = {"over_dense": seconds["dense"] / ours} if "dense" in seconds else {}
    if others:
        ratio |= {"best_peer": others[min(others)], "over_best_peer": min(others) / ours}
    return {"name": name, "problem": {}, "peers": peers, "ratios": {mode: ratio}}


def test_losses_show_the_worst_case_of_a_suite_and_how_many_are_lost():
    cases = [
        _timed("won", "eager", bsk=1e-3, fa4=2e-3),
        _timed("lost", "eager", bsk=1e-3, fa4=9e-4, cudnn=3e-3),
        _timed("worst", "graph", bsk=1e-3, fa4=2e-3, dense=5e-4),
    ]
    text = losses([{"suite": "a_b", "cases": cases}, {"suite": "won", "cases": cases[:1]}])
    assert text.splitlines()[2:] == [
        "| a b: worst, CUDA graph | 2 of 3 | 1 ms | 0.5 ms (dense) | 0.50x |"
    ]
    assert losses([{"suite": "won", "cases": cases[:1]}]) == losses([]) == ""


def test_every_suite_with_a_ratio_below_one_is_among_the_losses():
    documents = committed(REPOSITORY / RESULTS)
    lost = {
        document["suite"].replace("_", " ")
        for document in documents
        for case in document["cases"]
        for ratio in case.get("ratios", {}).values()
        if min(ratio.get("over_best_peer", 1), ratio.get("over_dense") or 1) < 0.995
    }
    rows = losses(documents).splitlines()[2:]
    assert {row.split(":")[0].removeprefix("| ") for row in rows} == lost


def _case(name, peer, over_peer, over_dense=None):
    ratio = {"best_peer": peer, "over_best_peer": over_peer} if peer else {}
    ratio |= {} if over_dense is None else {"over_dense": over_dense}
    return {"name": name, "problem": {}, "peers": {}, "ratios": {"eager": ratio}}


def test_one_row_for_each_suite_names_its_worst_case():
    cases = [_case("a|b", "fa4", 1.2), _case("c", "cudnn", 0.8), _case("d", "fa4", 1.0)]
    products = [_case("e", "torch", 2.0, 3.0), _case("f", None, None, 1.0)]
    text = summary(
        [{"suite": "attention_dense", "cases": cases}, {"suite": "matmul_x", "cases": products}]
    )
    assert text.splitlines()[2:] == [
        "| attention dense, single calls | 3 | 0.80x, 1.00x, 1.20x | c (cudnn) |  |",
        "| matmul x, single calls | 2 | 2.00x, 2.00x, 2.00x | e (torch) | 1.00x, 2.00x, 3.00x |",
    ]


def test_first_calls_have_a_row():
    case = _case("attention, compiled before", "sdpa", 0.1)
    case["ratios"] = {"reported": case["ratios"]["eager"]}
    (row,) = summary([{"suite": "first_call", "cases": [case]}]).splitlines()[2:]
    assert row.startswith("| first call, wall clock | 1 | 0.10x, 0.10x, 0.10x | attention")


def test_suites_that_compare_nothing_have_no_row():
    alone = {"name": "a", "problem": {}, "peers": {}, "ratios": {}}
    assert summary([{"suite": "first_call", "cases": [alone]}]) == ""
    assert summary([]) == ""


@pytest.mark.parametrize("suite", ["../../outside", "/outside", "README", "matmul_decode", ""])
def test_a_results_file_cannot_name_the_pages_that_are_written(tmp_path, suite):
    """Pages and plots are named after the suite: it must be that of the file's own name."""
    folder = tmp_path / "repository" / RESULTS
    document = json.loads((REPOSITORY / RESULTS / "matmul_founding.json").read_text())
    results.write(document | {"suite": suite}, folder / "matmul_founding.json")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidInput, match=r"is of another suite; expected 'matmul_founding', got"):
        pages.write_pages(tmp_path / "repository")
    assert sorted(tmp_path.rglob("*")) == before
