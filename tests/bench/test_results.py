import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blackwell_sparsek import InvalidInput
from blackwell_sparsek.bench import results
from blackwell_sparsek.bench.commands.compare import compare
from blackwell_sparsek.bench.report.markdown import suite_tables
from blackwell_sparsek.bench.report.page import page, standalone
from blackwell_sparsek.bench.report.pages import headline, headlines, summary

from .. import fuzzing


def _document(**more):
    times = {"eager": {"quantiles_s": {"p50": 0.1}}}
    peers = {"bsk": {"label": "", "times": times}}
    return {
        "schema": 2,
        "suite": "fake",
        "environment": {"device_name": "a", "versions": {}},
        "cases": [{"name": "one", "problem": {}, "peers": peers}],
        **more,
    }


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "a" / "b.json"
    results.write(_document(), path)
    assert results.read(path) == _document()
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


def test_older_files_are_brought_up_to_date(tmp_path):
    path = tmp_path / "old.json"
    old = _document(schema=1)
    old["cases"][0]["peers"]["x"] = old["cases"][0]["peers"]["bsk"]
    old["cases"][0]["ratios"] = {"eager": {"best_sparse_peer": "x", "over_best_sparse": 2.0}}
    path.write_text(json.dumps(old))
    (case,) = results.read(path)["cases"]
    assert case["ratios"] == {"eager": {"best_peer": "x", "over_best_peer": 2.0}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON: Expecting value"),
        ("{", "is not JSON: "),
        ("[" * 100_000, "is not JSON that can be read: nested too deeply"),
        ("[1]", "expected an object, got list"),
        ("{}", "'schema' is missing or no int"),
        (json.dumps(_document(schema=99)), "schema 99 is unknown (1 to 2 are)"),
        (json.dumps(_document(cases={})), "'cases' is missing or no list"),
        (json.dumps(_document(environment={})), "the environment has no device_name"),
        (
            json.dumps(_document(environment={"device_name": "a", "versions": []})),
            "the versions of the environment are no object",
        ),
        (json.dumps(_document(cases=[{}])), "case 0: has no name"),
        (json.dumps(_document(cases=[{"name": "a"}])), "case 0: has no peers"),
        (
            json.dumps(_document(cases=[{"name": "a", "peers": {"x": 1}}])),
            "case 0: peer 'x' has no times",
        ),
        (
            json.dumps(_document(cases=[{"name": "a", "peers": {"x": {"times": {"eager": {}}}}}])),
            "case 0: peer 'x' has no median in mode 'eager'",
        ),
        (json.dumps(_document()).replace("0.1", '"fast"'), "has no median in mode 'eager'"),
        (json.dumps(_document()).replace("0.1", "NaN"), "has no median in mode 'eager'"),
    ],
)
def test_other_files_are_refused_with_their_name_and_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        results.read(path)
    assert str(caught.value).startswith(f"{path}: is not ") and message in str(caught.value)


def test_a_missing_file_and_bytes_that_are_no_text(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read: No such file or directory"):
        results.read(tmp_path / "nowhere.json")
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="is not JSON"):
        results.read(path)


def _whole(suite="matmul_founding", sides=(16, 32, 64)):
    """A document with everything that a reader looks at."""
    figures = {"quantiles_s": {"p50": 0.1, "p25": 0.1}, "rounds": 3, "executed_tflops": 3.0}
    entry = {"label": "a", "times": {"eager": figures}, "implementation": "triton"}
    problem = {"heads": 2, "length": 8, "block": [16, 16], "density": 0.5, "dtype": "float16"}
    problem |= {"tiers_us_per_head": [3.0], "weight": [4, 4], "n": 4}
    ratios = {"over_dense": 2.0, "best_peer": "dense", "over_best_peer": 1.0}
    cases = [
        {
            "name": f"8192^3, blocks {side}x{side}, 78% sparse",
            "problem": problem | {"length": side, "density": side / 200},
            "peers": {"bsk": copy.deepcopy(entry), "dense": copy.deepcopy(entry)},
            "ratios": {"eager": dict(ratios)},
            "clocks": {},
            "unsteady": "moved",
        }
        for side in sides
    ]
    curve = {"block": [16, 16], "density": 0.5, "speedups": [[0.1, 2.0], [0.9, 0.5]]}
    whole = _document(suite=suite, unit="us_per_head", cases=cases, commit="abc", left_out=["b"])
    whole["environment"] |= {"device_name": "NVIDIA H200", "arch": "sm_90"}
    return whole | {"crossover": [curve], "elapsed_s": 1.0, "interrupted": True}


