"""`sparse_attention` into a tensor that is given, by every implementation."""

from functools import partial

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.sparse_attention import op
from blackwell_sparsek.testing.inputs import normal

from ..attention.test_out import written_into
from . import problems

IMPLS = ["eager", "reference", "triton"]
PROBLEMS = {
    "blocks": partial(
        problems.dense, batch=2, heads=(4, 2), lists=2, lengths=(37, 50), dims=(16, 24), sinks=True
    ),
    "keys": partial(problems.dense, heads=(4, 1), granularity=1, most=9, gate=True, window=5),
    # queries before the first key, which see nothing
    "hidden": partial(problems.dense, lengths=(33, 17), granularity=4),
    "packed": partial(problems.packed, heads=(4, 2), lists=2, window=3),
    "paged": partial(problems.paged, q_len=3, k_lens=(3, 37, 0)),
}
kinds = pytest.mark.parametrize("kind", PROBLEMS)


@pytest.mark.parametrize("impl", IMPLS)
@kinds
def test_results_are_those_without_out(kind, impl, device):
    arguments, options = PROBLEMS[kind](device=device)
    run = partial(bsk.sparse_attention, *arguments, **options, impl=impl)
    expected, expected_lse = run(return_lse=True)
    out, lse = written_into(partial(run, return_lse=True), expected.shape, device)
    assert out.equal(expected) and lse.equal(expected_lse)
    out, lse = written_into(run, expected.shape, device)
    assert out.equal(expected) and lse is None


@pytest.mark.parametrize("impl", ["eager", "triton"])
@kinds
def test_results_keep_the_budget(kind, impl, device, monkeypatch):
    """Against the oracle, which has no `out`."""
    problem = PROBLEMS[kind](device=device)
    plain = bsk.sparse_attention

    def into(*arguments, **options):
        (q, _, v, _) = arguments
        out = q.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)
        return plain(*arguments, **options, out=out)

    monkeypatch.setattr(bsk, "sparse_attention", into)
    problems.check_forward(problem, impl)


def test_no_queries():
    arguments, options = problems.dense(lengths=(0, 20))
    out = torch.empty_like(arguments[0])
    assert bsk.sparse_attention(*arguments, **options, out=out) is out


def test_autocast_decides_the_dtype():
    (q, k, v, chosen), options = problems.dense()
    with torch.autocast("cpu", torch.bfloat16):
        expected = bsk.sparse_attention(q, k, v, chosen, **options)
        out = torch.empty_like(expected)
        assert bsk.sparse_attention(q, k, v, chosen, **options, out=out).equal(expected)
        with pytest.raises(bsk.InvalidInput, match=r"out has an unsupported dtype.*bfloat16"):
            bsk.sparse_attention(q, k, v, chosen, **options, out=torch.empty_like(q))


(Q, K, V, CHOSEN), _ = problems.dense(heads=(4, 2))
EXPANDED = torch.empty(1, 1, 17, 16).expand(-1, 4, -1, -1)


@pytest.mark.parametrize(
    ("out", "error", "why"),
    [
        ([1.0], bsk.InvalidType, r"out is not a tensor; .*got list"),
        (Q[:, :, 1:], bsk.InvalidInput, r"out has a wrong shape.*17, 16\].*\[1, 4, 16, 16\]"),
        (Q[0], bsk.InvalidInput, r"out has a wrong shape.*\[1, 4, 17, 16\], got \[4, 17, 16\]"),
        (Q.half(), bsk.InvalidType, r"out has an unsupported dtype"),
        (torch.empty_like(Q, device="meta"), bsk.InvalidInput, r"q on cpu, out on meta"),
        (Q.clone().mT.contiguous().mT, bsk.InvalidInput, r"out is not contiguous"),
        (EXPANDED, bsk.InvalidInput, r"out overlaps itself; .*got \[272, 0, 16, 1\]"),
        (Q, bsk.InvalidInput, r"out overlaps q"),
        (torch.empty_like(Q, requires_grad=True), bsk.InvalidInput, r"requires a gradient"),
    ],
)
def test_outputs_that_cannot_be_written(out, error, why):
    with pytest.raises(error, match=f"^sparse_attention: .*{why}") as caught:
        bsk.sparse_attention(Q, K, V, CHOSEN, out=out)
    assert type(caught.value) is error


