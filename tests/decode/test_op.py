"""bsk::attn_decode as an operator: opcheck, compile, dispatch, who takes the kernel."""

import dataclasses

import pytest
import torch

from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.errors import InvalidInput, Unsupported
from blackwell_sparsek.decode.api import attention_decode
from blackwell_sparsek.decode.op import attn_decode, decode_dispatch
from blackwell_sparsek.decode.tuning import why_not_triton
from blackwell_sparsek.dispatch.dispatcher import explain
from blackwell_sparsek.testing.decode_cases import DecodeCase

H200 = Arch("cuda", 90, 132, 232448, False)


def arguments(case, impl="auto"):
    call = case.build("cpu")
    return (
        call.q, call.k_cache, call.v_cache, call.cache_seqlens, call.page_table, call.kv_blocks,
        call.kv_block_size, *call.band.scalars(), call.scale, call.softcap, call.sinks,
        call.k_scale, call.v_scale, call.alibi_slopes, impl,
    )  # fmt: skip


def problem(arch=H200, **changes):
    call = DecodeCase(1, heads=(8, 2), head_dims=(64, 64)).build("cpu")
    return dataclasses.replace(call.problem, arch=arch, **changes)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(1, heads=(4, 2), lengths=(20, 3), q_len=2),
        DecodeCase(2, heads=(4, 2), lengths=(20, 3), page_size=16, sinks=True),
        DecodeCase(3, heads=(4, 2), lengths=(20, 3), block_size=8, softcap=2.0),
        DecodeCase(4, heads=(4, 2), lengths=(20, 3), slopes="sequence"),
    ],
)
def test_opcheck(case, impl):
    torch.library.opcheck(attn_decode, arguments(case, impl))


def test_opcheck_fp8():
    """Without the checks that multiply their inputs, which torch cannot do in float8."""
    case = DecodeCase(4, heads=(4, 2), lengths=(20, 3), fp8="head")
    tests = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(attn_decode, arguments(case), test_utils=tests)


def test_it_compiles_as_a_whole():
    call = DecodeCase(5, torch.float32, lengths=(20, 7), page_size=16).build("cpu")

    def step(q, k, v, lengths, table):
        return attention_decode(q, k, v, cache_seqlens=lengths, page_table=table) * 2.0

    inputs = (call.q, call.k_cache, call.v_cache, call.cache_seqlens, call.page_table)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), step(*inputs))


def test_a_window_may_change_without_another_graph():
    call = DecodeCase(6, torch.float32, lengths=(20, 7)).build("cpu")
    compiled = torch.compile(attention_decode, fullgraph=True, backend="aot_eager")
    for window in (None, 3, 5, 9):
        options = {"cache_seqlens": call.cache_seqlens, "window": window}
        torch.testing.assert_close(
            compiled(call.q, call.k_cache, call.v_cache, **options),
            attention_decode(call.q, call.k_cache, call.v_cache, **options),
        )


def test_auto_prefers_the_kernel_on_a_gpu():
    assert decode_dispatch.decide("auto", problem()).chosen == "sm90"
    for sm in (80, 89, 100):
        portable = problem(Arch("cuda", sm, 108, 166912, False))
        assert decode_dispatch.decide("auto", portable).chosen == "triton"
    for interpreted in (False, True):
        cpu = Arch("cpu", 0, 1, 0, interpreted)
        assert decode_dispatch.decide("auto", problem(cpu)).chosen == "eager"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": torch.float64}, "needs float16, bfloat16 or float32, got torch.float64"),
        ({"head_dim": 577}, "needs head dimensions of 1 to 576, got 577 and 64"),
        ({"capacity": 2**30}, "needs caches of at most 1073741823 tokens a sequence"),
        ({"capacity": 2**29, "batch": 2**8}, "needs at most 2147483647 tiles"),
        ({"arch": Arch("cuda", 75, 40, 65536, False)}, "needs a CUDA GPU of sm_80"),
        (
            {"arch": Arch("cuda", 80, 108, 166912, False), "cache_dtype": torch.float8_e4m3fn},
            "needs sm_89 or newer for a float8 cache, got sm_80",
        ),
        (
            {"dtype": torch.float32, "cache_dtype": torch.float8_e4m3fn},
            "needs float16 or bfloat16 queries for a float8 cache, got torch.float32",
        ),
    ],
)
def test_what_the_kernel_cannot_run(changes, reason):
    why = why_not_triton(problem(**changes))
    assert why is not None and why.startswith(reason)


def test_explain_names_the_choice():
    call = DecodeCase(7, page_size=16, block_size=16).build("cpu")
    decision = explain(
        attention_decode, call.q, call.k_cache, call.v_cache, cache_seqlens=call.cache_seqlens,
        page_table=call.page_table, kv_blocks=call.kv_blocks,
    )  # fmt: skip
    assert decision.chosen == "eager"
    assert "pages of 16, listed blocks of 16" in str(decision)


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_paths_on_the_host_refuse_what_is_out_of_range(impl):
    call = DecodeCase(8, lengths=(20,), page_size=16).build("cpu")
    call.page_table[0, 1] = 99
    with pytest.raises(InvalidInput, match=r"page_table\[0, 1\] is out of range; expected 0 to 4"):
        attention_decode(
            call.q,
            call.k_cache,
            call.v_cache,
            cache_seqlens=call.cache_seqlens,
            page_table=call.page_table,
            impl=impl,
        )


def test_auto_takes_the_portable_kernel_for_what_hopper_has_none():
    for changes in ({"head_dim": 80}, {"page_size": 20}, {"cache_dtype": torch.float8_e4m3fn}):
        assert decode_dispatch.decide("auto", problem(**changes)).chosen == "triton"


def test_the_kernel_of_hopper_says_why_not():
    pytest.importorskip("triton")
    call = DecodeCase(9).build("cpu")
    with pytest.raises(Unsupported, match="needs sm_90, this is cpu"):
        attention_decode(
            call.q, call.k_cache, call.v_cache, cache_seqlens=call.cache_seqlens, impl="sm90"
        )


def test_the_kernel_agrees_with_eager(device):
    pytest.importorskip("triton")
    call = DecodeCase(10, torch.float32, heads=(4, 2), lengths=(33, 20), page_size=16).build(device)
    options = {
        "cache_seqlens": call.cache_seqlens, "page_table": call.page_table, "return_lse": True,
        "window": 9, "softcap": 4.0,
    }  # fmt: skip
    ours = attention_decode(call.q, call.k_cache, call.v_cache, impl="triton", **options)
    torch.testing.assert_close(
        ours, attention_decode(call.q, call.k_cache, call.v_cache, impl="eager", **options)
    )
