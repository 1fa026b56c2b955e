"""Running one case: every peer is checked, then all peers that passed are timed in turns."""

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from .arguments import MODES
from .case import EAGER, GRAPH, HOST, REPORTED, SUSTAINED, Case, Contender, Peer, Suite
from .machine import ClockLog, unsteady
from .timing import (
    Run,
    Timing,
    captured,
    time_host,
    time_interleaved,
    time_reported,
    time_sustained,
)

# Some peers compile for minutes, or their compiler processes deadlock.
_LONGEST_START_S = 40.0

Stage = Callable[[str, str], None]
"""Called with the current stage, and the peer to blame if the process dies in it."""


class ContextLost(RuntimeError):
    """A peer left the GPU in a state from which only a new process recovers."""


def measure(
    case: Case,
    peers: Mapping[str, Peer],
    device: torch.device,
    *,
    seconds: float,
    clocks: ClockLog,
    stage: Stage = lambda text, peer: None,
    modes: Collection[str] = MODES,
    crashed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Check and time one case; a peer that fails gets a reason instead of times.

    `crashed` names the peers that ended an earlier process on this case or another, and how.
    """
    result: dict[str, Any] = {"name": case.name, "problem": case.problem, "peers": {}}
    stage("preparing", "")
    try:
        inputs = case.build(device)
    except Exception as error:  # such as out of memory: the other cases still run
        return result | {"error": told(error)}
    contenders: dict[str, Contender] = {}
    for name in case.peers:
        peer = peers[name]
        entry = result["peers"][name] = {"label": peer.label, "rival": peer.rival}
        if crashed and name in crashed:
            entry["crashed"] = crashed[name]
            continue
        stage("", name)
        try:
            if (reason := peer.available() or peer.supports(inputs)) is not None:
                entry["n/a"] = reason
                continue
            stage(f"checking {name}", name)
            with time_limit(_LONGEST_START_S):
                contender = peer.prepare(inputs)
                result_of_run = contender.run()
        except NotImplementedError as error:
            entry["n/a"] = told(error)
            continue
        except Exception as error:  # the other peers still run
            entry["crashed"] = told(error)
            if isinstance(error, TookTooLong):
                entry["too_slow"] = True
            _raise_if_lost(device, name)
            continue
        try:
            contender.check(result_of_run)
        except Exception as error:
            entry["failed" if isinstance(error, AssertionError) else "crashed"] = told(error)
            _raise_if_lost(device, name)
            continue
        del result_of_run
        entry |= contender.notes or {}
        contenders[name] = contender

    started = time.monotonic()
    for mode in case.modes:
        if mode not in modes or (mode in (GRAPH, SUSTAINED) and device.type != "cuda"):
            continue
        stage(f"timing, {mode}", "")
        for name, timing in _times(contenders, mode, device, seconds, result, stage).items():
            entry = _figures(timing, contenders[name], case.dense_flops)
            result["peers"][name].setdefault("times", {})[mode] = entry
    result["clocks"] = clocks.between(started, time.monotonic())
    if (mark := unsteady(result["clocks"])) is not None:
        result["unsteady"] = mark
    return result


def _figures(timing: Timing, contender: Contender, dense_flops: float) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "quantiles_s": timing.quantiles(),
        "rounds": len(timing.seconds),
    }
    tera = 1e12 * timing.median
    if contender.flops:
        figures["executed_tflops"] = contender.flops / tera
    if dense_flops:
        figures["dense_equivalent_tflops"] = dense_flops / tera
    if contender.moved_bytes:
        figures["terabytes_per_s"] = contender.moved_bytes / tera
    return figures


def _times(
    contenders: dict[str, Contender],
    mode: str,
    device: torch.device,
    seconds: float,
    result: dict[str, Any],
    stage: Stage,
) -> dict[str, Timing]:
    runs: dict[str, Run] = {}
    calls: dict[str, int] = {}
    for name, contender in contenders.items():
        together = contender.replicas or (contender.run,)
        stage("", name)
        try:
            runs[name] = captured(together) if mode == GRAPH else contender.run
            if mode != REPORTED:
                runs[name]()
        except Exception as error:
            result["peers"][name][f"no {mode}"] = told(error)
            runs.pop(name, None)
            _raise_if_lost(device, name)
            continue
        calls[name] = len(together) if mode == GRAPH else 1
    if not runs:
        return {}
    stage("", "")
    try:
        times = _TIMERS[mode](runs, device, seconds)
    except Exception as error:
        result[f"no {mode}"] = told(error)
        return {}
    return {name: Timing([s / calls[name] for s in t.seconds]) for name, t in times.items()}


def _interleaved(runs: dict[str, Run], device: torch.device, seconds: float) -> dict[str, Timing]:
    return time_interleaved(runs, device, budget_s=seconds, rounds=(3, 100))


def _sustained(runs: dict[str, Run], device: torch.device, seconds: float) -> dict[str, Timing]:
    return time_sustained(runs, device, block_s=seconds / 4)


_Timer = Callable[[dict[str, Run], torch.device, float], dict[str, Timing]]
_TIMERS: dict[str, _Timer] = {
    EAGER: _interleaved,
    GRAPH: _interleaved,
    SUSTAINED: _sustained,
    HOST: time_host,
    REPORTED: time_reported,
}


class TookTooLong(RuntimeError):
    """A peer was stopped before its first result."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in the body after `seconds`; no limit outside the main thread."""

    def stop(*_: Any) -> None:
        raise TookTooLong(f"no result after {seconds:.0f} s")

    try:
        old = signal.signal(signal.SIGALRM, stop)
    except (AttributeError, ValueError):  # no such signal here, or not the main thread
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def _raise_if_lost(device: torch.device, peer: str) -> None:
    """Raise `ContextLost` if, say, an illegal access makes every later call on the GPU fail."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        raise ContextLost(f"{peer}: {told(error)}") from error


def ratios(result: dict[str, Any], suite: Suite) -> dict[str, Any]:
    """Speedups of ours over the dense peer and over the best rival, by mode."""
    found: dict[str, Any] = {}
    rivals = [name for name, entry in result["peers"].items() if entry.get("rival")]
    for mode in MODES:
        medians = {
            name: entry["times"][mode]["quantiles_s"]["p50"]
            for name, entry in result["peers"].items()
            if mode in entry.get("times", {})
        }
        if suite.ours not in medians:
            continue
        found[mode] = {}
        mine = medians[suite.ours]
        if suite.dense in medians:
            found[mode]["over_dense"] = medians[suite.dense] / mine
        others = {name: medians[name] for name in rivals if name in medians}
        if others:
            best = min(others, key=others.__getitem__)
            found[mode] |= {"best_peer": best, "over_best_peer": others[best] / mine}
    return found


def told(error: BaseException) -> str:
    """The first line of an error, because some of torch's run for pages."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
