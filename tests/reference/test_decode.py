"""The oracle of decoding against that of attention, which it must agree with where both apply."""

import dataclasses

import pytest
import torch

from blackwell_sparsek.calls.attention import AttnSpec
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.reference.attention import attention
from blackwell_sparsek.reference.decode import attention_decode
from blackwell_sparsek.testing.decode_cases import DecodeCase


@pytest.mark.parametrize("band", [Band(None, 0), Band(5, 0), Band(None, None), Band(3, 1)])
def test_a_contiguous_cache_is_attention(band):
    case = DecodeCase(
        1, torch.float64, heads=(6, 2), lengths=(20, 13), q_len=3, band=band, softcap=3.0,
        sinks=True, capacity=25,
    )  # fmt: skip
    call = case.build("cpu")
    out, lse = attention_decode(call)
    for b, length in enumerate(case.lengths):
        options = AttnSpec(call.scale, band, softcap=3.0, sinks=call.sinks)
        own = slice(b, b + 1)
        k, v = (cache[own, :, :length] for cache in (call.k_cache, call.v_cache))
        exact = attention(call.q[own], k, v, options)
        torch.testing.assert_close((out[own], lse[own]), exact)


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_pages_hold_the_same_keys(page_size):
    case = DecodeCase(2, torch.float64, heads=(4, 2), lengths=(20, 0, 7), q_len=2)
    contiguous = attention_decode(case.build("cpu"))
    paged = attention_decode(dataclasses.replace(case, page_size=page_size).build("cpu"))
    assert contiguous[0].equal(paged[0]) and contiguous[1].equal(paged[1])


def test_listed_blocks_by_hand():
    call = DecodeCase(3, torch.float64, heads=(1, 1), lengths=(10,)).build("cpu")
    blocks = torch.tensor([[[2, -1, 0]]], dtype=torch.int32)
    out, _ = attention_decode(dataclasses.replace(call, kv_blocks=blocks, kv_block_size=4))
    kept = [8, 9, 0, 1, 2, 3]
    weights = torch.softmax(call.q[0, 0] @ call.k_cache[0, 0, kept].mT * call.scale, -1)
    torch.testing.assert_close(out[0, 0], weights @ call.v_cache[0, 0, kept])


def test_a_block_listed_twice_counts_twice():
    call = DecodeCase(4, torch.float64, heads=(1, 1), lengths=(8,)).build("cpu")
    once, twice = (
        attention_decode(
            dataclasses.replace(
                call, kv_blocks=torch.tensor([[blocks]], dtype=torch.int32), kv_block_size=4
            )
        )
        for blocks in ([1], [1, 1])
    )
    torch.testing.assert_close(twice[0], once[0])
    torch.testing.assert_close(twice[1], once[1] + torch.log(torch.tensor(2.0)).double())


def test_scales_multiply_keys_and_values():
    call = DecodeCase(5, torch.float32, heads=(4, 2), lengths=(9,), fp8="head").build("cpu")
    out, lse = attention_decode(call)
    plain = attention_decode(
        dataclasses.replace(
            call,
            k_cache=call.k_cache.float() * call.k_scale.view(-1, 1, 1),
            v_cache=call.v_cache.float() * call.v_scale.view(-1, 1, 1),
            k_scale=None,
            v_scale=None,
        )
    )
    torch.testing.assert_close((out, lse), plain)


def test_no_keys():
    out, lse = attention_decode(DecodeCase(6, lengths=(0,), capacity=4).build("cpu"))
    assert out.eq(0).all() and lse.eq(-torch.inf).all()
