import importlib
import json
import pathlib
import subprocess
import sys

import pytest
import torch

from blackwell_sparsek.bench import cli
from blackwell_sparsek.bench import run as live
from blackwell_sparsek.bench.commands import bench
from blackwell_sparsek.bench.suites import SUITES

from ..fakes import case, contender, peer, suite


@pytest.fixture
def fake(monkeypatch):
    """A suite that takes no time."""
    cases = [case(f"case {i}") for i in range(5)]
    monkeypatch.setitem(SUITES, "fake", suite(cases=lambda tiny: cases))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _run(tmp_path, *args):
    status = cli.main(["bench", "fake", "--seconds", "0", "-o", str(tmp_path), *args])
    path = tmp_path / "fake.json"
    if not tmp_path.is_dir():
        return status, None
    return status, json.loads(path.read_text()) if path.exists() else None


def test_a_suite_runs_prints_its_table_and_leaves_a_file(fake, tmp_path, capsys):
    status, document = _run(tmp_path, "--commit", "abc")
    assert status == 0 and document["commit"] == "abc" and len(document["cases"]) == 5
    out, err = capsys.readouterr()
    assert out.startswith("**fake** (") and "| case 0 |" in out
    assert f"Wrote {tmp_path / 'fake.json'}." in err
    assert "[1/5] case 0: timing, eager" in err and "\x1b" not in err


def test_choices_of_cases_peers_and_modes(fake, tmp_path):
    _, document = _run(tmp_path, "--case", "case 3", "--peers", "bsk")
    (only,) = document["cases"]
    assert only["name"] == "case 3" and set(only["peers"]) == {"bsk"}
    _, document = _run(tmp_path, "--quick", "--mode", "host")
    assert [c["name"] for c in document["cases"]] == ["case 0", "case 2", "case 4"]
    assert all("times" not in entry for c in document["cases"] for entry in c["peers"].values())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bench", "matmull"], "bsk bench: unknown suite 'matmull'; did you mean matmul"),
        (["bench", "fake", "--peers", "bsk,fa9"], "bsk bench: unknown peer 'fa9'; did you mean fa"),
        (["bench", "fake", "--device", "cuda"], "--device cuda: torch finds no CUDA GPU here"),
        (["bench", "fake", "--device", "xpu"], "--device is 'xpu'; expected cpu or cuda"),
        (["bench", "fake", "--case", "zz"], "no case of fake has 'zz' in its name; expected part"),
    ],
)
def test_wrong_requests_are_answered_with_what_there_is(fake, tmp_path, capsys, args, message):
    assert cli.main([*args, "-o", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_suite_among_others_is_told_and_they_are_measured(fake, tmp_path, capsys):
    asked = ["bench", "matmull", "fake", "--seconds", "0", "-o", str(tmp_path)]
    assert cli.main(asked) == 2
    assert len(json.loads((tmp_path / "fake.json").read_text())["cases"]) == 5
    assert "bsk bench: unknown suite 'matmull'; did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--seconds", "-1", "is '-1'; expected seconds, 0 or more"),
        ("--seconds", "nan", "is 'nan'; expected seconds, 0 or more"),
        ("--time-left", "soon", "is 'soon'; expected seconds, 0 or more"),
        ("--prepare", "0", "is '0'; expected a whole number of 1 or more"),
    ],
)
def test_numbers_that_mean_nothing(fake, tmp_path, capsys, option, value, expected):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "fake", "-o", str(tmp_path), f"{option}={value}"])
    assert caught.value.code == 2 and f"argument {option}: {expected}" in capsys.readouterr().err


def test_results_stay_where_no_case_is_meant(fake, tmp_path):
    _run(tmp_path)
    status, document = _run(tmp_path, "--case", "nothing like it")
    assert status == 2 and len(document["cases"]) == 5


def test_a_suite_without_such_a_case_is_passed_over(fake, tmp_path, monkeypatch):
    monkeypatch.setitem(SUITES, "other", suite(name="other", cases=lambda tiny: [case("else")]))
    args = ["bench", "fake", "other", "--seconds", "0", "-o", str(tmp_path), "--case", "else"]
    assert cli.main(args) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]


