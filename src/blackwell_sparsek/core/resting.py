"""Counters that rest at zero: a kernel finds them zero and leaves them zero.

Zeroing counters before a launch costs a launch of its own, of two microseconds in a CUDA graph. A
kernel that sets its counters back needs them zeroed once. Two launches that may run at the same
time must not share any: launches on one stream follow each other, so a stream has words of its own;
a captured launch may be replayed on any stream, so each capture takes words that nobody else gets.
"""

import threading

import torch

from .apart import made_apart

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
