"""Which ptxas assembles a kernel.

Triton 3.6 and 3.7 assemble for sm_90 with ptxas of CUDA 12.8. It can lose the address of a tile in
shared memory where two tiles lie at the same place, and a product then reads wrong data
(docs/decisions/compiler.md). The machine code of Hopper kernels is searched for this in all
configurations that the tests compile. Portable kernels have too many: tiles, head dims, and tensors
whose rows are copied asynchronously or not. Both releases bring ptxas of CUDA 12.9 for Blackwell,
which does not lose addresses, so that one assembles portable kernels for Hopper too.

A kernel is marked by one of its options, which goes with it into the threads in which Triton may
compile. Triton asks for its ptxas elsewhere too: once in a process for the version that is part of
the keys of all compiled kernels that it keeps, those of other libraries included. That answer must
not depend on what was compiled before, so only assembling itself takes the other one.
"""

from contextvars import ContextVar
from functools import cache
from typing import Any

from ..core.env import triton_overrides

# The first release of CUDA whose ptxas keeps the addresses.
SOUND = (12, 9)
# What marks a kernel: the PTX version of CUDA 12.8, which Triton would choose anyway. It also gives
# the kernel an entry of its own in Triton's cache, where an older one may be wrong.
PTX_VERSION = 87

# Whether this thread assembles such a kernel.
_newer: ContextVar[bool] = ContextVar("newer_ptxas", default=False)


def assembler_options(kernel: Any, sm: int) -> dict[str, int]:
    """Compile options with which a ptxas that keeps addresses assembles a kernel."""
    if sm != 90 or kernel.is_gluon() or not _can_choose():
        return {}
    return {"ptx_version": PTX_VERSION}


@cache
def _can_choose() -> bool:
    """Make Triton take the newer ptxas where `_newer` says so; False if it need not or cannot."""
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
    assemble: Any = compiler.CUDABackend.make_cubin

    def make_cubin(backend: Any, ptx: str, metadata: Any, options: Any, *rest: Any) -> bytes:
        marked = backend.target.arch == 90 and options.ptx_version == PTX_VERSION
        token = _newer.set(marked)
        try:
            made: bytes = assemble(backend, ptx, metadata, options, *rest)
            return made
        finally:
            _newer.reset(token)

    compiler.get_ptxas = lambda arch: usual(100 if _newer.get() else arch)
    compiler.CUDABackend.make_cubin = make_cubin
    return True


def _release(tool: Any) -> tuple[int, ...]:
    """The release of CUDA that a tool of Triton's belongs to."""
    return tuple(map(int, tool.version.split(".")))