def _shown(path):
    """All that is made of a results file, as `bsk report` and `bsk compare` write it."""
    document = results.read(path)
    markdown = [suite_tables(document), headlines([document]), summary([document])]
    plots = headline(document)
    markdown += [plot.caption for _, plot in plots]
    for text in (page([document]), *markdown, *(standalone(plot) for _, plot in plots)):
        text.encode()
        assert "<script>alert" not in text
    assert 'x" onload' not in page([document])
    found = compare(document, document)
    printed = "\n".join([*markdown, *map(str, found.changes), *found.notes])
    assert all(c.isprintable() or c == "\n" for c in printed)


def test_the_whole_document_is_shown(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(_whole()))
    _shown(path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("suite", ["matmul_founding", "decode"])
def test_any_wrong_value_is_refused_or_shown(tmp_path, suite):
    """Every odd value in every place of a small document; none is a crash."""
    path, whole, counts = tmp_path / "x.json", _whole(suite, sides=(64,)), [0, 0]
    for place in fuzzing.places(whole):
        for value in fuzzing.ODD:
            path.write_text(fuzzing.as_text(fuzzing.replaced(whole, place, value)))
            try:
                _shown(path)
                counts[0] += 1
            except InvalidInput as error:
                assert len(str(error).splitlines()) == 1, (place, value)
                counts[1] += 1
            except Exception as error:
                raise AssertionError(f"{value!r} at {place}") from error
    assert min(counts) > 100


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=st.one_of(fuzzing.changed(_whole()), fuzzing.changed(_whole("decode"))))
def test_a_changed_document_is_refused_or_shown(tmp_path, document):
    path = tmp_path / "x.json"
    path.write_text(fuzzing.as_text(document))
    try:
        _shown(path)
    except InvalidInput as error:
        assert type(error) is InvalidInput and len(str(error).splitlines()) == 1


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | fuzzing.values.map(lambda x: fuzzing.as_text(x).encode()))
def test_any_other_file_is_refused(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        results.read(path)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("depth", [30, 300, 900, 100_000])
def test_nesting_that_readers_would_follow_is_refused(tmp_path, depth):
    path = tmp_path / "x.json"
    text = json.dumps(_document()).replace('"versions": {}', f'"versions": {fuzzing.nested(depth)}')
    path.write_text(text)
    with pytest.raises(InvalidInput, match="nested too deeply"):
        results.read(path)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=40) | fuzzing.values.map(lambda x: fuzzing.as_text(x).encode()))
def test_a_note_of_the_running_case_is_two_names_or_nothing(tmp_path, content):
    path = tmp_path / "x.json"
    (tmp_path / "x.json.running").write_bytes(content)
    found = results.running(path)
    assert found is not None
    assert [type(name) for name in found] == [str, str]


@pytest.mark.parametrize("value", [1e-320, 1e-13, 0.0, -0.0, 1e9, 10**400])
@pytest.mark.parametrize(
    "place",
    [
        ("peers", "bsk", "times", "eager", "quantiles_s", "p50"),
        ("peers", "bsk", "times", "eager", "quantiles_s", "p25"),
        ("peers", "bsk", "times", "eager", "executed_tflops"),
        ("ratios", "eager", "over_dense"),
    ],
    ids=lambda place: place[-1],
)
def test_numbers_whose_products_or_reciprocals_overflow_are_refused(tmp_path, place, value):
    path = tmp_path / "x.json"
    whole = _whole()
    path.write_text(json.dumps(fuzzing.replaced(whole, ("cases", 1, *place), value)))
    with pytest.raises(InvalidInput, match=r"case 1: .*(no median|no times|no numbers)"):
        results.read(path)
