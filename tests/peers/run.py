"""Runs suites of other projects twice, with this package and without, and lists what differs.

`python -m tests.peers.run [suite ...]` (or `make peer-tests`). The suites are not part of any
package on an index, so their sources are fetched from GitHub at the tag of the version that is
installed, into `.peers/`; `--sources DIR` takes them from `DIR/transformers` and `DIR/pytorch`
instead. A suite that cannot be run is skipped with the reason. A test counts as a finding if it
passes in the control run (sdpa, or torch's own products) and fails with this package, unless
`accepted.txt` names it with a reason. FlashAttention's grid of sizes is `test_flash_attention_grid`
beside this file and needs no sources; `flash_attention.py` runs its own test files.
"""

import argparse
import fnmatch
import importlib.metadata
import io
import os
import pathlib
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2",
    "phi3", "mixtral", "olmo2", "granite", "gpt_oss",
)  # fmt: skip
SECONDS_TO_FETCH = 60


@dataclass(frozen=True)
class Suite:
    """One suite.

    Parameters
    ----------
    name : as on the command line
    package : the installed package whose version names the tag
    repository, folder : on GitHub, and its name below `--sources`
    needs : further packages that its tests import
    files : test files below the folder
    select : `-k` of pytest
    """

    name: str
    package: str
    repository: str
    folder: str
    needs: tuple[str, ...]
    files: tuple[str, ...]
    select: str = ""


SUITES = (
    Suite(
        "transformers", "transformers", "huggingface/transformers", "transformers",
        ("parameterized", "datasets"),
        tuple(f"tests/models/{x}/test_modeling_{x}.py" for x in FAMILIES),
        "not Integration and not flash and not flex and not pipeline",
    ),
    Suite(
        "torch-sdpa", "torch", "pytorch/pytorch", "pytorch", ("expecttest", "hypothesis"),
        ("test/test_transformers.py",), "sdp or scaled_dot_product or SDPA",
    ),
    Suite(
        "torch-bsr", "torch", "pytorch/pytorch", "pytorch", ("expecttest", "hypothesis"),
        ("test/test_sparse_csr.py",), "bsr or BSR or block",
    ),
)  # fmt: skip


class Skipped(Exception):
    """Why a suite cannot be run here."""


class Side(NamedTuple):
    """Outcomes of one run by test, and the first line of each failure."""

    outcomes: dict[str, str]
    reasons: dict[str, str]


def sources(suite: Suite, given: pathlib.Path | None, cache: pathlib.Path) -> pathlib.Path:
    """The folder of a suite's sources, fetched unless it is there."""
    for package in (suite.package, *suite.needs):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise Skipped(f"needs {package}: pip install {package}") from None
        if package == suite.package:
            tag = f"v{version.split('+')[0]}"
    folder = (given or cache) / suite.folder
    if given is None:
        folder = cache / f"{suite.folder}-{tag}"
        if not folder.exists():
            fetch(f"https://github.com/{suite.repository}/archive/refs/tags/{tag}.tar.gz", folder)
    missing = [file for file in suite.files if not (folder / file).is_file()]
    if missing:
        raise Skipped(f"{folder} has no {missing[0]}")
    return folder


def fetch(url: str, folder: pathlib.Path) -> None:
    """Unpack an archive whose members lie in one folder; links and odd names are refused."""
    try:
        with urllib.request.urlopen(url, timeout=SECONDS_TO_FETCH) as answer:
            packed = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise Skipped(f"cannot fetch {url}: {error}") from error
    partial = folder.with_name(folder.name + ".partial")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(partial, filter="data")
    (found,) = partial.iterdir()
    found.rename(folder)
    partial.rmdir()


