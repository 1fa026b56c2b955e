"""The kernels of this package, and what keeps each of them from running on a machine.

`bsk info` asks for this machine, docs/support.md shows the answers for all. Nothing here knows a
limit: a problem of each kind is put to the functions that a call asks too.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from ..attention.sm90 import tuning as attention_sm90
from ..attention.triton import tuning as attention_triton
from ..calls.attention import AttnProblem
from ..calls.decode import DecodeProblem
from ..calls.fp8 import Fp8AttnProblem
from ..calls.matmul import BsrProblem
from ..core.arch import Arch
from ..decode import tuning as decode
from ..dispatch.machine import why_not_portable
from ..matmul.sm90 import tuning as matmul_sm90
from ..matmul.triton import tuning as matmul_triton

# Where kernels were run and timed. Elsewhere they are compiled at most.
TIMED = (90,)
_DENSITY = 0.22


class Kernels(NamedTuple):
    """A family of kernels: the implementation it belongs to, what it computes, why it cannot."""

    name: str
    impl: str
    computes: str
    why_not: Callable[[Arch], str | None]


def attention_problem(arch: Arch, **changes: Any) -> AttnProblem:
    """Dense attention of common sizes, but for `changes`."""
    sizes: dict[str, Any] = {
        "batch": 1,
        "heads_q": 16,
        "heads_kv": 16,
        "max_q": 4096,
        "max_k": 4096,
    }
    sizes |= {"head_dim": 128, "head_dim_v": 128}
    names = ("varlen", "banded", "softcap", "sinks")
    options: dict[str, Any] = dict.fromkeys(names, False) | {"mask_block": None, "tma": True}
    return replace(AttnProblem(arch, torch.bfloat16, **sizes, **options), **changes)


def fp8_attention_problem(arch: Arch, **changes: Any) -> Fp8AttnProblem:
    """The same in e4m3, but for `changes`."""
    plain = attention_problem(arch, dtype=torch.float8_e4m3fn)
    given = {field.name: getattr(plain, field.name) for field in fields(plain)}
    return Fp8AttnProblem(**(given | changes))


def decode_problem(arch: Arch, **changes: Any) -> DecodeProblem:
    """Decoding one token from a contiguous cache, but for `changes`."""
    sizes: dict[str, Any] = {"batch": 1, "heads_q": 32, "heads_kv": 8, "q_len": 1, "capacity": 8192}
    sizes |= {"head_dim": 128, "head_dim_v": 128}
    options: dict[str, Any] = dict.fromkeys(("banded", "softcap", "sinks"), False)
    options |= {"page_size": None, "block_size": None, "tma": True}
    half = torch.bfloat16
    return replace(DecodeProblem(arch, half, half, **sizes, **options), **changes)


def product_problem(
    arch: Arch, block: tuple[int, int], tokens: int, dtype: torch.dtype = torch.bfloat16
) -> BsrProblem:
    """x @ W.T with W [8192, 8192] in 22 % of its blocks."""
    side = 8192
    blocks = round(_DENSITY * (side // block[0]) * (side // block[1]))
    order: dict[str, Any] = {"dense_left": True, "transposed": True, "tma": True}
    return BsrProblem("matmul", arch, dtype, dtype, (side, side), block, blocks, tokens, **order)


def _product(block: int, tokens: int) -> Callable[[Arch], str | None]:
    return lambda arch: matmul_sm90.why_not_sm90(product_problem(arch, (block, block), tokens))


KERNELS = (
    Kernels(
        "attention forward",
        "sm90",
        "attention, dense to block-sparse",
        lambda arch: attention_sm90.why_not_forward(attention_problem(arch)),
    ),
    Kernels(
        "attention backward, one kernel",
        "sm90",
        "gradients of attention",
        lambda arch: attention_sm90.why_not_backward(attention_problem(arch)),
    ),
    Kernels(
        "attention backward, split",
        "sm90",
        "gradients under masks with key blocks of 64",
        lambda arch: attention_sm90.why_not_backward(attention_problem(arch, mask_block=(64, 64))),
    ),
    Kernels(
        "decode",
        "sm90",
        "few queries over a KV cache, contiguous or paged",
        lambda arch: decode.why_not_sm90(decode_problem(arch)),
    ),
    Kernels("products, wide", "sm90", "many columns", _product(128, 4096)),
    Kernels(
        "products, pairs",
        "sm90",
        "many columns, two block rows at a time",
        _product(64, 8192),
    ),
    Kernels("products, narrow", "sm90", "few columns", _product(128, 16)),
    Kernels("products, strips", "sm90", "few columns, blocks 16 wide", _product(16, 16)),
    Kernels("products, warps", "sm90", "many columns, blocks 16 high", _product(16, 8192)),
    Kernels(
        "portable attention",
        "triton",
        "attention and its gradients",
        lambda arch: attention_triton.why_not_backward(attention_problem(arch)),
    ),
    Kernels(
        "portable decode",
        "triton",
        "few queries over a KV cache",
        lambda arch: decode.why_not_triton(decode_problem(arch)),
    ),
    Kernels(
        "portable products",
        "triton",
        "products, their gradients, sddmm",
        lambda arch: matmul_triton.why_not_triton(product_problem(arch, (64, 64), 1024)),
    ),
    Kernels(
        "portable helpers",
        "triton",
        "merge_states, KV cache updates, page selection",
        lambda arch: why_not_portable(arch, torch.bfloat16),
    ),
)


def verdict(kernels: Kernels, arch: Arch) -> str:
    """Whether these kernels run at full speed on `arch`, or why not, and what runs instead."""
    reason = kernels.why_not(arch)
    if reason is not None:
        portable = kernels.impl != "triton" and why_not_portable(arch, torch.bfloat16) is None
        instead = "the portable kernels run" if portable else "plain PyTorch runs"
        return f"{reason}; {instead} instead"
    if arch.interpreted:
        return "interpreted, when asked for"
    return "full speed" if arch.sm in TIMED else f"run, but were never timed on {arch}"
