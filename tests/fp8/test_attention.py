"""Attention over e4m3 tensors against fp64 on what they stand for, and `bsk.fp8.attention`."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.ragged import api as ragged_api
from blackwell_sparsek.reference import fp8 as oracle_fp8
from blackwell_sparsek.reference.attention import attention as oracle_attention
from blackwell_sparsek.testing import layouts, poison
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

E4M3 = torch.float8_e4m3fn
KERNELS = pytest.mark.parametrize("impl", ["triton", "eager"])


def tensors(lengths, heads, dims, batch=1, device="cpu", turned=False):
    """e4m3 tensors, and scales in every form."""
    (sq, sk), (hq, hkv), (d, dv) = lengths, heads, dims
    q = torch.randn(batch, hq, sq, d, device=device) * 3
    k = torch.randn(batch, hkv, sk, d, device=device)
    v = torch.randn(batch, hkv, sk, dv, device=device)
    q, k = (bsk.fp8.quantize(x, "block", impl="eager") for x in (q, k))
    v = bsk.fp8.quantize(v, "channel", transposed=turned, impl="eager")
    scales = {"q_descale": q.descale, "k_descale": k.descale, "v_descale": v.descale}
    return (q.data, k.data, v.data), scales


def in_fp32(q, k, v, spec):
    """The oracle's formula in the precision of the kernels."""
    return oracle_attention(q.float(), k.float(), v.float(), spec, torch.float32)


def check(given, scales, impl, out_dtype=torch.float32, function=bsk.attention, **options):
    """Within twice of what fp32, and weights that are rounded to fp16, the operands, may cost."""
    with poison.poisoned_empty():
        out, lse = function(
            *given, **scales, out_dtype=out_dtype, return_lse=True, impl=impl, **options
        )
    assert out.dtype == out_dtype and lse.dtype == torch.float32
    oracle = {"out_dtype": torch.float32, "impl": "reference", **scales, **options}
    exact, exact_lse = function(*given, return_lse=True, **oracle)
    with mock.patch.object(oracle_fp8, "attention", in_fp32):
        plain, plain_lse = function(*given, return_lse=True, **oracle)
    q, k, v, *offsets = given
    magnitude = function(q, k, (v.view(torch.uint8) & 0x7F).view(E4M3), *offsets, **oracle)
    rounded = exact + (plain - exact).abs() + magnitude * 2.0**-11
    assert_within_budget(out, exact.double(), rounded)
    assert_within_budget(lse, exact_lse.double(), plain_lse, roundings=3.0)
    return out


@KERNELS
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("lengths", "heads", "dims"),
    [
        ((1, 1), (1, 1), (8, 8)),
        ((65, 129), (2, 1), (64, 64)),
        ((130, 140), (2, 1), (40, 72)),
        ((17, 140), (1, 1), (256, 128)),
    ],
)
def test_sizes(impl, turned, lengths, heads, dims, device):
    check(*tensors(lengths, heads, dims, device=device, turned=turned), impl)


