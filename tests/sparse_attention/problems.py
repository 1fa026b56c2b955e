"""Problems of sparse attention, and their comparison with the oracle in fp64."""

import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.sparse_attention import SparseAttentionCall
from blackwell_sparsek.reference import sparse_attention as reference
from blackwell_sparsek.sparse_attention.inputs import sparse_call
from blackwell_sparsek.testing import inputs
from blackwell_sparsek.testing.tolerance import assert_lse_within_budget, assert_within_budget

DEFAULTS = dict.fromkeys(
    (
        *("window", "sinks", "gate", "scale", "softcap", "cu_seqlens_q", "cu_seqlens_k"),
        *("max_seqlen_q", "max_seqlen_k", "page_table", "cache_seqlens", "deterministic", "out"),
    )
)


def selection(
    batch, heads, tokens, most, kv_len, granularity, *, seed=0, device="cpu", limits=None
):
    """Random entries: none for some queries, all places for others, neighbours mostly alike."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((batch, heads, tokens, most), -1)
    for b in range(batch):
        for h in range(heads):
            own = torch.randperm(max(-(-kv_len // granularity), 1), generator=generator)
            for t in range(tokens):
                blocks = -(-(kv_len if limits is None else limits[t]) // granularity)
                if int(torch.randint(0, 3, (), generator=generator)) == 0:
                    own = torch.randperm(max(-(-kv_len // granularity), 1), generator=generator)
                entries = own[own < blocks][:most]
                count = int(torch.randint(0, len(entries) + 1, (), generator=generator))
                count = len(entries) if t % 2 else count
                indices[b, h, t, :count] = entries[:count]
    return bsk.KeySelection.from_indices(indices.to(device), granularity=granularity, kv_len=kv_len)


def dense(
    *,
    batch=1,
    heads=(2, 1),
    lists=1,
    lengths=(17, 33),
    dims=(16, 16),
    granularity=16,
    most=3,
    gate=False,
    sinks=False,
    seed=0,
    dtype=torch.float32,
    device="cpu",
    **options,
):
    """q, k, v, selection and options of a call."""
    given = {"seed": seed, "dtype": dtype, "device": device}
    q, k, v = inputs.qkv(batch, *heads, *lengths, dims[0], v_dim=dims[1], **given)
    chosen = selection(batch, lists, lengths[0], most, lengths[1], granularity, seed=seed)
    chosen = chosen.to(device)
    if sinks:
        options["sinks"] = inputs.normal(heads[0], seed=seed + 7, device=device)
    if gate:
        options["gate"] = gates(chosen, seed=seed + 8)
    return (q, k, v, chosen), options


def gates(chosen, *, seed=0):
    """Weights from 0 to 2, some of them 0."""
    drawn = inputs.normal(*chosen.ids.shape, seed=seed, device=chosen.device)
    return (drawn + 1).clamp(0, 2)


def packed(*, q_lens=(5, 0, 17), k_lens=(9, 3, 40), heads=(2, 1), lists=1, seed=0, **rest):
    """The same for packed sequences."""
    dims, granularity = rest.pop("dims", (16, 16)), rest.pop("granularity", 16)
    most, device = rest.pop("most", 3), rest.pop("device", "cpu")
    given = {"seed": seed, "dtype": rest.pop("dtype", torch.float32), "device": device}
    q, k, v = inputs.qkv(1, *heads, sum(q_lens), sum(k_lens), dims[0], v_dim=dims[1], **given)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    limits = [kl for ql, kl in zip(q_lens, k_lens, strict=True) for _ in range(ql)]
    chosen = selection(
        1,
        lists,
        sum(q_lens),
        most,
        max(k_lens),
        granularity,
        seed=seed,
        device=device,
        limits=limits,
    )
    offsets = [
        torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=device)
        for lens in (q_lens, k_lens)
    ]
    if rest.pop("sinks", False):
        rest["sinks"] = inputs.normal(heads[0], seed=seed + 7, device=device)
    if rest.pop("gate", False):
        rest["gate"] = gates(chosen, seed=seed + 8)
    options = {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    options |= {"max_seqlen_q": max(q_lens), "max_seqlen_k": max(k_lens)}
    return (q, k, v, chosen), {**options, **rest}


def paged(*, q_len=1, k_lens=(1, 37), page_size=16, heads=(4, 2), lists=2, seed=0, **rest):
    """The same for keys in pages, in an order of their own, with NaN past the lengths."""
    dims, granularity = rest.pop("dims", (16, 16)), rest.pop("granularity", 16)
    most, device = rest.pop("most", 3), rest.pop("device", "cpu")
    dtype = rest.pop("dtype", torch.float32)
    batch, per = len(k_lens), -(-max(k_lens) // page_size) + 1
    pages = batch * per + 1
    q = inputs.normal(batch, heads[0], q_len, dims[0], seed=seed, dtype=dtype, device=device)
    k = inputs.normal(
        pages, page_size, heads[1], dims[0], seed=seed + 1, dtype=dtype, device=device
    )
    v = inputs.normal(
        pages, page_size, heads[1], dims[1], seed=seed + 2, dtype=dtype, device=device
    )
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))[: batch * per]
    table = table.view(batch, per).to(torch.int32)
    for b, length in enumerate(k_lens):
        for t in range(length, per * page_size):
            k[table[b, t // page_size], t % page_size] = torch.nan
            v[table[b, t // page_size], t % page_size] = torch.nan
        table[b, -(-length // page_size) :] = 10**6
    chosen = selection(batch, lists, q_len, most, per * page_size, granularity, seed=seed)
    if rest.pop("gate", False):
        rest["gate"] = gates(chosen.to(device), seed=seed + 8)
    options = {"page_table": table.to(device)}
    options["cache_seqlens"] = torch.tensor(k_lens, dtype=torch.int32, device=device)
    return (q, k, v, chosen.to(device)), {**options, **rest}


def call_of(arguments, options) -> SparseAttentionCall:
    """The checked call that the oracle takes."""
    given = {"causal": True, **DEFAULTS, **options}
    return sparse_call("test", *arguments, **given)


def plain_of(call):
    """Precision that plain PyTorch would compute in."""
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32


def expected_of(problem):
    """Output and lse of the oracle, and those of plain PyTorch."""
    call = call_of(*problem)
    wide = SparseAttentionCall(*(x.double() for x in (call.q, call.k, call.v)), call.spec)
    plain = reference.sparse_attention(call, precision=plain_of(call))
    return reference.sparse_attention(wide), plain


def check_forward(problem, impl):
    """Compare output and lse with the oracle; return them."""
    arguments, options = problem
    out, lse = bsk.sparse_attention(*arguments, **options, return_lse=True, impl=impl)
    (exact, exact_lse), (plain, plain_lse) = expected_of(problem)
    assert_within_budget(out, exact, plain.to(out.dtype), what="out")
    assert_lse_within_budget(lse, exact_lse, plain_lse)
    return out, lse


def check_repeats(problem):
    """Twenty calls of the Hopper kernel have the same bits."""
    arguments, options = problem
    first, *others = (
        bsk.sparse_attention(*arguments, **options, return_lse=True, impl="sm90") for _ in range(20)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def check_graph(problem):
    """A graph of the call after the first one, replayed."""
    arguments, _ = problem
    expected = bsk.sparse_attention(*arguments, impl="sm90")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bsk.sparse_attention(*arguments, impl="sm90")
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def weighted(out, lse):
    """A sum of results with random weights."""
    # rows that see nothing have an lse of -inf, whose gradient must not count
    lse = torch.where(lse.isinf(), 0.0, lse)
    dout = inputs.normal(*out.shape, seed=91, device=out.device).to(out.dtype)
    dlse = inputs.normal(*lse.shape, seed=92, device=out.device).to(lse.dtype)
    return (out * dout).sum() + (lse * dlse).sum()


def gradients_by(problem, run, dtype=None, loss=weighted):
    """Gradients, by name, of everything that has one, through `run(arguments, options)`."""
    (q, k, v, chosen), options = problem
    leaves = {"q": q, "k": k, "v": v}
    leaves |= {name: options[name] for name in ("sinks", "gate") if name in options}
    own = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in leaves.items()}
    rest = {name: own[name] for name in own if name not in "qkv"}
    total = loss(*run((own["q"], own["k"], own["v"], chosen), {**options, **rest}))
    return dict(zip(own, torch.autograd.grad(total, list(own.values())), strict=True))


def our_gradients(problem, impl, loss=weighted):
    """Gradients by an implementation."""

    def run(arguments, options):
        return bsk.sparse_attention(*arguments, **options, return_lse=True, impl=impl)

    return gradients_by(problem, run, loss=loss)


def check_gradients(problem, impl, loss=weighted):
    """Compare the gradients of everything that has one with the oracle."""

    def oracle(precision):
        return lambda a, o: reference.sparse_attention(call_of(a, o), precision=precision)

    ours = our_gradients(problem, impl, loss)
    exact = gradients_by(problem, oracle(torch.float64), torch.float64, loss)
    plain = gradients_by(problem, oracle(plain_of(call_of(*problem))), loss=loss)
    dtype = problem[0][0].dtype
    for name in ours:
        # The backward recomputes probabilities from a rounded lse, and delta from an output that
        # was rounded to the dtype of q: fp32 gradients of sinks are no more precise than that.
        made, usual = (x[name].to(dtype) for x in (ours, plain))
        assert_within_budget(made, exact[name], usual, what=f"d{name}", factor=3.0, roundings=4.0)
    return ours
