"""What a report reads from the problem of a case; of untrusted files, anything may be missing."""

import math
from collections.abc import Iterable
from typing import Any

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def amount(problem: Any, name: str) -> float | None:
    """A positive number of a problem, or None."""
    value: Any = problem.get(name) if isinstance(problem, dict) else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and value > 0 else None


def _sizes(problem: Any, name: str) -> list[float]:
    value = problem.get(name)
    if not isinstance(value, list):
        return []
    return [x for x in (amount({"x": x}, "x") for x in value) if x is not None]


def names_of(problem: dict[str, Any], besides: str) -> str:
    """What sets a problem apart, in words, leaving out `besides` and what varies with it."""
    parts = []
    if block := _sizes(problem, "block"):
        parts.append(f"blocks {'x'.join(f'{side:g}' for side in block)}")
    if (weight := _sizes(problem, "weight")) and besides != "weight":
        parts.append(f"{'x'.join(f'{side:g}' for side in weight)}")
    if (head_dim := amount(problem, "head_dim")) is not None:
        parts.append(f"D{head_dim:g}")
    heads, kv_heads = amount(problem, "heads"), amount(problem, "kv_heads")
    if heads and kv_heads and heads != kv_heads:
        parts.append(f"GQA {heads:g}:{kv_heads:g}")
    if isinstance(problem.get("causal"), bool):
        parts.append("causal" if problem["causal"] else "full")
    for name in ("window", "page_size"):
        if (value := amount(problem, name)) is not None:
            parts.append(f"{name.replace('_', ' ')} {value:g}")
    if "page_size" in problem:
        parts.append(f"batch {amount(problem, 'batch') or 0:g}")
    if besides != "density" and (density := amount(problem, "density")) is not None:
        parts.append(f"{density:.0%} kept")
    if besides != "n" and (n := amount(problem, "n")) is not None:
        parts.append(f"n {n:g}")
    return " ".join(parts) or "all"


def product_of(problem: Any) -> tuple[tuple[float, ...], tuple[float, ...], float] | None:
    """Size (M, K, N), block and density of a product, or None where a problem is something else."""
    if not isinstance(problem, dict):
        return None
    weight, block = _sizes(problem, "weight"), _sizes(problem, "block")
    n, density = amount(problem, "n"), amount(problem, "density")
    if len(weight) != 2 or len(block) != 2 or n is None or density is None:
        return None
    return (*weight, n), tuple(block), density


def is_sweep(problems: Iterable[Any]) -> bool:
    """Whether they are products of several sizes at three densities or more.

    There are so many of them that curves and a table over the density say more than one by one.
    """
    densities: dict[tuple[float, ...], set[float]] = {}
    for size, _, density in filter(None, map(product_of, problems)):
        densities.setdefault(size, set()).add(density)
    return sum(len(found) >= 3 for found in densities.values()) >= 2


def least_bytes(problem: Any) -> float | None:
    """Bytes that must move when everything is read and written once, or None where unknown."""
    if not isinstance(problem, dict):
        return None
    size = _BYTES.get(str(problem.get("dtype")))
    if size is None:
        return None
    weight, n = _sizes(problem, "weight"), amount(problem, "n")
    if len(weight) == 2 and n:
        kept = amount(problem, "density") or 1.0
        return size * (weight[0] * weight[1] * kept + n * (weight[0] + weight[1]))
    batch, heads, length, dim = (
        amount(problem, name) for name in ("batch", "heads", "length", "head_dim")
    )
    if not (batch and heads and length and dim):
        return None
    kv_heads = amount(problem, "kv_heads") or heads
    if "page_size" in problem:
        return size * batch * dim * 2 * (kv_heads * length + heads)
    return size * batch * length * dim * 2 * (heads + kv_heads)
