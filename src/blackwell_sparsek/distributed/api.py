"""`bsk.distributed.attention`: attention over tensors that are split among ranks."""

from typing import Any, Literal, overload

import torch
from torch.distributed.tensor import DTensor, Shard

from ..attention.api import attention as attend_whole
from ..attention.inputs import (
    DENSE,
    autocast_qkv,
    check_head_dims,
    check_qkv,
    check_sinks,
    is_deterministic,
    scale_or_default,
    softcap_or_off,
)
from ..calls.attention import check_impl_and_lse
from ..core.checks import (
    check_choice,
    check_derivatives,
    check_rank,
    check_tensor,
    is_batched,
    message,
)
from ..core.errors import BskError, InvalidInput, InvalidType, Unsupported
from ..core.torch_private import untraced
from ..core.torch_state import is_explaining
from ..masks.band import Band, band_of
from ..masks.block_mask import BlockMask
from ..masks.packed import check_cu_seqlens
from .call import METHODS, OP, OtherRanks, RanksCall, check_is_mask, document_mask
from .group import Members, agree_once, check_same, members_of
from .plan import Plan


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any = None,
    group: Any = None,
    plan: Plan | None = None,
    method: str = "auto",
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any = None,
    group: Any = None,
    plan: Plan | None = None,
    method: str = "auto",
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: Literal[True],
    deterministic: bool | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any = None,
    group: Any = None,
    plan: Plan | None = None,
    method: str = "auto",
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any = None,
    group: Any = None,
    plan: Plan | None = None,
    method: str = "auto",
    cu_seqlens: torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str = "auto",
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Self-attention over a sequence that is split among the ranks of a group.

    Each rank passes the queries, keys and values of its own tokens and gets their outputs, equal to
    those of `bsk.attention` on the whole sequence. Every rank has to call this, and to run the
    backward pass if any does.

    Parameters
    ----------
    q, k, v : `[B, Hq, tokens, D]`, `[B, Hkv, tokens, D]`, `[B, Hkv, tokens, Dv]`
        This rank's tokens, as `plan.shard(x, 2)` cuts them; there may be none. Or DTensors,
        `Shard(2)` on a mesh of one dimension (`Shard(1)` for the method "heads"); results are then
        DTensors too.
    mesh : DeviceMesh of one dimension, optional
    group : ProcessGroup, optional
        By default the default group.
    plan : Plan, optional
        Which tokens each rank has. By default runs of tokens in the order of the ranks, whose
        lengths are multiples of 16, except the last.
    method : str
        - `allgather`: every rank fetches all keys and values. One collective, memory for all keys.
        - `needed`: every rank fetches the blocks that its queries see. Bytes and memory in
          proportion to the kept blocks.
        - `ring`: keys and values pass from rank to rank, and the next shard travels while one is
          computed. Memory for two shards.
        - `ulysses`: queries, keys and values are exchanged so that each rank has whole sequences of
          some heads. With fewer KV heads than ranks, several ranks get the same KV head.
        - `heads`: inputs are already whole sequences of this rank's heads, as tensor parallel
          projections give them; nothing is sent.
        - `auto`: the one of `needed`, `allgather` and `ulysses` that sends the fewest bytes.
    cu_seqlens : int32 `[documents + 1]`, optional
        Offsets of documents in the whole sequence: queries see keys of their own document, and
        causal and window count inside it.
    causal, window, scale, softcap, sinks, return_lse, deterministic, impl :
        As in `bsk.attention`. All gradients but that of the sinks are complete; each rank has its
        own queries' part of the gradient of the sinks, to be summed over ranks like that of any
        replicated parameter. `impl="reference"` is for the method "heads" alone. The other options
        of `bsk.attention` (key_gate, alibi_slopes, bias, descales, out) are refused.
    block_mask : BlockMask, optional
        For the whole sequence, the same on every rank. Its blocks must fit the tiles of the plan.

    Returns
    -------
    out : `[B, Hq, tokens, Dv]`, dtype of q
    lse : fp32 `[B, Hq, tokens]`
        Only with `return_lse`.

    Notes
    -----
    Sums over ranks run in fp32 in the order of the ranks, so results are the same bits in every
    run whenever those of the local kernels are (`deterministic`).

    Ranks compare their arguments before they exchange data: if one has failed or differs, all
    raise. They do so in every call if the group has a backend for the CPU, such as gloo, and
    otherwise, since the host has to wait for it, in the first call with new sizes or options. If a
    rank fails later, or does not call at all, the others end with the timeout of the group.

    Masks of shards are made on the CPU in the first call with a plan, mask and options, and kept
    for later ones; a mask or `cu_seqlens` on a GPU is copied for this, which waits.

    `bsk.explain(bsk.distributed.attention, ...)` shows the method, the bytes that each rank sends,
    the imbalance, and why not the other methods. With a plan, one rank can ask alone.

    Examples
    --------
    Under `torchrun --nproc-per-node 4`::

        plan = bsk.distributed.balance(bsk.distributed.Band(None, 0), 4, seq_length=S)
        q, k, v = (plan.shard(x, 2) for x in (q, k, v))
        out = bsk.distributed.attention(q, k, v, plan=plan, causal=True)
        whole = plan.unshard(out, 2)

    In a group of one:

    >>> import torch
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q = k = v = torch.randn(1, 2, 40, 16)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([1, 2, 40, 16])
    >>> dist.destroy_process_group()
    """
    if isinstance(q, DTensor):
        check_impl_and_lse(OP, impl, return_lse)
        options = {
            "plan": plan, "cu_seqlens": cu_seqlens, "causal": causal, "window": window,
            "block_mask": block_mask, "scale": scale, "softcap": softcap, "sinks": sinks,
            "deterministic": deterministic, "impl": impl, **others,
        }  # fmt: skip
        placed = _of_dtensors(q, k, v, mesh, group, method, options)
        return placed if return_lse else placed[0]
    members = members_of(OP, mesh, group)
    if members.size == 1:
        # straight to the plain call, which repeats a recorded launch in a few microseconds
        if others:
            _refuse(others)
        if plan is not None or method != "auto":
            _check_alone(plan, members, method, q)
        _check_lengths(q, k)
        if cu_seqlens is not None:
            check_tensor(OP, "q", q)
            check_tensor(OP, "cu_seqlens", cu_seqlens)
            band = band_of(OP, causal, window)
            block_mask = document_mask(q, band, block_mask, cu_seqlens)
            causal, window = False, None
        return attend_whole(
            q, k, v, causal=causal, window=window, block_mask=block_mask, scale=scale,
            softcap=softcap, sinks=sinks, return_lse=return_lse, deterministic=deterministic,
            impl=impl,
        )  # fmt: skip
    out, lse = _over_ranks(
        members, q, k, v, (causal, window), others, plan=plan, method=method,
        cu_seqlens=cu_seqlens, block_mask=block_mask, scale=scale, softcap=softcap, sinks=sinks,
        deterministic=deterministic, impl=impl, return_lse=return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


@untraced
def _over_ranks(
    members: Members,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sides: tuple[Any, Any],
    others: dict[str, Any],
    **options: Any,
) -> Any:
    """Output and lse over several ranks; `sides` are causal and window.

    `options` are those of `_checked_call`. One break in a compiled graph: the compiler would break
    at every collective and cached mask, and compile the pieces between for each rank.
    """
    failure: Exception | None = None
    call: RanksCall | None = None
    try:
        if others:
            _refuse(others)
        q, k, v = _checked(q, k, v)
        call = _checked_call(q, k, v, members, band=band_of(OP, *sides), **options)
    except Exception as error:
        failure = error
    plan = options["plan"]
    if is_explaining() and isinstance(plan, Plan):
        # the plan knows the others, so one rank may ask alone
        if failure is not None:
            raise failure
        known = OtherRanks(plan.lengths, ())
    else:
        known = _agreed(members, call, failure, q)
    assert call is not None
    return call.attend(q, k, v, known)


def _checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_qkv(OP, q, k, v, DENSE)
    check_head_dims(OP, q, v)
    _check_lengths(q, k)
    for arg, x in {"q": q, "k": k, "v": v}.items():
        check_derivatives(OP, arg, x)
        if is_batched(x):
            problem, expected = "is mapped over by torch.vmap", "a batch dimension of q, k and v"
            raise Unsupported(message(OP, arg, problem, expected, "a transform"))
    return autocast_qkv(OP, q, k, v)


# Options of `bsk.attention` that shards do not have, and what to do instead.
REFUSED = {
    "key_gate": "key_gate=None: thresholds run over the whole sequence, which no rank has",
    "alibi_slopes": "alibi_slopes=None, or rotary embeddings at plan.positions()",
    "bias": "bias=None, or a block_mask for a bias of 0 and -inf",
    "q_descale": "q, k and v in 16 bits or more",
    "k_descale": "q, k and v in 16 bits or more",
    "v_descale": "q, k and v in 16 bits or more",
    "out_dtype": "out_dtype=None: results have the dtype of q",
    "out": "out=None: results are new tensors",
}


def _refuse(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name not in REFUSED:
            raise TypeError(f"{OP}() got an unexpected keyword argument {name!r}")
        if value is not None:
            problem, got = "is not available over several ranks", type(value).__name__
            raise Unsupported(message(OP, name, problem, REFUSED[name], got))


def _check_lengths(q: Any, k: Any) -> None:
    """Check that queries and keys have the same tokens; other functions reject non-tensors."""
    queries, keys = (x.shape[2:3] if isinstance(x, torch.Tensor) else () for x in (q, k))
    if queries and keys and queries != keys:
        got = f"{queries[0]} queries, {keys[0]} keys"
        raise InvalidInput(message(OP, "q/k", "have different lengths", "self-attention", got))


def _check_alone(plan: Any, members: Members, method: Any, q: Any) -> None:
    """Check the options of a group of one that the plain call does not have."""
    check_choice(OP, "method", method, METHODS)
    check_tensor(OP, "q", q)
    check_rank(OP, "q", q, "[B, Hq, S, D]")
    if plan is not None:
        _check_plan(plan, members, method, q)


def _agreed(
    members: Members, call: "RanksCall | None", failure: Exception | None, q: torch.Tensor
) -> OtherRanks:
    key = None if call is None else call.key(q)
    # what the key identifies
    held = None if call is None else (call.cu_seqlens, call.block_mask)
    texts = agree_once(
        OP, members, key, lambda: "" if call is None else call.text(q), failure, held
    )
    rows = [text.split("|", 2) for text in texts]
    check_same(OP, [rest for _, _, rest in rows])
    return OtherRanks(
        tuple(int(length) for length, _, _ in rows), tuple(int(heads) for _, heads, _ in rows)
    )


def _checked_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    members: Members,
    plan: Any,
    method: str,
    cu_seqlens: Any,
    band: Band,
    block_mask: Any,
    scale: Any,
    softcap: Any,
    sinks: Any,
    deterministic: Any,
    impl: str,
    return_lse: bool,
) -> RanksCall:
    check_choice(OP, "method", method, METHODS)
    check_impl_and_lse(OP, impl, return_lse)
    if plan is not None:
        _check_plan(plan, members, method, q)
    if cu_seqlens is not None:
        check_cu_seqlens(OP, "cu_seqlens", cu_seqlens)
    if block_mask is not None:
        check_is_mask(block_mask)
    if method != "heads":
        check_sinks(OP, sinks, q)
        if plan is not None and block_mask is not None:
            length = plan.seq_length
            block_mask.check_problem(OP, q.shape[0], q.shape[1], length, length)
    batch, heads, _, dim = q.shape
    shared = batch, dim, v.shape[-1], str(q.dtype), *(x.requires_grad for x in (q, k, v))
    sizes = shared if method == "heads" else (*shared, heads, k.shape[1])
    return RanksCall(
        members, plan, method, cu_seqlens, band, block_mask, scale_or_default(OP, scale, dim),
        softcap_or_off(OP, softcap), sinks, is_deterministic(OP, deterministic), impl, return_lse,
        sizes,
    )  # fmt: skip


def _check_plan(plan: Any, members: Members, method: str, q: torch.Tensor) -> None:
    if not isinstance(plan, Plan):
        raise InvalidType(message(OP, "plan", "is not a plan", "Plan", type(plan).__name__))
    if method == "heads":
        expected = "None, since each rank has whole sequences"
        raise InvalidInput(
            message(OP, "plan", "does not apply to the method heads", expected, plan)
        )
    plan.check_world(OP, members.size)
    length = plan.lengths[members.rank]
    if q.shape[2] != length:
        expected = f"{length} tokens on rank {members.rank}, as the plan says"
        raise InvalidInput(message(OP, "q", "has a wrong length", expected, q.shape[2]))


def _of_dtensors(
    q: Any, k: Any, v: Any, mesh: Any, group: Any, method: str, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    of_mesh = q.device_mesh
    try:
        method = _method_of_dtensors(q, k, v, mesh, group, method)
    except BskError as error:
        # with a plan, `explain` is asked by one rank alone
        alone = is_explaining() and isinstance(options["plan"], Plan)
        if of_mesh.ndim == 1 and not alone:
            members = members_of(OP, of_mesh, None)
            agree_once(OP, members, None, str, error)
        raise
    local = (x.to_local() for x in (q, k, v))
    out, lse = attention(*local, mesh=of_mesh, method=method, return_lse=True, **options)
    shape = torch.Size((*q.shape[:3], v.shape[3]))
    return _placed(out, q, shape), _placed(lse, q, q.shape[:3])


def _method_of_dtensors(q: Any, k: Any, v: Any, mesh: Any, group: Any, method: str) -> str:
    """The method, "heads" where `auto` finds whole sequences; raises for other placements."""
    if not all(isinstance(x, DTensor) for x in (k, v)):
        got = ", ".join(type(x).__name__ for x in (q, k, v))
        raise InvalidType(message(OP, "q/k/v", "are of different kinds", "all DTensors", got))
    of_mesh, placements = q.device_mesh, q.placements
    if any(x.device_mesh != of_mesh or x.placements != placements for x in (k, v)):
        got = ", ".join(str(x.placements) for x in (q, k, v))
        raise InvalidInput(message(OP, "q/k/v", "are placed differently", "one placement", got))
    if group is not None or (mesh is not None and mesh != of_mesh):
        problem = "does not apply to DTensors, which have a mesh"
        raise InvalidInput(message(OP, "mesh/group", problem, "None", "another"))
    if of_mesh.ndim == 1 and placements[0] == Shard(1) and method in ("auto", "heads"):
        method = "heads"
    elif of_mesh.ndim != 1 or placements[0] != Shard(2) or method == "heads":
        expected = "Shard(2) on a mesh of one dimension, or Shard(1) for the method heads"
        got = f"{placements} on {of_mesh.ndim} dimensions, method {method!r}"
        raise Unsupported(message(OP, "q/k/v", "are placed otherwise", expected, got))
    return method


def _placed(x: torch.Tensor, like: DTensor, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=shape, stride=stride)
