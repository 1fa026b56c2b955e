"""`sparse_attention`: refusals, choices, compilers and modes."""

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.sparse_attention import op

from . import problems


@pytest.fixture
def given():
    return problems.dense(batch=2, heads=(4, 2), lists=2, gate=True, sinks=True)


def test_reference_is_what_it_says(given):
    problems.check_forward(given, "reference")
    problems.check_gradients(given, "reference")


def test_operators(given):
    (q, k, v, chosen), options = given
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    call = problems.call_of((q, k, v, chosen), {**options, "window": 3})
    arguments = op.operator_arguments(call, "eager")
    torch.library.opcheck(torch.ops.bsk.sparse_attn_fwd.default, tuple(arguments))
    again = op.operator_arguments(op.call_of(arguments), "eager")
    for name, before, after in zip(arguments._fields, arguments, again, strict=True):
        same = torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
        assert same, name


def test_compiled(given):
    (q, k, v, chosen), options = given

    def run(q, k, v, ids, counts):
        own = bsk.KeySelection._from_tensors(ids, counts, 16, 33)
        return bsk.sparse_attention(q, k, v, own, **options) * 2

    q = q.requires_grad_()
    arguments = (q, k, v, chosen.ids, chosen.counts)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    ours, plain = compiled(*arguments), run(*arguments)
    assert torch.equal(ours, plain)
    gradients = (torch.autograd.grad(x.square().sum(), q)[0] for x in (ours, plain))
    assert torch.equal(*gradients)


def test_explained(given):
    arguments, options = given
    decision = bsk.explain(bsk.sparse_attention, *arguments, **options, window=5)
    assert decision.chosen == "eager"
    text = str(decision.problem)
    assert "3 entries of 16 in 2 lists" in text and "local, sinks, gate" in text


