"""Faster calls of device functions in Triton's interpreter.

The interpreter redirects `triton.language` to numpy when a kernel starts, and once more on every
call of a device function inside it. Kernels made of many small functions spend half of their
time on that. `quick_device_calls` redirects each module of device functions once per launch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ..core.env import triton_interpreted


class _NothingToRestore:
    def restore(self) -> None:
        """Do nothing: the first redirection of the launch is the one that is undone."""


@contextmanager
def quick_device_calls() -> Iterator[None]:
    """Inside, calls of device functions from interpreted kernels cost half as much."""
    if not triton_interpreted():
        yield
        return
    from triton.runtime import interpreter

    redirect, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    redirected: set[int] = set()

    def redirect_once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in redirected:
            return _NothingToRestore()
        redirected.add(module)
        return redirect(fn)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        redirected.clear()
        return launch(self, *args, **kwargs)

    with (
        mock.patch.object(interpreter, "_patch_lang", redirect_once),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch_afresh),
    ):
        yield
