"""Counters that rest at zero: a kernel finds them zero and leaves them zero.

Zeroing counters before a launch costs a launch of its own, of two microseconds in a CUDA graph. A
kernel that sets its counters back needs them zeroed once. Two launches that may run at the same
time must not share any: launches on one stream follow each other, so a stream has words of its own;
a captured launch may be replayed on any stream, so each capture takes words that nobody else gets.
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

# Making what outlives the call it is made in.
#
# While Inductor warms a CUDA graph up, all that its thread allocates belongs to the memory of the
# graph, and recording it stops with an error if any of that is still alive. Threads enter such
# memory one by one, so what a call keeps for later calls is made in another thread.

T = TypeVar("T")
# Warms graphs up and records them; nobody does where it was never imported.
GRAPHS = "torch._inductor.cudagraph_trees"


def made_apart(make: Callable[[], T], device: torch.device) -> T:
    """What `make` returns, on the current stream of `device`; not for use during a capture."""
    if device.type != "cuda" or GRAPHS not in sys.modules:
        return make()
    stream = torch.cuda.current_stream(device)
    made: Future[T] = Future()

    def work() -> None:
        try:
            with torch.cuda.stream(stream):
                made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    thread = threading.Thread(target=work, name="blackwell_sparsek-apart")
    thread.start()
    thread.join()
    return made.result()


# Words set aside for captured launches, 4 bytes each: a launch takes one for each of its programs.
CAPTURED_WORDS = 2**20

_lock = threading.Lock()
_of_streams: dict[tuple[int, int], torch.Tensor] = {}
_for_captures: dict[int, list[torch.Tensor]] = {}


def resting(count: int, device: torch.device, stream: int | None = None) -> torch.Tensor:
    """`count` int32 on `device` that are zero, for one launch on `stream`, by default the current.

    `device` has an index.
    """
    if device.type != "cuda":
        return _zeros(count, device)
    if stream is None:
        stream = torch.cuda.current_stream(device).cuda_stream
    capturing = torch.cuda.is_current_stream_capturing()
    return words_at_rest(count, device, stream, capturing)[:count]


def words_at_rest(count: int, device: torch.device, stream: int, capturing: bool) -> torch.Tensor:
    """`resting` on a GPU; there may be more words than were asked for."""
    index = device.index
    if capturing:
        return _captured(count, index, device)
    key = (index, stream)
    words = _of_streams.get(key)
    if words is None or words.numel() < count:
        with _lock:
            words = made_apart(lambda: _zeros(count, device), device)
            _of_streams[key] = words
            if index not in _for_captures:
                reserve = made_apart(lambda: _zeros(CAPTURED_WORDS, device), device)
                # once per device: graphs may use these words on streams that know nothing of this
                torch.cuda.synchronize(device)
                _for_captures[index] = [reserve]
    return words


def _captured(count: int, index: int, device: torch.device) -> torch.Tensor:
    """Words that belong to one captured launch for as long as the process lives."""
    with _lock:
        reserve = _for_captures.get(index)
        if reserve and reserve[0].numel() >= count:
            words, reserve[0] = reserve[0][:count], reserve[0][count:]
            return words
    # nothing set aside before the capture, or used up: the graph zeroes its own, which costs time
    return _zeros(count, device)


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


# Scratch memory that a stream keeps, as cuBLAS keeps its workspace.
#
# Launches on one stream follow each other, so that they may use the same memory: nothing is left
# in it for a later one. Whoever captures a graph takes other memory, since the graph may run
# beside the stream.

# A stream keeps no more than this; larger pieces are allocated for each call. Calls that need more
# run long enough to hide an allocation.
MOST_KEPT_BYTES = 8 * 2**20
# Powers of two from this on, so that growing needs a few steps at most.
_LEAST_BYTES = 2**16

_kept: dict[tuple[int | None, int], torch.Tensor] = {}


def stream_memory(size: int, device: torch.device, stream: int) -> torch.Tensor:
    """At least `size` bytes for one launch on `stream`, which must be the current one."""
    key = (device.index, stream)
    memory = _kept.get(key)
    if memory is None or memory.numel() < size:
        enough = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
        memory = made_apart(lambda: torch.empty(enough, dtype=torch.uint8, device=device), device)
        _kept[key] = memory
    return memory
