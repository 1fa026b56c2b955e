"""attention_decode and check_decode_inputs: semantics at the surface, errors by type and words."""

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.core.errors import InvalidInput, InvalidType, Unsupported
from blackwell_sparsek.testing.decode_cases import DecodeCase

FP8 = torch.float8_e4m3fn


def inputs(**changes):
    """Keyword arguments of a call that is right, but for the changes."""
    call = DecodeCase(1, torch.float32, heads=(4, 2), lengths=(20, 7)).build("cpu")
    return {
        "q": call.q,
        "k_cache": call.k_cache,
        "v_cache": call.v_cache,
        "cache_seqlens": call.cache_seqlens,
        **changes,
    }


def paged(**changes):
    call = DecodeCase(1, torch.float32, heads=(4, 2), lengths=(20, 7), page_size=16).build("cpu")
    return (
        inputs(q=call.q, k_cache=call.k_cache, v_cache=call.v_cache, page_table=call.page_table)
        | changes
    )


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_it_is_attention_over_the_keys_of_each_sequence():
    call = inputs()
    out, lse = bsk.attention_decode(**call, window=9, softcap=4.0, return_lse=True)
    for b, length in enumerate((20, 7)):
        q, k, v = (call[name][b : b + 1] for name in ("q", "k_cache", "v_cache"))
        exact = bsk.attention(
            q, k[:, :, :length], v[:, :, :length], causal=True, window=9, softcap=4.0,
            return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), exact)


@pytest.mark.parametrize("impl", ["auto", "reference", "triton"])
def test_page_tables_of_64_bits(impl):
    call = paged(window=9)
    wide = call | {"page_table": call["page_table"].long()}
    assert bsk.attention_decode(**wide, impl=impl).equal(bsk.attention_decode(**call, impl=impl))
    bsk.check_decode_inputs(**wide)
    wide["page_table"][0, 0] += 2**32
    with pytest.raises(bsk.InvalidInput, match=r"page_table\[0, 0\] is out of range"):
        bsk.check_decode_inputs(**wide)


def test_generation_token_by_token_is_one_causal_call():
    q, k, v = torch.randn(3, 1, 2, 12, 16)
    whole = bsk.attention(q, k, v, causal=True)
    cache = torch.full((2, 1, 2, 16, 16), float("nan"))
    for t in range(12):
        cache[0, :, :, t], cache[1, :, :, t] = k[:, :, t], v[:, :, t]
        out = bsk.attention_decode(q[:, :, t : t + 1], *cache, cache_seqlens=ints(t + 1))
        torch.testing.assert_close(out, whole[:, :, t : t + 1])


def test_several_tokens_at_once_are_the_same_as_one_by_one():
    q, k, v = torch.randn(3, 1, 2, 12, 16)
    whole = bsk.attention(q, k, v, causal=True)
    out = bsk.attention_decode(q[:, :, 5:], k, v, cache_seqlens=ints(12))
    torch.testing.assert_close(out, whole[:, :, 5:])


def test_parts_of_a_cache_merge():
    call = inputs()
    whole = bsk.attention_decode(**call, kv_blocks=torch.arange(5).expand(2, 2, 5).int(),
                                 kv_block_size=4)  # fmt: skip
    lists = (ints(3, 0).expand(2, 2, 2), ints(4, 1, 2).expand(2, 2, 3))
    parts = [
        part
        for blocks in lists
        for part in bsk.attention_decode(**call, kv_blocks=blocks, kv_block_size=4, return_lse=True)
    ]
    torch.testing.assert_close(bsk.merge_states(*parts)[0], whole)


def test_layout_of_the_output_follows_the_queries():
    call = inputs(q=torch.randn(2, 3, 4, 16).transpose(1, 2))
    assert bsk.attention_decode(**call).stride() == call["q"].stride()


