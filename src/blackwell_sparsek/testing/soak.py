"""Repeats fixed calls from threads, streams, CUDA graphs and processes until one goes wrong.

`python -m blackwell_sparsek.testing.soak --minutes 8 --calls 1000000 --processes 2 --threads 4`
makes the calls of `fixed_calls` over and over. Each result must have the bits of the first run of
its call, in every thread and process; a different bit, an error, or growth of memory fails with
the name of the call. In each process the last thread replays CUDA graphs, the others make calls,
each on a stream of its own. Results are compared on the device and nothing waits for a single
call, so calls overlap as in real use.

Results that may differ in bits (dq of the Hopper backward unless `deterministic`) are compared
with fp64 under the error budget; the run prints which they are, and what this device cannot run.
"""

import argparse
import gc
import hashlib
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from ..core.arch import arch_of
from ..core.compat import warps_may_part
from .fixed_calls import Call, FixedCall, Results, fixed_calls, supported

# A Python object takes 56 bytes or more, so a process that keeps one for each call passes this.
# The constant part is for what the allocator of the C library holds back.
HOST_BYTES, HOST_BYTES_PER_CALL = 64 * 2**20, 32
# How often threads stop, so that flags and memory are read while nothing runs.
LAP_SECONDS = 10.0
# Rounds after which device memory counts as settled: streams own all that they keep by then.
SETTLING_LAPS = 2
# Calls of a thread that may be waiting for the device.
MOST_IN_FLIGHT = 128
# Kernels that must have run on Hopper with a release of Triton that builds them all.
HOPPER_KERNELS = (
    "_attn_fwd_sm90_kernel", "_attn_bwd_sm90_kernel", "_attn_bwd_wide_sm90_kernel",
    "_attn_bwd_dkdv_sm90_kernel", "_attn_bwd_dq_sm90_kernel", "_attn_decode_sm90_kernel",
    "_spmm_sm90_kernel", "_spmm_sm90_kernel (paired)", "_spmm_narrow_sm90_kernel",
    "_spmm_strips_kernel", "_spmm_warps_kernel", "_attn_fwd_kernel", "_attn_dq_kernel",
    "_attn_dkdv_kernel", "_attn_decode_kernel", "_kv_append_kernel", "_page_summaries_kernel",
    "_page_scores_kernel", "_select_pages_kernel", "_bsr_spmm_kernel", "_bsr_spmm_narrow_kernel",
    "_bsr_sddmm_kernel", "_bsr_pair_products_kernel", "_merge_states_kernel",
    "_attn_bwd_wide_dq_sm90_kernel", "_attn_decode_latent_kernel", "_attn_ragged_sm90_kernel",
    "_attn_ragged_kernel", "_attn_fwd_fp8_sm90_kernel", "_sparse_attn_fwd_sm90_kernel",
    "_sparse_attn_latent_kernel", "_sparse_attn_dq_sm90_kernel", "_sparse_attn_dkdv_sm90_kernel",
    "_sparse_attn_fwd_kernel", "_sparse_attn_dq_kernel", "_sparse_attn_dkdv_kernel",
    "_sparse_attn_gathered_kernel", "_sparse_attn_unions_kernel", "_select_keys_kernel",
    "_scores_kernel", "_choose_kernel", "_sparsek_kernel", "_append_slots_kernel",
)  # fmt: skip


class Checked:
    """One call and its expected results; `differs` counts runs with a wrong result."""

    def __init__(self, call: FixedCall, device: torch.device):
        self.call: FixedCall = call
        self.device: torch.device = device
        self.expected: Results = tuple(x.detach().clone() for x in call.make(device)())
        self.bounds: dict[int, tuple[torch.Tensor, float]] = {}
        if call.varying:
            assert call.exact is not None
            exact, plain = call.exact(device)
            for i in call.varying:
                self.bounds[i] = exact[i].detach().double(), _budget(exact[i], plain[i])

    def digest(self) -> str:
        """Of the bits that every process must find."""
        digest = hashlib.sha256()
        for i, x in enumerate(self.expected):
            if i not in self.bounds:
                digest.update(_bits(x).cpu().numpy().tobytes())
        return digest.hexdigest()

    def compare(self, results: Results, differs: torch.Tensor) -> None:
        """Add 1 to `differs`, a tensor of the device, if a result is not what it should be."""
        if len(results) != len(self.expected):
            raise AssertionError(f"{len(results)} results, the first run had {len(self.expected)}")
        for i, (got, expected) in enumerate(zip(results, self.expected, strict=True)):
            if got.shape != expected.shape or got.dtype != expected.dtype:
                raise AssertionError(
                    f"result {i} is {got.dtype} {list(got.shape)}, the first run gave "
                    f"{expected.dtype} {list(expected.shape)}"
                )
            if i in self.bounds:
                exact, bound = self.bounds[i]
                # not (error <= bound), so that NaN counts
                wrong = ~((got.detach().double() - exact).abs() <= bound).all()
            else:
                wrong = (_bits(got.detach()) != _bits(expected)).any()
            differs.add_(wrong)


