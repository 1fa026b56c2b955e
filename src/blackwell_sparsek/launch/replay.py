"""Replay of earlier calls, without their checks, operator dispatch and kernel lookup.

The launches of a call depend only on its sizes, strides, dtypes and options. They are recorded the
second time these come; a later call that agrees in all of them only allocates its results and
launches. `described` makes the key. It runs in every call and looks at each tensor once: everything
in the key was checked when the call was recorded, so only the rest is checked again.

Modes and transforms of PyTorch need the operator, so nothing is recorded or replayed while one of
them may be active; nor if a gradient is needed, unless the caller takes care of it.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..core.env import asked_impl
from ..core.torch_private import empty_on_gpu, raw_device, raw_stream
from ..core.torch_state import is_explaining
from .launcher import on_device_of
from .recording import Recording, recording, unrecorded
from .templates import RecordedLaunches
from .workspace import hold_for_graph

# Recordings in one cache, which is cleared when it is full: a model has only a handful of sizes.
MAX_RECORDINGS = 64
# Keys whose calls are counted. Recording takes longer than a call, so only the second call with the
# same key is recorded: the sizes of a ragged batch may never come again.
MAX_SEEN = 4096
# Calls with the same lengths that reuse a launch made for other lengths before one is recorded. On
# an H200 a resized forward takes 39 us and a replayed one 20 us, and recording takes 300 us.
RESIZED_CALLS = 16
_PLAIN = _TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
# The precision of float32 products is a global switch, which a recording would not follow.
_DTYPES = (torch.float16, torch.bfloat16)
# Options that a key can hold and compare; others go to the checks of the operator.
_OPTIONS = (type(None), bool, int, float, str, tuple, torch.dtype)

_is_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_tracing_state = torch._C._get_tracing_state
_transform = torch._C._functorch.peek_interpreter_stack
_deterministic = torch.are_deterministic_algorithms_enabled
_is_autocast_enabled: Callable[[], bool] = torch.is_autocast_enabled

Tensors = tuple[torch.Tensor, ...]
Launches = Callable[[list[int]], Tensors]
# A cache of recordings, by key. The value is None if the call cannot be replayed.
Cache = dict[Any, Any]


# How often each key was noted, by its hash.
_seen: dict[int | None, int] = {}


def seen_before(key: tuple[Any, ...]) -> bool:
    """Whether a call with this key of `described` was noted before; if not, it is noted.

    If it was, the caller records it, and counting starts anew: otherwise a program with more sizes
    than a cache holds would record every call.
    """
    if _seen.pop(_place(key), 0):
        return True
    note_call(key)
    return False


def times_seen(key: tuple[Any, ...]) -> int:
    """How many calls with this key were noted since the last one was recorded."""
    return _seen.get(_place(key), 0)


def note_call(key: tuple[Any, ...]) -> None:
    """Count a call that is not recorded."""
    place = _place(key)
    if place is None:
        return
    count = _seen.get(place, 0)
    if not count and len(_seen) >= MAX_SEEN:
        _seen.clear()
    _seen[place] = count + 1


def _place(key: tuple[Any, ...]) -> int | None:
    """Where a key is counted; None if an option in it is unhashable."""
    try:
        # if two keys share a hash, they are recorded a few calls earlier
        return hash(key)
    except TypeError:
        return None


# The properties of a tensor that launches depend on, besides its address: shape, strides, dtype,
# device index, and whether it needs a gradient. A plain tuple, because a NamedTuple takes seven
# times as long to make.
TensorFacts = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int, bool]


class Described(NamedTuple):
    """Everything that the launches of a call depend on, as `described` found it."""

    key: tuple[Any, ...]
    """Options, `kind` and `tensors`."""
    kind: tuple[Any, ...]
    """The rest of the key: types of the options, the stream, global switches."""
    addresses: list[int]
    """Of the inputs; 0 for an absent one."""
    trains: bool
    """Whether an input needs a gradient."""
    tensors: list[TensorFacts | None]
    """One for each input, None for an absent one."""


class Recorded:
    """The launches of a call, and the results that it allocates for them.

    After the inputs, launches take derived tensors; `derived` says how to make each of them, as
    given to `recording.note_derived`.
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
    """Recorded launches with their last inputs bound: tensors that this object keeps alive.

    The first of them is the row pointers of a mask, with which the others end.
    """

    __slots__ = ("_addresses", "_outside", "_recorded", "_tensors")

    def __init__(self, recorded: Recorded, tensors: Sequence[torch.Tensor]):
        self._recorded = recorded
        self._tensors = tensors
        self._addresses = [x.data_ptr() for x in tensors]
        # tensors that were made inside a capture live in the pool of its graph
        self._outside = not torch.cuda.is_current_stream_capturing()

    def __call__(self, inputs: list[int]) -> Tensors:
        """The results, with the remaining inputs at these addresses."""
        if self._outside:
            hold_for_graph(self._tensors[0], self._tensors)
        return self._recorded([*inputs, *self._addresses])