def test_autocast_casts_queries_but_no_cache():
    call = inputs()
    call |= {name: call[name].bfloat16() for name in ("k_cache", "v_cache")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bsk.attention_decode(**call).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"q": 1}, "q is not a tensor; expected torch.Tensor, got int"),
        ({"q": torch.zeros(2, 4, 1, 16, dtype=torch.int32)}, "q has an unsupported dtype"),
        ({"v_cache": torch.zeros(2, 2, 20, 16).half()}, "k_cache/v_cache have different dtypes"),
        (
            {"q": torch.zeros(2, 4, 1, 16).half()},
            "k_cache has a dtype that q does not go with; expected that of q, torch.float16, or "
            "torch.float8_e4m3fn, got torch.float32",
        ),
        ({"cache_seqlens": torch.tensor([20, 7])}, "cache_seqlens has an unsupported dtype"),
        ({"cache_seqlens": [20, 7]}, "cache_seqlens is not a tensor; expected torch.Tensor"),
        ({"causal": 1}, "causal is not a bool"),
        ({"kv_blocks": torch.zeros(2, 2, 1).int()}, "kv_block_size is not an int"),
        ({"scale": "1"}, "scale is not a number"),
        ({"return_lse": "yes"}, "return_lse is not a bool; expected bool, got str"),
    ],
)
def test_wrong_types(changes, words):
    with pytest.raises(InvalidType, match=r"^attention_decode: ") as error:
        bsk.attention_decode(**inputs(**changes))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"q": torch.zeros(4, 1, 16)}, "q has a wrong rank; expected [B, H, S, D], got [4, 1, 16]"),
        ({"q": torch.zeros(3, 4, 1, 16)}, "q/k_cache have different batch sizes"),
        ({"q": torch.zeros(2, 3, 1, 16)}, "3 query heads not divisible by 2 kv heads"),
        ({"q": torch.zeros(2, 4, 1, 8)}, "q/k_cache have different head dims"),
        ({"v_cache": torch.zeros(2, 2, 21, 16)}, "k_cache/v_cache do not match"),
        ({"k_cache": torch.zeros(2, 2, 20, 32)[..., ::2]}, "k_cache is not contiguous in its last"),
        ({"cache_seqlens": ints(1)}, "cache_seqlens has a wrong shape; expected [2], got [1]"),
        (
            {"kv_blocks": torch.zeros(2, 4, 1).int(), "kv_block_size": 4},
            "kv_blocks has a wrong shape; expected [2, 2, n], got [2, 4, 1]",
        ),
        (
            {"kv_blocks": torch.zeros(2, 2, 1).int(), "kv_block_size": 0},
            "kv_block_size is not positive; expected an int >= 1, got 0",
        ),
        ({"kv_block_size": 4}, "kv_block_size goes with kv_blocks"),
        ({"k_scale": torch.ones(())}, "k_scale scales a cache that is not; expected"),
        ({"softcap": -1.0}, "softcap is not positive"),
        ({"window": 0}, "window sees no key"),
        ({"impl": "cuda"}, "impl is unknown"),
        ({"sinks": torch.zeros(3)}, "sinks has a wrong shape; expected [4], got [3]"),
    ],
)
def test_wrong_values(changes, words):
    with pytest.raises(InvalidInput, match=r"^attention_decode: ") as error:
        bsk.attention_decode(**inputs(**changes))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"page_table": torch.zeros(1, 2).int()},
            "page_table has a wrong shape; expected [2, max_",
        ),
        (
            {"kv_blocks": torch.zeros(2, 2, 1).int(), "kv_block_size": 8},
            "kv_block_size differs from the page size; expected None or the page size 16, got 8",
        ),
        ({"k_cache": torch.zeros(3, 16, 16)}, "k_cache has a wrong rank; expected [pages, page_si"),
    ],
)
def test_wrong_pages(changes, words):
    with pytest.raises(InvalidInput, match=r"^attention_decode: ") as error:
        bsk.attention_decode(**paged(**changes))
    assert words in str(error.value)


@pytest.mark.parametrize("shape", [(3,), (1, 2), (2, 1)])
def test_wrong_scales(shape):
    call = inputs()
    call |= {name: call[name].to(FP8) for name in ("k_cache", "v_cache")}
    with pytest.raises(InvalidInput, match=r"v_scale has a wrong shape; expected \[2\]"):
        bsk.attention_decode(**call, v_scale=torch.ones(shape))


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_on_another_device(name):
    call = inputs()
    call |= {cache: call[cache].to(FP8) for cache in ("k_cache", "v_cache")}
    text = f"^attention_decode: arguments are on different devices; .*cpu, {name} on meta"
    with pytest.raises(InvalidInput, match=text):
        bsk.attention_decode(**call, **{name: torch.ones(2, device="meta")})


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k_scale", "v_scale"])
def test_gradients_are_refused_and_not_dropped(name):
    call = inputs()
    if "scale" in name:
        call |= {cache: call[cache].to(FP8) for cache in ("k_cache", "v_cache")}
        call[name] = torch.ones(2)
    call[name].requires_grad_()
    with pytest.raises(Unsupported, match=f"attention_decode: {name} requires a gradient"):
        bsk.attention_decode(**call)
    with torch.no_grad():
        assert not bsk.attention_decode(**call).requires_grad
    tensors = {arg: x for arg, x in call.items() if isinstance(x, torch.Tensor)}
    fixed = {arg: x for arg, x in call.items() if arg not in tensors}
    batched = {arg: x[None].expand(2, *x.shape) for arg, x in tensors.items()}
    with pytest.raises(Unsupported, match=f"attention_decode: {name} requires a gradient"):
        torch.vmap(lambda given: bsk.attention_decode(**given, **fixed))(batched)


