"""Kernels under `jax.vmap`: the mapped axis becomes part of the batch of one launch.

Calls have a batch as the first dimension of their arrays. While an axis is folded into it, an array
that is the same for all entries keeps a batch of 1: kernels read it with a stride of 0.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax.custom_batching import custom_vmap, sequential_vmap

import jax

Fold = Callable[[int, Any, Any], tuple[Any, int] | None]
"""From the size of the axis, which arrays have it, and all of them: what one launch takes and its
batch without the axis, or None if entries must run one by one."""


def vmapped(run: Callable[..., Any], fold: Fold) -> Callable[..., Any]:
    """`run`, whose results begin with the batch of the call, and which `jax.vmap` folds."""
    folding, one_by_one = custom_vmap(run), sequential_vmap(run)

    @folding.def_vmap
    def mapped(size: int, is_mapped: Any, *inputs: Any) -> Any:
        folded = fold(size, is_mapped, inputs)
        if folded is None:
            axes = jax.tree.map(lambda mapped: 0 if mapped else None, is_mapped)
            results = jax.vmap(one_by_one, tuple(axes))(*inputs)
        else:
            arrays, batch = folded
            results = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), folding(*arrays))
        return results, jax.tree.map(lambda _: True, results)

    return folding


def common_batch(sizes: Iterable[int]) -> int:
    """The batch of arrays some of which may broadcast with a batch of 1."""
    sizes = tuple(sizes)
    return 0 if 0 in sizes else max(sizes)


def batch_of(x: jax.Array, is_mapped: bool) -> int:
    """The batch of an array, which follows the mapped axis if it has that."""
    return x.shape[1 if is_mapped else 0]


def fold_axis(x: Any, is_mapped: Any, size: int, batch: int, broadcasts: bool = True) -> Any:
    """An array whose batch is `size * batch`, or 1 if it `broadcasts` to that; None for None."""
    if x is None:
        return None
    if not is_mapped:
        if x.shape[0] == 1 and broadcasts:
            return x
        x = jnp.broadcast_to(x, (size, *x.shape))
    return jnp.broadcast_to(x, (size, batch, *x.shape[2:])).reshape(size * batch, *x.shape[2:])


def fold_pool(x: jax.Array, ids: Any, is_mapped: bool, ids_are_mapped: bool, size: int) -> Any:
    """A pool `[items, ...]` that all entries share, and ids of its items that point into it.

    Pools of their own are joined, and ids moved; those below 0, which stand for no item, stay.
    Returns the pool, the ids, and whether these have the mapped axis.
    """
    if not is_mapped:
        return x, ids, ids_are_mapped
    items = x.shape[1]
    first = items * jnp.arange(size, dtype=jnp.int32)
    ids = ids if ids_are_mapped else jnp.broadcast_to(ids, (size, *ids.shape))
    moved = ids + first.reshape(size, *[1] * (ids.ndim - 1))
    return x.reshape(size * items, *x.shape[2:]), jnp.where(ids < 0, ids, moved), True
