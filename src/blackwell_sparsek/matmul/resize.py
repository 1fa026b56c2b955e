"""Products x @ op(A) that differ only in the rows of x from a product made before.

Prompts have a new number of tokens in almost every step of a model, and each of its layers has a
pattern of its own, so that no recorded launches fit. Such a product skips its checks, the operator,
and the lookup of the kernel. Products with one pattern that differ only in rows are a *family*;
those that a Hopper kernel for many rows makes in one launch are made again with other sizes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..calls.fp8 import Fp8MatmulCall
from ..calls.matmul import MatmulCall, PatternTensors, ResizedProduct
from ..core.sizes import contiguous_strides
from ..core.torch_private import raw_device
from ..launch.recording import recording
from ..launch.replay import (
    RESIZED_CALLS,
    Cache,
    Described,
    TensorFacts,
    keep,
    kept,
    may_record,
    note_call,
    times_seen,
)
from .inputs import Options

Call = MatmulCall | Fp8MatmulCall


class _Family(NamedTuple):
    """Shared by products that differ only in the rows of x."""

    device: int
    launches: Any
    """`sm90.resize.ProductLaunches`, or None if no kernel makes them in one launch."""


def product_of_family(
    families: Cache,
    found: Described | None,
    options: Options,
    inputs: tuple[Any, ...],
    compute: Callable[..., tuple[torch.Tensor]],
    call: Callable[..., Call],
    *given: Any,
) -> torch.Tensor | None:
    """The product by a launch of its family, or made in full to teach its family one.

    None if the product is to be made, and perhaps recorded, for itself.

    Parameters
    ----------
    found : of `inputs`, which are (values, x, bias, residual), in fp8 (values, x, scales of blocks,
        scales of x, bias, residual)
    compute, call : the product in full and its checked call, both of `given`
    """
    # rows that recur are recorded
    if found is None or times_seen(found.key) >= RESIZED_CALLS:
        return None
    member = _given(found, options)
    if member is None:
        return None
    key, resized = member
    family = kept(families, key)
    product: torch.Tensor | None = None
    if family is not None:
        if family.launches is None or family.device != raw_device():
            return None
        product = family.launches.run(resized)
    if product is None:
        facts, *_ = found.key
        lacks = family is None or family.launches.lacks(resized.lead)
        if not (lacks and may_record(facts, (), inputs)):
            return None
        with recording() as record:
            (product,) = compute(*given)
        if family is None:
            family = _new_family(call(*given), options.impl)
            keep(families, key, family)
        if family.launches is not None and record.complete and not record.derived:
            family.launches.learn(record.launches, resized.lead)
    note_call(found.key)
    return product


def _new_family(call: Call, impl: str) -> _Family:
    plain = call.given if isinstance(call, Fp8MatmulCall) else call
    launches = None
    if isinstance(plain.pattern, PatternTensors) and plain.problem.arch.sm == 90:
        # imported here because it imports kernels
        from .sm90.resize import FP8_TILES, TILES, ProductLaunches

        kernel = TILES if plain is call else FP8_TILES
        if kernel.takes(plain.problem):
            launches = ProductLaunches(plain, impl, kernel)
    return _Family(plain.values.get_device(), launches)


def _given(found: Described, options: Options) -> tuple[Any, ResizedProduct] | None:
    """The family of a product, and everything else that its launch depends on; None if none."""
    facts, *_ = found.key
    values, dense, *scales, bias, residual = found.tensors
    if not options.dense_left or values is None or dense is None:
        return None
    shape, *_ = dense
    if len(shape) < 2 or 0 in shape:
        return None
    *lead, _ = shape
    by_row: list[Any] = []
    for x in (dense, residual, *scales[1:]):
        if x is None:
            by_row.append(None)
        elif (of_row := _of_row(x, lead)) is not None:
            by_row.append(of_row)
        else:
            return None
    at_values, at_dense, *at_scales, at_bias, at_residual = found.addresses
    addresses = (at_values, at_dense, tuple(at_scales), at_bias, at_residual)
    key = (facts, found.kind, len(shape), values, *scales[:1], bias, *by_row)
    return key, ResizedProduct(*addresses, tuple(lead))


def _of_row(x: TensorFacts, lead: list[int]) -> tuple[Any, ...] | None:
    """The last dimension, dtype and device of a contiguous tensor with these others; else None."""
    shape, strides, *others = x
    if len(shape) != len(lead) + 1:
        return None
    *lead_x, size = shape
    if lead_x != lead or strides != contiguous_strides(shape):
        return None
    return (size, *others)