def described(
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    stream: int | None = None,
    below_autocast: bool = False,
    gradients: bool = False,
    operands: int = 0,
) -> Described | None:
    """The `Described` of a call whose arguments are still unchecked; None to make it in full.

    Parameters
    ----------
    options : everything besides tensors that the launches depend on
    inputs : the tensors, None for an absent one
    stream : the current stream, if the launches belong to it
    below_autocast : whether autocast has already cast the inputs, as inside operators
    gradients : whether the caller can replay calls that need gradients; if not, they get None
    operands : how many of the first inputs autocast would cast; under autocast, the call can only
        be replayed if they already have its dtype
    """
    if torch.compiler.is_compiling():
        return None
    if not _is_not_intercepted(below_autocast) and not (
        operands and _autocast_keeps(inputs[:operands]) and _is_not_intercepted(True)
    ):
        return None
    addresses: list[int] = []
    tensors: list[TensorFacts | None] = []
    with_gradients, trains, bits = _is_grad_enabled(), False, 0
    try:
        for x in inputs:
            if x is None:
                tensors.append(None)
                addresses.append(0)
                continue
            given = type(x)
            if given is not _TENSOR and given is not _PARAMETER:
                return None
            wants = with_gradients and x.requires_grad
            if wants:
                if not gradients:
                    return None
                trains = True
            address = x.data_ptr()
            addresses.append(address)
            bits |= address
            tensors.append((x.shape, x.stride(), x.dtype, x.get_device(), wants))
    except (TypeError, RuntimeError):
        # a tensor without strides or memory: the checks of the full call report it
        return None
    # a recorded variant of a kernel may rely on the alignment
    if bits & 15:
        return None
    # types, since True equals 1; torch's switch decides which backward will run
    switch = trains and _deterministic()
    kind = (*map(type, options), asked_impl(), stream, switch)
    return Described((options, kind, *tensors), kind, addresses, trains, tensors)


def repeat(
    cache: Cache,
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    below_autocast: bool = False,
) -> Tensors | None:
    """Replay what `record` kept for such a call; None if the call must be made in full."""
    found = described(options, inputs, below_autocast=below_autocast)
    if found is None:
        return None
    launches = kept(cache, found.key)
    return None if launches is None else launches(found.addresses)


def record(
    cache: Cache,
    options: tuple[Any, ...],
    inputs: tuple[Any, ...],
    run: Callable[..., Tensors],
    *args: Any,
    operands: int,
    wanted: int | None = None,
    below_autocast: bool = False,
    closed: bool = False,
) -> Tensors:
    """Return `run(*args)`; keep its launches for `repeat` if they compute all of it.

    The first `operands` inputs are multiplied with each other; only their dtypes are restricted.
    `repeat` returns only the first `wanted` results, by default all; the others become scratch
    memory. For `closed` see `Recorder`.
    """
    found = described(options, inputs, below_autocast=below_autocast)
    if found is None or not may_record(options, inputs[:operands], inputs[operands:]):
        return run(*args)
    key = found.key
    if key in cache or not seen_before(key):
        return run(*args)
    with Recorder(cache, key, inputs, wanted, closed) as recorder:
        return recorder.keep(run(*args))


def kept(cache: Cache, key: tuple[Any, ...]) -> Any:
    """The value kept under a key of `described`; None if an option in the key is unhashable."""
    try:
        return cache.get(key)
    except TypeError:
        return None


def keep(cache: Cache, key: Any, value: Any, most: int | None = None) -> None:
    """Add to a cache, which is cleared first if it has `most` entries, else MAX_RECORDINGS."""
    if len(cache) >= (MAX_RECORDINGS if most is None else most):
        cache.clear()
    cache[key] = value


