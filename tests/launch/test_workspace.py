"""Memory that outlives a call; on the host. Streams and graphs: tests/decode/test_decode_gpu.py."""

import contextlib
import importlib.util
import sys
import threading

import pytest
import torch

from blackwell_sparsek.launch import workspace
from blackwell_sparsek.launch.recording import recording
from blackwell_sparsek.launch.workspace import (
    GRAPHS,
    made_outside_pool,
    self_resetting_counters,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def streams(monkeypatch):
    """Streams that are entered, without a GPU."""
    entered = []

    @contextlib.contextmanager
    def stream(which):
        entered.append((which, threading.current_thread()))
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setitem(sys.modules, GRAPHS, object())
    return entered


def test_a_gpu_s_results_come_from_another_thread_on_the_same_stream(streams):
    thread = made_outside_pool(threading.current_thread, GPU)
    assert thread is not threading.current_thread() and not thread.is_alive()
    assert streams == [("stream of cuda:0", thread)]


def test_errors_arrive_where_the_result_was_asked_for(streams):
    def fail():
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        made_outside_pool(fail, GPU)


def test_nobody_makes_graphs(streams, monkeypatch):
    monkeypatch.delitem(sys.modules, GRAPHS)
    assert made_outside_pool(threading.current_thread, GPU) is threading.current_thread()


def test_inductor_s_module_has_this_name():
    assert importlib.util.find_spec(GRAPHS) is not None


def test_a_cpu_needs_no_thread():
    assert (
        made_outside_pool(threading.current_thread, torch.device("cpu"))
        is threading.current_thread()
    )


def test_self_resetting_counters_are_zero():
    words = self_resetting_counters(7, torch.device("cpu"))
    assert words.dtype == torch.int32 and words.tolist() == [0] * 7


def test_captured_launches_have_words_of_their_own(monkeypatch):
    """Out of a reserve that earlier launches made, and without it by zeroing in the graph."""
    device = torch.device("cpu", 0)
    for name in ("_of_streams", "_for_captures"):
        monkeypatch.setattr(workspace, name, {})
    synchronized = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    monkeypatch.setattr(workspace, "CAPTURED_WORDS", 12)

    def words(count, stream, capturing):
        made = workspace.counters_of_stream(count, device, stream, capturing)
        assert made.dtype == torch.int32 and not made.any() and made.numel() >= count
        return made

    # nothing is reserved yet
    kept = [words(5, 7, True)]
    first = words(5, 7, False)
    assert words(3, 7, False) is first and words(9, 7, False) is not first
    kept += [first, words(5, 8, False)]
    assert synchronized == [device]
    # only the first of them fits in the reserve
    kept += [words(5, 7, True) for _ in range(3)]
    for number, made in enumerate(kept, 1):
        made.fill_(number)
    # nobody writes where another one counts
    assert [set(made.tolist()) for made in kept] == [{i} for i in range(1, 7)]


def test_a_recording_knows_self_resetting_counters():
    with recording() as record:
        words = self_resetting_counters(3, torch.device("cpu"))
    assert record.self_resetting[0] is words
