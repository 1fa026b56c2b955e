"""`attention` and `attention_varlen` into a tensor that is given, by every implementation."""

from functools import partial

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.attention import api
from blackwell_sparsek.testing.inputs import qkv

IMPLS = ["eager", "reference", "triton"]
OFFSETS = torch.tensor([0, 9, 9, 30], dtype=torch.int32)


def dense(device="cpu", dtype=torch.float32, **changes):
    sizes = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 37, "kv_len": 50, "head_dim": 16}
    return qkv(**(sizes | changes), seed=3, dtype=dtype, device=device)


def packed(device="cpu", dtype=torch.float32):
    q, k, v = dense(device, dtype, batch=1, q_len=30, kv_len=30)
    return tuple(x[0].transpose(0, 1).contiguous() for x in (q, k, v))


def every_other_block(q_len, kv_len, device="cpu", side=16):
    rows, columns = -(-q_len // side), -(-kv_len // side)
    keep = (torch.arange(rows)[:, None] + torch.arange(columns)) % 2 == 0
    return bsk.BlockMask.from_dense(keep.to(device), side, (q_len, kv_len))


def varlen(device="cpu", **options):
    offsets = OFFSETS.to(device)
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 21,
            "max_seqlen_k": 21, "causal": True, **options}  # fmt: skip


def written_into(run, shape, device, dtype=torch.float32):
    """What `run` writes between guards, in a tensor with gaps and swapped dimensions."""
    *lead, a, b, last = shape
    memory = torch.full((*lead, b, a, last + 16), torch.nan, device=device, dtype=dtype)
    out = memory.transpose(-3, -2)[..., 8 : 8 + last]
    got = run(out=out)
    assert memory[..., :8].isnan().all() and memory[..., 8 + last :].isnan().all()
    got, lse = got if isinstance(got, tuple) else (got, None)
    assert got is out
    return out, lse


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_dense(impl, masked, return_lse, device):
    q, k, v = dense(device)
    mask = every_other_block(37, 50, device) if masked else None
    options = {"window": 30, "softcap": 4.0, "block_mask": mask, "impl": impl}
    expected, expected_lse = bsk.attention(q, k, v, **options, return_lse=True)
    out, lse = written_into(
        partial(bsk.attention, q, k, v, **options, return_lse=return_lse), expected.shape, device
    )
    assert out.equal(expected)
    assert lse.equal(expected_lse) if return_lse else lse is None


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("masked", [False, True])
def test_packed(impl, masked, device):
    q, k, v = packed(device)
    mask = every_other_block(21, 21, device) if masked else None
    options = varlen(device, block_mask=mask, return_lse=True, impl=impl)
    expected, expected_lse = bsk.attention_varlen(q, k, v, **options)
    run = partial(bsk.attention_varlen, q, k, v, **options)
    out, lse = written_into(run, expected.shape, device)
    assert out.equal(expected) and lse.equal(expected_lse)


def test_packed_sequences_keep_their_fast_kernel():
    """With packed keys alone, `out` does not send a call to the kernels for caches."""
    q, k, v = packed()
    decided = bsk.explain(bsk.attention_varlen, q, k, v, **varlen(), out=torch.empty_like(q))
    assert decided.op == "attn_fwd"


def test_no_queries():
    q, k, v = dense(q_len=0)
    out = torch.empty_like(q)
    assert bsk.attention(q, k, v, out=out) is out


def test_autocast_decides_the_dtype():
    q, k, v = dense()
    with torch.autocast("cpu", torch.bfloat16):
        expected = bsk.attention(q, k, v)
        out = torch.empty_like(expected)
        assert bsk.attention(q, k, v, out=out).equal(expected)
        with pytest.raises(bsk.InvalidInput, match=r"out has an unsupported dtype.*bfloat16"):
            bsk.attention(q, k, v, out=torch.empty_like(q))


Q, K, V = dense()
EXPANDED = torch.empty(2, 1, 37, 16).expand(-1, 4, -1, -1)


@pytest.mark.parametrize(
    ("out", "error", "why"),
    [
        ([1.0], bsk.InvalidInput, r"out is not a tensor; .*got list"),
        (Q[:, :, 1:], bsk.InvalidInput, r"out has a wrong shape.*37, 16\].*\[2, 4, 36, 16\]"),
        (Q.half(), bsk.InvalidInput, r"out has an unsupported dtype"),
        (torch.empty_like(Q, device="meta"), bsk.InvalidInput, r"q on cpu, out on meta"),
        (Q.clone().mT.contiguous().mT, bsk.InvalidInput, r"out is not contiguous"),
        (EXPANDED, bsk.InvalidInput, r"out overlaps itself; .*got \[592, 0, 16, 1\]"),
        (Q, bsk.InvalidInput, r"out overlaps q"),
        (torch.empty_like(Q, requires_grad=True), bsk.InvalidInput, r"requires a gradient"),
    ],
)  # fmt: skip
def test_outputs_that_cannot_be_written(out, error, why):
    with pytest.raises(error, match=why):
        bsk.attention(Q, K, V, out=out)


def test_overlap_with_values():
    memory = torch.randn(2, 4, 37, 16)
    with pytest.raises(bsk.InvalidInput, match="out overlaps v"):
        bsk.attention(Q, K[:, :, :37], memory[:, :2], out=memory)


