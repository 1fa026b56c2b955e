"""Dockerfile and workflows: they cannot be run in a test, but they can be read."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from blackwell_sparsek.core.compat import WARPS_TRITON
from blackwell_sparsek.testing.compile_cases import ALL_ARCHS

REPOSITORY = pathlib.Path(__file__).parents[2]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))


def _workflow(path):
    yaml = pytest.importorskip("yaml")
    # YAML 1.1 takes the key `on` for a boolean
    document = yaml.safe_load(path.read_text())
    return {("on" if key is True else key): value for key, value in document.items()}


def _steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_the_stages_people_ask_for_are_there():
    stages = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)
    assert stages == ["base", "build", "prod", "bench", "ci", "dev"]


def test_every_file_that_is_copied_exists_and_nothing_runs_as_root():
    for sources in re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((REPOSITORY / source).exists() for source in sources.split())
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        users = re.findall(r"^USER (\d+)$", stage, re.MULTILINE)
        assert not users or users[-1] != "0"


def test_hadolint_has_nothing_to_say():
    beside = pathlib.Path(sys.executable).parent / "hadolint"
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    path = str(REPOSITORY / "Dockerfile")
    done = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_little_and_end(path):
    workflow = _workflow(path)
    assert set(workflow) == {"name", "on", "permissions", "concurrency", "jobs"}
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in workflow["on"]
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60 and job["runs-on"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_scripts_take_no_text_from_outside(path):
    for step in _steps(_workflow(path)):
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"])
            if "checkout" in step["uses"]:
                assert step["with"]["persist-credentials"] is False
        assert "${{" not in step.get("run", "")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_make_targets_of_workflows_exist(path):
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for step in _steps(_workflow(path)):
        for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
            assert target in targets


def test_the_matrix_compiles_for_every_architecture():
    jobs = _workflow(REPOSITORY / ".github/workflows/test.yml")["jobs"]
    assert jobs["compile"]["strategy"]["matrix"]["arch"] == [f"sm_{sm}" for sm in ALL_ARCHS]
    versions = {row["python"] for row in jobs["cpu"]["strategy"]["matrix"]["include"]}
    assert {"3.10", "3.13"} <= versions


def test_the_matrix_compiles_hopper_with_every_release_that_is_known():
    matrix = _workflow(REPOSITORY / ".github/workflows/test.yml")["jobs"]["compile"]["strategy"]
    rows = matrix["matrix"]["include"]
    releases = set(matrix["matrix"]["triton"])
    releases |= {row["triton"] for row in rows if row["arch"] == "sm_90"}
    assert releases == {f"{major}.{minor}.*" for major, minor in WARPS_TRITON}


def test_the_gpu_runs_only_when_somebody_says_so():
    workflow = _workflow(REPOSITORY / ".github/workflows/gpu.yml")
    assert workflow["on"]["pull_request"] == {"types": ["labeled"]}
    (job,) = workflow["jobs"].values()
    assert "label.name == 'gpu'" in job["if"] and "self-hosted" in job["runs-on"]