class Recorder:
    """Records the launches made inside; `keep` stores them under `key` for replay.

    It stores None if they cannot be replayed. `inputs` are those of `described`, followed by
    further tensors. A replay returns only the first `wanted` results, by default all. With
    `closed`, launches that take any tensor besides inputs, results and workspaces are not replayed.
    Without a cache nothing is recorded.
    """

    def __init__(
        self,
        cache: Cache | None,
        key: Hashable = None,
        inputs: Sequence[Any] = (),
        wanted: int | None = None,
        closed: bool = False,
    ):
        self._cache = cache
        self._key = key
        self._inputs = inputs
        self._wanted = wanted
        self._closed = closed
        self._recording = None if cache is None else recording()

    def __enter__(self) -> "Recorder":
        if self._recording is not None:
            self._record: Recording = self._recording.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._recording is not None:
            self._recording.__exit__(*error)

    def keep(self, results: Tensors) -> Tensors:
        """Keep the launches that computed `results`; return `results`."""
        if self._cache is not None:
            keep(self._cache, self._key, self.repeatable(results))
        return results

    def repeatable(self, results: Tensors) -> Any:
        """The launches that compute such results again, or None."""
        wanted = len(results) if self._wanted is None else self._wanted
        given, record = results[:wanted], self._record
        record.scratch += [x for x in results[wanted:] if x.numel()]
        derived = {x.made.data_ptr(): x for x in record.derived}.values()
        # tensors without elements have no address
        tensors = (*given, *self._inputs, *(x.made for x in derived))
        roles = [x if x is not None and x.numel() else None for x in tensors]
        launches = RecordedLaunches.make(record, roles, self._closed)
        if launches is None:
            return None
        device = self._inputs[0].get_device()
        return Recorded(launches, given, device, [x.how for x in derived])


NO_RECORDER = Recorder(None)


def may_record(options: Sequence[Any], operands: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether the launches of a call may be kept, after `described` has made its key.

    `operands` are multiplied with each other; `others` are further inputs, None if absent.
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


def _autocast_keeps(operands: Sequence[Any]) -> bool:
    """Whether the operands already have the dtype that autocast would cast them to."""
    dtype = torch.get_autocast_dtype("cuda")
    return all(getattr(x, "dtype", None) == dtype for x in operands)


def is_plain_call(tensors: Sequence[Any]) -> bool:
    """Whether only autograd intercepts an operator on these tensors; autocast has run already."""
    return _is_not_intercepted(below_autocast=True) and all(type(x) in _PLAIN for x in tensors)


def _is_not_intercepted(below_autocast: bool) -> bool:
    """Whether no mode, transform or autocast intercepts a call before it reaches the kernels."""
    return not (
        _dispatch_modes()
        or _function_modes()
        or _transform() is not None
        or (_is_autocast_enabled() and not below_autocast)
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
        or is_explaining()
    )


def stream_of(x: Any) -> int | None:
    """The current stream of the device of a plain tensor on a GPU."""
    plain = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
    return raw_stream(x.get_device()) if plain and x.is_cuda else None


# Launches that build something to be kept, such as the lists of a mask. They are recorded
# separately: the replay of a call that needs these lists must not build them again.

_BUILDING: Cache = {}


def launch_recorded(
    key: Hashable, roles: Sequence[torch.Tensor], launches: Callable[[], None]
) -> RecordedLaunches | None:
    """Run `launches`, or replay what they launched if `key` was recorded before.

    Parameters
    ----------
    key : everything that `launches` depends on besides the device and the addresses of tensors
    roles : every tensor that the kernels take, except scratch memory; none may be empty

    Returns
    -------
    Launches that `repeat_at` can replay with other tensors at 16-byte aligned addresses, or None.
    """
    first, addresses = roles[0], [x.data_ptr() for x in roles]
    device, aligned = first.get_device(), tuple([x % 16 == 0 for x in addresses])
    place = (key, device, aligned)
    recorded = _BUILDING.get(place)
    if recorded is not None:
        repeat_at(recorded, device, addresses)
    elif place in _BUILDING or not first.is_cuda or torch.cuda.is_current_stream_capturing():
        with unrecorded(), on_device_of(first):
            launches()
    else:
        with recording() as record, on_device_of(first):
            launches()
        recorded = RecordedLaunches.make(record, roles)
        keep(_BUILDING, place, recorded)
    return recorded if all(aligned) else None


def repeat_at(recorded: RecordedLaunches, device: int, addresses: list[int]) -> None:
    """Launch on `device` with tensors at `addresses`, in the order of the recorded roles."""
    if raw_device() == device:
        recorded.repeat(addresses)
    else:
        with torch.cuda.device(device):
            recorded.repeat(addresses)
