"""Calls that were made before, without checks, operator and kernel lookup a second time.

The launches of a call depend on its sizes, strides, dtypes and options alone. They are recorded at
the first call; a later call that agrees in all of these only allocates its results and launches.
Modes and transforms of PyTorch need the operator, so where one of them could be at work, nothing is
recorded or repeated; nor where gradients are wanted, unless the caller takes care of them.

`described` is on the way of every call and looks at each tensor once: what its key holds was
checked when the call was recorded, so only what it does not hold is checked again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..core.compat import empty_on_gpu, raw_device
from ..core.env import asked_impl
from ..core.torch_state import is_explaining
from .launcher import RecordedLaunches, recording

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
    """The launches of a call, and the results that it allocates for them.

    `derived` tells how the tensors are made that launches take after the inputs, as
    `core.launch.note_derived` was told.
    """

    def __init__(
        self,
        launches: RecordedLaunches,
        results: Tensors,
        device: int,
        derived: Sequence[Any] = (),
    ):
        self._launches = launches
        # plain tuples, as the allocator wants them
        self._results = [(tuple(x.shape), x.stride(), x.dtype) for x in results]
        self._device = device
        self.derived = derived

    def __call__(self, inputs: list[int]) -> Tensors:
        """The results for inputs at these addresses."""
        if raw_device() != self._device:
            with torch.cuda.device(self._device):
                return self(inputs)
        results = [empty_on_gpu(*made) for made in self._results]
        self._launches.repeat([*[x.data_ptr() for x in results], *inputs])
        return tuple(results)


class Bound:
    """Recorded launches whose last inputs are given: tensors that live as long as this does."""

    __slots__ = ("_addresses", "_recorded", "_tensors")

    def __init__(self, recorded: Recorded, tensors: Sequence[torch.Tensor]):
        self._recorded = recorded
        self._tensors = tensors
        self._addresses = [x.data_ptr() for x in tensors]

    def __call__(self, inputs: list[int]) -> Tensors:
        """The results for other inputs at these addresses."""
        return self._recorded([*inputs, *self._addresses])


Known = dict[Any, Any]


def described(
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    stream: int | None = None,
    below_autocast: bool = False,
    gradients: bool = False,
    operands: int = 0,
) -> tuple[tuple[Any, ...], list[int], bool] | None:
    """What tells a call from others, the addresses of its inputs, and whether it wants gradients.

    None where it must be made in full. Nothing was checked before. `options` hold all that launches
    depend on besides tensors; `inputs` are those tensors, None where absent; `stream` is the
    current one where launches belong to it. Operators are `below_autocast`: it has cast what it
    wanted to. Where it casts nothing but the first `operands` inputs, it may have nothing to cast.
    Without `gradients` a call that wants them is made in full.
    """
    if torch.compiler.is_compiling():
        return None
    if not _nothing_else_looks(below_autocast) and not (
        operands and _autocast_leaves(inputs[:operands]) and _nothing_else_looks(True)
    ):
        return None
    key, addresses, bits = [options, *map(type, options), asked_impl(), stream], [], 0
    with_gradients, wants = _is_grad_enabled(), False
    try:
        for x in inputs:
            if x is None:
                key.append(None)
                addresses.append(0)
                continue
            kind = type(x)
            if kind is not _PLAIN[0] and kind is not _PLAIN[1]:
                return None
            if with_gradients and x.requires_grad:
                if not gradients:
                    return None
                wants = True
                key.append(True)
            address = x.data_ptr()
            addresses.append(address)
            bits |= address
            key += (x.shape, x.stride(), x.dtype, x.get_device())
    except (TypeError, RuntimeError):
        # a tensor without strides or memory: the checks will tell
        return None
    # a recorded variant of a kernel may count on the alignment
    return None if bits & 15 else (tuple(key), addresses, wants)


def repeat(
    known: Known,
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    stream: int | None = None,
    below_autocast: bool = False,
) -> Tensors | None:
    """The results by the launches that `record` kept for such a call, or None to make it."""
    found = described(options, inputs, stream, below_autocast)
    recorded = None if found is None else known_launches(known, found[0])
    return None if found is None or recorded is None else recorded(found[1])


def known_launches(known: Known, key: tuple[Any, ...]) -> Any:
    """What is kept for a key of `described`; None where it has an option that no key can hold."""
    try:
        return known.get(key)
    except TypeError:
        return None


def record(
    known: Known,
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    run: Callable[..., Tensors],
    *args: Any,
    operands: int,
    wanted: int | None = None,
    stream: int | None = None,
    below_autocast: bool = False,
    closed: bool = False,
) -> Tensors:
    """Make the results by `run(*args)`; keep its launches for `repeat` where they make all of it.

    The first `operands` inputs are those that are multiplied with each other. Only `wanted` of the
    results are given back by `repeat`, by default all: for the others it allocates nothing. For
    `closed` see `make_recorded`.
    """
    found = described(options, inputs, stream, below_autocast)
    if found is None or not may_record(options, inputs[:operands], inputs[operands:]):
        return run(*args)
    key = found[0]
    if key in known:
        return run(*args)
    results, recorded = make_recorded(lambda: run(*args), inputs, wanted, closed)
    keep(known, key, recorded)
    return results


def keep(known: Known, key: Any, recorded: Any) -> None:
    """Add to what is known, which does not grow without end."""
    if len(known) >= MAX_RECORDINGS:
        known.clear()
    known[key] = recorded


def make_recorded(
    call: Callable[[], Tensors],
    inputs: Sequence[Any],
    wanted: int | None = None,
    closed: bool = False,
) -> tuple[Tensors, Recorded | None]:
    """The results of `call`, and its launches as far as they can be repeated.

    `inputs` are what `described` looks at, and tensors that come after them. With `closed` a
    repetition takes no tensor of this call but from memory that it allocates.
    """
    with recording() as made:
        results = call()
    given, unwanted = results[:wanted], results[len(results) if wanted is None else wanted :]
    made.scratch += [(x, False) for x in unwanted if x.numel()]
    how_made = {x.data_ptr(): (how, x) for how, x in made.derived}.values()
    derived = [x for _, x in how_made]
    # tensors without elements have no address
    roles = [x if x is not None and x.numel() else None for x in (*given, *inputs, *derived)]
    launches = RecordedLaunches.make(made, roles, closed)
    if launches is None:
        return results, None
    return results, Recorded(launches, given, inputs[0].get_device(), [how for how, _ in how_made])


def may_record(options: Sequence[Any], operands: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether the launches of a call that `described` has looked at may be kept.

    `operands` are multiplied with each other; `others` are read besides, None where absent.
    """
    tensors = [*operands, *(x for x in others if x is not None)]
    return (
        all(map(_is_option, options))
        and all(type(x) in _PLAIN for x in tensors)
        and all(map(_is_in_gpu_memory, tensors))
        and all(x.dtype in _DTYPES for x in operands)
        and all(x.device == tensors[0].device for x in tensors)
        and not torch.cuda.is_current_stream_capturing()
    )


def _is_option(option: Any) -> bool:
    return type(option) in _OPTIONS and (type(option) is not tuple or all(map(_is_option, option)))


def _is_in_gpu_memory(x: torch.Tensor) -> bool:
    return x.is_cuda and x.layout == torch.strided


def _autocast_leaves(operands: Sequence[Any]) -> bool:
    """Whether autocast would cast none of these."""
    dtype = torch.get_autocast_dtype("cuda")
    return all(getattr(x, "dtype", None) == dtype for x in operands)


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
