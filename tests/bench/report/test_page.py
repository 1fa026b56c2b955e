import html
import html.parser
import json
import math
import re
import xml.etree.ElementTree as ET

import pytest

from blackwell_sparsek.bench import cli
from blackwell_sparsek.bench.machine import peak_of
from blackwell_sparsek.bench.report.charts import Axis, axis, element
from blackwell_sparsek.bench.report.figures import amount, figures_of, least_bytes, names_of
from blackwell_sparsek.bench.report.page import colours_of, page

HOSTILE = '"><script>alert(1)</script><img src=x onerror="alert(2)">&\'|'


def _times(seconds, tflops=None, mode="eager"):
    quantiles = {"p25": seconds * 0.9, "p50": seconds, "p75": seconds * 1.1}
    work = {} if tflops is None else {"executed_tflops": tflops}
    return {"label": "x", "times": {mode: {"quantiles_s": quantiles, "rounds": 5, **work}}}


def _attention(length, causal=False, ours=1e-3):
    problem = {
        "batch": 2,
        "heads": 16,
        "kv_heads": 16,
        "length": length,
        "head_dim": 128,
        "dtype": "bfloat16",
        "causal": causal,
    }
    peers = {"bsk": _times(ours, 600.0), "fa4": _times(1.1e-3, 560.0)}
    ratio = {"best_peer": "fa4", "over_best_peer": 1.1e-3 / ours}
    name = f"S{length} {'causal' if causal else 'full'}"
    return {"name": name, "problem": problem, "peers": peers, "ratios": {"eager": ratio}}


def _product(density, over_dense):
    problem = {"weight": [64, 64], "n": 64, "block": [16, 16], "density": density}
    peers = {"bsk": _times(1e-3, 5.0), "dense": _times(over_dense * 1e-3, 9.0)}
    ratio = {"over_dense": over_dense}
    return {
        "name": f"{density}",
        "problem": problem | {"dtype": "float16"},
        "peers": peers,
        "ratios": {"eager": ratio},
    }


def _document(cases, suite="attention_dense", device="NVIDIA H200", **more):
    environment = {"device_name": device, "versions": {"torch": "2.11"}, "load": 0.5}
    return {
        "schema": 2,
        "suite": suite,
        "commit": "0123456789abcdef",
        "environment": environment,
        "cases": cases,
        **more,
    }


LENGTHS = [_attention(n, causal) for n in (1024, 2048, 4096) for causal in (False, True)]


