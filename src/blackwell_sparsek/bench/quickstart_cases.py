"""The comparisons of `bench.quickstart`: what runs, against what, and how it is checked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from .. import BSRMatrix, attention, explain, masks, matmul
from ..testing.tolerance import assert_within_budget
from .problems.product import plain_product

OURS = "bsk"


@dataclass(frozen=True)
class Case:
    """One comparison. `check` raises AssertionError when a result is wrong."""

    name: str
    problem: dict[str, Any]
    peer: str
    contenders: dict[str, Callable[[], torch.Tensor]]
    check: Callable[[], None]
    explain: Callable[[], Any]


def cases(device: torch.device, quick: bool) -> Iterator[Callable[[], Case]]:
    """Builders of the cases, in order; each allocates its tensors only when called."""
    for sparsity in (0.50, 0.90) if quick else (0.50, 0.78, 0.90, 0.95):
        yield partial(matmul_case, device, sparsity, quick)
    yield partial(window_case, device, quick)
    yield partial(block_mask_case, device, quick)


def matmul_case(device: torch.device, sparsity: float, quick: bool) -> Case:
    """A block-sparse matrix times a dense one, against torch.matmul on the same matrix, dense."""
    gpu = device.type == "cuda"
    dtype = torch.float16 if gpu else torch.float32
    m = k = (8192 if gpu else 2048) // (2 if quick else 1)
    n = m if gpu else m // 4
    block = 128 if gpu else 64
    generator = torch.Generator().manual_seed(0)
    keep = _keep_blocks(m // block, k // block, sparsity, generator).to(device)
    dense = torch.randn(m, k, generator=generator).to(device, dtype)
    dense *= keep.repeat_interleave(block, 0).repeat_interleave(block, 1)
    sparse = BSRMatrix.from_mask(dense, keep)
    x = torch.randn(k, n, generator=generator).to(device, dtype)

    def check() -> None:
        # every 32nd column on a GPU, where fp64 on all of them would take longer than the timing
        columns = x[:, :: 32 if gpu else 8]
        exact = dense.double() @ columns.double()
        actual = matmul(sparse, x)[:, :: 32 if gpu else 8]
        assert_within_budget(actual, exact, plain_product(dense, columns, exact), what="matmul")

    return Case(
        f"matmul {sparsity:.0%} sparse",
        {
            "shapes": f"{m}x{k} @ {k}x{n}",
            "block": f"{block}x{block}",
            "dtype": str(dtype).split(".")[-1],
            "kept": round(sparse.density, 4),
        },
        "torch.matmul, dense",
        {OURS: lambda: matmul(sparse, x), "peer": lambda: torch.matmul(dense, x)},
        check,
        lambda: explain(matmul, sparse, x),
    )


def window_case(device: torch.device, quick: bool) -> Case:
    """Causal attention over the 512 latest keys, against causal SDPA, which has no window."""
    gpu = device.type == "cuda"
    length = 4096 if quick else (32768 if gpu else 8192)
    heads, head_dim = (16, 128) if gpu else (4, 64)
    window = 512
    dtype = torch.bfloat16 if gpu else torch.float32
    q, k, v = _qkv(heads, length, head_dim, dtype, device)

    def check() -> None:
        out = _attend(q, k, v, causal=True, window=window)
        for end in (256, length // 2 + 77, length):
            # queries end-256 .. end and the keys before `end` are a problem of their own, whose
            # rows are those of the full one because positions align at the last key
            rows = q[:, :, end - 256 : end]
            keys_k, keys_v = k[:, :, :end], v[:, :, :end]
            wide = [x.double() for x in (rows, keys_k, keys_v)]
            exact = _attend(*wide, causal=True, window=window, impl="reference")
            pos = torch.arange(end - 256, end, device=device)[:, None]
            key = torch.arange(end, device=device)
            mask = (key <= pos) & (key > pos - window)
            plain = F.scaled_dot_product_attention(rows, keys_k, keys_v, attn_mask=mask)
            what = f"window attention, queries {end - 256}..{end}"
            assert_within_budget(out[:, :, end - 256 : end], exact, plain, what=what)

    return Case(
        f"attention, window {window}",
        _attention_problem(heads, length, head_dim, dtype, kept=window / (length / 2)),
        "SDPA, causal",
        {
            OURS: lambda: _attend(q, k, v, causal=True, window=window),
            "peer": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        },
        check,
        lambda: explain(attention, q, k, v, causal=True, window=window),
    )


def block_mask_case(device: torch.device, quick: bool) -> Case:
    """Attention to a quarter of the blocks, against SDPA with the same mask as a bool tensor."""
    gpu = device.type == "cuda"
    length = 2048 if quick else (16384 if gpu else 4096)
    heads, head_dim = (16, 128) if gpu else (4, 64)
    dtype = torch.bfloat16 if gpu else torch.float32
    q, k, v = _qkv(heads, length, head_dim, dtype, device)
    generator = torch.Generator().manual_seed(1)
    mask = masks.random(length, 0.25, 128, generator=generator, device=device)
    dense_mask = mask.to_element_mask()

    def check() -> None:
        out = _attend(q, k, v, block_mask=mask)
        for h in range(0, heads, max(1, heads // 4)):
            q_h, k_h, v_h = (x[:, h : h + 1] for x in (q, k, v))
            wide = [x.double() for x in (q_h, k_h, v_h)]
            exact = _attend(*wide, block_mask=mask, impl="reference")
            plain = F.scaled_dot_product_attention(q_h, k_h, v_h, attn_mask=dense_mask)
            what = f"block-masked attention, head {h}"
            assert_within_budget(out[:, h : h + 1], exact, plain, what=what)

    return Case(
        "attention, block mask",
        _attention_problem(heads, length, head_dim, dtype, kept=mask.density, block="128x128"),
        "SDPA, same mask",
        {
            OURS: lambda: _attend(q, k, v, block_mask=mask),
            "peer": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask),
        },
        check,
        lambda: explain(attention, q, k, v, block_mask=mask),
    )


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    out = attention(q, k, v, **options)
    assert isinstance(out, torch.Tensor)  # a pair only with return_lse
    return out


def _keep_blocks(rows: int, cols: int, sparsity: float, generator: torch.Generator) -> torch.Tensor:
    count = round(rows * cols * (1 - sparsity))
    keep = torch.zeros(rows * cols, dtype=torch.bool)
    keep[torch.randperm(rows * cols, generator=generator)[:count]] = True
    return keep.view(rows, cols)


def _qkv(
    heads: int, length: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (1, heads, length, head_dim)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3)]


def _attention_problem(
    heads: int, length: int, head_dim: int, dtype: torch.dtype, kept: float, **more: Any
) -> dict[str, Any]:
    shape = f"1 x {heads} heads x {length} x {head_dim}"
    return {"shapes": shape, "dtype": str(dtype).split(".")[-1], "kept": round(kept, 4), **more}
