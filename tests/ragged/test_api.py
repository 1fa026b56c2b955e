"""`attention_varlen` over caches: against the oracle, checks, routes, gradients."""

from dataclasses import replace

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.core.errors import InvalidInput, InvalidType, Unsupported
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.ragged import api
from blackwell_sparsek.reference.ragged import attention_ragged as oracle
from blackwell_sparsek.testing.ragged_cases import RaggedCase, check_ragged, draw_ragged_case
from blackwell_sparsek.testing.tolerance import assert_within_budget


def arguments(call):
    """A call as the public function takes it."""
    band = call.band
    packed = call.cu_seqlens_k is not None
    options = {
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
        "cache_seqlens": None if packed else call.seqlens_k,
        "seqused_k": call.seqlens_k if packed else None,
        "page_table": call.page_table,
        "kv_blocks": call.kv_blocks,
        "kv_block_size": call.kv_block_size or None,
        "cache_batch_idx": call.slabs,
        "seqused_q": call.seqused_q,
        "leftpad_k": call.first_key,
        "causal": band.right == 0,
        "window": None if band in (Band(None, 0), Band(None, None)) else tuple(band),
        "chunk": call.chunk or None,
        "align": "top_left" if call.top_left else "bottom_right",
        "scale": call.scale,
        "softcap": call.softcap or None,
        "sinks": call.sinks,
        "alibi_slopes": call.alibi_slopes,
        "k_scale": call.k_scale,
        "v_scale": call.v_scale,
        "batch_invariant": call.batch_invariant,
    }
    return (call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k), options


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("impl", ["eager"])
def test_random_calls(seed, impl):
    dtypes = (torch.float16, torch.float32, torch.bfloat16, torch.float64)
    case = draw_ragged_case(seed, dtypes=dtypes)
    call = case.build("cpu")
    args, options = arguments(call)
    out, lse = bsk.attention_varlen(*args, **options, out=call.out, return_lse=True, impl=impl)
    assert out is call.out
    call.lse.copy_(lse)
    check_ragged(call, what=str(case))


@pytest.mark.parametrize("alibi", [False, True])
def test_the_problem_tells_of_slopes(alibi):
    call = RaggedCase(1, torch.float32).build("cpu")
    call = replace(call, alibi_slopes=torch.ones(call.q.shape[1]) if alibi else None)
    assert call.problem.alibi is alibi


def test_long_prompts_are_cut_into_several_parts():
    """More queries than `eager` computes at a time."""
    case = RaggedCase(1, torch.float32, q_lens=(300, 1), kv_lens=(300, 280), band=Band(40, 0))
    call = case.build("cpu")
    args, options = arguments(call)
    bsk.attention_varlen(*args, **options, out=call.out, impl="eager")
    exact, _ = oracle(call)
    plain, _ = oracle(call, torch.float32)
    assert_within_budget(call.out, exact, plain)


def test_listed_blocks_of_packed_keys():
    case = RaggedCase(21, layout="packed", block_size=16, q_lens=(1, 20), kv_lens=(60, 33))
    call = case.build("cpu")
    assert (call.kv_blocks >= 0).any() and (call.kv_blocks < 0).any()
    args, options = arguments(call)
    out, lse = bsk.attention_varlen(*args, **options, return_lse=True)
    call.out.copy_(out), call.lse.copy_(lse)
    check_ragged(call)


def test_reference_is_an_implementation():
    call = RaggedCase(2, torch.float64, padding=2).build("cpu")
    args, options = arguments(call)
    out, lse = bsk.attention_varlen(*args, **options, return_lse=True, impl="reference")
    exact, exact_lse = oracle(call)
    assert out.equal(exact) and lse.equal(exact_lse)


@pytest.mark.parametrize("seed", [0, 3])
def test_triton_route(seed, interpreted):
    """Operator, dispatch and launch of the portable kernel."""
    call = RaggedCase(seed, layout="paged", page_size=32, padding=3, sinks=True, softcap=3.0).build(
        "cpu"
    )
    args, options = arguments(call)
    out, lse = bsk.attention_varlen(*args, **options, return_lse=True, impl="triton")
    call.out.copy_(out), call.lse.copy_(lse)
    check_ragged(call)


