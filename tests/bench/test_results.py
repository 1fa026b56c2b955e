import json

import pytest

from blackwell_sparsek import InvalidInput
from blackwell_sparsek.bench import results


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
