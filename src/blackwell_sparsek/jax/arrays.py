"""What arrays of JAX have in common here: checks, conversion from other frameworks, shards."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax

from ..core.errors import InvalidInput, InvalidType
from ..core.messages import message

FLOATS = ("float16", "bfloat16", "float32", "float64")


def is_torch(x: Any) -> bool:
    """Whether `x` is a tensor of torch, which is not imported to find out."""
    return any(cls.__module__.split(".")[0] == "torch" for cls in type(x).__mro__)


def as_jax(op: str, arg: str, x: Any) -> jax.Array:
    """`x` as a JAX array; tensors of torch are shared by DLPack, or copied if they have gaps."""
    expected = "an array of JAX, NumPy or torch"
    if is_torch(x):
        return jnp.from_dlpack(_without_gaps(x.detach()))
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, np.ndarray):
        try:
            # `asarray` may share the memory, so that later writes to x would change the result
            return jnp.array(x)
        except TypeError as error:  # objects, text, another byte order
            problem = "has a dtype that JAX does not know"
            raise InvalidType(message(op, arg, problem, expected, x.dtype.str)) from error
    raise InvalidType(message(op, arg, "is not an array", expected, type(x).__name__))


def _without_gaps(x: Any) -> Any:
    """A tensor of torch, copied if JAX cannot share it: if it has gaps or repeats elements."""
    by_stride = sorted(range(x.ndim), key=x.stride, reverse=True)
    return x if x.permute(by_stride).is_contiguous() else x.contiguous()


def as_host(op: str, arg: str, x: Any) -> np.ndarray:
    """`x` as a NumPy array, for patterns: their sizes decide what is compiled."""
    if isinstance(x, jax.core.Tracer):
        problem = "is traced, but its values decide the shape of the pattern"
        expected = "a concrete array (make the pattern outside jit, grad and vmap)"
        raise InvalidType(message(op, arg, problem, expected, str(x.aval)))
    if is_torch(x) and not x.is_floating_point():
        # not through JAX, which may cut int64 off to int32
        return x.detach().cpu().numpy()
    return np.asarray(as_jax(op, arg, x) if is_torch(x) else x)


def check_array(op: str, arg: str, x: Any, dims: int, layout: str) -> jax.Array:
    """A floating-point array of JAX or NumPy with this many dimensions."""
    if is_torch(x):
        expected = "jnp.from_dlpack(tensor)"
        raise InvalidType(message(op, arg, "is a tensor of torch", expected, type(x).__name__))
    array = as_jax(op, arg, x)
    if array.dtype.name not in FLOATS:
        expected = f"one of {', '.join(FLOATS)}"
        raise InvalidType(message(op, arg, "has a wrong dtype", expected, array.dtype.name))
    if array.ndim != dims:
        raise InvalidInput(message(op, arg, "has a wrong rank", layout, list(array.shape)))
    return array


def check_integers(op: str, arg: str, x: Any, shape: Sequence[int | None]) -> jax.Array:
    """An int32 array of this shape; None stands for any size."""
    array = as_jax(op, arg, x)
    if array.dtype != jnp.int32:
        raise InvalidType(message(op, arg, "has a wrong dtype", "int32", array.dtype.name))
    fits = array.ndim == len(shape) and all(
        want in (None, size) for want, size in zip(shape, array.shape, strict=True)
    )
    if not fits:
        expected = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
        raise InvalidInput(message(op, arg, "has a wrong shape", expected, list(array.shape)))
    return array


def check_same_dtype(op: str, arrays: dict[str, jax.Array]) -> None:
    """Refuse arrays of different dtypes: nothing is converted silently."""
    if len({x.dtype for x in arrays.values()}) > 1:
        got = ", ".join(f"{arg} {x.dtype.name}" for arg, x in arrays.items())
        names = "/".join(arrays)
        raise InvalidType(message(op, names, "have different dtypes", "one dtype", got))


def check_number(op: str, arg: str, value: Any) -> float:
    """A finite number that is known while tracing."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        expected = "a number known while tracing"
        raise InvalidType(message(op, arg, "is not a number", expected, type(value).__name__))
    if not math.isfinite(value):
        raise InvalidInput(message(op, arg, "is not finite", "a finite number", value))
    return float(value)


def check_pair(op: str, arg: str, value: Any, least: int) -> tuple[int, int]:
    """Two ints of at least `least`."""
    fits = isinstance(value, (tuple, list)) and len(value) == 2
    if not fits or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
        raise InvalidType(message(op, arg, "is malformed", "a pair of ints", value))
    if min(value) < least:
        raise InvalidInput(message(op, arg, "is too small", f"ints >= {least}", value))
    return value[0], value[1]


def compute_dtype(dtype: Any) -> Any:
    """Softmax and sums run in fp32, and in fp64 when the inputs are fp64."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def cdiv(a: int, b: int) -> int:
    """Ceiling division of non-negative integers."""
    return -(-a // b)


def into_blocks(x: jax.Array, block: int) -> jax.Array:
    """[..., n, d] as [..., ceil(n / block), block, d], the last block filled up with zeros."""
    rows = x.shape[-2]
    blocks = cdiv(rows, block)
    pad = [(0, 0)] * (x.ndim - 2) + [(0, blocks * block - rows), (0, 0)]
    return jnp.pad(x, pad).reshape(*x.shape[:-2], blocks, block, x.shape[-1])


def from_blocks(x: jax.Array, rows: int) -> jax.Array:
    """The inverse of `into_blocks` for an array with `rows` rows."""
    joined = x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])
    return joined[..., :rows, :]


# Inside `jax.shard_map`, JAX tracks along which axes of the mesh a value varies. Loops need a carry
# that varies like what they add to it, and a gradient must vary exactly like its input.


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """Axes of the mesh along which one of the arrays varies; none outside `shard_map`."""
    return frozenset().union(*(_varying(jax.typeof(x)) for x in arrays))


def _varying(kind: Any) -> frozenset[str]:
    # what JAX 0.10 and later call `manual_axis_type.varying` was `vma` before
    axes = getattr(kind, "manual_axis_type", None)
    return kind.vma if axes is None else axes.varying


def vary_like(x: jax.Array, *others: jax.Array) -> jax.Array:
    """Mark `x` as varying along the axes of `others`."""
    missing = varying_axes(*others) - varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def gradient_of(x: jax.Array, gradient: jax.Array) -> jax.Array:
    """`gradient` in the dtype of x, added up over the shards that read the same x."""
    extra = varying_axes(gradient) - varying_axes(x)
    total = lax.psum(gradient, tuple(sorted(extra))) if extra else gradient
    return vary_like(total.astype(x.dtype), x)


def over_chunks(step: Any, state: Any, items: Any, size: int) -> Any:
    """Fold `step(state, items) -> state` over parts of `size` of the leading dimension of `items`.

    What is missing in the last part is filled up with -1; `step` leaves items that begin with -1
    out. Bounds the memory that one step takes.
    """
    count = jax.tree.leaves(items)[0].shape[0]
    if count <= size:
        return step(state, items) if count else state
    parts = cdiv(count, size)

    def split(x: jax.Array) -> jax.Array:
        pad = [(0, parts * size - count)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, pad, constant_values=-1).reshape(parts, size, *x.shape[1:])

    return lax.scan(
        lambda carry, part: (step(carry, part), None), state, jax.tree.map(split, items)
    )[0]