@KERNELS
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": 40},
        {"window": (3, None), "softcap": 2.0},
        {"scale": -0.3},
        {"scale": 0.0},
        {"sinks": True, "causal": True},
        {"mask": (64, 64)},
        {"mask": (64, 16), "causal": True},
        {"mask": (32, 256), "softcap": 5.0},
    ],
    ids=str,
)
def test_options(impl, options, device):
    given, scales = tensors((70, 150), (2, 1), (16, 16), device=device, turned=True)
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(2, device=device)
    if block := options.pop("mask", None):
        grid = (1, 2, -(-70 // block[0]), -(-150 // block[1]))
        keep = (torch.rand(grid) < 0.4).to(device)
        options["block_mask"] = bsk.BlockMask.from_dense(keep, block, seq_lengths=(70, 150))
    check(given, scales, impl, **options)


@KERNELS
@pytest.mark.parametrize("scaled", ["k_descale", "v_descale"])
def test_keys_that_are_the_values(impl, scaled, device):
    """As many blocks of keys as channels: only the role says which of them a scale is for."""
    x = torch.randn(1, 1, 2048, 16) * torch.linspace(0.1, 3, 2048).view(-1, 1)
    made = bsk.fp8.quantize(x.to(device), "block", impl="eager")
    q = bsk.fp8.quantize(torch.randn(1, 1, 30, 16, device=device), "head", impl="eager")
    scales = {"q_descale": q.descale, scaled: made.descale}
    check((q.data, made.data, made.data), scales, impl)
    # scaled in fp64: scores are in the hundreds, and fp32 would round them
    queries, k, v = (x.double() for x in (q.data, made.data, made.data))
    queries = queries * q.descale.double()[..., None, None]
    factors = made.descale.double()
    if scaled == "k_descale":
        k = k * factors.repeat_interleave(128, -1)[..., None]
    else:
        v = v * factors.view(1, 1, 1, 16)
    exact = torch.softmax(queries @ k.mT / 4, -1) @ v
    options = {"out_dtype": torch.float32, "impl": "reference"}
    oracle = bsk.attention(q.data, made.data, made.data, **scales, **options)
    assert_within_budget(oracle, exact, exact.float())


@KERNELS
@pytest.mark.parametrize("form", ["none", "one", "head", "broadcast", "full"])
def test_forms_of_scales(impl, form, device):
    given, _ = tensors((140, 140), (2, 2), (16, 24), batch=2, device=device)
    batch, names = 2, ("q_descale", "k_descale", "v_descale")
    sizes = {"none": None, "one": [()] * 3, "head": [(batch, 2)] * 3}
    sizes["broadcast"] = [(1, 2), (batch, 1), (1, 2, 24)]
    sizes["full"] = [(batch, 2, 2), (1, 2, 2), (batch, 1, 24)]
    scales = {}
    if form == "none":
        # scaled numbers fill the range of e4m3, and scores of 10^5 have no digits left
        given = tuple((x.float() / 64).to(E4M3) for x in given)
    else:
        made = (0.1 + torch.rand(size, device=device) for size in sizes[form])
        scales = dict(zip(names, made, strict=True))
    check(given, scales, impl)


@pytest.mark.parametrize("impl", ["triton", "eager"])
@pytest.mark.parametrize("scaled", ["none", "one", "sequence"])
def test_packed_sequences(impl, scaled, device):
    lengths = [(0, 3), (65, 65), (1, 140), (20, 0)]
    (tq, tk), (hq, hkv), dim = (sum(x) for x in zip(*lengths, strict=True)), (4, 2), 32
    given = [torch.randn(t, h, dim, device=device).to(E4M3) for t, h in ((tq, hq), (tk, hkv))]
    given.append(torch.randn(tk, hkv, dim, device=device).to(E4M3))
    offsets = [torch.tensor([0, *x]).cumsum(0).int().to(device) for x in zip(*lengths, strict=True)]
    sizes = {"none": None, "one": [(1,)] * 3, "sequence": [(4, hq), (4, 1), (1, hkv, dim)]}[scaled]
    names, scales = ("q_descale", "k_descale", "v_descale"), {}
    if sizes is not None:
        made = (0.1 + torch.rand(size, device=device) for size in sizes)
        scales = dict(zip(names, made, strict=True))
    options = {"max_seqlen_q": 65, "max_seqlen_k": 140, "causal": True}
    check((*given, *offsets), scales, impl, function=bsk.attention_varlen, **options)


@KERNELS
@pytest.mark.parametrize("start", range(3))
def test_every_tensor_with_strides_of_its_own(impl, start, device):
    given, scales = tensors((33, 50), (4, 2), (16, 16), device=device)
    bits = layouts.different_layouts(*(x.view(torch.uint8) for x in given), start=start)
    check([x.view(E4M3) for x in bits], scales, impl)


@KERNELS
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_output_dtypes(impl, out_dtype, device):
    given, scales = tensors((40, 50), (2, 1), (16, 16), device=device)
    check(given, scales, impl, out_dtype=out_dtype)
    assert bsk.attention(*given, **scales, impl=impl).dtype == torch.bfloat16


@KERNELS
def test_many_keys_stay_accurate(impl, device):
    """Sums over 2k keys of one sign: a short accumulator would lose what comes last."""
    given, scales = tensors((16, 2048), (1, 1), (16, 16), batch=1, device=device)
    q, k, v = given
    check((q, k, (v.float().abs() + 1).to(E4M3)), scales, impl)


def test_keys_that_nobody_sees_may_be_nan(device):
    given, scales = tensors((20, 300), (1, 1), (16, 16), device=device)
    q, k, v = given
    k.view(torch.uint8)[:, :, 40:] = 0x7F
    v.view(torch.uint8)[:, :, 256:] = 0x7F
    keep = torch.zeros(1, 1, 1, 19, dtype=torch.bool, device=device)
    keep[..., :2] = True
    mask = bsk.BlockMask.from_dense(keep, (32, 16), seq_lengths=(20, 300))
    for impl in ("triton", "eager"):
        out = bsk.attention(q, k, v, **scales, block_mask=mask, impl=impl)
        assert out.isfinite().all()


def test_lengths_compile_nothing_new(run_recorder):
    script = """
import importlib
kernels = importlib.import_module("blackwell_sparsek.attention.triton.forward_fp8")
from blackwell_sparsek.calls.fp8 import Fp8AttentionCall

kernels._attn_fwd_fp8_kernel = Recorder(kernels._attn_fwd_fp8_kernel)

def call(s, h):
    q, k, v = (torch.empty(2, n, s, 64, dtype=torch.float8_e4m3fn) for n in (2 * h, h, h))
    spec = AttnSpec(0.125, max_q=s, max_k=s)
    scales = (torch.ones(2, 2 * h, -(-s // 128)), torch.ones(2, h, 1), torch.ones(1, h, 64))
    return Fp8AttentionCall(AttentionCall(q, k, v, spec), *scales, torch.bfloat16)

sizes = [(s, h) for s in (2, 17, 128, 2048) for h in (2, 4)]
calls = [(lambda made=call(s, h): kernels.forward(made)) for s, h in sizes]
print(json.dumps(variants(calls)))
"""
    assert run_recorder(script) == 1


def test_compiles_without_a_break():
    given, scales = tensors((40, 50), (2, 1), (16, 16), turned=True)

    def attend(q, k, v, a, b, c):
        return bsk.attention(q, k, v, q_descale=a, k_descale=b, v_descale=c, causal=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    args = (*given, *scales.values())
    assert torch.equal(compiled(*args), attend(*args))


def test_operator():
    given, scales = tensors((40, 50), (2, 1), (16, 16), turned=True)
    lengths, band = (None, None, 40, 50, [], []), (2**30, 0)
    args = (*given, *scales.values(), torch.bfloat16, *lengths, *band, 0.25, 0.0, None, None, None)
    args = (*args, False)
    # the schema test multiplies its inputs, which PyTorch does not do in fp8
    op = torch.ops.bsk.attn_fwd_fp8.default
    torch.library.opcheck(op, (*args, "eager"), test_utils=("test_faketensor",))


def test_explain():
    given, scales = tensors((40, 50), (2, 1), (16, 16))
    chosen = bsk.explain(bsk.attention, *given, **scales)
    assert chosen.chosen == "eager" and "triton" in chosen.reasons


def test_explain_of_attention_that_rounds_is_about_attention():
    q = torch.randn(1, 4, 40, 16, dtype=torch.bfloat16)
    decision = bsk.explain(bsk.fp8.attention, q, q[:, :2], q[:, :2], causal=True)
    assert decision.op == "attn_fwd_fp8" and decision.chosen == "eager"
    assert "queries 40, keys 40" in str(decision)


def packed(**change):
    x = normal(10, 4, 16, seed=1).to(E4M3)
    offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    given = {"q": x, "k": x, "v": x, "max_seqlen_q": 7, "max_seqlen_k": 7} | change
    return bsk.attention_varlen(cu_seqlens_q=offsets, cu_seqlens_k=offsets, **given)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"chunk": 4}, "chunk"),
        ({"seqused_k": torch.tensor([1, 2], dtype=torch.int32)}, "seqused_k"),
        ({"align": "top_left"}, "align"),
        ({"batch_invariant": True, "k_scale": torch.ones(())}, "k_scale, batch_invariant"),
        *(({name: 1}, name) for name in ragged_api._FURTHER),
    ],
)
def test_options_without_packed_fp8_are_named(change, named):
    text = f"attention_varlen: q in fp8 does not go with {named}; expected packed q, k and v"
    with pytest.raises(bsk.Unsupported, match=text):
        packed(**change)


