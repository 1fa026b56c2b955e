"""ALiBi slopes in `attention_decode`, by every implementation that takes them."""

from dataclasses import replace

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.decode import tuning
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.testing import poison
from blackwell_sparsek.testing.decode_cases import DecodeCase, check_decode

HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16
CASES = [
    DecodeCase(1, FLOAT, heads=(4, 2), lengths=(33, 0, 7), slopes="head"),
    DecodeCase(2, HALF, heads=(6, 2), lengths=(50, 20), q_len=3, slopes="sequence", sinks=True),
    DecodeCase(3, BRAIN, heads=(4, 1), lengths=(40, 65), page_size=16, slopes="sequence",
               softcap=5.0, band=Band(20, 0)),
    DecodeCase(4, HALF, heads=(4, 2), lengths=(60, 33), page_size=16, block_size=16, q_len=2,
               slopes="head", scale=-0.3),
    DecodeCase(5, HALF, heads=(2, 1), lengths=(48, 31), fp8="head", slopes="sequence"),
]  # fmt: skip


def public(call, impl):
    size = None if call.page_table is not None or call.kv_blocks is None else call.kv_block_size
    return bsk.attention_decode(
        call.q, call.k_cache, call.v_cache, cache_seqlens=call.cache_seqlens,
        page_table=call.page_table, kv_blocks=call.kv_blocks, kv_block_size=size, causal=False,
        window=tuple(call.band), scale=call.scale, softcap=call.softcap or None, sinks=call.sinks,
        k_scale=call.k_scale, v_scale=call.v_scale, alibi_slopes=call.alibi_slopes,
        return_lse=True, impl=impl,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.seed))
@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_slopes(case, impl, device):
    call = case.build(device)
    with poison.poisoned_empty():
        out, lse = public(call, impl)
    check_decode(out, lse, call, what=str(case))


def test_oracle_agrees_with_attention():
    """One sequence that fills its cache is a call of `attention`."""
    call = DecodeCase(6, FLOAT, heads=(4, 2), lengths=(40,), q_len=5, slopes="sequence").build(
        "cpu"
    )
    out, lse = public(call, "reference")
    expected = bsk.attention(
        call.q, call.k_cache, call.v_cache, causal=True, scale=call.scale, return_lse=True,
        alibi_slopes=call.alibi_slopes, impl="reference",
    )  # fmt: skip
    torch.testing.assert_close((out, lse), expected)
    assert not out.equal(public(replace(call, alibi_slopes=None), "reference")[0])


def test_who_takes_them():
    problem = CASES[1].build("cpu").problem
    hopper = replace(problem, arch=Arch("cuda", 90, 132, 2**18, False), tma=True, head_dim=64)
    hopper = replace(hopper, head_dim_v=64)
    assert "ALiBi" in tuning.attn_decode_sm90_unsupported(hopper)
    assert tuning.attn_decode_sm90_unsupported(replace(hopper, alibi=False)) is None
    assert not tuning.attn_decode_config(hopper, "ieee").across
    assert tuning.attn_decode_config(replace(hopper, alibi=False), "ieee").across


def test_refusals():
    call = CASES[0].build("cpu")
    with pytest.raises(bsk.InvalidInput, match=r"alibi_slopes has a wrong shape; expected \[4\]"):
        public(replace(call, alibi_slopes=torch.rand(3)), "auto")
    with pytest.raises(bsk.Unsupported, match="alibi_slopes requires a gradient"):
        public(replace(call, alibi_slopes=torch.rand(4, requires_grad=True)), "auto")


def test_it_compiles():
    call = CASES[1].build("cpu")
    compiled = torch.compile(public, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(call, "eager"), public(call, "eager"))


@pytest.mark.gpu
def test_replays():
    """Slopes of later calls are read by replayed launches."""
    call = replace(CASES[1], head_dims=(64, 64)).build("cuda")
    for factor in (1.0, 2.0, 3.0, 4.0):
        call = replace(call, alibi_slopes=call.alibi_slopes * factor)
        check_decode(*public(call, "triton"), call, what=str(factor))
