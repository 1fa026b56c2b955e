"""The page that compares Triton releases."""

import json

from blackwell_sparsek.bench.report.releases import PAGE, releases_page


def _write(run, release, seconds):
    cases = [
        {"name": name, "problem": {}, "peers": {"bsk": {"label": "", "times": _times(value)}}}
        for name, value in seconds.items()
    ]
    environment = {"device_name": "A GPU", "versions": {"torch": "2.11", "triton": release}}
    document = {"schema": 2, "suite": "decode", "unit": "us", "commit": "c", "cases": cases}
    path = run / f"triton-{release}"
    path.mkdir(parents=True)
    (path / "decode.json").write_text(json.dumps(document | {"environment": environment}))


def _times(median):
    return {"eager": {"quantiles_s": {"p50": median}}}


def test_cases_are_compared_with_the_oldest_release_of_their_run(tmp_path):
    run, other = (tmp_path / "releases" / name for name in ("2026-02-01", "2026-01-01"))
    _write(run, "3.10.0", {"a": 1.0, "b": 1.0, "c": 3.0})
    assert releases_page(tmp_path) == {}
    _write(run, "3.9.0", {"a": 1.0, "b": 0.5, "d": 1.0})
    _write(other, "3.8.0", {"a": 9.0})
    _write(other, "3.9.0", {"a": 4.5})
    text = releases_page(tmp_path)[PAGE]
    runs = ["## 3.9.0 and 3.8.0", "## 3.10.0 and 3.9.0"]
    assert [line for line in text.splitlines() if line.startswith("##")] == runs
    assert "\n\nA GPU, torch 2.11, 2026-02-01.\n\n| suite | cases |" in text
    assert "| decode, single calls, cold L2 | 1 | 2.00 | 2.00 | 0 |\n" in text
    assert "| decode, single calls, cold L2 | 2 | 0.75 | 0.50 | 1 |\n\n- 0.50 decode: b\n" in text