def test_autocast_casts_the_operands_only(given):
    (q, k, v, chosen), options = given
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = bsk.sparse_attention(q, k, v, chosen, **options, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    low = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(out, bsk.sparse_attention(*low, chosen, **options))


def test_one_selection_for_all_sequences(given):
    (q, k, v, chosen), _ = given
    one = bsk.KeySelection(chosen.ids[:1], chosen.counts[:1], granularity=16, kv_len=33)
    gate = problems.gates(one)
    problems.check_gradients(((q, k, v, one), {"gate": gate}), "eager")
    problems.check_gradients(((q, k, v, one), {"gate": gate}), "triton")


def test_expanded_output_gradients(given):
    (q, k, v, chosen), options = given
    q = q.requires_grad_()
    out = bsk.sparse_attention(q, k, v, chosen, **options)
    (dq,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    assert torch.equal(dq, torch.autograd.grad(out, q, torch.ones_like(out))[0])


@pytest.mark.parametrize("impl", ["eager", "triton"])
@pytest.mark.parametrize("sizes", [(0, 2, 2, 5), (1, 0, 0, 5), (1, 2, 2, 0)])
def test_nothing_to_compute(sizes, impl):
    batch, heads, kv_heads, tokens = sizes
    q = torch.zeros(batch, heads, tokens, 16, requires_grad=True)
    k = v = torch.zeros(batch, kv_heads, 20, 16)
    indices = torch.zeros(batch, 1, tokens, 1, dtype=torch.int32)
    chosen = bsk.KeySelection.from_indices(indices, granularity=16, kv_len=20)
    out = bsk.sparse_attention(q, k, v, chosen, impl=impl)
    out.sum().backward()
    assert out.shape == q.shape and q.grad.shape == q.shape


@pytest.mark.parametrize("impl", ["eager", "triton"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_gates_of_lists_without_entries(tokens, impl):
    q = torch.randn(1, 4, tokens, 16, requires_grad=True)
    k = v = torch.randn(1, 2, 20, 16)
    indices, gate = torch.zeros(1, 2, tokens, 0).int(), torch.zeros(1, 2, tokens, 0)
    chosen = bsk.KeySelection.from_indices(indices, granularity=16, kv_len=20)
    gate.requires_grad_()
    bsk.sparse_attention(q, k, v, chosen, window=3, gate=gate, impl=impl).sum().backward()
    same = q.detach().requires_grad_()
    bsk.attention(same, k, v, causal=True, window=3).sum().backward()
    torch.testing.assert_close(q.grad, same.grad)
    assert gate.grad.shape == gate.shape


def test_selections_made_in_inference_mode_train(given):
    (q, k, v, chosen), options = given
    with torch.inference_mode():
        made = bsk.KeySelection(
            chosen.ids.clone(), chosen.counts.clone(), granularity=chosen.granularity,
            kv_len=chosen.kv_len,
        )  # fmt: skip
    q = q.requires_grad_()
    grads = [
        torch.autograd.grad(bsk.sparse_attention(q, k, v, x, **options).square().sum(), q)[0]
        for x in (made, chosen)
    ]
    assert torch.equal(*grads)


def test_double_backward_is_refused(given):
    (q, k, v, chosen), options = given
    q = q.requires_grad_()
    out = bsk.sparse_attention(q, k, v, chosen, **options)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(bsk.Unsupported, match="no backward of the backward"):
        dq.sum().backward()


def test_values_are_checked_where_they_are_read(given):
    (q, k, v, chosen), _ = given
    ids = chosen.ids.clone()
    ids[1, 0, 3, 0] = 50
    bad = bsk.KeySelection._from_tensors(ids, chosen.counts, 16, 33)
    with pytest.raises(bsk.InvalidInput, match=r"ids\[1, 0, 3, 0\] is out of range"):
        bsk.sparse_attention(q, k, v, bad)


def test_wrong_pages_and_lengths():
    arguments, options = problems.paged()
    wrong = {**options, "cache_seqlens": torch.tensor([1, 1000], dtype=torch.int32)}
    with pytest.raises(bsk.InvalidInput, match=r"cache_seqlens\[1\] is out of range"):
        bsk.sparse_attention(*arguments, **wrong)
    options["page_table"][1, 2] = 77
    with pytest.raises(bsk.InvalidInput, match=r"page_table\[1, 2\] is out of range.*got 77"):
        bsk.sparse_attention(*arguments, **options)


def test_gradients_through_pages_are_refused():
    (q, k, v, chosen), options = problems.paged()
    with pytest.raises(bsk.Unsupported, match="k requires a gradient, which keys in pages"):
        bsk.sparse_attention(q, k.requires_grad_(), v, chosen, **options)


CHOSEN = problems.selection(1, 1, 5, 2, 20, 16)
Q, K, V = torch.zeros(1, 4, 5, 8), *torch.zeros(2, 1, 2, 20, 8)
OFFSETS = torch.tensor([0, 5], dtype=torch.int32)
TABLE = torch.zeros(1, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"selection": torch.zeros(1)}, bsk.InvalidType, "is not a selection of keys.*got Tensor"),
        (
            {"q": Q[:, :, :4]},
            bsk.InvalidInput,
            r"expected \[1, 1 or 2 or 4, 4, 20\], got \[1, 1, 5",
        ),
        ({"k": K[:, :, :9], "v": V[:, :, :9]}, bsk.InvalidInput, "was made for other sizes"),
        ({"q": Q[:, :3]}, bsk.InvalidInput, "3 query heads not divisible by 2 kv heads"),
        ({"gate": torch.ones(1, 1, 5, 3)}, bsk.InvalidInput, "gate has a wrong shape"),
        ({"gate": torch.ones(1, 1, 5, 2).int()}, bsk.InvalidType, "gate has an unsupported dtype"),
        ({"window": 0}, bsk.InvalidInput, "window"),
        ({"causal": 3}, bsk.InvalidType, "causal"),
        ({"impl": "sm90"}, bsk.Unsupported, "cannot run this: needs sm_90, this is cpu"),
        ({"impl": "fast"}, bsk.InvalidInput, "impl is unknown"),
        ({"deterministic": 1}, bsk.InvalidType, "deterministic is not a bool"),
        ({"return_lse": "yes"}, bsk.InvalidType, "return_lse is not a bool"),
        ({"cu_seqlens_q": OFFSETS}, bsk.InvalidInput, "belong together.*only cu_seqlens_q"),
        ({"page_table": TABLE}, bsk.InvalidInput, "belong together.*only page_table"),
        ({"softcap": -1.0}, bsk.InvalidInput, "softcap is not positive"),
        ({"sinks": torch.zeros(3)}, bsk.InvalidInput, "sinks has a wrong shape"),
    ],
)
def test_refusals(changed, error, text):
    given = {"q": Q, "k": K, "v": V, "selection": CHOSEN, **changed}
    with pytest.raises(error, match=text):
        bsk.sparse_attention(**given)


def test_layouts_that_exclude_each_other():
    (q, k, v, chosen), options = problems.packed()
    tables = {"page_table": TABLE, "cache_seqlens": OFFSETS[:1]}
    with pytest.raises(bsk.InvalidInput, match="exclude each other"):
        bsk.sparse_attention(q, k, v, chosen, **options, **tables)


def test_head_dims_that_no_kernel_takes():
    q = k = v = torch.zeros(1, 1, 5, 300)
    chosen = problems.selection(1, 1, 5, 2, 5, 16)
    assert bsk.sparse_attention(q, k, v, chosen).shape == (1, 1, 5, 300)
    with pytest.raises(bsk.Unsupported, match="needs 16-bit tensors for head dimensions above 256"):
        bsk.sparse_attention(q, k, v, chosen, impl="triton")