def test_equals_decoding_and_packed_attention():
    """One query a sequence, and prompts alone: what the other two functions compute."""
    q = torch.randn(3, 4, 16, dtype=torch.float64)
    caches = torch.randn(2, 3, 2, 20, 16, dtype=torch.float64)
    lengths = torch.tensor([20, 3, 7], dtype=torch.int32)
    offsets = torch.arange(4, dtype=torch.int32)
    ours = bsk.attention_varlen(
        q, *caches, offsets, max_seqlen_q=1, cache_seqlens=lengths, causal=True, window=5
    )
    theirs = bsk.attention_decode(q[:, :, None], *caches, cache_seqlens=lengths, window=5)
    torch.testing.assert_close(ours, theirs[:, :, 0])
    k = v = torch.randn(30, 2, 16, dtype=torch.float64)
    offsets = torch.tensor([0, 1, 10, 30], dtype=torch.int32)
    packed = {"max_seqlen_q": 20, "max_seqlen_k": 20, "causal": True}
    q = torch.randn(30, 4, 16, dtype=torch.float64)
    plain = bsk.attention_varlen(q, k, v, offsets, offsets, **packed)
    ours = bsk.attention_varlen(q, k, v, offsets, offsets, **packed, out=torch.empty_like(q))
    torch.testing.assert_close(ours, plain)


def test_explain_names_the_operator():
    call = RaggedCase(3).build("cpu")
    args, options = arguments(call)
    decision = bsk.explain(bsk.attention_varlen, *args, **options)
    assert decision.op == "attn_ragged" and decision.chosen == "eager"
    assert "contiguous" in str(decision.problem)
    with pytest.raises(Unsupported, match="sm90"):
        bsk.attention_varlen(*args, **options, impl="sm90")


def test_fp8_needs_16_bit_queries_on_triton(interpreted):
    call = RaggedCase(4, torch.float32).build("cpu")
    args, options = arguments(call)
    args = (args[0], *(x.to(torch.float8_e4m3fn) for x in args[1:3]), *args[3:])
    with pytest.raises(Unsupported, match="needs float16 or bfloat16 queries for a float8 cache"):
        bsk.attention_varlen(*args, **options, impl="triton")


def test_compiles_without_graph_breaks():
    call = RaggedCase(5, torch.float32).build("cpu")
    args, options = arguments(call)

    def step(q, out):
        return bsk.attention_varlen(q, *args[1:], **options, out=out) * 2

    out = torch.zeros_like(call.out)
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(call.q, out)
    expected = bsk.attention_varlen(*args, **options)
    torch.testing.assert_close(got, expected * 2)
    torch.testing.assert_close(out, expected)


def test_autocast_casts_queries_only():
    call = RaggedCase(6, torch.bfloat16).build("cpu")
    args, options = arguments(call)
    with torch.autocast("cpu", torch.bfloat16):
        out = bsk.attention_varlen(args[0].float(), *args[1:], **options)
    assert out.dtype == torch.bfloat16
    assert out.equal(bsk.attention_varlen(*args, **options))


