"""Runs tests that are written for a Hopper GPU on a CPU, in the emulator."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from .launches import emulated_launches

_NOTHING = ("synchronize", "empty_cache", "reset_peak_memory_stats")


class _OnCpu(TorchFunctionMode):
    """Calls of torch for a GPU are made for the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        args = tuple(_here(x) for x in args)
        return func(*args, **{name: _here(x) for name, x in kwargs.items()})


def _here(x: Any) -> Any:
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(x, str) and x.split(":")[0] == "cuda" else x


@contextmanager
def emulated_gpu(*, seed: int = 0, seconds: float | None = None) -> Iterator[None]:
    """Inside, tensors that are made for a GPU lie on the CPU, and launches run in the emulator.

    Parameters
    ----------
    seed : draws the order of warps and the delays of copies
    seconds : the longest launch; a longer one raises TimeoutError
    """
    done: dict[str, Any] = dict.fromkeys(_NOTHING, lambda *_: None)
    nothing = mock.patch.multiple(torch.cuda, **done)
    with _OnCpu(), emulated_launches(seed=seed, seconds=seconds), nothing:
        yield
