"""Timing contenders against one another: interleaved rounds, medians and their spread."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Run = Callable[[], Any]

# Larger than the last-level cache of any current GPU.
_FLUSH_BYTES = 256 * 2**20
# The cache is overwritten at most this often before a sample, to give a slow host time.
_MOST_FLUSHES = 8
# Blocks of back-to-back calls that are timed for each contender.
_SUSTAINED_BLOCKS = 3
# Shorter CPU samples are repeated, because the clock and a cold cache line would distort them.
_SHORTEST_SAMPLE_S = 2e-3


@dataclass
class Timing:
    """Seconds per call of one contender, one entry for each round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the samples, in seconds."""
        return statistics.median(self.seconds)

    def quantiles(self) -> dict[str, float]:
        """Minimum, deciles 1 and 9, quartiles, median and maximum, in seconds."""
        ordered = sorted(self.seconds)
        shares = {"min": 0.0, "p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9}
        return {name: _quantile(ordered, q) for name, q in (*shares.items(), ("max", 1.0))}


def _quantile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def time_interleaved(
    contenders: Mapping[str, Run],
    device: torch.device,
    *,
    budget_s: float = 3.0,
    rounds: tuple[int, int] = (5, 50),
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Time each contender once per round, in turns, so that drift of the machine affects all.

    Parameters
    ----------
    contenders : name to a function without arguments
    device : a CUDA device is timed with events, after its L2 cache has been overwritten
    budget_s : time for all rounds together; a contender with a longer call runs in two rounds only
    rounds : fewest and most rounds, whatever the budget
    progress : called with (rounds done, rounds)

    Examples
    --------
    >>> import torch
    >>> x = torch.ones(8)
    >>> cpu = torch.device("cpu")
    >>> times = time_interleaved({"sum": x.sum}, cpu, budget_s=0.0, rounds=(3, 3))
    >>> len(times["sum"].seconds)
    3
    """
    sample = _CudaSample(device) if device.type == "cuda" else _CpuSample()
    once = {}
    for name, run in contenders.items():
        run()  # compiles, allocates
        once[name] = sample(run, 1)
    fewest, most = rounds
    repeats = {name: sample.repeats(seconds) for name, seconds in once.items()}
    round_s = sum(repeats[name] * seconds for name, seconds in once.items())
    count = max(fewest, min(most, int(budget_s / max(round_s, 1e-9))))
    long_s = budget_s or float("inf")

    timings = {name: Timing() for name in contenders}
    names = list(contenders)
    for done in range(count):
        # rotate, so that the order starts with another contender in each round
        turn = done % len(names)
        for name in names[turn:] + names[:turn]:
            if done < 2 or once[name] <= long_s:
                timings[name].seconds.append(sample(contenders[name], repeats[name]))
        if progress:
            progress(done + 1, count)
    return timings


def time_sustained(
    contenders: Mapping[str, Run], device: torch.device, *, block_s: float = 0.1
) -> dict[str, Timing]:
    """Time each contender over blocks of back-to-back calls, in turns.

    A GPU under sustained load reaches its power limit and lowers its clocks, more so for kernels
    that keep it busier; single calls between pauses do not show that. Each block gives one time
    per call; the first round is a warm-up and does not count.
    """
    event: Callable[..., Any] = torch.cuda.Event
    sample = _CudaSample(device)
    calls = {name: max(1, round(block_s / sample(run, 1))) for name, run in contenders.items()}
    timings = {name: Timing() for name in contenders}
    for block in range(1 + _SUSTAINED_BLOCKS):
        for name, run in contenders.items():
            start, end = event(enable_timing=True), event(enable_timing=True)
            start.record()
            for _ in range(calls[name]):
                run()
            end.record()
            end.synchronize()
            if block > 0:
                timings[name].seconds.append(start.elapsed_time(end) * 1e-3 / calls[name])
    return timings


def time_host(
    contenders: Mapping[str, Run], device: torch.device, seconds: float = 0.3
) -> dict[str, Timing]:
    """Time until calls return while the device still works: what a call costs the host.

    Samples have few calls, so that the launch queue never fills and blocks the host.
    """
    calls = {name: _calls_for_host(run) for name, run in contenders.items()}
    timings = {name: Timing() for name in contenders}
    started = time.perf_counter()
    while len(next(iter(timings.values())).seconds) < 5 or time.perf_counter() - started < seconds:
        for name, run in contenders.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            for _ in range(calls[name]):
                run()
            timings[name].seconds.append((time.perf_counter() - begin) / calls[name])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return timings


def _calls_for_host(run: Run) -> int:
    begin = time.perf_counter()
    run()
    return max(1, min(20, round(10 * _SHORTEST_SAMPLE_S / (time.perf_counter() - begin))))


def time_reported(
    contenders: Mapping[str, Run], device: torch.device, seconds: float = 0.3
) -> dict[str, Timing]:
    """Time runs that measure themselves and return seconds, in one to three rounds."""
    timings = {name: Timing() for name in contenders}
    for _ in range(max(1, min(3, round(10 * seconds)))):
        for name, run in contenders.items():
            timings[name].seconds.append(float(run()))
    return timings


def captured(runs: tuple[Run, ...]) -> Run:
    """Capture all of `runs`, in order, as one CUDA graph."""
    make_stream: Any = torch.cuda.Stream
    stream = make_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    # an older graph that Python destroyed during the capture would make it fail
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph.replay


class _CpuSample:
    """Seconds per call by the wall clock."""

    @staticmethod
    def repeats(seconds: float) -> int:
        return max(1, min(1000, round(_SHORTEST_SAMPLE_S / max(seconds, 1e-9))))

    def __call__(self, run: Run, repeats: int) -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - started) / repeats


class _CudaSample:
    """Seconds per call on the device, from a cold L2 cache.

    The device overwrites its cache while the host queues the call. If the host takes longer than
    that, the cache is overwritten more often, so that these times exclude the cost on the host.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
        self.flushes: dict[Run, int] = {}

    @staticmethod
    def repeats(seconds: float) -> int:
        return 1

    def __call__(self, run: Run, repeats: int) -> float:
        flushes = self.flushes.setdefault(run, 1)
        seconds, waited = self._once(run, repeats, flushes)
        while waited and flushes < _MOST_FLUSHES:
            flushes = self.flushes[run] = 2 * flushes
            seconds, waited = self._once(run, repeats, flushes)
        return seconds

    def _once(self, run: Run, repeats: int, flushes: int) -> tuple[float, bool]:
        """Seconds per call, and whether the device was idle before the host had queued the call."""
        with torch.cuda.device(self.device):
            event: Callable[..., Any] = torch.cuda.Event
            start, end = event(enable_timing=True), event(enable_timing=True)
            for _ in range(flushes):
                self.flush.zero_()
            start.record()
            for _ in range(repeats):
                run()
            end.record()
            waited = bool(start.query())
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / repeats, waited