@pytest.mark.parametrize("name", ragged_api._FOR_FP8)
def test_arguments_of_packed_fp8_are_named(name):
    q, offsets = normal(10, 4, 16, seed=2), torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(bsk.InvalidInput, match=f"^attention_varlen: {name} goes with packed fp8"):
        bsk.attention_varlen(
            q, q, q, offsets, offsets, max_seqlen_q=10, max_seqlen_k=10, chunk=4, **{name: 1}
        )


def test_slopes_do_not_go_with_packed_fp8():
    with pytest.raises(bsk.Unsupported, match="alibi_slopes does not go with fp8 tensors"):
        packed(alibi_slopes=torch.ones(4))


def test_wider_queries_over_packed_fp8_keys_need_no_factors():
    q, one = normal(10, 4, 16, seed=2), torch.ones(())
    assert torch.equal(packed(q=q), packed(q=q, k_scale=one, v_scale=one))


def test_fp8_of_some_tensors_alone_is_refused():
    q = normal(1, 2, 8, 16, seed=1)
    with pytest.raises(bsk.InvalidType, match=r"k is in fp8 and q is not; .* for all of q, k, v"):
        bsk.attention(q, q.to(E4M3), q.to(E4M3))
    with pytest.raises(bsk.InvalidType, match=r"q has an unsupported dtype; .*float32, got"):
        bsk.fp8.attention(q.to(E4M3), q, q)
    gate = (torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    with pytest.raises(bsk.Unsupported, match="key_gate does not go with fp8 tensors"):
        bsk.attention(*[q.to(E4M3)] * 3, key_gate=gate)


def refusal(change):
    given, scales = tensors((40, 150), (4, 2), (16, 16), batch=2)
    arguments = dict(zip(("q", "k", "v"), given, strict=True)) | scales | change
    q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
    return bsk.attention(q, k, v, **arguments)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": torch.randn(2, 4, 40, 16)}, "q is not in fp8, which q_descale.*bsk.fp8.quantize"),
        ({"k": torch.randn(2, 2, 150, 16).to(torch.float8_e5m2)}, "k is not in fp8"),
        ({"q": torch.zeros(2, 3, 40, 16).to(E4M3)}, "3 query heads not divisible by 2"),
        ({"k": torch.zeros(2, 2, 149, 16).to(E4M3)}, "do not match"),
        ({"q": torch.zeros(2, 4, 40, 32).to(E4M3)[..., ::2]}, "contiguous in its last dimension"),
        ({"q_descale": torch.ones(3, 4)}, "q_descale has a wrong shape.*got \\[3, 4\\]"),
        ({"k_descale": torch.ones(2, 2, 3)}, "k_descale has a wrong shape.*2\\]"),
        ({"v_descale": torch.ones(2, 2).double()}, "v_descale has an unsupported dtype"),
        ({"out_dtype": torch.float64}, "out_dtype is unknown"),
        ({"deterministic": True}, "deterministic is about gradients"),
        ({"q": torch.zeros(2, 4, 40, 16).to(E4M3).requires_grad_()}, "bsk.fp8.attention on 16-bit"),
        ({"q_descale": torch.ones(1).requires_grad_()}, "q_descale requires gradients, which fp8"),
        ({"k_descale": torch.ones(2, 2).requires_grad_()}, "k_descale requires gradients"),
        ({"v_descale": torch.ones(2, 2).requires_grad_()}, "v_descale requires gradients"),
        ({"sinks": torch.ones(4).requires_grad_()}, "sinks requires gradients.*on 16-bit"),
    ],
)
def test_refusals(change, text):
    with pytest.raises((bsk.InvalidInput, bsk.InvalidType), match=f"(?s){text}"):
        refusal(change)


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_derivatives_of_scales_by_transforms_are_refused(name):
    given, scales = tensors((40, 150), (4, 2), (16, 16), batch=2)

    def attend(scale):
        return bsk.attention(*given, **{**scales, name: scale}).float().sum()

    scale = torch.ones(1)
    with pytest.raises(bsk.Unsupported, match=f"{name} has a forward-mode derivative"):
        torch.func.jvp(attend, (scale,), (torch.ones(1),))
    with pytest.raises(bsk.Unsupported, match=f"{name} is differentiated by torch.func"):
        torch.func.grad(attend)(scale)


