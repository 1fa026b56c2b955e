"""The time of the first call in a process: imports, compilation, launch."""

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from ...core.env import environment_with_cache
from ..case import REPORTED, Case, Contender, Peer, Suite
from .attention_peers import OURS, needs

_LONGEST_S = 120
_WORKER = pathlib.Path(__file__).with_name("first_call_worker.py")
# The worker runs by its path: as a module it would import this package before its clock starts.
_START = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
# The cache that each call filled when it started from nothing, for the cases with a warm cache.
_compiled: dict[str, "tempfile.TemporaryDirectory[str]"] = {}


def first_call(tiny: bool = False) -> Iterator[Case]:
    """The first call of a process: nothing compiled, or all of it in Triton's cache."""
    # the call with the most peers comes last
    for call in ("matmul", "attention"):
        for state in ("nothing compiled", "compiled before"):
            peers = (OURS, *PEERS) if call == "attention" else (OURS,)
            build = partial(FirstCall, call, state == "compiled before")
            yield Case(f"{call}, {state}", {"call": call}, build, peers, modes=(REPORTED,))


class FirstCall(NamedTuple):
    """Which call a fresh process makes, and whether its kernels were compiled before."""

    call: str
    warm: bool
    device: torch.device


def _prepare(inputs: FirstCall, name: str = "") -> Contender:
    call = name or inputs.call
    if inputs.warm and call not in _compiled:
        _uncompiled_seconds(call)
    measured = _compiled_seconds if inputs.warm else _uncompiled_seconds
    return Contender(_Repeated(measured, call), _passed)


def _passed(seconds: float) -> None:
    """Nothing to check: `seconds_of` has checked the result."""


class _Repeated:
    """Measurements of a call; the one made for the check is reused as the first round."""

    def __init__(self, measurement: Callable[[str], float], call: str):
        self.measurement, self.call = measurement, call
        self.checked: float | None = None
        self.is_checked = False

    def __call__(self) -> float:
        if self.checked is not None:
            seconds, self.checked = self.checked, None
            return seconds
        seconds = self.measurement(self.call)
        if not self.is_checked:
            self.checked, self.is_checked = seconds, True
        return seconds


def _uncompiled_seconds(call: str) -> float:
    fresh = tempfile.TemporaryDirectory()
    seconds = seconds_of(call, pathlib.Path(fresh.name))
    _compiled.setdefault(call, fresh)
    return seconds


def _compiled_seconds(call: str) -> float:
    return seconds_of(call, pathlib.Path(_compiled[call].name))


def seconds_of(call: str, cache: pathlib.Path) -> float:
    """Run one call in a fresh process with its compiled kernels in `cache`."""
    command = [sys.executable, "-c", _START, str(_WORKER), call]
    done = subprocess.run(
        command,
        env=environment_with_cache(str(cache)),
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
        raise RuntimeError(f"the process of {call} ended with {done.returncode}: {last[0]}")
    # libraries may print other lines
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if not lines:
        raise RuntimeError(f"the process of {call} printed no time")
    record: dict[str, Any] = json.loads(lines[-1])
    if not record["finite"]:
        raise AssertionError(f"{call} gave something that is not finite")
    return float(record["seconds"])


def _on_gpu(inputs: FirstCall) -> str | None:
    return None if inputs.device.type == "cuda" else "needs a CUDA GPU"


PEERS = {
    "sdpa": Peer("sdpa", "SDPA", partial(_prepare, name="sdpa"), rival=True),
    "flex": Peer(
        "flex",
        "FlexAttention, compiled",
        partial(_prepare, name="flex"),
        supports=_on_gpu,
        rival=True,
    ),
    "fa4": Peer(
        "fa4",
        "FlashAttention 4",
        partial(_prepare, name="fa4"),
        available=needs("flash_attn.cute", "flash_attn_func"),
        rival=True,
    ),
}
_OURS = {OURS: Peer(OURS, "blackwell_sparsek", _prepare)}
SUITES = [Suite("first_call", first_call.__doc__ or "", first_call, _OURS | PEERS, OURS, unit="ms")]
