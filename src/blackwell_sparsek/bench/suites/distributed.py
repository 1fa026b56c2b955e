"""What the distributed path costs where there is one rank: the same calls with and without it."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from ... import distributed
from ..case import Case, Contender, Peer, Suite
from .attention import dtype_of
from .attention_peers import OURS, contender_of, options_of, ours
from .attention_problem import Attention, AttentionInputs

ONE_RANK = "bsk_one_rank"
# Leaves the group that this suite joined; empty where the caller has one already.
_joined = ExitStack()


def _why_no_group() -> str | None:
    if not dist.is_available():
        return "this torch has no torch.distributed"
    if dist.is_initialized() and dist.get_world_size() > 1:
        return "there is more than one rank"
    return None


def _join_a_group_of_one(device: torch.device) -> None:
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    _joined.callback(dist.destroy_process_group)


def _leave(document: dict[str, Any]) -> None:
    _joined.close()


def _one_rank(inputs: AttentionInputs) -> Contender:
    _join_a_group_of_one(inputs.q.device)
    plan = distributed.Plan.contiguous(inputs.problem.length, 1)
    options = options_of(inputs)

    def call(x: AttentionInputs) -> torch.Tensor:
        out = distributed.attention(x.q, x.k, x.v, plan=plan, **options)
        assert isinstance(out, torch.Tensor)  # a pair only with return_lse
        return out

    return contender_of(inputs, call, {"backend": dist.get_backend()})


PEERS = {
    ONE_RANK: Peer(ONE_RANK, "bsk.distributed, one rank", _one_rank, _why_no_group),
    OURS: ours,
}


def one_rank(tiny: bool = False) -> Iterator[Case]:
    """Attention by `bsk.distributed` in a group of one rank, and by `bsk.attention`."""
    dtype, sizes = dtype_of(tiny), (1, 2, 64, 16, 1) if tiny else (1, 16, 8192, 128, 8)
    block = (16, 16) if tiny else (128, 128)
    problems = {
        "8k, causal": Attention(*sizes, dtype=dtype, causal=True),
        "8k, window of 1k": Attention(*sizes, dtype=dtype, window=16 if tiny else 1024),
        "8k, 22 % of the blocks": Attention(*sizes, dtype=dtype, block=block, density=0.22),
    }
    for name, problem in problems.items():
        yield Case(name, problem.describe(), problem.build, (ONE_RANK, OURS))


SUITES = [
    Suite(
        "distributed", one_rank.__doc__ or "", one_rank, PEERS, ONE_RANK, unit="us", finish=_leave
    )
]
