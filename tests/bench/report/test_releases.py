"""The page that compares Triton releases."""

import json

from blackwell_sparsek.bench.report.releases import PAGE, releases_page


def _write(folder, release, seconds):
    cases = [
        {"name": name, "problem": {}, "peers": {"bsk": {"label": "", "times": _times(value)}}}
        for name, value in seconds.items()
    ]
    environment = {"device_name": "A GPU", "versions": {"torch": "2.11", "triton": release}}
    document = {"schema": 2, "suite": "decode", "unit": "us", "commit": "c", "cases": cases}
    path = folder / f"triton-{release}"
    path.mkdir()
    (path / "decode.json").write_text(json.dumps(document | {"environment": environment}))


def _times(median):
    return {"eager": {"quantiles_s": {"p50": median}}}


def test_cases_are_compared_with_the_oldest_release(tmp_path):
    _write(tmp_path, "3.10.0", {"a": 1.0, "b": 1.0, "c": 3.0})
    assert releases_page(tmp_path) == {}
    _write(tmp_path, "3.9.0", {"a": 1.0, "b": 0.5, "d": 1.0})
    text = releases_page(tmp_path)[PAGE]
    assert "A GPU, torch 2.11. Each ratio is the time of a case with Triton 3.9.0 divided" in text
    assert "## 3.10.0\n\n| suite | cases |" in text
    assert "| decode, single calls, cold L2 | 2 | 0.75 | 0.50 | 1 |\n\n- 0.50 decode: b\n" in text