@pytest.mark.parametrize("arg", ["sinks", "alibi_slopes", "k_scale", "v_scale"])
@pytest.mark.parametrize("over", ["decode", "varlen"])
@pytest.mark.parametrize("wants_lse", [False, True])
def test_overlap_with_what_is_read_beside_a_cache(arg, over, wants_lse):
    memory = torch.zeros(2, 4, 1, 16)
    caches = torch.randn(2, 2, 2, 9, 16)
    if "scale" in arg:
        caches = caches.to(torch.float8_e4m3fn)
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    options = {"cache_seqlens": lengths, "return_lse": wants_lse}
    options |= {"k_scale": None, arg: memory.view(-1)[: 2 if "scale" in arg else 4]}
    q, out = torch.randn(2, 4, 1, 16), memory
    call = bsk.attention_decode
    if over == "varlen":
        offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
        call = partial(bsk.attention_varlen, cu_seqlens_q=offsets, max_seqlen_q=1)
        q, out = q[:, :, 0], memory[:, :, 0]
    with pytest.raises(bsk.InvalidInput, match=f"out overlaps {arg}"):
        call(q, *caches, **options, out=out)
    got = call(q, *caches, **options, out=torch.empty_like(out))
    assert (got[0] if wants_lse else got).isfinite().all()


@pytest.mark.parametrize("arg", ["q", "k", "v", "sinks"])
def test_gradients_are_refused(arg):
    given = dict(zip("qkv", dense(), strict=True)) | {"sinks": torch.zeros(4)}
    given[arg].requires_grad_()
    out = torch.empty(2, 4, 37, 16)
    with pytest.raises(bsk.Unsupported, match=f"attention: {arg} requires a gradient, .* out "):
        bsk.attention(**given, out=out)
    with torch.no_grad():
        assert bsk.attention(**given, out=out).equal(bsk.attention(**given))


def test_gradients_of_transforms_are_refused():
    out = torch.empty_like(Q)
    with pytest.raises(bsk.Unsupported, match="q requires a gradient"):
        torch.func.grad(lambda q: bsk.attention(q, K, V, out=out).sum())(Q)


def test_fp8_is_refused():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in dense())
    with pytest.raises(bsk.Unsupported, match="out does not go with fp8"):
        bsk.attention(q, k, v, out=torch.empty_like(Q))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in packed())
    with pytest.raises(bsk.Unsupported, match="out does not go with fp8"):
        bsk.attention_varlen(q, k, v, **varlen(), out=torch.empty(30, 4, 16))


@pytest.mark.parametrize("masked", [False, True])
def test_it_compiles(masked):
    mask = every_other_block(37, 50) if masked else None

    def run(out):
        return bsk.attention(Q, K, V, block_mask=mask, out=out) + 1

    out, expected = torch.empty_like(Q), bsk.attention(Q, K, V, block_mask=mask)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(out)
    assert out.equal(expected) and compiled.equal(expected + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "sm90"])
@pytest.mark.parametrize("kind", ["dense", "masked", "packed"])
def test_replayed_calls(impl, kind):
    """Calls after the first two replay their launches, into any tensor of the same layout."""
    dtype, sizes = torch.bfloat16, {"q_len": 320, "kv_len": 320, "head_dim": 64}
    options, call = {"causal": True, "impl": impl}, bsk.attention
    if kind == "masked":
        options["block_mask"] = every_other_block(320, 320, "cuda", 64)
    if kind == "packed":
        offsets = torch.tensor([0, 100, 320], dtype=torch.int32, device="cuda")
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        options |= {"max_seqlen_q": 220, "max_seqlen_k": 220}
        call = bsk.attention_varlen
    for _ in range(5):
        q, k, v = dense("cuda", dtype, **sizes)
        if kind == "packed":
            q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        expected = call(q, k, v, **options)
        out, _ = written_into(partial(call, q, k, v, **options), expected.shape, "cuda", dtype)
        assert out.equal(expected)
    with pytest.raises(bsk.InvalidInput, match="out overlaps q"):
        call(q, k, v, **options, out=q)


def test_replays_compare_out_with_all_that_is_read(monkeypatch):
    q, k, v, sinks, bias, out = (torch.zeros(1, 1, 1, 8) for _ in range(6))
    compared = []
    monkeypatch.setattr(api, "overlaps", lambda out, *others: not compared.extend(others))
    assert api._replay_extended((), (q, k, v, sinks, None, bias, out), None) is None
    assert [id(x) for x in compared] == [id(x) for x in (q, k, v, sinks, bias)]


@pytest.mark.gpu
def test_replays_notice_an_overlap_with_the_bias():
    q, k, v = dense("cuda", torch.bfloat16, q_len=64, kv_len=64, head_dim=64)
    memory = torch.zeros(*q.shape[:3], 64, dtype=q.dtype, device="cuda")
    for _ in range(4):
        bsk.attention(q, k, v, bias=memory, out=torch.empty_like(q))
    with pytest.raises(bsk.InvalidInput, match="out overlaps bias"):
        bsk.attention(q, k, v, bias=memory, out=memory)


@pytest.mark.gpu
def test_replays_notice_an_overlap_in_caches():
    """A recorded decode into `out` must not be replayed where `out` overlaps its queries."""
    q, cache = torch.randn(2, 8, 1, 64, device="cuda").half(), torch.randn(2, 2, 2, 128, 64)
    k, v = cache.cuda().half()
    lengths = torch.tensor([128, 7], dtype=torch.int32, device="cuda")
    for _ in range(4):
        bsk.attention_decode(q, k, v, cache_seqlens=lengths, out=torch.empty_like(q))
    with pytest.raises(bsk.InvalidInput, match="out overlaps q"):
        bsk.attention_decode(q, k, v, cache_seqlens=lengths, out=q)
