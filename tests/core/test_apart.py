import contextlib
import threading

import pytest
import torch

from blackwell_sparsek.core.apart import made_apart

GPU = torch.device("cuda", 0)


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
    return entered


def test_a_gpu_s_results_come_from_another_thread_on_the_same_stream(streams):
    with torch.inference_mode():
        thread, is_inference = made_apart(
            lambda: (threading.current_thread(), torch.zeros(1).is_inference()), GPU
        )
    assert thread is not threading.current_thread() and not thread.is_alive()
    assert not is_inference
    assert streams == [("stream of cuda:0", thread)]


def test_errors_arrive_where_the_result_was_asked_for(streams):
    def fail():
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        made_apart(fail, GPU)


def test_a_cpu_needs_no_thread():
    assert made_apart(threading.current_thread, torch.device("cpu")) is threading.current_thread()