@pytest.mark.parametrize("name", ["sinks", "q_descale", "k_descale", "v_descale"])
def test_gradients_of_packed_calls_are_refused(name):
    x, offsets = torch.ones(8, 2, 16).to(E4M3), torch.tensor([0, 8], dtype=torch.int32)
    given = {name: torch.ones(2 if name == "sinks" else 1, requires_grad=True)}
    call = (x, x, x, offsets, offsets)
    lengths = {"max_seqlen_q": 8, "max_seqlen_k": 8}
    with pytest.raises(bsk.InvalidInput, match=f"{name} requires gradients"):
        bsk.attention_varlen(*call, **lengths, **given)
    with torch.no_grad():
        out = bsk.attention_varlen(*call, **lengths, **given)
    assert not out.requires_grad


def test_a_recorded_call_does_not_hide_a_gradient():
    given, scales = tensors((40, 50), (2, 1), (16, 16))
    sinks = torch.ones(2)
    for _ in range(3):
        bsk.attention(*given, **scales, sinks=sinks)
    with pytest.raises(bsk.InvalidInput, match="sinks requires gradients"):
        bsk.attention(*given, **scales, sinks=sinks.requires_grad_())


def test_arguments_of_fp8_are_refused_for_other_dtypes():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(bsk.InvalidInput, match="q is not in fp8, which out_dtype"):
        bsk.attention(q, q, q, out_dtype=torch.float32)
    offsets = torch.tensor([0, 4]).int()
    pages = torch.randn(2, 4, 1, 8)
    with pytest.raises(bsk.InvalidInput, match="v_descale goes with packed fp8 keys"):
        bsk.attention_varlen(
            torch.randn(4, 1, 8), pages, pages, offsets, max_seqlen_q=4, v_descale=torch.ones(1),
            cache_seqlens=torch.tensor([4]).int(), page_table=torch.tensor([[0]]),
        )  # fmt: skip


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("dim", [64, 40])
def test_fp8_attention_is_near_the_exact_one(impl, dim, device):
    q = torch.randn(2, 4, 70, dim, device=device)
    k = torch.randn(2, 2, 150, dim, device=device) + 3 * torch.randn(dim, device=device)
    v = torch.randn(2, 2, 150, dim, device=device)
    out, lse = bsk.fp8.attention(q, k, v, causal=True, return_lse=True, impl=impl)
    exact, exact_lse = bsk.attention(q, k, v, causal=True, return_lse=True)
    assert out.dtype == q.dtype
    # a rounding to e4m3 is wrong by at most 1/16, by 1/50 on average
    assert (out - exact).norm() <= exact.norm() / 16
    assert (lse - exact_lse).abs().max() <= exact_lse.abs().max() / 16