@pytest.mark.parametrize("arg", ["k", "v", "sinks", "gate"])
@kinds
def test_overlap_with_what_is_read(kind, arg):
    (q, k, v, chosen), options = PROBLEMS[kind]()
    given = {**options, "k": k, "v": v}
    given["sinks"] = torch.zeros(q.shape[1])
    given["gate"] = torch.ones(chosen.ids.shape)
    size, x = (*q.shape[:-1], v.shape[-1]), given[arg]
    memory = torch.zeros(x.numel() + torch.Size(size).numel())
    given[arg] = memory[: x.numel()].view(x.shape).copy_(x)
    # one element of the input is also one of the output
    out = memory[x.numel() - 1 : -1].view(size)
    with pytest.raises(bsk.InvalidInput, match=f"out overlaps {arg}"):
        bsk.sparse_attention(q, selection=chosen, **given, out=out)
    out = memory[x.numel() :].view(size)
    got = bsk.sparse_attention(q, selection=chosen, **given, out=out)
    assert got.equal(bsk.sparse_attention(q, selection=chosen, **given))


@pytest.mark.parametrize("arg", ["q", "k", "v", "sinks", "gate"])
def test_gradients_are_refused(arg):
    (q, k, v, chosen), options = problems.dense(heads=(2, 1), gate=True, sinks=True)
    given = {"q": q, "k": k, "v": v, "selection": chosen, **options}
    given[arg].requires_grad_()
    out = torch.empty_like(q)
    problem = f"sparse_attention: {arg} requires a gradient, which a result in out does not have"
    with pytest.raises(bsk.Unsupported, match=problem):
        bsk.sparse_attention(**given, out=out)
    with torch.no_grad():
        assert bsk.sparse_attention(**given, out=out).equal(bsk.sparse_attention(**given))


def test_gradients_of_transforms_are_refused():
    out = torch.empty_like(Q)
    with pytest.raises(bsk.Unsupported, match=r"q is differentiated by torch\.func"):
        torch.func.grad(lambda q: bsk.sparse_attention(q, K, V, CHOSEN, out=out).sum())(Q)


@kinds
def test_it_compiles(kind):
    (q, k, v, chosen), options = PROBLEMS[kind]()

    def run(q, k, v, out):
        return bsk.sparse_attention(q, k, v, chosen, **options, out=out) + 1

    expected = bsk.sparse_attention(q, k, v, chosen, **options)
    out = torch.full_like(expected, torch.nan)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v, out)
    assert out.equal(expected) and compiled.equal(expected + 1)


def test_opcheck():
    (q, k, v, chosen), options = problems.dense(gate=True, sinks=True, window=3)
    call = problems.call_of((q, k, v, chosen), options)
    arguments = op.operator_arguments(call, "eager")
    torch.library.opcheck(op.sparse_attn_fwd_into, (torch.zeros_like(q), *arguments))


def test_explained():
    decision = bsk.explain(bsk.sparse_attention, Q, K, V, CHOSEN, out=torch.empty_like(Q))
    assert decision.op == "sparse_attn_fwd" and decision.chosen == "eager"


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    counted = []
    for out in (None, torch.empty_like(Q)):
        with FlopCounterMode(display=False) as counter:
            bsk.sparse_attention(Q, K, V, CHOSEN, out=out)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


@pytest.mark.sm90
@pytest.mark.parametrize("impl", ["triton", "sm90"])
@pytest.mark.parametrize(
    ("granularity", "dims"), [(64, (64, 64)), (1, (128, 128)), (1, (576, 512))], ids=str
)
def test_repeated_calls_on_a_gpu(granularity, dims, impl):
    """Into other tensors of the same layout, with other inputs."""
    sizes = {"heads": (64, 1), "lengths": (5, 130), "dims": dims, "most": 2}
    sizes |= {"granularity": granularity, "dtype": torch.bfloat16, "device": "cuda"}
    for seed in range(3):
        (q, k, v, chosen), options = problems.dense(seed=seed, **sizes)
        v = k[..., :512] if dims[0] == 576 else v
        run = partial(bsk.sparse_attention, q, k, v, chosen, **options, impl=impl)
        expected = run()
        out, _ = written_into(run, expected.shape, "cuda", torch.bfloat16)
        assert out.equal(expected)
    with pytest.raises(bsk.InvalidInput, match="out overlaps q"):
        run(out=q[..., : dims[1]])


@pytest.mark.gpu
def test_a_graph_writes_into_out():
    arguments, options = problems.dense(
        heads=(4, 1), lengths=(70, 300), dims=(64, 64), dtype=torch.bfloat16, device="cuda"
    )
    expected = bsk.sparse_attention(*arguments, **options)
    out = torch.empty_like(expected)
    bsk.sparse_attention(*arguments, **options, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bsk.sparse_attention(*arguments, **options, out=out)
    for seed in range(3):
        arguments[0].copy_(normal(*arguments[0].shape, seed=seed, device="cuda"))
        graph.replay()
        assert out.equal(bsk.sparse_attention(*arguments, **options))