@pytest.mark.parametrize("options", [
    {"alibi_slopes": torch.ones(4)}, {"chunk": 4}, {"batch_invariant": True},
    {"seqused_k": torch.tensor([2, 5], dtype=torch.int32)},
])  # fmt: skip
def test_autocast_casts_packed_keys(options):
    q, k, v = torch.randn(3, 10, 4, 16, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    options = {"max_seqlen_q": 7, "max_seqlen_k": 7, "causal": True, **options}
    with torch.autocast("cpu", torch.bfloat16):
        out = bsk.attention_varlen(q, k, v, offsets, offsets, **options)
    low = [x.bfloat16() for x in (q, k, v)]
    assert out.equal(bsk.attention_varlen(*low, offsets, offsets, **options))


def test_no_queries_and_no_sequences():
    offsets = torch.zeros(1, dtype=torch.int32)
    cache = torch.zeros(0, 2, 5, 8)
    none = torch.zeros(0, dtype=torch.int32)
    for rows in (0, 3):
        out, lse = bsk.attention_varlen(
            torch.ones(rows, 4, 8), cache, cache, offsets, max_seqlen_q=0, cache_seqlens=none,
            return_lse=True,
        )  # fmt: skip
        assert out.shape == (rows, 4, 8) and out.eq(0).all() and lse.eq(-torch.inf).all()


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("changes, error, match", [
    ({"cu_seqlens_k": None, "max_seqlen_k": 9, "cache_seqlens": None}, InvalidInput,
     "cu_seqlens_k is missing; expected cu_seqlens_k and max_seqlen_k for packed keys, or cache"),
    ({"cu_seqlens_k": int32(0, 1, 2, 3)}, InvalidInput,
     "cu_seqlens_k/cache_seqlens must name the keys; expected one of the two"),
    ({"cache_seqlens": None, "seqused_q": int32(1, 1, 1)}, InvalidInput, "got neither"),
    ({"seqused_k": int32(1, 1, 1)}, InvalidInput, "seqused_k is for packed keys"),
    ({"cache_batch_idx": int32(0, 1, 2), "page_table": int32(1, 2, 3)[:, None]}, InvalidInput,
     "cache_batch_idx is for contiguous caches"),
    ({"cache_seqlens": int32(1, 2)}, InvalidInput,
     r"cache_seqlens has a wrong shape; expected \[3\]"),
    ({"cache_seqlens": torch.tensor([1, 2, 3])}, InvalidType, "cache_seqlens .* torch.int32"),
    ({"leftpad_k": int32(1)}, InvalidInput, "leftpad_k has a wrong shape"),
    ({"q": torch.zeros(1, 4, 23, 16)}, InvalidInput, r"q has a wrong rank; expected \[T, H, D\]"),
    ({"k": torch.zeros(3, 2, 40, 8)}, InvalidInput, "q/k have different head dims"),
    ({"k": torch.zeros(3, 3, 40, 16), "v": torch.zeros(3, 3, 40, 16)}, InvalidInput,
     "4 query heads not divisible by 3 kv heads"),
    ({"k": torch.zeros(4, 2, 40, 16), "v": torch.zeros(4, 2, 40, 16)}, InvalidInput,
     "k has a wrong batch size; expected 3, the sequences of cu_seqlens_q, or cache_batch_idx"),
    ({"k": torch.zeros(3, 2, 40, 16, dtype=torch.float16)}, InvalidType, "k/v have different"),
    ({"align": "left"}, InvalidInput, "align"),
    ({"chunk": 0}, InvalidInput, "chunk is too small; expected an int >= 1, got 0"),
    ({"chunk": 2.0}, InvalidType, "chunk is not an int"),
    ({"max_seqlen_q": -1}, InvalidInput, "max_seqlen_q is too small"),
    ({"batch_invariant": 1}, InvalidType, "batch_invariant is not a bool"),
    ({"deterministic": "a"}, InvalidType, "deterministic is not a bool; expected bool or None"),
    ({"return_lse": "yes"}, InvalidType, "return_lse is not a bool"),
    ({"kv_block_size": 4}, InvalidInput, "kv_block_size goes with kv_blocks"),
    ({"kv_blocks": torch.zeros(3, 2, 1, dtype=torch.int32)}, InvalidType, "kv_block_size is not"),
    ({"k_scale": torch.ones(())}, InvalidInput, "k_scale scales a cache that is not"),
    ({"alibi_slopes": torch.ones(3)}, InvalidInput, r"alibi_slopes .*\[4\]"),
    ({"alibi_slopes": torch.ones(2, 4)}, InvalidInput, r"alibi_slopes .*\[3, 4\]"),
    ({"out": torch.zeros(23, 4, 8)}, InvalidInput, r"out .*\[23, 4, 16\]"),
    ({"out": torch.zeros(23, 4, 16, dtype=torch.float16)}, InvalidType, "out has an unsupported"),
    ({"block_mask": bsk.masks.causal((20, 40), 16)}, Unsupported, "use kv_blocks"),
    ({"window": 0}, InvalidInput, "window sees no key"),
    ({"impl": "cuda"}, InvalidInput, "impl"),
    # values, which `eager` reads
    ({"cache_seqlens": int32(1, 41, 3)}, InvalidInput,
     r"cache_seqlens\[1\] is out of range; expected 0 to 40, got 41"),
    ({"cache_seqlens": int32(1, 9, 3), "max_seqlen_k": 8}, InvalidInput, "expected 0 to 8, got 9"),
    ({"cu_seqlens_q": int32(0, 5, 4, 23)}, InvalidInput, r"cu_seqlens_q\[2\] falls"),
    ({"cu_seqlens_q": int32(0, 7, 8, 24)}, InvalidInput, r"cu_seqlens_q\[3\] is out of range"),
    ({"cu_seqlens_q": int32(1, 5, 6, 23)}, InvalidInput, r"cu_seqlens_q\[0\] is out of range"),
    ({"max_seqlen_q": 16}, InvalidInput, "longer than max_seqlen_q; expected at most 16"),
    ({"seqused_q": int32(1, 18, 5)}, InvalidInput,
     r"seqused_q\[1\] is out of range; expected 0 to 17"),
    ({"leftpad_k": int32(1, -1, 5)}, InvalidInput, r"leftpad_k\[1\] is out of range"),
    ({"cache_batch_idx": int32(1, 2, 3)}, InvalidInput, r"cache_batch_idx\[2\] is out of range"),
    ({"kv_blocks": torch.full((3, 2, 1), 9, dtype=torch.int32), "kv_block_size": 8}, InvalidInput,
     r"kv_blocks\[0, 0, 0\] is out of range; expected -1 to 4, got 9"),
])  # fmt: skip
def test_refusals(changes, error, match):
    call = RaggedCase(7, torch.float32).build("cpu")
    (q, k, v, cu_q, cu_k), options = arguments(call)
    given = dict(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    with pytest.raises(error, match="attention_varlen: .*" + match):
        bsk.attention_varlen(**{**given, "max_seqlen_k": None, **changes})


def test_wrong_pages_are_named():
    call = RaggedCase(8, layout="paged").build("cpu")
    call.page_table[2, 1] = 99
    args, options = arguments(call)
    with pytest.raises(InvalidInput, match=r"page_table\[2, 1\] is out of range; expected 0 to"):
        bsk.attention_varlen(*args, **options)


def test_a_replay_tells_missing_offsets_from_those_that_are_passed_twice(monkeypatch):
    """It comes before all checks, which refuse a call that names no keys."""
    asked = []
    monkeypatch.setattr(api, "repeat", lambda cache, *given: asked.append(given))
    q, offsets = torch.randn(6, 2, 16), torch.tensor([0, 2, 6], dtype=torch.int32)
    used = torch.tensor([1, 3], dtype=torch.int32)
    sizes = {"max_seqlen_q": 4, "max_seqlen_k": 4, "seqused_k": used}
    bsk.attention_varlen(q, q, q, offsets, offsets, **sizes)
    with pytest.raises(InvalidInput, match="must name the keys"):
        bsk.attention_varlen(q, q, q, offsets, **sizes)
    (of_pair, _), (of_none, _) = asked
    assert of_pair != of_none


def test_out_must_not_overlap():
    call = RaggedCase(9, torch.float32).build("cpu")
    args, options = arguments(call)
    with pytest.raises(InvalidInput, match="out overlaps q; expected memory of its own"):
        bsk.attention_varlen(*args, **options, out=args[0])


@pytest.mark.parametrize("arg", ["q", "k", "sinks", "k_scale", "v_scale"])
def test_gradients_are_refused(arg):
    call = RaggedCase(10, torch.float32, sinks=True).build("cpu")
    args, options = arguments(call)
    if "scale" in arg:
        args = [args[0], *(x.to(torch.float8_e4m3fn) for x in args[1:3]), *args[3:]]
        options[arg] = torch.ones(())
    tensor = {"q": args[0], "k": args[1], **options}[arg].requires_grad_()
    with pytest.raises(Unsupported, match=f"{arg} requires a gradient, which a cache does not"):
        bsk.attention_varlen(*args, **options)
    with torch.no_grad():
        assert bsk.attention_varlen(*args, **options).isfinite().all()
    assert tensor.requires_grad
