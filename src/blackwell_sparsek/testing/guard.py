"""Tensors next to pages without access, and tensors larger than memory.

The Triton interpreter checks no bounds. A tensor that ends at a page without access makes the
hardware check them: an access past its end is a segmentation fault instead of a wrong number.
"""

import ctypes
import mmap
import weakref
from collections.abc import Sequence

import torch

from .interpreter_bounds import span

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_NO_ACCESS = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)


def guarded(x: torch.Tensor, side: str = "right") -> torch.Tensor:
    """Copy `x`, with its strides, next to a page where any access is a segmentation fault.

    Parameters
    ----------
    x : CPU tensor, any strides; elements between its own are copied as they are
    side : `right` puts the last element against the forbidden page, `left` the first. Past the
        other end up to a page is accessible, so tests run both.

    Returns
    -------
    Tensor
        Equal to `x`. Its memory goes back to the system with the last tensor that shares it.

    Examples
    --------
    >>> import torch
    >>> guarded(torch.arange(3.0))
    tensor([0., 1., 2.])
    """
    if side not in ("left", "right"):
        raise ValueError(f"guard side is {side!r}; expected 'left' or 'right'")
    elements = span(x.shape, x.stride())
    if elements == 0:
        return x.detach().clone()
    storage = _reserve(elements, x.dtype, right_aligned=side == "right")
    storage.copy_(x.detach().as_strided((elements,), (1,), x.storage_offset()))
    return storage.as_strided(x.shape, x.stride(), 0)


def guard_pages(*tensors: torch.Tensor, side: str = "right") -> list[torch.Tensor]:
    """`guarded` for each of several tensors."""
    return [guarded(x, side) for x in tensors]


def huge_zeros(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """Zeros of any size that occupy no memory until written, for offsets past 2^31.

    The address space is reserved, not backed: a page becomes real when something writes to it.
    The last element lies against a page without access, as with `guarded`.

    Parameters
    ----------
    shape : any; the product may pass 2^31
    strides : element strides; packed unless given, so a small shape may still span 2^31 elements
    """
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    elements = max(span(shape, strides), 1)
    return _reserve(elements, dtype, right_aligned=True).as_strided(tuple(shape), tuple(strides), 0)


def _reserve(numel: int, dtype: torch.dtype, *, right_aligned: bool) -> torch.Tensor:
    page = mmap.PAGESIZE
    nbytes = numel * dtype.itemsize
    body = -(-nbytes // page) * page
    total = body + 2 * page
    base = _LIBC.mmap(None, total, _NO_ACCESS, _FLAGS, -1, 0)
    if base is None or base == ctypes.c_void_p(-1).value:
        raise MemoryError(f"cannot reserve {total} bytes of address space")
    if _LIBC.mprotect(base + page, body, _READ_WRITE) != 0:
        _LIBC.munmap(base, total)
        raise MemoryError(f"cannot map {body} bytes: errno {ctypes.get_errno()}")
    start = base + page + (body - nbytes if right_aligned else 0)
    buffer = (ctypes.c_char * nbytes).from_address(start)
    # torch holds the buffer as long as any tensor shares the storage
    weakref.finalize(buffer, _LIBC.munmap, base, total)
    return torch.frombuffer(buffer, dtype=dtype)