def run_side(suite: Suite, folder: pathlib.Path, side: str, options: argparse.Namespace) -> Side:
    """Run the suite's tests in a process of their own."""
    report = options.cache / f"{suite.name}.{side}.xml"
    options.cache.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    # not the root: the suites have a package `tests` of their own
    path = [str(HERE), str(ROOT / "src"), str(folder), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(x for x in path if x),
        "BSK_PEER_SUITE": suite.name, "BSK_PEER_SIDE": side, "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bsk_peer_plugin", "--tb=line"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", *suite.files]
    select = " and ".join(f"({x})" for x in (suite.select, options.select) if x)
    command += ["-k", select] if select else []
    command += ["-n", str(options.workers)] if options.workers > 1 else []
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if not report.exists():
        said = (done.stdout + done.stderr).strip()[-500:]
        raise Skipped(f"pytest wrote no report ({done.returncode}): {said}")
    return read_report(report)


def read_report(path: pathlib.Path) -> Side:
    """Outcomes from a report of pytest."""
    outcomes, reasons = {}, {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        outcomes[name] = "passed"
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcomes[name] = "skipped" if child.tag == "skipped" else "failed"
                reasons[name] = _first_line(child)
    return Side(outcomes, reasons)


def _first_line(failure: ElementTree.Element) -> str:
    """The message of a failure; an error at collection has it at the end of its text."""
    message = (failure.get("message") or "").strip()
    if message == "collection failure":
        message = (failure.text or message).strip().split("\n")[-1]
    return message.split("\n")[0][:160]


def read_accepted(path: pathlib.Path) -> dict[str, str]:
    """Patterns of tests that may fail, each with the reason after `#`."""
    accepted = {}
    for line in path.read_text().splitlines():
        pattern, _, reason = (x.strip() for x in line.partition("#"))
        if pattern:
            if not reason:
                raise ValueError(f"{path}: {pattern} has no reason")
            accepted[pattern] = reason
    return accepted


def findings(ours: Side, control: Side, accepted: dict[str, str]) -> dict[str, str]:
    """Tests that pass in the control run and fail with this package, with what they said."""
    found = {}
    for name, outcome in control.outcomes.items():
        if outcome != "passed" or ours.outcomes.get(name) == "passed":
            continue
        if any(fnmatch.fnmatch(name, pattern) for pattern in accepted):
            continue
        got = ours.outcomes.get(name, "missing")
        found[name] = f"{got}: {ours.reasons.get(name, 'no such test in this run')}"
    return found


def _counts(side: Side) -> str:
    counts = Counter(side.outcomes.values())
    return ", ".join(f"{counts[x]} {x}" for x in ("passed", "failed", "skipped"))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when a test fails that the control run passes."""
    names = [suite.name for suite in SUITES]
    parser = argparse.ArgumentParser(prog="python -m tests.peers.run", description=__doc__)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(names)}; all unless given")
    parser.add_argument("--sources", type=pathlib.Path, help="folder with checkouts")
    parser.add_argument("--cache", type=pathlib.Path, default=ROOT / ".peers")
    parser.add_argument("--workers", type=int, default=1, help="of pytest-xdist")
    parser.add_argument("--select", default="", help="a further -k for pytest")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.suites if name not in names]:
        parser.error(f"{unknown[0]!r} is not a suite; expected one of {', '.join(names)}")
    # tests run in the folder of their sources
    args.cache = args.cache.resolve()
    if args.sources is not None:
        args.sources = args.sources.resolve()
    accepted = read_accepted(HERE / "accepted.txt")
    status = 0
    for suite in SUITES:
        if args.suites and suite.name not in args.suites:
            continue
        try:
            folder = sources(suite, args.sources, args.cache)
            control = run_side(suite, folder, "control", args)
            if "passed" not in control.outcomes.values():
                said = next(iter(control.reasons.values()), "no test was found")
                raise Skipped(f"nothing passes in the control run: {said}")
            ours = run_side(suite, folder, "ours", args)
        except Skipped as reason:
            print(f"{suite.name}: skipped: {reason}", flush=True)
            continue
        found = findings(ours, control, accepted)
        print(f"{suite.name}: control {_counts(control)}; ours {_counts(ours)}", flush=True)
        print(f"{suite.name}: {len(found)} tests fail that the control run passes")
        for name, reason in sorted(found.items()):
            print(f"    {name}\n        {reason}")
        status |= bool(found)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
