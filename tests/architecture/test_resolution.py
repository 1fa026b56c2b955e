"""The pins of constraints.txt exist and agree, on every platform and Python that is supported."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("uv")

REPOSITORY = pathlib.Path(__file__).parents[2]
# uv's names of the platforms; torch's wheels for macOS need its release 14
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
ENVIRONMENT = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}

pytestmark = pytest.mark.exhaustive


def compiled(*options, requirements=""):
    """What `uv pip compile` makes of some requirements.

    uv would try every Python on the path for one of the asked version: it is given this one.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header"]
    command += ["--no-annotate", "--python", sys.executable, *options]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, env=ENVIRONMENT, input=requirements
    )


@pytest.fixture(scope="module")
def index():
    """Skip where no package index can be asked; any other trouble of uv is a failure."""
    done = compiled("--no-cache", "-", requirements="pip")
    if "Failed to fetch" in done.stderr or "network was disabled" in done.stderr:
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_pins_resolve(index, platform, python):
    # wheels only: a pin without one would have to be built, which takes a compiler and time
    where = ("--python-platform", platform, "--python-version", python, "--only-binary", ":all:")
    extras = [word for extra in ("test", "docs", "release") for word in ("--extra", extra)]
    done = compiled(*where, "--constraint", "constraints.txt", *extras, "pyproject.toml")
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"^([\w-]+)==(\S+)$", done.stdout, re.MULTILINE))
    text = (REPOSITORY / "constraints.txt").read_text()
    pins = set(re.findall(r"^([\w-]+)==([^\s;]+)", text, re.MULTILINE))
    # a pin whose marker leaves this Python out would let any version in
    pinned = {name for name, _ in pins}
    assert {pair for pair in found.items() if pair[0] in pinned} <= pins
    assert ("triton" in found) == ("linux" in platform)
