"""Products x @ op(A) that differ only in the rows of x from a product made before.

Prompts have a new number of tokens in almost every step of a model, and each of its layers has a
pattern of its own, so that no recorded launches fit. Such a product skips its checks, the operator,
and the lookup of the kernel. Products with one pattern that differ only in rows are a *family*;
those that the Hopper kernel for tiles makes in one launch are made again with other sizes.
"""

from typing import Any, NamedTuple

import torch

from ..calls.matmul import MatmulCall, PatternTensors, ResizedProduct
from ..core.sizes import contiguous_strides
from ..core.torch_private import raw_device
from ..launch.recording import Recording
from ..launch.replay import (
    RESIZED_CALLS,
    Cache,
    Described,
    keep,
    kept,
    may_record,
    note_call,
    times_seen,
)
from .inputs import Options


class _Family(NamedTuple):
    """Shared by products that differ only in the rows of x."""

    device: int
    launches: Any
    """`sm90.resize.ProductLaunches`, or None if that kernel cannot make them in one launch."""


def resized_product(
    families: Cache, found: Described | None, options: Options
) -> torch.Tensor | None:
    """The product that `found` describes, if its family knows a launch for it."""
    if not families or found is None:
        return None
    given = _given(found, options)
    if given is None:
        return None
    key, call = given
    family = kept(families, key)
    if family is None or family.launches is None or family.device != raw_device():
        return None
    # rows that recur are left to the full call, which records its launches
    if times_seen(found.key) >= RESIZED_CALLS:
        return None
    product: torch.Tensor | None = family.launches.run(call)
    if product is not None:
        note_call(found.key)
    return product


def is_to_learn(
    families: Cache, found: Described, options: Options, inputs: tuple[Any, ...]
) -> bool:
    """Whether the launches of this product are to be recorded for its family."""
    values, dense, *others = inputs
    given = _given(found, options) if may_record(options, (values, dense), others) else None
    if given is None or times_seen(found.key) >= RESIZED_CALLS:
        return False
    key, product = given
    family = kept(families, key)
    if family is None:
        return True
    return family.launches is not None and family.launches.lacks(product.lead)


def learn(
    families: Cache, found: Described, options: Options, call: MatmulCall, record: Recording
) -> None:
    """Keep the launches of a product, made in full, for its family."""
    given = _given(found, options)
    if given is None:
        return
    key, product = given
    note_call(found.key)
    family = kept(families, key)
    if family is None:
        launches = None
        if isinstance(call.pattern, PatternTensors):
            # imported here because it imports kernels
            from .sm90.resize import ProductLaunches

            if ProductLaunches.takes(call.problem):
                launches = ProductLaunches(call, options.impl)
        family = _Family(call.values.get_device(), launches)
        keep(families, key, family)
    if family.launches is not None and record.complete and not record.derived:
        family.launches.learn(record.launches, product.lead)


def _given(found: Described, options: Options) -> tuple[Any, ResizedProduct] | None:
    """The family of a product, and everything else that its launch depends on; None if none."""
    values, dense, bias, residual = found.tensors
    if not options.dense_left or values is None or dense is None:
        return None
    shape, strides, dtype, device, wants = dense
    *lead, inner = shape
    if not lead or 0 in shape or strides != contiguous_strides(shape):
        return None
    of_residual: tuple[Any, ...] = ()
    if residual is not None:
        shape_r, strides_r, *others = residual
        *lead_r, features = shape_r
        if lead_r != lead or strides_r != contiguous_strides(shape_r):
            return None
        of_residual = (features, *others)
    of_dense = (len(shape), inner, dtype, device, wants)
    key = (options, found.kind, values, of_dense, bias, of_residual)
    at_values, at_dense, at_bias, at_residual = found.addresses
    return key, ResizedProduct(at_values, at_dense, at_bias, at_residual, tuple(lead))
