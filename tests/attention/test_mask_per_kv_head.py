"""Block masks with one mask for each KV head, which its query heads share."""

from dataclasses import replace

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.sm90 import tuning as sm90
from blackwell_sparsek.calls.attention import AttnGradients
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.testing.attention_cases import AttnCase, check_attention
from blackwell_sparsek.testing.attention_gradients import check_gradients, upstream

HALF, FLOAT = torch.float16, torch.float32
PER_KV_HEAD = {"mask_per_kv_head": True, "mask_broadcast": (False, False)}
CASES = [
    AttnCase(1, FLOAT, batch=2, heads=(6, 2), lengths=((33, 40),), mask="elements",
             block_size=(16, 32), **PER_KV_HEAD),
    AttnCase(2, HALF, batch=2, heads=(6, 3), lengths=((33, 20),), mask="blocks",
             block_size=(32, 16), band=Band(40, 0), **PER_KV_HEAD),
    AttnCase(3, FLOAT, heads=(4, 2), lengths=((9, 20), (17, 7)), varlen=True, mask="elements",
             block_size=(16, 16), alibi="heads", **PER_KV_HEAD),
]  # fmt: skip


def call_of(spec):
    options = {"scale": spec.scale, "window": tuple(spec.band), "block_mask": spec.block_mask}
    options["alibi_slopes"] = spec.alibi_slopes
    if not spec.is_varlen:
        return bsk.attention, options
    options |= {"cu_seqlens_q": spec.cu_seqlens_q, "cu_seqlens_k": spec.cu_seqlens_k}
    return bsk.attention_varlen, options | {"max_seqlen_q": spec.max_q, "max_seqlen_k": spec.max_k}


@pytest.mark.parametrize("impl", ["eager", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.seed))
def test_results_and_gradients(case, impl, device):
    q, k, v, spec = case.build(device)
    assert spec.block_mask.heads == case.heads[1]
    attend, options = call_of(spec)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves, **options, return_lse=True, impl=impl)
    check_attention(out.detach(), lse.detach(), q, k, v, spec, what=str(case))
    upstreams = upstream(out, lse, case.seed)
    made = torch.autograd.grad((out, lse), leaves, upstreams)
    check_gradients(AttnGradients(*made, None), *upstreams, q, k, v, spec, what=str(case))


@pytest.mark.parametrize("impl", ["reference", "eager", "triton"])
def test_same_as_a_mask_per_query_head(impl, device):
    q, k, v, spec = CASES[0].build(device)
    mask = spec.block_mask
    got, lse = bsk.attention(q, k, v, block_mask=mask, return_lse=True, impl=impl)
    wide = mask[:, [h // 3 for h in range(6)]]
    assert wide.heads == 6
    # the oracle of the budget sees the wide mask
    check_attention(got, lse, q, k, v, spec._replace(block_mask=wide), what=impl)
    assert not got.equal(bsk.attention(q, k, v, impl=impl))


def test_hopper_says_what_to_do():
    problem = replace(
        bsk.explain(bsk.attention, *CASES[0].build("cpu")[:3]).problem,
        arch=Arch("cuda", 90, 132, 2**18, False), dtype=HALF, tma=True, mask_per_kv_head=True,
    )  # fmt: skip
    assert "h // 3 for h in range(6)" in sm90.attn_fwd_sm90_unsupported(problem)


def test_other_numbers_of_heads_are_refused():
    q, k, v, spec = CASES[0].build("cpu")
    mask = spec.block_mask[:, [0, 1, 1]]
    with pytest.raises(bsk.InvalidInput, match=r"was made for .*\[2, 3, 33, 40\]"):
        bsk.attention(q, k, v, block_mask=mask)
