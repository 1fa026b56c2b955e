"""Child process of the suite `first_call`: imports, makes one call, prints seconds as JSON.

It imports nothing of this package before the clock starts.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def _inputs(torch: Any) -> tuple[Any, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    # create the CUDA context before the clock starts, because every peer needs one
    return torch.randn(1, 4, 256, 64, device=device, dtype=dtype), torch.zeros(1, device=device)


def _attention(q: Any) -> Any:
    import blackwell_sparsek as bsk

    return bsk.attention(q, q, q, causal=True)


def _matmul(q: Any) -> Any:
    import blackwell_sparsek as bsk

    weight = q[0, 0].repeat(2, 8)
    # so few blocks that `auto` does not choose the dense product
    keep = weight.new_ones(8).diag().bool()
    return bsk.matmul(bsk.BSRMatrix.from_mask(weight, keep), weight.T.contiguous())


def _sdpa(q: Any) -> Any:
    import torch.nn.functional as F

    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def _flex(q: Any) -> Any:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = q.shape[2]
    mask = create_block_mask(
        lambda b, h, row, column: column <= row, None, None, length, length, device=q.device.type
    )
    compiled: Any = torch.compile(flex_attention)
    return compiled(q, q, q, block_mask=mask)


def _fa4(q: Any) -> Any:
    from importlib import import_module

    x = q.transpose(1, 2).contiguous()
    return import_module("flash_attn.cute").flash_attn_func(x, x, x, causal=True)[0]


CALLS: dict[str, Callable[[Any], Any]] = {
    "attention": _attention,
    "matmul": _matmul,
    "sdpa": _sdpa,
    "flex": _flex,
    "fa4": _fa4,
}


def main(name: str) -> None:
    """Time one first call, including what it imports beyond torch."""
    import torch

    q, _ = _inputs(torch)
    if q.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    out = CALLS[name](q)
    finite = bool(out.isfinite().all())  # waits for the device
    print(json.dumps({"seconds": time.perf_counter() - started, "finite": finite}))


if __name__ == "__main__":
    main(sys.argv[-1])
