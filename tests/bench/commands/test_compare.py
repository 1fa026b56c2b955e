import json

import pytest

from blackwell_sparsek import InvalidInput
from blackwell_sparsek.bench import cli
from blackwell_sparsek.bench.commands.compare import compare


def _times(p50, spread=0.01):
    quantiles = {"p25": p50 * (1 - spread), "p50": p50, "p75": p50 * (1 + spread)}
    return {"label": "", "times": {"eager": {"quantiles_s": quantiles}}}


def _document(cases, device="H200", suite="attention_dense", **versions):
    environment = {
        "device_name": device,
        "arch": "sm_90",
        "versions": {"torch": "2.11", **versions},
    }
    made = [{"name": name, "problem": {}, "peers": peers} for name, peers in cases.items()]
    return {"schema": 2, "suite": suite, "environment": environment, "cases": made}


OLD = _document({"a": {"bsk": _times(1.0), "fa4": _times(2.0)}, "b": {"bsk": _times(1.0)}})


@pytest.mark.parametrize(
    ("now", "spread", "verdict"),
    [
        (1.02, 0.001, "same"),  # below what counts at all
        (1.04, 0.001, "slower"),
        (1.04, 0.05, "same"),  # within the quartiles of the new run
        (1.10, 0.05, "slower"),
        (0.90, 0.01, "faster"),
        (0.98, 0.001, "same"),
    ],
)
def test_changes_count_beyond_the_noise(now, spread, verdict):
    new = _document({"a": {"bsk": _times(now, spread), "fa4": _times(2.0)}})
    (change,) = compare(OLD, new).changes
    assert change.verdict == verdict and change.case == "a"


def test_a_slower_machine_is_not_a_regression_but_more_than_it_is():
    names = "abcd"
    old = _document({n: {"bsk": _times(1.0), "fa4": _times(2.0)} for n in names})
    new = _document({n: {"bsk": _times(1.1), "fa4": _times(2.2)} for n in names})
    found = compare(old, new)
    assert found.drift == pytest.approx(1.1) and {c.verdict for c in found.changes} == {"same"}
    new["cases"][1]["peers"]["bsk"] = _times(1.3)
    assert [c.case for c in compare(old, new).of("slower")] == ["b"]
    # a faster machine excuses nothing and makes nothing worse
    new = _document({n: {"bsk": _times(1.0), "fa4": _times(1.0)} for n in names})
    assert {c.verdict for c in compare(old, new).changes} == {"same"}


def test_what_fails_now_is_gone_and_what_was_not_measured_is_not():
    new = _document({"a": {"bsk": {"label": "", "failed": "AssertionError: over"}}})
    (change,) = compare(OLD, new).changes
    assert change.verdict == "gone" and "a: no times any more: AssertionError: over" in str(change)
    new = _document({"a": {}})
    new["cases"][0]["error"] = "OutOfMemoryError: x"
    assert "OutOfMemoryError" in str(compare(OLD, new).of("gone")[0])
    found = compare(OLD, _document({}))
    assert found.changes == [] and found.notes == ["not measured again: a, b"]


def test_a_way_of_timing_that_fails_now_is_gone():
    old = _document({"a": {"bsk": _times(1.0)}})
    figures = old["cases"][0]["peers"]["bsk"]["times"]
    figures["graph"] = figures["eager"]
    new = _document({"a": {"bsk": _times(1.0)}})
    assert compare(old, new).of("gone") == []  # it was not asked for
    new["cases"][0]["peers"]["bsk"]["no graph"] = "RuntimeError: capture"
    (change,) = compare(old, new).of("gone")
    assert str(change) == (
        "attention_dense: a: no times any more: RuntimeError: capture: bsk, graph: gone"
    )
    del new["cases"][0]["peers"]["bsk"]["no graph"]
    new["cases"][0]["no graph"] = "RuntimeError: all of them"
    assert "all of them" in str(compare(old, new).of("gone")[0])


def test_nothing_to_compare_is_no_success(tmp_path, capsys):
    old = _write(tmp_path / "old.json", OLD)
    new = _write(tmp_path / "new.json", _document({}))
    assert cli.main(["compare", old, new]) == 1
    out = capsys.readouterr().out
    assert f"NOTHING {new}: no time of ours that {old} has as well" in out


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (_document({}, device="H100"), "device_name differs: H200 and H100; --force"),
        (_document({}, suite="decode"), "suites differ: attention_dense and decode"),
    ],
)
def test_what_cannot_be_compared(new, message):
    with pytest.raises(InvalidInput, match=message):
        compare(OLD, new)


def test_force_compares_machines_and_versions_are_noted():
    found = compare(OLD, _document({}, device="H100", torch="2.13"), force=True)
    assert found.notes[:2] == ["device_name differs: H200 and H100", "torch 2.11 -> 2.13"]


def _write(path, document):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return str(path)


def test_the_command_names_the_case_and_exits_with_1(tmp_path, capsys):
    old = _write(tmp_path / "old.json", OLD)
    worse = _document({"a": {"bsk": _times(2.0)}, "b": {"bsk": _times(0.5)}})
    new = _write(tmp_path / "new.json", worse)
    assert cli.main(["compare", old, new]) == 1
    out = capsys.readouterr().out
    assert "SLOWER  attention_dense: a: bsk, eager: +100.0%" in out
    assert "faster  attention_dense: b: bsk, eager: -50.0%" in out
    assert cli.main(["compare", old, old]) == 0
    assert "2 times compared, 2 within the noise" in capsys.readouterr().out


def test_folders_are_compared_by_the_names_of_files(tmp_path, capsys):
    _write(tmp_path / "old" / "x.json", OLD)
    _write(tmp_path / "old" / "only.json", OLD)
    _write(tmp_path / "new" / "x.json", OLD)
    assert cli.main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.count("times compared") == 1


def test_files_that_cannot_be_compared_leave_the_others(tmp_path, capsys):
    worse = _document({"a": {"bsk": _times(2.0)}, "b": {"bsk": _times(1.0)}})
    for folder, document in (("old", OLD), ("new", worse)):
        for name in ("a", "c", "y"):
            _write(tmp_path / folder / f"{name}.json", document)
    (tmp_path / "new" / "a.json").write_text("{")
    _write(tmp_path / "new" / "c.json", _document({}, device="H100"))
    assert cli.main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 2
    captured = capsys.readouterr()
    assert "a.json: is not JSON" in captured.err and "device_name differs" in captured.err
    assert captured.out.count("SLOWER") == 1 and "y.json: 2 times compared" in captured.out


def test_what_is_not_there_is_named(tmp_path, capsys):
    (tmp_path / "old").mkdir()
    assert cli.main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 2
    assert f"{tmp_path / 'new'}: no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["missing.json", "folder", "broken.json"])
def test_bad_files_are_named(tmp_path, capsys, other):
    old = _write(tmp_path / "old.json", OLD)
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.json").write_text("{")
    assert cli.main(["compare", old, str(tmp_path / other)]) == 2
    assert other in capsys.readouterr().err


def test_folders_with_nothing_in_common(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "have no results file in common" in capsys.readouterr().err