@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_are_those_of_the_exact_attention(sinks):
    q, k, v = (torch.randn(1, h, 50, 16, requires_grad=True) for h in (4, 2, 2))
    leaves = [q, k, v]
    options = {"causal": True}
    if sinks:
        options["sinks"] = torch.randn(4, requires_grad=True)
        leaves.append(options["sinks"])
    dout = torch.randn(1, 4, 50, 16)
    out = bsk.fp8.attention(q, k, v, **options)
    made = torch.autograd.grad(out, leaves, dout)
    exact = torch.autograd.grad(bsk.attention(q, k, v, **options), leaves, dout)
    for got, expected in zip(made, exact, strict=True):
        assert torch.equal(got, expected)
    only = torch.autograd.grad(bsk.fp8.attention(q, k.detach(), v.detach(), causal=True), q, dout)
    assert only[0].shape == q.shape


@pytest.mark.parametrize("batched_keys", [True, False])
def test_gradients_inside_of_vmap(batched_keys):
    q, k, v = (torch.randn(3, 1, h, 20, 16, requires_grad=True) for h in (4, 2, 2))
    if batched_keys:
        out = torch.vmap(bsk.fp8.attention)(q, k, v)
        parts = zip(q, k, v, strict=True)
    else:
        out = torch.vmap(lambda q: bsk.fp8.attention(q, k[0], v[0]))(q.detach())
        parts = ((x, k[0], v[0]) for x in q.detach())
    expected = torch.stack([bsk.fp8.attention(*part) for part in parts])
    dout = torch.randn(out.shape)
    leaves = (q, k, v) if batched_keys else (k, v)
    made, exact = (torch.autograd.grad(x, leaves, dout) for x in (out, expected))
    assert torch.equal(out, expected)
    torch.testing.assert_close(made, exact)


