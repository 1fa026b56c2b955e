"""Calls that were made before, without checks, operator and kernel lookup a second time.

The launches of a call depend on its sizes, strides, dtypes and options alone. They are recorded at
the first call; a later call that agrees in all of these only allocates its results and launches.
Gradients, modes and transforms of PyTorch need the operator, so where one of them could be at work,
nothing is recorded or repeated.

`repeat` is on the way of every call and looks at each tensor once: what the key holds was checked
when the call was recorded, so only what it does not hold is checked again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..core.compat import empty_on_gpu, raw_device
from ..core.env import asked_impl
from ..core.launch import RecordedLaunches, recording
from .dispatch import is_explaining

# Recordings kept together. A model meets a handful of sizes; a stream of new ones starts over.
MAX_RECORDINGS = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# The precision of float32 products is a global switch, which a recording would not follow.
_DTYPES = (torch.float16, torch.bfloat16)
# Options that a key can hold and compare; others go to the checks of the operator.
_OPTIONS = (type(None), bool, int, float, str, tuple, torch.dtype)

_is_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_tracing_state = torch._C._get_tracing_state
_transform = torch._C._functorch.peek_interpreter_stack
_is_autocast_enabled: Callable[[], bool] = torch.is_autocast_enabled

Tensors = tuple[torch.Tensor, ...]


class Recorded:
    """The launches of a call, and the results that it allocates for them."""

    def __init__(self, launches: RecordedLaunches, results: Tensors, device: int):
        self._launches = launches
        # plain tuples, as the allocator wants them
        self._results = [(tuple(x.shape), x.stride(), x.dtype) for x in results]
        self._device = device

    def __call__(self, inputs: list[int]) -> Tensors:
        """The results for inputs at these addresses."""
        if raw_device() != self._device:
            with torch.cuda.device(self._device):
                return self(inputs)
        results = [empty_on_gpu(*made) for made in self._results]
        self._launches.repeat([*[x.data_ptr() for x in results], *inputs])
        return tuple(results)


def repeat(
    known: dict[Any, Recorded | None],
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    stream: int | None = None,
    below_autocast: bool = False,
) -> Tensors | None:
    """The results by the launches that `record` kept for such a call, or None to make it.

    Nothing was checked before. `options` hold all that launches depend on besides tensors; `inputs`
    are those tensors, None where absent; `stream` is the current one where launches belong to it.
    Operators are `below_autocast`: it has cast what it wanted to.
    """
    if not _nothing_else_looks(below_autocast):
        return None
    key, addresses, bits = [options, *map(type, options), asked_impl(), stream], [], 0
    with_gradients = _is_grad_enabled()
    try:
        for x in inputs:
            if x is None:
                key.append(None)
                addresses.append(0)
                continue
            kind = type(x)
            if (kind is not _PLAIN[0] and kind is not _PLAIN[1]) or (
                with_gradients and x.requires_grad
            ):
                return None
            address = x.data_ptr()
            addresses.append(address)
            bits |= address
            key += (x.shape, x.stride(), x.dtype, x.get_device())
        recorded = known.get(tuple(key))
    except (TypeError, RuntimeError):
        # an option that no key can hold, a tensor without strides or memory: the checks will tell
        return None
    # a recorded variant of a kernel may count on the alignment
    return None if recorded is None or bits & 15 else recorded(addresses)


def record(
    known: dict[Any, Recorded | None],
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    call: Callable[[], Tensors],
    *,
    operands: int,
    wanted: int | None = None,
    stream: int | None = None,
    below_autocast: bool = False,
) -> Tensors:
    """Make the results by `call`; keep its launches for `repeat` where they make all of it.

    The first `operands` inputs are those that are multiplied with each other. Only `wanted` of the
    results are given back by `repeat`, by default all: for the others it allocates nothing.
    """
    if not (
        all(type(option) in _OPTIONS for option in options)
        and may_repeat(inputs[:operands], inputs[operands:], below_autocast)
    ):
        return call()
    try:
        key = _key(options, inputs, stream)
        is_known = key in known
    except (TypeError, RuntimeError):
        # as in `repeat`
        return call()
    if is_known or torch.cuda.is_current_stream_capturing():
        return call()
    with recording() as made:
        results = call()
    if len(known) >= MAX_RECORDINGS:
        known.clear()
    given, unwanted = results[:wanted], results[len(results) if wanted is None else wanted :]
    made.scratch += [(x, False) for x in unwanted if x.numel()]
    # tensors without elements have no address
    roles = [x if x is not None and x.numel() else None for x in (*given, *inputs)]
    launches = RecordedLaunches.make(made, roles)
    device = inputs[0].get_device()
    known[key] = None if launches is None else Recorded(launches, given, device)
    return results


def _key(options: tuple[Any, ...], inputs: Sequence[Any], stream: int | None) -> tuple[Any, ...]:
    """As `repeat` makes it."""
    key = [options, *map(type, options), asked_impl(), stream]
    for x in inputs:
        key += (None,) if x is None else (x.shape, x.stride(), x.dtype, x.get_device())
    return tuple(key)


def may_repeat(
    operands: Sequence[Any], others: Sequence[Any], below_autocast: bool = False
) -> bool:
    """Whether launches make the whole of a call: no gradient, mode or transform needs more.

    `operands` are multiplied with each other; `others` are read besides, None where absent.
    """
    tensors = [*operands, *(x for x in others if x is not None)]
    return (
        _nothing_else_looks(below_autocast)
        and all(type(x) in _PLAIN for x in tensors)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and all(map(_is_in_gpu_memory, tensors))
        and all(x.dtype in _DTYPES for x in operands)
        and all(x.device == tensors[0].device and x.data_ptr() % 16 == 0 for x in tensors)
    )


def _is_in_gpu_memory(x: torch.Tensor) -> bool:
    return x.is_cuda and x.layout == torch.strided


def is_plain_call(tensors: Sequence[Any]) -> bool:
    """Whether an operator on these tensors, which autocast has seen, meets autograd alone."""
    return _nothing_else_looks(below_autocast=True) and all(type(x) in _PLAIN for x in tensors)


def _nothing_else_looks(below_autocast: bool) -> bool:
    """Whether no mode or transform stands between this call and the kernels, nor autocast."""
    return not (
        _dispatch_modes()
        or _function_modes()
        or _transform() is not None
        or (_is_autocast_enabled() and not below_autocast)
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
        or is_explaining()
    )