def test_a_folder_that_cannot_be_written_to_is_named_at_once(fake, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status, document = _run(tmp_path / "file" / "deep")
    assert status == 2 and document is None
    err = capsys.readouterr().err
    assert f"bsk: {tmp_path / 'file' / 'deep'}: Not a directory" in err and "Trace" not in err


def test_a_suite_for_gpus_is_named_and_the_others_run(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SUITES, "big", suite(name="big", gpu_only=True))
    args = ["bench", "big", "fake", "--seconds", "0", "-o", str(tmp_path)]
    assert cli.main(args) == 1
    assert "FAILED big: needs a CUDA GPU" in capsys.readouterr().out
    assert (tmp_path / "fake.json").exists()


def test_a_wrong_result_of_ours_makes_the_status_1(fake, tmp_path, monkeypatch, capsys):
    def fails(out):
        raise AssertionError("over the budget")

    wrong = peer("bsk", lambda inputs: contender(check=fails))
    monkeypatch.setitem(SUITES, "fake", suite([wrong, peer("other")]))
    status, document = _run(tmp_path)
    assert status == 1 and "times" in document["cases"][0]["peers"]["other"]
    assert "FAILED fake: one: bsk: AssertionError: over the budget" in capsys.readouterr().out


def test_an_interrupt_keeps_what_there_is(fake, tmp_path, monkeypatch, capsys):
    def interrupts(device):
        raise KeyboardInterrupt

    cases = [case("a"), case("b", build=interrupts), case("c")]
    monkeypatch.setitem(SUITES, "fake", suite(cases=lambda tiny: cases))
    status, document = _run(tmp_path)
    assert status == 130 and [c["name"] for c in document["cases"]] == ["a"]
    out, err = capsys.readouterr()
    assert "The run was interrupted; some cases are missing." in out and "is kept" in err


def test_an_interrupt_before_the_first_case_leaves_what_was_there(
    fake, tmp_path, monkeypatch, capsys
):
    _run(tmp_path)

    def interrupts(device):
        raise KeyboardInterrupt

    monkeypatch.setitem(SUITES, "fake", suite(cases=lambda tiny: [case("a", build=interrupts)]))
    capsys.readouterr()
    status, document = _run(tmp_path)
    assert status == 130 and len(document["cases"]) == 5 and "interrupted" not in document
    assert "nothing was measured, and nothing is changed" in capsys.readouterr().err


def test_an_interrupt_leaves_the_earlier_results_and_says_where_the_new_ones_are(
    fake, tmp_path, monkeypatch, capsys
):
    _run(tmp_path)

    def interrupts(device):
        raise KeyboardInterrupt

    cases = [case("a"), case("b", build=interrupts)]
    monkeypatch.setitem(SUITES, "fake", suite(cases=lambda tiny: cases))
    capsys.readouterr()
    status, document = _run(tmp_path)
    assert status == 130 and len(document["cases"]) == 5
    saved = tmp_path / "fake.json.partial"
    err = capsys.readouterr().err
    assert "fake.json still has the results of an earlier run" in err and f"kept in {saved}" in err
    left = json.loads(saved.read_text())
    assert [c["name"] for c in left["cases"]] == ["a"] and left["interrupted"] is True
    assert cli.main(["report", str(saved), "-o", str(tmp_path / "report.html")]) == 0


def test_on_a_gpu_a_worker_does_the_work(fake, tmp_path, monkeypatch):
    seen = []

    def worker(command, paths):
        assert paths == [tmp_path / "fake.json"]
        seen.append(command(0, False))
        assert command(0, True) == [*command(0, False), "--resume"]
        torch_is_there = monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert torch_is_there is None
        return cli.main([*seen[0][3:], "--device", "cpu"])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.supervise, "run_worker", worker)
    status, document = _run(tmp_path, "--case", "case 1", "--quick")
    (command,) = seen
    assert command[1:6] == ["-m", "blackwell_sparsek", "bench", "fake", "--worker"]
    assert command[-3:-1] == ["--quick", "--time-left"] and 40 < float(command[-1]) <= 45
    assert "case 1" in command
    assert status == 0 and [c["name"] for c in document["cases"]] == ["case 1"]


def test_a_worker_that_follows_keeps_the_cases_of_the_first_suite(fake, tmp_path):
    _, document = _run(tmp_path, "--case", "case 1", "--worker")
    first = document["cases"][0]["clocks"] = {"kept": 1.0}
    (tmp_path / "fake.json.partial").write_text(json.dumps(document))
    _, document = _run(tmp_path, "--worker", "--resume")
    assert len(document["cases"]) == 5 and document["cases"][0]["clocks"] == first
    _, document = _run(tmp_path, "--worker")
    assert len(document["cases"]) == 5 and document["cases"][0]["clocks"] == {}


def test_the_listing_names_suites_groups_and_absent_peers(capsys):
    assert cli.main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert "attention_small" in out and "founding" in out
    assert "flashinfer" in out and "-- n/a: flashinfer is not installed" in out


def test_no_command_and_version(capsys):
    assert cli.main([]) == 2
    assert "bench     measure suites" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out.startswith("bsk ")


def test_one_line_about_a_case():
    times = {"eager": {"quantiles_s": {"p50": 0.0012}, "executed_tflops": 612.3}}
    ratio = {"over_dense": 3.0, "best_peer": "fa4", "over_best_peer": 0.954}
    result = {
        "peers": {"bsk": {"times": times}, "fa3": {"crashed": "RuntimeError: boom"}},
        "ratios": {"eager": ratio},
        "unsteady": "the SM clock moved between 1 and 2 MHz",
    }
    assert live.summary(result, "bsk") == (
        "eager 1.2 ms, 612 TFLOP/s, 3.00x dense, 0.95x fa4; fa3 crashed: RuntimeError: boom; "
        "the SM clock moved between 1 and 2 MHz"
    )
    times["eager"]["executed_tflops"] = 0.00417
    assert ", 4.17 GFLOP/s, 3.00x" in live.summary(result, "bsk")
    assert live.summary({"error": "MemoryError: x", "peers": {}}, "bsk") == "MemoryError: x"
    assert live.summary({"peers": {"bsk": {"n/a": "not yet"}}}, "bsk") == "n/a: not yet"


def test_the_command_is_installed_and_the_module_is_the_same(monkeypatch):
    tomllib = pytest.importorskip("tomllib")
    project = pathlib.Path(__file__).parents[3] / "pyproject.toml"
    module, name = tomllib.loads(project.read_text())["project"]["scripts"]["bsk"].split(":")
    monkeypatch.setattr(cli, "main", lambda *args: 37)
    assert getattr(importlib.import_module(module), name)() == 37
    command = [sys.executable, "-m", "blackwell_sparsek", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("bsk ")
