"""A client of the library type-checks under mypy's strictest rules."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("mypy")

HERE = pathlib.Path(__file__).parent
SOURCE = HERE.parents[1] / "src"

pytestmark = pytest.mark.exhaustive


def strictly(path, cache):
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull]
    # what the library does inside is checked by its own configuration
    command += ["--follow-imports", "silent", "--cache-dir", str(cache), str(path)]
    environment = {**os.environ, "MYPYPATH": str(SOURCE)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_client_is_clean_and_a_planted_error_is_found(tmp_path):
    client = tmp_path / "client.py"
    text = (HERE / "typed_client.py").read_text()
    client.write_text(text)
    done = strictly(client, tmp_path / "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    client.write_text(text.replace("return_lse=True), Pair)", "return_lse=True), torch.Tensor)"))
    done = strictly(client, tmp_path / "cache")
    assert done.returncode == 1 and 'not "Tensor"' in done.stdout, done.stdout