def _bits(x: torch.Tensor) -> torch.Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(sizes[x.element_size()])


def _budget(exact: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest error that `tolerance.assert_within_budget` accepts."""
    error = (plain.detach().double() - exact.detach().double()).abs().max().item()
    return 2 * error + torch.finfo(plain.dtype).eps * exact.detach().abs().max().item()


@dataclass
class Report:
    """What a run did and found."""

    calls: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    host_growth: int = 0


class Failed(Exception):
    """A call went wrong; the message says which and how."""


class Soak:
    """The calls of one process.

    Parameters
    ----------
    checked : the calls with their expected results
    threads : how many make calls at once; on a GPU the last one replays graphs
    graphs : whether the last thread replays CUDA graphs
    say : called with a line of progress after each lap
    """

    def __init__(
        self,
        checked: Sequence[Checked],
        threads: int,
        *,
        graphs: bool,
        say: Callable[[Report], None] = lambda report: None,
    ):
        self.checked: Sequence[Checked] = checked
        self.threads: int = threads
        self.graphs: bool = graphs
        self.say: Callable[[Report], None] = say
        self.device: torch.device = checked[0].device
        self.on_gpu: bool = self.device.type == "cuda"
        self.report: Report = Report()
        self.stop: threading.Event = threading.Event()
        self.workers: list[_Worker] = [self._worker(i) for i in range(threads)]

    def _worker(self, index: int) -> "_Worker":
        if self.graphs and index == self.threads - 1:
            return _Replayer(self, index)
        return _Worker(self, index)

    def run(self, seconds: float, calls: int, lap_seconds: float = LAP_SECONDS) -> Report:
        """Call until time is up or `calls` were made, or something goes wrong."""
        started = time.perf_counter()
        device_bytes, host_bytes, host_calls, lap = 0, 0, 0, 0
        while not self.report.failures:
            left = seconds - (time.perf_counter() - started)
            if left <= 0 or self.report.calls >= calls:
                break
            self._lap(min(left, lap_seconds), calls - self.report.calls)
            self.report.seconds = time.perf_counter() - started
            self._read_flags()
            allocated, resident = self._memory()
            if lap < SETTLING_LAPS:
                device_bytes = max(device_bytes, allocated)
                host_bytes, host_calls = resident, self.report.calls
            else:
                self._judge_memory(
                    allocated - device_bytes, resident - host_bytes, self.report.calls - host_calls
                )
            lap += 1
            self.say(self.report)
        return self.report

    def _lap(self, seconds: float, calls: int) -> None:
        self.stop.clear()
        share = -(-calls // self.threads)
        until = time.perf_counter() + seconds
        for lap in [worker.thread.submit(worker.run, until, share) for worker in self.workers]:
            lap.result()
        for worker in self.workers:
            self.report.calls += worker.made
            worker.made = 0
            self.report.failures += worker.errors
            worker.errors = []

    def _read_flags(self) -> None:
        if any("CUDA" in failure for failure in self.report.failures):
            return  # nothing can be read after a fault
        for worker in self.workers:
            for i, times in enumerate(worker.differs.tolist()):
                if times:
                    self.report.failures.append(
                        f"{self.checked[i].call.name}: {times} results of {worker.what} differ "
                        "from the first run"
                    )

    def _memory(self) -> tuple[int, int]:
        """Bytes in use on the device, and of this process on the host."""
        gc.collect()
        allocated = 0
        if self.on_gpu and not self.report.failures:
            torch.cuda.synchronize(self.device)
            allocated = torch.cuda.memory_allocated(self.device)
        return allocated, resident_bytes()

    def _judge_memory(self, device_growth: int, host_growth: int, calls: int) -> None:
        self.report.host_growth = host_growth
        if device_growth > 0:
            self.report.failures.append(
                f"memory: {device_growth} bytes more are in use on {self.device} after {calls} "
                "calls than after the first laps"
            )
        allowed = HOST_BYTES + HOST_BYTES_PER_CALL * calls
        if host_growth > allowed:
            self.report.failures.append(
                f"memory: the process grew by {host_growth} bytes in {calls} calls; at most "
                f"{allowed} are accepted"
            )


class _Worker:
    """One thread: inputs, a stream and flags of its own."""

    what = "a call"

    def __init__(self, soak: Soak, index: int):
        self.soak, self.index = soak, index
        self.made = 0
        self.errors: list[str] = []
        device = soak.device
        self.differs = torch.zeros(len(soak.checked), dtype=torch.int64, device=device)
        # the first thread stays on the default stream
        self.stream: Any = None
        if soak.on_gpu and index:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # One thread for all laps: PyTorch keeps memory for cuBLAS, 32 MiB on Hopper, for every
        # thread and stream that met, and would take more for the threads of another lap.
        self.thread: ThreadPoolExecutor = ThreadPoolExecutor(1, f"soak-{index}")
        self.order = random.Random(index)
        self.calls: list[Call] = [checked.call.make(device) for checked in soak.checked]
        if soak.on_gpu:
            torch.cuda.synchronize(device)

    def run(self, until: float, most: int) -> None:
        """Make calls until the time comes, `most` were made, or another thread fails."""
        on_stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        try:
            with on_stream:
                for _ in self._rounds():
                    late = time.perf_counter() >= until
                    if late or self.made >= most or self.soak.stop.is_set():
                        break
                self._wait()
        except Failed as error:
            self.errors.append(str(error))
            self.soak.stop.set()
        except Exception as error:
            self.errors.append(f"{self.what}: waiting for the device: {_text(error)}")
            self.soak.stop.set()

    def _rounds(self) -> Iterator[None]:
        """Make a call at each step."""
        places = list(range(len(self.calls)))
        since = 0
        while True:
            self.order.shuffle(places)
            for i in places:
                self._once(i)
                self.made += 1
                since += 1
                if since == MOST_IN_FLIGHT:
                    since = 0
                    self._wait()
                yield

    def _once(self, i: int) -> None:
        checked = self.soak.checked[i]
        try:
            checked.compare(self.calls[i](), self.differs[i])
        except Exception as error:
            raise Failed(f"{checked.call.name}: {self.what} raised {_text(error)}") from error

    def _wait(self) -> None:
        if self.soak.on_gpu:
            torch.cuda.current_stream(self.soak.device).synchronize()


class _Replayer(_Worker):
    """A thread that replays one graph for each call that a graph may hold."""

    what = "a replayed graph"

    def __init__(self, soak: Soak, index: int):
        super().__init__(soak, index)
        self.replays: list[tuple[int, torch.cuda.CUDAGraph]] = []
        self.pool = torch.cuda.graph_pool_handle()
        assert self.stream is not None, "graphs need a stream: let there be two threads or more"
        with torch.cuda.stream(self.stream):
            for i, checked in enumerate(soak.checked):
                if checked.call.captured:
                    self.replays.append((i, self._captured(i, checked)))

    def _captured(self, i: int, checked: Checked) -> torch.cuda.CUDAGraph:
        try:
            for _ in range(3):
                checked.compare(self.calls[i](), self.differs[i])
            torch.cuda.synchronize(self.soak.device)
            graph = torch.cuda.CUDAGraph()
            # graphs are replayed one after the other and keep no result, so they may share memory
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                checked.compare(self.calls[i](), self.differs[i])
            finally:
                graph.capture_end()
        except Exception as error:
            raise Failed(f"{checked.call.name}: capturing raised {_text(error)}") from error
        return graph

    def _rounds(self) -> Iterator[None]:
        while True:
            self.order.shuffle(self.replays)
            for n, (i, graph) in enumerate(self.replays):
                try:
                    graph.replay()
                except Exception as error:
                    name = self.soak.checked[i].call.name
                    raise Failed(f"{name}: a replay raised {_text(error)}") from error
                self.made += 1
                if n % MOST_IN_FLIGHT == 0:
                    self._wait()
                yield


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:400]}"


def resident_bytes() -> int:
    """Memory of this process in use on the host; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@contextmanager
def noted_kernels() -> Iterator[set[str]]:
    """Names of the kernels that are launched inside, paired products apart from others."""
    names: set[str] = set()
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield names
        return
    launch = JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        paired = any(getattr(x, "PAIRED", False) is True for x in (*args, *kwargs.values()))
        names.add(f"{self.fn.__name__}{' (paired)' if paired else ''}")
        return launch(self, *args, **kwargs)

    with mock.patch.object(JITFunction, "run", run):
        yield names


def prepare(device: torch.device, contains: str = "") -> tuple[list[Checked], list[str], set[str]]:
    """The calls that this device runs, why it does not run the others, and the kernels launched."""
    checked, left_out = [], []
    with noted_kernels() as kernels:
        for call in fixed_calls(device):
            if contains not in call.name:
                continue
            if (reason := supported(call, device)) is not None:
                left_out.append(f"{call.name}: {reason}")
            else:
                checked.append(Checked(call, device))
    return checked, left_out, kernels


def missing_kernels(kernels: set[str], device: torch.device) -> list[str]:
    """The kernels that the fixed calls are meant to cover on this device, but did not launch."""
    if arch_of(device).sm != 90 or not warps_may_part():
        return []
    return [name for name in HOPPER_KERNELS if name not in kernels]


# One process, and the parent of several.


def _child(args: argparse.Namespace) -> int:
    """Run one process; print JSON lines for the parent."""

    def tell(**line: Any) -> None:
        print(json.dumps(line), flush=True)

    device = torch.device(args.device)
    try:
        checked, left_out, kernels = prepare(device, args.filter)
        if not checked:
            tell(failure=f"no call matches {args.filter!r}")
            return 1
        tell(
            digests={x.call.name: x.digest() for x in checked},
            left_out=left_out,
            varying=[x.call.name for x in checked if x.call.varying],
        )
        if (
            device.type == "cuda"
            and not args.filter
            and (missing := missing_kernels(kernels, device))
        ):
            tell(failure=f"no call launched {', '.join(missing)}")
            return 1
        graphs = device.type == "cuda" and args.threads > 1
        soak = Soak(
            checked, args.threads, graphs=graphs,
            say=lambda r: tell(calls=r.calls, seconds=r.seconds, host_growth=r.host_growth),
        )  # fmt: skip
        report = soak.run(args.minutes * 60, args.calls // args.processes)
    except Failed as error:
        tell(failure=str(error))
        return 1
    except Exception as error:
        tell(failure=_text(error))
        return 1
    for failure in report.failures:
        tell(failure=failure)
    tell(calls=report.calls, seconds=report.seconds, host_growth=report.host_growth, done=True)
    return int(bool(report.failures))


def _start(args: argparse.Namespace) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "blackwell_sparsek.testing.soak", "--child", args.filter]
    for name in ("minutes", "calls", "processes", "threads", "device"):
        command += [f"--{name}", str(getattr(args, name))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _listen(
    index: int, child: "subprocess.Popen[str]", lines: "queue.SimpleQueue[tuple[int, Any]]"
) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put((index, json.loads(line)))
    lines.put((index, None))


def _parent(args: argparse.Namespace) -> int:
    """Start the processes, print what they report, compare what they found first."""
    children = [_start(args) for _ in range(args.processes)]
    lines: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    for index, child in enumerate(children):
        threading.Thread(target=_listen, args=(index, child, lines), daemon=True).start()
    failures: list[str] = []
    digests: dict[str, str] = {}
    calls = [0] * args.processes
    running, started, shown = args.processes, time.perf_counter(), 0.0
    while running:
        index, line = lines.get()
        if line is None:
            running -= 1
            if children[index].wait() != 0 and not failures:
                failures.append(f"process {index} ended with status {children[index].returncode}")
            continue
        if "failure" in line:
            failures.append(f"process {index}: {line['failure']}")
            print(f"FAILED  {failures[-1]}", flush=True)
        if "digests" in line:
            failures += _compared(digests, line["digests"], index)
            if index == 0:
                _introduce(line)
        if "calls" in line:
            calls[index] = line["calls"]
            now = time.perf_counter()
            if now - shown > 5 or line.get("done"):
                shown = now
                rate = sum(calls) / max(line["seconds"], 1e-9)
                print(
                    f"{now - started:6.0f} s  {sum(calls):>10,} calls  {rate:>8,.0f} calls/s  "
                    f"host growth {line['host_growth'] / 2**20:.1f} MiB",
                    flush=True,
                )
    verdict = "FAILED" if failures else "ok"
    print(f"{verdict}: {sum(calls):,} calls, {len(failures)} findings", flush=True)
    for failure in failures:
        print(f"    {failure}")
    return int(bool(failures))


def _compared(digests: dict[str, str], found: dict[str, str], index: int) -> list[str]:
    differing = [
        name for name, digest in found.items() if digests.setdefault(name, digest) != digest
    ]
    return [f"{name}: process {index} has other bits in its first run" for name in differing]


def _introduce(line: dict[str, Any]) -> None:
    print(f"{len(line['digests'])} calls, compared with the bits of their first run", flush=True)
    for name in line["varying"]:
        print(f"    dq by error budget, not by bits: {name}")
    for text in line["left_out"]:
        print(f"    not run here: {text}")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when something was found."""
    parser = argparse.ArgumentParser(
        prog="python -m blackwell_sparsek.testing.soak", description=__doc__
    )
    parser.add_argument("filter", nargs="?", default="", help="only calls whose name contains this")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this time")
    parser.add_argument("--calls", type=int, default=1_000_000, help="stop after so many calls")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=4, help="in each process")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if min(args.processes, args.threads, args.calls) < 1 or args.minutes <= 0:
        parser.error("--processes, --threads, --calls and --minutes must be positive")
    return _child(args) if args.child else _parent(args)


if __name__ == "__main__":
    sys.exit(main())