def test_inputs_that_are_right_pass_the_check():
    bsk.check_decode_inputs(**inputs())
    bsk.check_decode_inputs(**paged())
    lists = ints(1, -1, 0, -1).expand(2, 2, 4)
    bsk.check_decode_inputs(**inputs(), kv_blocks=lists, kv_block_size=4)


def test_pages_that_nothing_reads_may_be_anything():
    call = paged()
    call["page_table"][1, 1] = -5
    bsk.check_decode_inputs(**call)
    call["page_table"][0, 0] = 1000
    bsk.check_decode_inputs(**call, window=3)
    bsk.check_decode_inputs(**call, kv_blocks=ints(1).expand(2, 2, 1))
    bsk.attention_decode(**call, window=3)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"cache_seqlens": ints(20, 33)}, "cache_seqlens[1] is out of range; expected 0 to 32"),
        ({"cache_seqlens": ints(-1, 3)}, "cache_seqlens[0] is out of range"),
        ({"page_table": ints(0, 7, 0, 0).view(2, 2)}, "page_table[0, 1] is out of range"),
        ({"kv_blocks": ints(0, 2).expand(2, 2, 2)}, "kv_blocks[0, 0, 1] is out of range"),
        ({"kv_blocks": ints(-2, 1).expand(2, 2, 2)}, "kv_blocks[0, 0, 0] is out of range"),
        (
            {"kv_blocks": ints(1, 0, 1).expand(2, 2, 3)},
            "kv_blocks[0, 0, 2] is listed twice; expected each block once, got 1",
        ),
    ],
)
def test_numbers_out_of_range(changes, words):
    with pytest.raises(InvalidInput, match=r"^check_decode_inputs: ") as error:
        bsk.check_decode_inputs(**paged(**changes))
    assert words in str(error.value)


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_an_output_that_is_given(impl, return_lse):
    """It may have any strides, is written whole, and is what the call returns."""
    q, (k, v) = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 2, 50, 16)
    lengths = torch.tensor([50, 0], dtype=torch.int32)
    expected = bsk.attention_decode(
        q, k, v, cache_seqlens=lengths, return_lse=return_lse, impl=impl
    )
    memory = torch.full((2, 3, 4, 20), torch.nan)
    out = memory.transpose(1, 2)[..., 2:18]
    got = bsk.attention_decode(
        q, k, v, cache_seqlens=lengths, out=out, return_lse=return_lse, impl=impl
    )
    if return_lse:
        assert got[1].equal(expected[1])
        got, expected = got[0], expected[0]
    assert got is out and out.equal(expected)
    assert memory[..., :2].isnan().all() and memory[..., 18:].isnan().all()


def test_outputs_that_cannot_be_written():
    q, (k, v) = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 2, 50, 16)
    lengths = torch.tensor([50], dtype=torch.int32)
    for out, why in (
        (torch.empty(1, 4, 1, 8), "out has a wrong shape"),
        (q.half(), "out has an unsupported dtype"),
        (q, "overlaps q"), (k[:, 0, :4, None], "overlaps k_cache"),
        (torch.empty(1, 4, 1, 16, requires_grad=True), "requires a gradient"),
    ):  # fmt: skip
        with pytest.raises(bsk.InvalidInput, match=why):
            bsk.attention_decode(q, k, v, cache_seqlens=lengths, out=out)


def test_an_output_that_is_given_compiles():
    q, (k, v) = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 2, 50, 16)
    lengths = torch.tensor([50], dtype=torch.int32)

    def run(out):
        return bsk.attention_decode(q, k, v, cache_seqlens=lengths, out=out) + 1

    out = torch.empty(1, 4, 1, 16)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(out)
    expected = bsk.attention_decode(q, k, v, cache_seqlens=lengths)
    assert out.equal(expected) and compiled.equal(expected + 1)
