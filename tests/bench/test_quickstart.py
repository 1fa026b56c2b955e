import json
from types import SimpleNamespace

import pytest
import torch

from blackwell_sparsek.bench import quickstart
from blackwell_sparsek.bench import quickstart as quickstart_cases
from blackwell_sparsek.bench.machine import describe_environment
from blackwell_sparsek.bench.quickstart import Case

CPU = torch.device("cpu")


def _case(name="fake", check=lambda: None):
    decision = SimpleNamespace(chosen="eager", reasons={"triton": "needs a GPU"})
    return Case(
        name,
        {"shapes": "8", "dtype": "float32", "kept": 0.25},
        "torch",
        {"bsk": lambda: torch.ones(8).sum(), "peer": lambda: torch.ones(8).sum()},
        check,
        lambda: decision,
    )


def _fails():
    raise AssertionError("error 1 at (0, 0) is over the budget 0.1")


def _never():
    raise RuntimeError("timed although the check failed")


def test_results_hold_what_the_file_promises():
    (result,) = quickstart.run([_case], CPU, budget_s=0.0)
    assert result["implementation"] == "eager"
    assert result["why_not"] == {"triton": "needs a GPU"}
    assert result["speedup"] > 0
    for name in ("bsk", "peer"):
        times = result["seconds"][name]
        assert times["quantiles"]["min"] <= times["quantiles"]["p50"] <= times["quantiles"]["max"]
        assert len(times["samples"]) >= 3


def test_a_failing_check_is_shown_not_timed_and_the_rest_runs():
    def bad():
        case = _case("bad", _fails)
        return Case(**{**vars(case), "contenders": {"bsk": _never, "peer": _never}})

    results = quickstart.run([bad, _case], CPU, budget_s=0.0)
    assert "seconds" not in results[0] and "seconds" in results[1]
    text = quickstart.report(results, describe_environment(CPU))
    assert "FAILED bad: AssertionError: error 1 at (0, 0) is over the budget 0.1" in text
    assert "check failed" in text and "All results agree" not in text


def test_report_says_which_implementation_ran_and_why():
    results = quickstart.run([_case], CPU, budget_s=0.0)
    text = quickstart.report(results, describe_environment(CPU))
    assert "Ran the eager implementation (plain PyTorch" in text
    assert "not triton: needs a GPU" in text
    assert "All results agree" in text
    assert f"torch {torch.__version__}" in text


@pytest.mark.parametrize(("load", "warned"), [(4.0, False), (4.1, True)])
def test_a_busy_machine_is_mentioned(load, warned):
    environment = {**describe_environment(CPU), "load": load, "cpu_count": 8}
    text = quickstart.report(quickstart.run([_case], CPU, budget_s=0.0), environment)
    assert ("keep this machine busy" in text) == warned


def test_progress_is_plain_lines_when_stderr_is_no_terminal(capsys):
    quickstart.run([_case], CPU, budget_s=0.0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[-1] for line in lines] == [
        "[1/1] preparing",
        "[1/1] fake: checking against fp64",
        "[1/1] fake: timing",
    ]
    assert "\r" not in "".join(lines) and "\x1b" not in "".join(lines)


def test_progress_is_one_line_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    quickstart.run([_case], CPU, budget_s=0.0)
    err = capsys.readouterr().err
    assert "timing [####################]" in err and "\n" not in err


@pytest.mark.parametrize(("check", "status"), [(lambda: None, 0), (_fails, 1)])
def test_exit_status_and_json(tmp_path, monkeypatch, capsys, check, status):
    fake = [lambda: _case(check=check)]
    monkeypatch.setattr(quickstart, "cases", lambda device, quick: fake)
    path = tmp_path / "out.json"
    assert quickstart.main(["--quick", "--device", "cpu", "--json", str(path)]) == status
    document = json.loads(path.read_text())
    assert document["schema"] == 1 and document["passed"] == (status == 0)
    assert document["environment"]["versions"]["torch"] == torch.__version__
    assert [case["name"] for case in document["cases"]] == ["fake"]
    assert f"Wrote {path}." in capsys.readouterr().out


def test_what_cannot_be_written_or_run_is_said_before_anything_is_timed(tmp_path, capsys):
    assert quickstart.main(["--device", "tpu"]) == 2
    assert "quickstart: --device is 'tpu'; expected cpu or cuda" in capsys.readouterr().err
    assert quickstart.main(["--device", "cpu", "--json", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_reasons_of_some_cases_name_them(monkeypatch):
    def result(name, estimate):
        why = {"sm90": "needs sm_90", "dense": estimate, "reference": "only when asked"}
        return {"name": name, "why_not": why}

    assert quickstart._why("eager", [result("a", "1 ms"), result("b", "2 ms")])[1:] == [
        "  not sm90: needs sm_90",
        "  not dense: 1 ms (a)",
        "  not dense: 2 ms (b)",
    ]


def test_the_real_cases_pass_their_checks_on_a_cpu():
    for builder in quickstart_cases.cases(CPU, quick=True):
        case = builder()
        case.check()
        assert case.explain().chosen == "eager"
        assert case.contenders["bsk"]().shape == case.contenders["peer"]().shape


def test_a_wrong_product_is_caught(monkeypatch):
    right = quickstart_cases.matmul
    monkeypatch.setattr(quickstart_cases, "matmul", lambda a, b: right(a, b).roll(1, 0))
    with pytest.raises(AssertionError, match="over the budget"):
        quickstart_cases.matmul_case(CPU, 0.9, quick=True).check()


@pytest.mark.parametrize("name", ["window_case", "block_mask_case"])
def test_wrong_attention_is_caught(monkeypatch, name):
    right = quickstart_cases.attention

    def wrong(q, k, v, impl="auto", **options):
        if "window" in options and impl == "auto":
            options["window"] += 1
        elif impl == "auto":
            options.pop("block_mask")
        return right(q, k, v, impl=impl, **options)

    monkeypatch.setattr(quickstart_cases, "attention", wrong)
    with pytest.raises(AssertionError, match="over the budget"):
        getattr(quickstart_cases, name)(CPU, quick=True).check()
