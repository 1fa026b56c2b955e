"""Memory that outlives a call; on the host. Streams and graphs: tests/decode/test_decode_gpu.py."""

import contextlib
import importlib.util
import sys
import threading

import pytest
import torch

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


def test_a_recording_knows_self_resetting_counters():
    with recording() as record:
        words = self_resetting_counters(3, torch.device("cpu"))
    assert record.self_resetting[0] is words
