"""Problems of attention with a gate of keys, and their comparison with the oracle in fp64."""

import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.gated.inputs import gated_call
from blackwell_sparsek.calls.attention import AttentionCall
from blackwell_sparsek.calls.gated_attention import GatedCall, KeyGate
from blackwell_sparsek.reference import gated_attention as reference
from blackwell_sparsek.testing import inputs
from blackwell_sparsek.testing.tolerance import assert_lse_within_budget, assert_within_budget

OPTIONS = ("window", "block_mask", "scale", "softcap", "sinks", "deterministic")


def problem(
    *,
    batch=1,
    heads=(2, 1),
    gates=1,
    gate_batch=None,
    lengths=(17, 40),
    dims=(16, 16),
    keep=6.0,
    sinks=False,
    seed=0,
    dtype=torch.float32,
    device="cpu",
    **options,
):
    """q, k, v, u and tau of a call, and its options; tau is that of SparseK."""
    given = {"seed": seed, "dtype": dtype, "device": device}
    q, k, v = inputs.qkv(batch, *heads, *lengths, dims[0], v_dim=dims[1], **given)
    rows = batch if gate_batch is None else gate_batch
    u = inputs.normal(rows, gates, lengths[1], seed=seed + 5, device=device)
    if lengths[0] <= lengths[1]:
        tau = bsk.sparsek_causal(u, keep)[..., lengths[1] - lengths[0] :].contiguous()
    else:
        tau = inputs.normal(rows, gates, lengths[0], seed=seed + 6, device=device)
    options.setdefault("causal", True)
    if sinks:
        options["sinks"] = inputs.normal(heads[0], seed=seed + 7, device=device)
    return {"q": q, "k": k, "v": v, "u": u, "tau": tau}, options


def ours(tensors, options, impl):
    """Output and lse by an implementation."""
    q, k, v, u, tau = tensors.values()
    return bsk.attention(q, k, v, key_gate=(u, tau), **options, return_lse=True, impl=impl)


def call_of(tensors, options):
    """The checked call that the oracle takes."""
    q, k, v, u, tau = tensors.values()
    given = {**dict.fromkeys(OPTIONS), **options}
    return gated_call("test", q, k, v, (u, tau), **given, others={})


def wide(call):
    """The same call in fp64."""
    given = call.attention
    q, k, v = (x.double() for x in (given.q, given.k, given.v))
    return GatedCall(AttentionCall(q, k, v, given.spec), KeyGate(*(x.double() for x in call.gate)))


def plain_of(dtype):
    """Precision that plain PyTorch would compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_forward(tensors, options, impl):
    """Compare output and lse with the oracle; return them."""
    out, lse = ours(tensors, options, impl)
    call = call_of(tensors, options)
    exact, exact_lse = reference.gated_attention(wide(call))
    plain, plain_lse = reference.gated_attention(call, precision=plain_of(out.dtype))
    assert_within_budget(out, exact, plain.to(out.dtype), what="out")
    assert_lse_within_budget(lse, exact_lse, plain_lse)
    return out, lse


def gradients_by(tensors, options, run, dtype=None, *, rounded=False):
    """Gradients, by name, of everything that has one, through `run(tensors, options)`.

    With `rounded`, as if delta, the sum of out * dout, were half an eps of its terms too large.
    """
    leaves = {**tensors, **({"sinks": options["sinks"]} if "sinks" in options else {})}
    own = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in leaves.items()}
    rest = {**options, **({"sinks": own["sinks"]} if "sinks" in own else {})}
    out, lse = run({name: own[name] for name in tensors}, rest)
    # rows that see nothing have an lse of -inf, whose gradient must not count
    lse = torch.where(lse.isinf(), 0.0, lse)
    device = out.device
    dout = inputs.normal(*out.shape, seed=91, device=device).to(out.dtype)
    dlse = inputs.normal(*lse.shape, seed=92, device=device).to(lse.dtype)
    if rounded:
        # delta is subtracted where the gradient of lse is added
        terms = (out * dout).detach().abs().sum(-1, dtype=dlse.dtype)
        dlse = dlse - torch.finfo(out.dtype).eps / 2 * terms
    total = (out * dout).sum() + (lse * dlse).sum()
    return dict(zip(own, torch.autograd.grad(total, list(own.values())), strict=True))


def check_gradients(tensors, options, impl):
    """Compare the gradients of everything that has one with the oracle; return them."""

    def oracle(precision):
        return lambda t, o: reference.gated_attention(call_of(t, o), precision=precision)

    made = gradients_by(tensors, options, lambda t, o: ours(t, o, impl))
    exact = gradients_by(tensors, options, oracle(torch.float64), torch.float64)
    # Autograd subtracts from a product of the gradient with values the same products weighted, so
    # that nothing is left where a query sees one key. A backward that takes delta from the output
    # has the rounding of two sums left, which a small weight of that key divides.
    plain = gradients_by(tensors, options, oracle(plain_of(tensors["q"].dtype)), rounded=True)
    dtype = tensors["q"].dtype
    for name in made:
        # The backward recomputes probabilities from a rounded lse, and delta from an output that
        # was rounded to the dtype of q: fp32 gradients of the gate are no more precise than that.
        ours_of, plain_of_it = (x[name].to(dtype) for x in (made, plain))
        assert_within_budget(
            ours_of, exact[name], plain_of_it, what=f"d{name}", factor=3.0, roundings=4.0
        )
    return made
