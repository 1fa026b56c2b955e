"""Defining operators in the namespace `bsk`.

`torch.library.custom_op` wraps every call in Python that checks aliasing; defining the schema and
registering the kernel for all backends costs a third of that per call and means the same.
"""

from collections.abc import Callable
from typing import Any

import torch

from .transforms import one_by_one, without_tangents

NAMESPACE = "bsk"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define_op(
    name: str,
    schema: str,
    impl: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Register `bsk::<name><schema>` with its implementation and its fake; return the operator."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, without_tangents(name, impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if not op._schema.is_mutable:
        torch.library.register_vmap(f"{NAMESPACE}::{name}", one_by_one(op), lib=_LIBRARY)
    return op


def define_autograd(name: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Register the derivative of `bsk::<name>`."""
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_LIBRARY
    )
