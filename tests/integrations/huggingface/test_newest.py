"""The other tests in this folder with the newest transformers; the constraints pin an older one."""

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.exhaustive
def test_with_the_newest_transformers(tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path)]
    done = subprocess.run([*command, "transformers"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no transformers from the package index: {done.stderr.strip()[-200:]}")
    folder = pathlib.Path(__file__).parent
    path = [str(tmp_path), str(folder.parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    options = ["-q", "-m", "not gpu and not exhaustive", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        cwd=folder.parents[2], env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
