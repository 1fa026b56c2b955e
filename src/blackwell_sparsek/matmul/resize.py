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
from ..launch.recording import Recording, recording
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


def resized_product(
    families: Cache, found: Described | None, options: Options
) -> torch.Tensor | None:
    """The product that `found` describes, if its family knows a launch for it.

    `found` is of (values, x, bias, residual), in fp8 of (values, x, scales of blocks, scales of x,
    bias, residual).
    """
    if not families or found is None:
        return None
    given = _given(found, options)
    if given is None:
        return None
    key, resized = given
    family = kept(families, key)
    if family is None or family.launches is None or family.device != raw_device():
        return None
    # rows that recur are left to the full call, which records its launches
    if times_seen(found.key) >= RESIZED_CALLS:
        return None
    product: torch.Tensor | None = family.launches.run(resized)
    if product is not None:
        note_call(found.key)
    return product


def learned_product(
    families: Cache,
    found: Described | None,
    options: Options,
    inputs: tuple[Any, ...],
    compute: Callable[..., tuple[torch.Tensor]],
    call: Callable[..., Call],
    *given: Any,
) -> torch.Tensor | None:
    """The product `compute(*given)`, whose launches its family learns; None if it would not.

    `call(*given)` is the checked call, `inputs` are those that `found` describes.
    """
    if found is None or not _is_to_learn(families, found, options, inputs):
        return None
    with recording() as record:
        (product,) = compute(*given)
    _learn(families, found, options, call(*given), record)
    return product


def _is_to_learn(
    families: Cache, found: Described, options: Options, inputs: tuple[Any, ...]
) -> bool:
    facts, *_ = found.key
    if times_seen(found.key) >= RESIZED_CALLS or not may_record(facts, (), inputs):
        return False
    given = _given(found, options)
    if given is None:
        return False
    key, product = given
    family = kept(families, key)
    if family is None:
        return True
    return family.launches is not None and family.launches.lacks(product.lead)


def _learn(
    families: Cache, found: Described, options: Options, call: Call, record: Recording
) -> None:
    """Keep the launches of a product, made in full, for its family."""
    given = _given(found, options)
    if given is None:
        return
    key, product = given
    note_call(found.key)
    family = kept(families, key)
    if family is None:
        plain = call.given if isinstance(call, Fp8MatmulCall) else call
        launches = None
        if isinstance(plain.pattern, PatternTensors) and plain.problem.arch.sm == 90:
            # imported here because it imports kernels
            from .sm90.resize import FP8_TILES, TILES, ProductLaunches

            kernel = TILES if plain is call else FP8_TILES
            if kernel.takes(plain.problem):
                launches = ProductLaunches(plain, options.impl, kernel)
        family = _Family(plain.values.get_device(), launches)
        keep(families, key, family)
    if family.launches is not None and record.complete and not record.derived:
        family.launches.learn(record.launches, product.lead)


def _given(found: Described, options: Options) -> tuple[Any, ResizedProduct] | None:
    """The family of a product, and everything else that its launch depends on; None if none."""
    facts, *_ = found.key
    values, dense, *scales, bias, residual = found.tensors
    if not options.dense_left or values is None or dense is None:
        return None
    shape, *_ = dense
    *lead, _ = shape
    if not lead or 0 in shape:
        return None
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
    *lead_x, size = shape
    if lead_x != lead or strides != contiguous_strides(shape):
        return None
    return (size, *others)
