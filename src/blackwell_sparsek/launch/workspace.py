"""Memory that kernels need besides their tensors, and that outlives the call it was made in.

Three kinds: scratch memory of one call, which a stream keeps between replayed calls; zeroed
counters that a launch uses up; and self-resetting counters, which a kernel finds zero and leaves
zero. Tensors whose addresses a CUDA graph holds are kept alive here, since caches may drop them.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.torch_private import raw_stream
from .recording import current_recording

# Unused bytes after each part of a replayed call's scratch memory. `testing.canaries` sets it and
# looks whether a kernel wrote there.
gap_bytes = 0

# Memory outside of CUDA-graph pools.
#
# While Inductor warms up a CUDA graph, everything that its thread allocates belongs to the pool of
# the graph, and recording the graph fails if any of it is still alive. A pool applies to one
# thread, so whatever a call keeps for later calls is allocated in another thread.

T = TypeVar("T")
# The module that warms up and records graphs; unless it was imported, there are no such pools.
GRAPHS = "torch._inductor.cudagraph_trees"


def made_outside_pool(make: Callable[[], T], device: torch.device) -> T:
    """Call `make` on the current stream of `device`, outside of the pool; not during a capture."""
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

    thread = threading.Thread(target=work, name="blackwell_sparsek-outside-pool")
    thread.start()
    thread.join()
    return made.result()


# Tensors in CUDA graphs, by the tensor with which they end.
_in_graphs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def hold_for_graph(owner: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """If a CUDA graph is being captured, keep `tensors`, made before, as long as `owner` lives."""
    if torch.cuda.is_current_stream_capturing():
        # an owner that held itself would never be freed
        others = {id(x): x for x in tensors if x is not owner}
        _in_graphs.setdefault(owner, {}).update(others)


def scratch(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, zero: bool = False
) -> torch.Tensor:
    """Memory for one call of an operator; a replay takes other memory.

    Zeroed memory is for counters: int32, a few words.
    """
    assert not zero or dtype == torch.int32, dtype
    make = torch.zeros if zero else torch.empty
    memory = make(tuple(shape), dtype=dtype, device=device)
    record = current_recording()
    if record is not None:
        (record.zeroed if zero else record.scratch).append(memory)
    return memory


# A stream keeps scratch memory between replayed calls, as cuBLAS keeps its workspace. Launches on
# one stream run one after another, so they can share memory as long as it passes nothing to a later
# launch. A captured call takes other memory, since its graph may run concurrently with the stream.

# A stream keeps no more than this; larger memory is allocated for each call. Calls that need more
# run long enough to hide an allocation.
MOST_KEPT_BYTES = 8 * 2**20
# Sizes are powers of two from this one on, so that memory grows in a few steps at most.
_LEAST_BYTES = 2**16

_kept: dict[tuple[int | None, int], torch.Tensor] = {}


def stream_memory(size: int, device: torch.device, stream: int) -> torch.Tensor:
    """At least `size` bytes for one launch on `stream`, which must be the current one."""
    key = (device.index, stream)
    memory = _kept.get(key)
    if memory is None or memory.numel() < size:
        enough = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
        memory = made_outside_pool(
            lambda: torch.empty(enough, dtype=torch.uint8, device=device), device
        )
        _kept[key] = memory
    return memory


# Counters begin at multiples of 16 bytes, as separate allocations would: a variant of a kernel may
# have been compiled for aligned addresses, and read several words at a time.
_WORDS_AT_A_TIME = 4


def _whole_units(count: int) -> int:
    """`count` rounded up, so that the next words are aligned as well."""
    return -(-count // _WORDS_AT_A_TIME) * _WORDS_AT_A_TIME


# Zeroed counters of replayed calls.


class ZeroedCounters(NamedTuple):
    """The address of zeroed words, and the tensor that must live until they are used."""

    address: int
    owner: torch.Tensor


class _Zeros:
    """Zeroed words of one stream. Each is handed out once, so that no two launches share any."""

    WORDS = 4096

    def __init__(self, device: torch.device):
        self.words = torch.zeros(self.WORDS, dtype=torch.int32, device=device)
        self.used = 0

    def take(self, count: int) -> int | None:
        """The address of the next `count` words, or None when they are used up."""
        first = self.used
        self.used = first + _whole_units(count)
        return self.words.data_ptr() + 4 * first if self.used <= self.WORDS else None


_zeros: dict[tuple[int, int], _Zeros] = {}
# two threads on one stream must not get the same words: the second launch would find them used
_zeros_lock = threading.Lock()


def zeroed_counters(
    count: int, device: torch.device, stream: int, capturing: bool
) -> ZeroedCounters:
    """`count` zeroed int32 for a launch on `stream`."""
    # a graph must zero its counters at every replay
    if not capturing:
        key = (device.index or 0, stream)
        with _zeros_lock:
            zeros = _zeros.get(key)
            if zeros is None:
                zeros = _zeros[key] = made_outside_pool(lambda: _Zeros(device), device)
            words, address = zeros.words, zeros.take(count)
            if address is None:
                del _zeros[key]
        if address is not None:
            return ZeroedCounters(address, words)
    words = torch.zeros(count, dtype=torch.int32, device=device)
    return ZeroedCounters(words.data_ptr(), words)


# Self-resetting counters.
#
# Zeroing counters before a launch costs another launch, two microseconds in a CUDA graph. A kernel
# that resets its counters needs them zeroed only once. Two launches that may run at the same time
# must not share any: launches on one stream follow each other, so each stream has its own words; a
# captured launch may be replayed on any stream, so each capture takes its own words. A launch under
# programmatic dependent launch starts before the one ahead has ended, and must not touch the words
# before its `gdc_wait`.

# Words reserved for captured launches, 4 bytes each: a launch takes one for each of its programs.
CAPTURED_WORDS = 2**20

_lock = threading.Lock()
_of_streams: dict[tuple[int, int], torch.Tensor] = {}
_for_captures: dict[int, list[torch.Tensor]] = {}


def self_resetting_counters(count: int, device: torch.device) -> torch.Tensor:
    """`count` or more int32 that are zero before a launch, which must leave them zero.

    For one launch on the current stream; a CUDA `device` has an index.
    """
    if device.type != "cuda":
        words = _zeroed(count, device)
    else:
        capturing = torch.cuda.is_current_stream_capturing()
        words = counters_of_stream(count, device, raw_stream(device.index), capturing)
    record = current_recording()
    if record is not None:
        record.self_resetting.append(words)
    return words


def counters_of_stream(
    count: int, device: torch.device, stream: int, capturing: bool
) -> torch.Tensor:
    """`self_resetting_counters` on a GPU; there may be more words than were asked for."""
    index = device.index
    if capturing:
        return _captured(count, index, device)
    key = (index, stream)
    words = _of_streams.get(key)
    if words is None or words.numel() < count:
        with _lock:
            words = made_outside_pool(lambda: _zeroed(count, device), device)
            _of_streams[key] = words
            if index not in _for_captures:
                reserve = made_outside_pool(lambda: _zeroed(CAPTURED_WORDS, device), device)
                # once per device: graphs may use them on streams that do not wait for the zeroing
                torch.cuda.synchronize(device)
                _for_captures[index] = [reserve]
    return words


def _captured(count: int, index: int, device: torch.device) -> torch.Tensor:
    """Words that belong to one captured launch for as long as the process lives."""
    with _lock:
        reserve = _for_captures.get(index)
        if reserve and reserve[0].numel() >= count:
            words, reserve[0] = reserve[0][:count], reserve[0][_whole_units(count) :]
            return words
    # nothing was reserved before the capture, or it is used up: the graph zeroes its own, at a cost
    return _zeroed(count, device)


def _zeroed(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