class _Balanced(html.parser.HTMLParser):
    """Fails on tags that do not close in order; collects what could load or run something."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self):
        super().__init__()
        self.open, self.found, self.scripts = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        for name, value in attrs:
            if name.startswith("on") or name in ("src", "srcset") or tag in ("link", "iframe"):
                self.found.append((tag, name, value))
            if name == "href" and not value.startswith("#"):
                self.found.append((tag, name, value))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _parsed(text):
    parser = _Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_is_well_formed_and_loads_nothing():
    text = page([_document(LENGTHS), _document([_product(0.1, 5.0)], suite="matmul_square")])
    parser = _parsed(text)
    assert parser.found == [] and parser.scripts == 1
    assert "http" not in text.replace("http-equiv", "")
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)
    assert "default-src 'none'" in text


def test_whatever_a_file_says_is_text():
    case = _attention(1024)
    case["name"] = HOSTILE
    case["peers"][HOSTILE] = {"label": HOSTILE, "crashed": HOSTILE}
    case["peers"]["bsk"]["implementation"] = HOSTILE
    case["peers"][f"timed{HOSTILE}"] = _times(2e-3, 300.0)
    case["unsteady"] = HOSTILE
    document = _document([case, *LENGTHS], suite=HOSTILE, device=HOSTILE, commit=HOSTILE)
    document["environment"][HOSTILE] = {"deep": HOSTILE}
    document["environment"]["versions"] = {"torch": HOSTILE}
    text = page([document])
    parser = _parsed(text)
    assert parser.found == [] and parser.scripts == 1
    assert "<img" not in text and "&lt;script&gt;alert(1)" in text


@pytest.mark.parametrize(
    "problem",
    [
        {},
        {"length": "x", "heads": None, "density": True, "block": 7},
        {"length": -1, "heads": 0, "head_dim": math.inf, "dtype": ["a"], "block": [None, "y"]},
        {"weight": [1], "n": {}, "dtype": "float16", "causal": "perhaps", "page_size": "p"},
    ],
)
def test_problems_that_say_nothing_are_no_problem(problem):
    cases = [{**_attention(1024), "name": f"{i}", "problem": problem} for i in range(3)]
    for unit in ("tflops", "us_per_head", "us", "ms", "furlongs"):
        _parsed(page([_document(cases, unit=unit)]))
    assert least_bytes(problem) is None


def test_pages_of_nothing():
    _parsed(page([_document([])]))
    only_reasons = {"name": "a", "problem": {}, "peers": {"bsk": {"label": "", "n/a": "later"}}}
    text = page([_document([only_reasons], interrupted=True, left_out=["b"])])
    _parsed(text)
    assert "bsk: n/a: later" in text and "The run was interrupted" in text


def test_figures_follow_what_varies():
    def captions(document):
        return [f.caption.split(",")[0] for f in figures_of(document, colours_of(document))]

    assert captions(_document(LENGTHS)) == [
        "TFLOP/s of executed work by sequence length",
        "Speedup over the best peer by sequence length",
        "Roofline of the data sheet",
    ]
    products = [_product(d, 1 / d) for d in (0.1, 0.5, 0.9)]
    assert captions(_document(products, suite="matmul_crossover")) == [
        "TFLOP/s of executed work by case",
        "Speedup over the same computation without sparsity",
        "Speedup over the dense product by sparsity",
        "Roofline of the data sheet",
    ]
    assert captions(_document(LENGTHS[:1], device="some CPU")) == [
        "TFLOP/s of executed work by case"
    ]
    times = [{"name": "a", "problem": {}, "peers": {"bsk": _times(1e-3, mode="host")}}]
    assert captions(_document(times, unit="us")) == ["µs by case"]


def test_a_sweep_has_a_picture_for_each_size_and_no_pages_of_bars():
    cases = []
    for size in (8192, 4096):
        for block in ([128, 128], [16, 16]):
            for density in (0.5, 0.22, 0.1):
                case = _product(density, 1 / density)
                case["problem"] |= {"weight": [size, size], "n": size, "block": block}
                cases.append(case)
    document = _document(cases, suite="matmul_square")
    (figure, roof) = figures_of(document, colours_of(document))
    assert figure.caption.startswith("Speedup over the dense product by sparsity")
    assert roof.caption.startswith("Roofline")
    small, large = figure.pictures
    assert "4096 x 4096 x 4096" in small and "8192 x 8192 x 8192" in large
    assert figure.legend == {"blocks 128x128": 0, "blocks 16x16": 1}
    assert small.count("<circle") == large.count("<circle") == 6
    assert "blocks 16x16: 10 times faster at 90" in small
    _parsed(page([document]))


def test_first_calls_are_shown_in_milliseconds():
    times = [{"name": "a", "problem": {}, "peers": {"bsk": _times(0.25, mode="reported")}}]
    document = _document(times, unit="ms", suite="first_call")
    text = page([document])
    assert '<th scope="col">bsk ms</th>' in text and ">250</td>" in text
    assert ">implementation<" not in text and "ms by case, wall clock; lower is better" in text
    times[0]["peers"]["bsk"]["implementation"] = "sm90"
    text = page([_document(times, unit="tflops")])
    assert (
        ">bsk µs<" in text
        and ">250000</td>" in text
        and ">implementation<" in text
        and ">sm90<" in text
    )


def test_first_calls_do_not_count_among_times_of_the_device():
    case = _attention(1024)
    case["ratios"] = {mode: {"best_peer": "sdpa", "over_best_peer": 0.1} for mode in ("reported",)}
    assert "geometric" not in page([_document([case])])
    assert "(geometric, device time)" in page([_document(LENGTHS)])


def test_crossings_have_a_picture_and_say_where_dense_takes_over():
    curve = {"block": [64, 64], "density": 0.62, "speedups": [[0.1, 6.0], [0.9, 0.7]]}
    never = {"block": [16, 16], "density": None, "speedups": [[0.1, 0.9], [0.9, 0.2]]}
    document = _document([_product(0.1, 2.0)], suite="matmul_crossover", crossover=[curve, never])
    captions = [f.caption for f in figures_of(document, {"bsk": 0})]
    assert "Density above which the dense product is faster: 62% for 64x64." in captions
    _parsed(page([document]))


def test_curves_stand_by_what_sets_cases_apart():
    figure = figures_of(_document(LENGTHS), {"bsk": 0, "fa4": 2})[0]
    assert len(figure.pictures) == 2 and figure.legend == {"bsk": 0, "fa4": 2}
    assert "D128 full" in figure.pictures[0] and "D128 causal" in figure.pictures[1]
    assert figure.pictures[0].count("<circle") == 6
    assert "bsk: 600 TFLOP/s at 4k" in figure.pictures[0]


def _decode(length, ours, **more):
    problem = {"batch": 1, "length": length, "heads": 32, "kv_heads": 8, "head_dim": 128}
    case = _attention(length, ours=ours)
    name = f"S{length} {more}"
    return {**case, "name": name, "problem": problem | {"page_size": 16} | more}


def test_no_curve_joins_cases_that_differ_in_more_than_the_length():
    """Three caches at each length are three curves, not one that jumps between them."""
    lengths = (1024, 8192, 131072)
    cases = [
        _decode(n, 1e-6 * n * kept, kept=kept, lengths=[n, 7] if mixed else None)
        for n in lengths
        for kept, mixed in ((1.0, False), (0.25, False), (1.0, True))
    ]
    # on no curve of even lengths, although no other case is as long
    cases += [_decode(4096, 3e-3, kept=1.0, lengths=[4096, 9])]
    alone = _decode(2048, 5e-5, kept=0.5)
    document = _document([*cases, alone], unit="us")
    curves, rest, *_ = figures_of(document, {"bsk": 0, "fa4": 2})
    assert len(curves.pictures) == 3
    for picture in curves.pictures:
        path = ET.fromstring(picture).findall(".//path")[-1].get("d")
        across = [float(place.split()[0]) for place in re.findall(r"[ML]([\d.]+ [\d.]+)", path)]
        assert len(across) == len(set(across)) == (4 if "mixed" in picture else 3)
    titles = " ".join(curves.pictures)
    assert "25% kept" in titles and "mixed lengths" in titles
    # a case that is on no curve is shown all the same
    assert "by case" in rest.caption and alone["name"] in html.unescape(rest.pictures[0])
    assert not any(case["name"] in html.unescape(rest.pictures[0]) for case in cases)


def test_equal_times_are_neither_won_nor_lost():
    cases = [_attention(n, ours=1.1e-3 / ratio) for n, ratio in ((64, 0.9951), (128, 1.0049))]
    cases += [_attention(n, ours=1.1e-3 / ratio) for n, ratio in ((256, 1.006), (512, 0.994))]
    text = page([_document(cases)])
    assert len(re.findall(r'<td class="even"[^>]*>1.00x', text)) == 2
    assert re.findall(r'<td class="(?:win|loss)"[^>]*>([\d.]+x)', text) == ["1.01x", "0.99x"]
    assert "<b>1 of 4</b>" in text and "2 equal within 1%, 1 slower" in text


def test_the_page_says_what_it_counts():
    alone = {"name": "a", "problem": {}, "peers": {"bsk": _times(1e-3)}}
    text = page([_document([*LENGTHS, alone]), _document([], suite="host")])
    assert "<b>7</b><span>cases in 2 suites: one set of sizes and options each" in text
    assert "In 6 of the 7 cases another library computes the same result" in text
    assert "counts once for each timing mode, which gives 6 comparisons" in text


def test_each_figure_is_drawn_for_a_desk_and_for_a_phone():
    text = page([_document([_product(0.1, 5.0)], suite="matmul_founding")])
    wide = re.findall(r'<div class="pictures wide">(.*?)</div>', text, re.DOTALL)
    narrow = re.findall(r'<div class="pictures narrow">(.*?)</div>', text, re.DOTALL)
    assert len(wide) == len(narrow) >= 2
    for pictures, most in ((wide, 960), (narrow, 354)):
        widths = [int(w) for w in re.findall(r'viewBox="0 0 (\d+)', "".join(pictures))]
        assert widths and max(widths) <= most


def test_colours_are_the_usual_ones_and_never_two_for_one():
    case = {"name": "", "peers": {name: {} for name in ("new", "bsk", "fa4", "other")}}
    found = colours_of({"cases": [case]})
    assert found["bsk"] == 0 and found["fa4"] == 2
    assert len(set(found.values())) == 4
    many = {"name": "", "peers": {f"p{i}": {} for i in range(30)}}
    assert max(colours_of({"cases": [many]}).values()) == 11


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([3.0, 47.0], 0, 50), ([0.0], 0, 1), ([-2.0, 5.0], -2, 6), ([], 0, 1)],
)
def test_linear_axes_end_on_round_values(values, low, high):
    found = axis(values, 0, 100)
    assert (found.low, found.high) == (low, high)
    assert found.at(found.low) == 0 and found.at(found.high) == 100
    assert 3 <= len(found.ticks()) <= 8


def test_logarithmic_axes():
    found = Axis(1.0, 100.0, 0.0, 200.0, True)
    assert found.at(10.0) == pytest.approx(100.0)
    assert found.ticks() == [1, 2, 5, 10, 20, 50, 100]
    assert found.at(1e9) == 200.0 and found.at(1e-9) == 0.0


def test_attributes_are_escaped_and_none_is_left_out():
    assert (
        element("a", class_='"x"', data_value=None, x1=1.50)
        == '<a class="&quot;x&quot;" x1="1.5"/>'
    )


def test_bytes_and_names_of_problems():
    assert least_bytes({"weight": [4, 8], "n": 2, "density": 0.5, "dtype": "float16"}) == 2 * (
        4 * 8 * 0.5 + 2 * 12
    )
    attention = LENGTHS[0]["problem"]
    assert least_bytes(attention) == 4 * 2 * 2 * 16 * 1024 * 128
    decode = {**attention, "kv_heads": 4, "page_size": 0}
    assert least_bytes(decode) == 2 * 2 * 128 * 2 * (4 * 1024 + 16)
    assert least_bytes({**decode, "queries": 4}) == 2 * 2 * 128 * 2 * (4 * 1024 + 4 * 16)
    assert names_of(attention, "length") == "D128 full"
    assert names_of(decode, "length") == "D128 GQA 16:4 full batch 2"
    assert amount({"a": 3}, "a") == 3.0 and amount({"a": "3"}, "a") is None
    assert peak_of("NVIDIA GH200 480GB").terabytes == 4.0 and peak_of("abacus") is None


def _write(path, document):
    path.write_text(json.dumps(document))
    return str(path)


def test_the_command_writes_a_page_of_what_can_be_read(tmp_path, capsys):
    good = _write(tmp_path / "good.json", _document(LENGTHS))
    bad = _write(tmp_path / "bad.json", {"schema": 2})
    out = tmp_path / "deep" / "report.html"
    assert cli.main(["report", good, "-o", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert cli.main(["report", bad, good, "-o", str(out)]) == 1
    assert "bad.json: is not a results file" in capsys.readouterr().err
    assert cli.main(["report", good, "-o", str(tmp_path)]) == 2
    assert f"bsk: {tmp_path}: Is a directory" in capsys.readouterr().err
    assert cli.main(["report", bad]) == 2
    assert cli.main(["report"]) == 2
    assert "no results files given" in capsys.readouterr().err


def test_markdown_is_that_of_the_tables(tmp_path, capsys):
    good = _write(tmp_path / "good.json", _document(LENGTHS))
    assert cli.main(["report", "--markdown", good]) == 0
    out = capsys.readouterr().out
    assert out.startswith("**attention dense** (NVIDIA H200, torch 2.11, commit 0123456789)")
    assert "| S1024 full | 600 | 560 | 1.10x (fa4) |" in out
