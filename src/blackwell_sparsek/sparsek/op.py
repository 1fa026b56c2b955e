"""`bsk::sparsek` and `bsk::sparsek_causal`: weights and thresholds, and their gradients.

z [..., n] with k [...], or None and one `number` for all rows, and, for ragged rows, lengths int32
[...]; p is like z, tau [...] fp32 (fp64 for fp64 scores). The causal operator takes u [..., n] and
gives tau [..., n].
"""

from typing import Any

import torch

from ..calls.attention import compute_dtype
from ..calls.sparsek import PrefixSparsekCall, SparsekCall, SparsekProblem
from ..core.errors import Unsupported
from ..core.torch_state import without_autocast
from ..dispatch.dispatcher import Dispatcher, every_problem, interpreted_only, only_asked
from ..dispatch.machine import why_not_portable
from ..dispatch.operators import Operator, define_autograd, define_op
from . import eager

Tensors = tuple[torch.Tensor, ...]
# Entries of a row that fp32 counts exactly.
LONGEST = 2**24


def _why_not_triton(problem: SparsekProblem) -> str | None:
    """Why the kernel cannot run this problem, or None when it can."""
    if problem.length > LONGEST:
        return f"needs rows of at most {LONGEST} entries, got {problem.length}"
    return why_not_portable(problem.arch, problem.dtype)


sparsek_dispatch: Dispatcher = Dispatcher("sparsek")
causal_dispatch: Dispatcher = Dispatcher("sparsek_causal")
for _dispatch, _name in ((sparsek_dispatch, "forward"), (causal_dispatch, "prefixes")):
    _dispatch.register(
        "triton",
        _why_not_triton,
        f"blackwell_sparsek.sparsek.triton:{_name}",
        auto_passes=interpreted_only,
    )
    _dispatch.register("eager", every_problem, f"blackwell_sparsek.sparsek.eager:{_name}")
    _dispatch.register(
        "reference",
        every_problem,
        f"blackwell_sparsek.reference.sparsek:{_name}",
        auto_passes=only_asked,
    )


def _sparsek(
    z: torch.Tensor, k: torch.Tensor | None, number: float, lengths: torch.Tensor | None, impl: str
) -> Tensors:
    call = SparsekCall(z, number if k is None else k, lengths)
    with without_autocast(z.device):
        results: Tensors = sparsek_dispatch.run(impl, call)
    return results


def _sparsek_fake(z: torch.Tensor, *others: Any) -> Tensors:
    return z.new_empty(z.shape), z.new_empty(z.shape[:-1], dtype=compute_dtype(z.dtype))


def _sparsek_bwd(
    z: torch.Tensor,
    tau: torch.Tensor,
    lengths: torch.Tensor | None,
    dp: torch.Tensor | None,
    dtau: torch.Tensor | None,
) -> Tensors:
    with without_autocast(z.device):
        dz, dk = eager.backward(z, tau, lengths, dp, dtau)
    return dz.contiguous(), dk.contiguous()


def _sparsek_bwd_fake(z: torch.Tensor, tau: torch.Tensor, *others: Any) -> Tensors:
    return z.new_empty(z.shape), tau.new_empty(tau.shape)


def _causal(u: torch.Tensor, k: torch.Tensor, impl: str) -> torch.Tensor:
    with without_autocast(u.device):
        tau: torch.Tensor = causal_dispatch.run(impl, PrefixSparsekCall(u, k))
    return tau


def _causal_fake(u: torch.Tensor, k: torch.Tensor, impl: str) -> torch.Tensor:
    return u.new_empty(u.shape, dtype=compute_dtype(u.dtype))


def _causal_bwd(u: torch.Tensor, tau: torch.Tensor, dtau: torch.Tensor) -> Tensors:
    with without_autocast(u.device):
        du, dk = eager.causal_backward(u, tau, dtau)
    return du.contiguous(), dk.to(tau.dtype)


def _causal_bwd_fake(u: torch.Tensor, tau: torch.Tensor, dtau: torch.Tensor) -> Tensors:
    return u.new_empty(u.shape), tau.new_empty(tau.shape[:-1])


sparsek_op: Operator = define_op(
    "sparsek",
    "(Tensor z, Tensor? k, float number, Tensor? lengths, str impl) -> (Tensor p, Tensor tau)",
    _sparsek,
    _sparsek_fake,
)
sparsek_bwd: Operator = define_op(
    "sparsek_bwd",
    "(Tensor z, Tensor tau, Tensor? lengths, Tensor? dp, Tensor? dtau) -> (Tensor dz, Tensor dk)",
    _sparsek_bwd,
    _sparsek_bwd_fake,
)
causal_op: Operator = define_op(
    "sparsek_causal", "(Tensor u, Tensor k, str impl) -> Tensor", _causal, _causal_fake
)
causal_bwd: Operator = define_op(
    "sparsek_causal_bwd",
    "(Tensor u, Tensor tau, Tensor dtau) -> (Tensor du, Tensor dk)",
    _causal_bwd,
    _causal_bwd_fake,
)


def _save_sparsek(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    z, k, _, lengths, _ = inputs
    _, tau = output
    ctx.save_for_backward(z, tau, lengths)
    ctx.k_dtype = None if k is None else k.dtype
    ctx.set_materialize_grads(False)


def _backward_of_sparsek(ctx: Any, dp: torch.Tensor | None, dtau: torch.Tensor | None) -> Any:
    if dp is None and dtau is None:
        return (None,) * 5
    z, tau, lengths = ctx.saved_tensors
    dz, dk = sparsek_bwd(z, tau, lengths, dp, dtau)
    return dz, None if ctx.k_dtype is None else dk.to(ctx.k_dtype), None, None, None


def _save_causal(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    u, k, _ = inputs
    ctx.save_for_backward(u, output)
    ctx.k_dtype = k.dtype


def _backward_of_causal(ctx: Any, dtau: torch.Tensor) -> Any:
    u, tau = ctx.saved_tensors
    du, dk = causal_bwd(u, tau, dtau)
    return du, dk.to(ctx.k_dtype), None


def _refuse_double_backward(ctx: Any, *gradients: Any) -> Any:
    raise Unsupported("sparsek: no backward of the backward")


define_autograd("sparsek", _save_sparsek, _backward_of_sparsek)
define_autograd("sparsek_causal", _save_causal, _backward_of_causal)
for _name in ("sparsek_bwd", "sparsek_causal_bwd"):
    define_autograd(_name, lambda ctx, inputs, output: None, _refuse_double_backward)
