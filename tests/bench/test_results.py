import json

import pytest

from blackwell_sparsek import InvalidInput
from blackwell_sparsek.bench import results
from blackwell_sparsek.bench.commands.compare import compare
from blackwell_sparsek.bench.report.markdown import suite_tables
from blackwell_sparsek.bench.report.page import page


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


def _places(value, path=()):
    """Every place in a document, as a path."""
    yield path
    if not isinstance(value, (dict, list)):
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _places(inner, (*path, key))


def _with(document, path, value):
    if not path:
        return value
    changed = json.loads(json.dumps(document))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("suite", ["matmul_crossover", "attention_small"])
@pytest.mark.parametrize("value", [None, True, -1, 1e300, "x", [], {}, [None], {"a": []}])
def test_any_wrong_value_is_refused_or_shown_but_never_a_crash(tmp_path, suite, value):
    figures = {"quantiles_s": {"p50": 0.1, "p25": 0.1}, "rounds": 3, "executed_tflops": 3.0}
    entry = {"label": "a", "times": {"eager": figures}}
    problem = {"heads": 2, "length": 8, "block": [16, 16], "density": 0.5, "dtype": "float16"}
    problem |= {"tiers_us_per_head": [3.0], "weight": [4, 4], "n": 4}
    case = {"name": "one", "problem": problem, "peers": {"bsk": entry, "dense": entry}}
    case["ratios"] = {"eager": {"over_dense": 2.0, "best_peer": "dense", "over_best_peer": 1.0}}
    case |= {"clocks": {}, "unsteady": "moved"}
    curve = {"block": [16, 16], "density": 0.5, "speedups": [[0.1, 2.0], [0.9, 0.5]]}
    whole = _document(suite=suite, unit="us_per_head", cases=[case], commit="abc", left_out=["b"])
    whole |= {"crossover": [curve], "elapsed_s": 1.0}
    path = tmp_path / "x.json"
    shown = 0
    for place in _places(whole):
        path.write_text(json.dumps(_with(whole, place, value)))
        try:
            document = results.read(path)
        except InvalidInput:
            continue
        shown += 1
        page([document])
        suite_tables(document)
        compare(document, document)
    assert shown > 5
