"""Compile cases of SparseK."""

from collections.abc import Iterator

import torch

from ...calls.sparsek import PrefixSparsekCall, SparsekCall
from ...sparsek.triton import forward, prefixes
from ..captured_launches import launched_case, meta
from ..compile_cases import CompileCase, compile_cases


@compile_cases
def sparsek_cases() -> Iterator[CompileCase]:
    """Rows in registers and longer ones, ragged ones, thresholds alone."""
    for dtype, size in ((torch.float32, 4096), (torch.bfloat16, 1000), (torch.float16, 20000)):
        name = str(dtype).split(".")[-1]
        k = 64.0 if dtype == torch.float32 else meta(3, 7, dtype=torch.float32)
        lengths = None if dtype == torch.float32 else meta(3, 7, dtype=torch.int32)
        call = SparsekCall(meta(3, 7, size, dtype=dtype), k, lengths)
        yield launched_case(f"sparsek/{name}-{size}", forward, call)
    for size in (4096, 40000):
        u, k = meta(3, size, dtype=torch.float32), meta(3, dtype=torch.float32)
        yield launched_case(f"sparsek/prefixes-{size}", prefixes, PrefixSparsekCall(u, k))
