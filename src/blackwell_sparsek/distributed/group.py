"""The ranks of a call: who they are, whether they agree, and the bytes they send."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..core.checks import message
from ..core.errors import InvalidInput, InvalidType
from ..core.torch_private import untraced

TEXT_BYTES = 1024
"""How much of its description a rank sends to the others."""


class Members(NamedTuple):
    """A process group as one of its ranks sees it."""

    group: Any
    rank: int
    size: int

    def peer(self, rank: int) -> int:
        """The global rank of a rank of this group, as point-to-point calls name it."""
        return dist.get_global_rank(self.group, rank % self.size)


class SentBytes:
    """What `count_bytes` counted: `total` bytes that this process sent to others."""

    def __init__(self) -> None:
        self.total = 0


_counters: list[SentBytes] = []


@contextmanager
def count_bytes() -> Iterator[SentBytes]:
    """A context manager that counts what `bsk.distributed` sends from this process to others.

    Queries, keys, values, results and gradients count; the few bytes with which ranks compare
    their arguments do not.

    Yields
    ------
    SentBytes

    Examples
    --------
    Within a group of one, nothing is sent:

    >>> with count_bytes() as sent:
    ...     pass
    >>> sent.total
    0
    """
    counter = SentBytes()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def add_sent(count: int) -> None:
    """Add to every counter that is active."""
    for counter in _counters:
        counter.total += count


def members_of(op: str, mesh: Any, group: Any) -> Members:
    """The ranks of `mesh` or `group`; of the default group if both are None."""
    if not dist.is_available() or not dist.is_initialized():
        expected = "torch.distributed.init_process_group() before this call"
        raise InvalidInput(message(op, "group", "does not exist", expected, "no process group"))
    if mesh is not None and group is not None:
        raise InvalidInput(message(op, "mesh/group", "are both given", "one of them", "both"))
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            got = type(mesh).__name__
            raise InvalidType(message(op, "mesh", "is not a mesh", "DeviceMesh", got))
        if mesh.ndim != 1:
            expected = 'one dimension, such as mesh["cp"]'
            raise InvalidInput(
                message(op, "mesh", "has several dimensions", expected, list(mesh.mesh.shape))
            )
        group = mesh.get_group()
    elif group is None:
        group = dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        # what new_group returns to a process that it leaves out
        expected = "a call on its members only"
        raise InvalidInput(message(op, "group", "does not contain this process", expected, group))
    if not isinstance(group, dist.ProcessGroup):
        got = type(group).__name__
        raise InvalidType(message(op, "group", "is not a group", "ProcessGroup", got))
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidInput(message(op, "group", "does not contain this process", "a member", rank))
    return Members(group, rank, dist.get_world_size(group))


def agree(
    op: str, members: Members, text: str, failure: Exception | None, device: torch.device
) -> list[str]:
    """Exchange descriptions with all ranks; raise on each of them if one has failed.

    Returns the descriptions by rank. A rank whose arguments are wrong would otherwise leave the
    others waiting for it inside a collective.
    """
    failed = failure is not None
    if failed:
        text = f"{type(failure).__name__}: {failure}"
    data = text.encode()[: TEXT_BYTES - 3]
    packet = bytes([failed, len(data) % 256, len(data) // 256]) + data
    mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8, device="cpu")
    mine[: len(packet)] = torch.frombuffer(bytearray(packet), dtype=torch.uint8)
    mine = mine.to(device)
    everyone = [torch.empty_like(mine) for _ in range(members.size)]
    dist.all_gather(everyone, mine, group=members.group)
    found: list[tuple[bool, str]] = []
    for row in torch.stack(everyone).cpu():
        status, low, high = row[:3].tolist()
        received = bytes(row[3 : 3 + low + 256 * high].tolist())
        found.append((bool(status), received.decode(errors="replace")))
    if failure is not None:
        raise failure
    for rank, (status, content) in enumerate(found):
        if status:
            raise InvalidInput(
                message(op, f"rank {rank}", "has failed", "valid arguments on all ranks", content)
            )
    return [content for _, content in found]


def talking_device(members: Members) -> torch.device:
    """Where tensors have to be for `agree`: on the CPU if the group has a backend for that."""
    if "cpu:" in dist.get_backend_config(members.group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


# Descriptions that all ranks of a group have exchanged before, and what they describe. They end
# with their group, whose place in memory another one may get. The ranks of a group make the same
# calls, so each keeps and drops the same descriptions of it, in whatever other groups they are: if
# only some of them knew one, the others would wait for them.
_AGREED: "WeakKeyDictionary[Any, OrderedDict[tuple[Any, ...], tuple[list[str], Any]]]" = (
    WeakKeyDictionary()
)
MOST_AGREED = 256
"""For each group."""


@untraced
def agree_once(
    op: str,
    members: Members,
    key: tuple[Any, ...] | None,
    described: Callable[[], str],
    failure: Exception | None,
    held: Any = None,
) -> list[str]:
    """`agree`, if it takes a GPU only when the group has not done so for `key` before.

    On a GPU it makes the host wait. `key` may contain ids of `held`, which is kept alive and must
    not hold the group.
    """
    device = talking_device(members)
    known = _AGREED.setdefault(members.group, OrderedDict())
    if device.type != "cpu" and key is not None and key in known:
        known.move_to_end(key)
        texts, _ = known[key]
        return texts
    texts = agree(op, members, "" if failure is not None else described(), failure, device)
    if key is not None and device.type != "cpu":
        known[key] = texts, held
        if len(known) > MOST_AGREED:
            known.popitem(last=False)
    return texts


def check_same(op: str, texts: list[str]) -> None:
    """Raise on all ranks if their descriptions differ, naming the first that does."""
    for rank, text in enumerate(texts):
        if text != texts[0]:
            expected = f"the arguments of rank 0 ({texts[0]})"
            raise InvalidInput(message(op, f"rank {rank}", "has other arguments", expected, text))
