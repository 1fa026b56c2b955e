"""The eager decode path against the oracle."""

import dataclasses

import pytest
import torch

from blackwell_sparsek.decode.eager import attention_decode
from blackwell_sparsek.testing.decode_cases import DecodeCase, check_decode, draw_decode_case
from blackwell_sparsek.testing.poison import poisoned_empty

DTYPES = (torch.float16, torch.float32, torch.bfloat16, torch.float64)


def check(case):
    call = case.build("cpu")
    with poisoned_empty():
        out, lse = attention_decode(call)
    if case.dtype == torch.float64:
        lse = lse.double()
    check_decode(out, lse, call, what=str(case))


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed):
    check(draw_decode_case(seed, dtypes=DTYPES, longest=70))


@pytest.mark.parametrize("scales", ["tensor", "head"])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("listed", [False, True])
def test_fp8_caches(scales, page_size, listed):
    case = DecodeCase(
        1, torch.bfloat16, heads=(4, 2), lengths=(40, 0, 33), q_len=2, fp8=scales,
        page_size=page_size, block_size=16 if listed else None,
    )  # fmt: skip
    check(case)


def test_only_visible_keys_are_gathered():
    """A sequence of 2**20 slots costs what its few keys cost."""
    case = DecodeCase(2, torch.float32, heads=(2, 1), lengths=(20,))
    call = case.build("cpu")
    table = torch.full((1, 2**16), -1, dtype=torch.int32)
    pages = dataclasses.replace(case, page_size=16).build("cpu").k_cache
    table[0, :2] = torch.tensor([0, 1], dtype=torch.int32)
    out, _ = attention_decode(
        dataclasses.replace(call, k_cache=pages, v_cache=pages, page_table=table)
    )
    assert out.shape == call.q.shape