def with_gradients(function, leaves, *arguments):
    """Results of a call, and the gradients of its output, whose own gradient is fixed."""
    out, lse = function(*arguments)
    assert not lse.requires_grad
    dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, lse, *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window": 20},
        {"causal": True, "dynamic": True},
        {"scale": 0.3, "hadamard": True, "impl": "eager"},
        {"sinks": True, "softcap": 4.0},
        {"mask": True, "causal": True},
    ],
    ids=str,
)
def test_compiles_with_gradients_without_a_break(options):
    q, k, v = (torch.randn(1, 50, h, 16).transpose(1, 2).requires_grad_() for h in (4, 2, 2))
    leaves, options = [q, k, v], dict(options)
    dynamic = options.pop("dynamic", False)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(4, requires_grad=True)
        leaves.append(options["sinks"])
    if options.pop("mask", False):
        keep = torch.rand(1, 4, 4, 4) < 0.6
        options["block_mask"] = bsk.BlockMask.from_dense(keep, 16, seq_lengths=(50, 50))

    def attend(q, k, v):
        return bsk.fp8.attention(q, k, v, **options, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    made = with_gradients(compiled, leaves, q, k, v)
    for got, expected in zip(made, with_gradients(attend, leaves, q, k, v), strict=True):
        assert torch.equal(got, expected) and got.stride() == expected.stride()


def test_gradients_of_some_inputs_compile():
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    v.requires_grad_()
    compiled = torch.compile(bsk.fp8.attention, fullgraph=True, backend="aot_eager")
    (made,) = torch.autograd.grad(compiled(q, k, v).sum(), v)
    assert torch.equal(made, torch.autograd.grad(bsk.fp8.attention(q, k, v).sum(), v)[0])


def test_compiled_code_knows_the_strides():
    """Also where heads share memory, which rounded queries and the output do not."""
    x = torch.randn(1, 1, 20, 16, requires_grad=True)

    def attend(x):
        out = bsk.fp8.attention(x.expand(1, 2, 20, 16), x, x)
        return out, out.stride()

    traced, strides = torch.compile(attend, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(traced, attend(x)[0]) and strides == traced.stride() == attend(x)[1]


def test_lengths_do_not_recompile():
    counts = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(bsk.fp8.attention, fullgraph=True, backend=counts, dynamic=True)
    for length in (17, 33, 50, 64):
        q, k, v = (torch.randn(1, h, length, 16, requires_grad=True) for h in (4, 2, 2))
        compiled(q, k, v, causal=True).sum().backward()
    assert counts.frame_count <= 2


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", range(3))
def test_operator_with_gradients(layout, masked):
    given = (torch.randn(1, 2, s, 16) for s in (20, 30, 30))
    q, k, v = (x.requires_grad_() for x in layouts.different_layouts(*given, start=layout))
    tensors, shape = [], []
    if masked:
        mask = bsk.BlockMask.from_dense(torch.rand(1, 2, 2, 2) < 0.6, 16, seq_lengths=(20, 30))
        tensors, shape = mask.tensors(for_gradients=True), [1, 2, 20, 30, 16, 16]
    lengths, band = (None, None, 20, 30, tensors, shape), (2**30, 0)
    args = (q, k, v, *lengths, *band, 0.25, 0.0, torch.randn(2, requires_grad=True), None, None)
    op = torch.ops.bsk.fp8_attention.default
    torch.library.opcheck(op, (*args, False, "eager", not masked, True))
    out, _ = op(*args, False, "eager", not masked, True)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(bsk.Unsupported, match="no backward of the backward"):
        torch.autograd.grad(dq.sum(), k)


def test_second_derivatives_are_refused():
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 2, 20, 16, requires_grad=True)
    out = bsk.fp8.attention(q * 1.5, k, v)
    made = torch.autograd.grad(out, (q, k, v), dout, create_graph=True)
    plain = bsk.attention(q * 1.5, k, v)
    for got, expected in zip(made, torch.autograd.grad(plain, (q, k, v), dout), strict=True):
        assert torch.equal(got, expected)
    for wanted in (q, dout):
        with pytest.raises(bsk.Unsupported, match="no backward of the backward"):
            torch.autograd.grad(made[1].sum(), wanted, retain_graph=True)


def test_mixed_dtypes_are_refused_or_cast():
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    mixed = (q.bfloat16().requires_grad_(), k.half(), v)
    with pytest.raises(bsk.InvalidType, match="q/k/v have different dtypes"):
        bsk.fp8.attention(*mixed)
    with torch.no_grad(), pytest.raises(bsk.InvalidType, match="q/k/v have different dtypes"):
        bsk.fp8.attention(*mixed)
    with torch.autocast("cpu", torch.bfloat16):
        out = bsk.fp8.attention(*mixed)
    cast = [x.detach().bfloat16() for x in mixed]
    assert out.dtype == torch.bfloat16 and torch.equal(out, bsk.fp8.attention(*cast))
    out.sum().backward()
    assert mixed[0].grad.dtype == torch.bfloat16


def test_smoothing_and_rotation_are_refused_where_they_change_the_result():
    q = torch.randn(1, 1, 8, 24)
    with pytest.raises(bsk.InvalidInput, match="smooth_k would change the result"):
        bsk.fp8.attention(q, q, q, softcap=3.0, smooth_k=True)
    with pytest.raises(bsk.InvalidInput, match=r"hadamard does not exist.*power of two"):
        bsk.fp8.attention(q, q, q, hadamard=True)
    with pytest.raises(bsk.InvalidType, match="smooth_k is not a bool"):
        bsk.fp8.attention(q, q, q, smooth_k=1)
    with pytest.raises(bsk.InvalidType, match="q has an unsupported dtype"):
        bsk.fp8.attention(q.double(), q.double(), q.double())
    exact = bsk.attention(q, q, q, softcap=3.0, sinks=torch.zeros(1))
    out = bsk.fp8.attention(q, q, q, softcap=3.0, sinks=torch.zeros(1))
    assert (out - exact).norm() <= exact.norm() / 16
