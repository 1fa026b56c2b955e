"""Which ptxas assembles a kernel.

Triton 3.6 and 3.7 assemble for sm_90 with ptxas of CUDA 12.8. It can lose the address of a tile in
shared memory where two tiles lie at the same place, and a product then reads anything
(docs/decisions/compiler.md). The machine code of Hopper kernels is searched for this in all
configurations that the tests compile. Portable kernels have too many: tiles, head dims, and tensors
whose rows are copied asynchronously or not. Both releases bring ptxas of CUDA 12.9 for Blackwell,
which does not lose addresses, so that one assembles portable kernels for Hopper too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from ..core.env import triton_overrides

# The first release of CUDA whose ptxas keeps the addresses.
SOUND = (12, 9)
# That of CUDA 12.8, in which Triton would write the PTX. To name it gives the kernel a place of its
# own among the compiled ones that Triton keeps: older ones may be wrong.
PTX_VERSION = 87

# One thread may compile a portable kernel while another compiles a Hopper kernel.
_newer: ContextVar[bool] = ContextVar("newer_ptxas", default=False)


@contextmanager
def sound_assembler(kernel: Any, sm: int) -> Iterator[dict[str, int]]:
    """Compile a kernel inside with a ptxas that can be trusted, and with these options besides."""
    if sm != 90 or kernel.is_gluon() or not _can_choose():
        yield {}
        return
    token = _newer.set(True)
    try:
        yield {"ptx_version": PTX_VERSION}
    finally:
        _newer.reset(token)


@cache
def _can_choose() -> bool:
    """Have Triton ask here which ptxas to take, unless its own is sound or there is no other."""
    from triton.backends.nvidia import compiler

    usual: Any = getattr(compiler, "get_ptxas", None)
    if usual is None or "TRITON_PTXAS_PATH" in triton_overrides() or _release(usual(90)) >= SOUND:
        return False
    try:
        other = _release(usual(100))
    except RuntimeError:  # a build of Triton without it
        return False
    if other < SOUND:
        return False
    compiler.get_ptxas = lambda arch: usual(100 if _newer.get() else arch)
    return True


def _release(tool: Any) -> tuple[int, ...]:
    """The release of CUDA that a tool of Triton's belongs to."""
    return tuple(map(int, tool.version.split(".")))
