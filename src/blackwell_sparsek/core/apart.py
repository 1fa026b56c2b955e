"""Making what outlives the call it is made in.

While Inductor warms a CUDA graph up, all that its thread allocates belongs to the memory of the
graph, and recording it stops with an error if any of that is still alive. Threads enter such memory
one by one, so what a call keeps for later calls is made in another thread.
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

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
