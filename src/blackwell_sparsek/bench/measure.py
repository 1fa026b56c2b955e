"""Running cases: every peer is checked, then all that passed are timed against one another."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .clocks import ClockLog
from .registry import Case, Contender, Peer
from .timing import Run, Timing, time_interleaved, time_sustained

EAGER, GRAPH, SUSTAINED = MODES = "eager", "graph", "sustained"


def measure(
    case: Case,
    peers: Mapping[str, Peer],
    device: torch.device,
    *,
    seconds: float,
    clocks: ClockLog,
    stage: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Check and time one case; what fails has a reason instead of times."""
    result: dict[str, Any] = {"name": case.name, "problem": case.problem, "peers": {}}
    stage("preparing")
    try:
        inputs = case.build(device)
    except Exception as error:  # such as memory: the other cases still run
        return result | {"error": _told(error)}
    contenders: dict[str, Contender] = {}
    for name in case.peers:
        stage(f"checking {name}")
        entry = result["peers"][name] = {"label": peers[name].label}
        if (reason := peers[name].why_not(inputs)) is not None:
            entry["n/a"] = reason
            continue
        try:
            contender = peers[name].prepare(inputs)
            contender.check(contender.run())
        except Exception as error:  # a peer that cannot, or computes something else
            entry["failed" if isinstance(error, AssertionError) else "n/a"] = _told(error)
            continue
        entry |= contender.notes or {}
        contenders[name] = contender

    started = time.monotonic()
    for mode in _modes(case, device):
        stage(f"timing, {mode}")
        for name, timing in _times(contenders, mode, device, seconds, result).items():
            times = {"quantiles_s": timing.quantiles(), "rounds": len(timing.seconds)}
            tera = 1e12 * timing.median
            times["executed_tflops"] = contenders[name].flops / tera
            times["dense_equivalent_tflops"] = case.dense_flops / tera
            result["peers"][name].setdefault("times", {})[mode] = times
    result["clocks"] = clocks.between(started, time.monotonic())
    return result


def _modes(case: Case, device: torch.device) -> tuple[str, ...]:
    """Narrow products are bound by launches and memory, wide ones by clocks and power."""
    if device.type != "cuda":
        return (EAGER,)
    return (EAGER, GRAPH) if case.narrow else (EAGER, SUSTAINED)


def _times(
    contenders: dict[str, Contender],
    mode: str,
    device: torch.device,
    seconds: float,
    result: dict[str, Any],
) -> dict[str, Timing]:
    runs: dict[str, Run] = {}
    calls: dict[str, int] = {}
    for name, contender in contenders.items():
        together = contender.replicas or (contender.run,)
        try:
            runs[name] = captured(together) if mode == GRAPH else contender.run
            runs[name]()
        except Exception as error:
            result["peers"][name][f"no {mode}"] = _told(error)
            runs.pop(name, None)
            continue
        calls[name] = len(together) if mode == GRAPH else 1
    if not runs:
        return {}
    try:
        if mode == SUSTAINED:
            return time_sustained(runs, device, block_s=seconds / 2)
        times = time_interleaved(runs, device, budget_s=seconds, rounds=(3, 100))
    except Exception as error:
        result[f"no {mode}"] = _told(error)
        return {}
    return {name: Timing([s / calls[name] for s in t.seconds]) for name, t in times.items()}


def captured(runs: tuple[Run, ...]) -> Run:
    """All of `runs`, one after the other, as one CUDA graph."""
    make_stream: Any = torch.cuda.Stream
    stream = make_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph.replay


def ratios(result: dict[str, Any], ours: str, dense: str, sparse: list[str]) -> dict[str, Any]:
    """How many times faster `ours` is than the dense peer and the best sparse one, by mode."""
    found: dict[str, Any] = {}
    for mode in MODES:
        medians = {
            name: entry["times"][mode]["quantiles_s"]["p50"]
            for name, entry in result["peers"].items()
            if mode in entry.get("times", {})
        }
        if ours not in medians:
            continue
        found[mode] = {}
        if dense in medians:
            found[mode]["over_dense"] = medians[dense] / medians[ours]
        others = {name: medians[name] for name in sparse if name in medians}
        if others:
            best = min(others, key=others.__getitem__)
            found[mode] |= {
                "best_sparse_peer": best,
                "over_best_sparse": others[best] / medians[ours],
            }
    return found


def _told(error: Exception) -> str:
    """The first line of an error; some of torch's go on for pages."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
