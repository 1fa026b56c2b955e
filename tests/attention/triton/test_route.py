"""The kernels as implementation `triton`: who takes them, and that they are the ones that run."""

import dataclasses

import pytest
import torch

from blackwell_sparsek.attention.api import attention, attention_packed
from blackwell_sparsek.attention.merge import merge_dispatch, merge_states_op
from blackwell_sparsek.attention.op import forward_dispatch
from blackwell_sparsek.attention.triton import tuning as attention_triton
from blackwell_sparsek.calls.attention import AttnProblem, AttnSpec, MergeProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.errors import Unsupported

pytest.importorskip("triton")

H200 = Arch("cuda", 90, 132, 232448, False)


def problem(arch=H200, **changes):
    q = torch.empty(1, 4, 8, 64, dtype=torch.float16)
    k = torch.empty(1, 2, 8, 64, dtype=torch.float16)
    spec = AttnSpec(0.125, max_q=8, max_k=8)
    return dataclasses.replace(AttnProblem.of(q, k, k, spec), arch=arch, **changes)


def test_auto_prefers_triton_on_a_gpu():
    assert forward_dispatch.decide("auto", problem()).chosen == "triton"
    merge = MergeProblem(H200, torch.float16, 8, 64)
    assert str(merge).endswith("torch.float16, 8 rows of 64")
    assert merge_dispatch.decide("auto", merge).chosen == "triton"


@pytest.mark.parametrize("interpreted", [False, True])
def test_auto_never_takes_triton_on_a_cpu(interpreted):
    cpu = Arch("cpu", 0, 1, 0, interpreted)
    assert forward_dispatch.decide("auto", problem(cpu)).chosen == "eager"
    assert forward_dispatch.decide("triton", problem(cpu)).chosen == (
        "triton" if interpreted else None
    )
    assert merge_dispatch.decide("auto", MergeProblem(cpu, torch.float16, 8, 64)).chosen == "eager"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": torch.float64}, "needs float16, bfloat16 or float32, got torch.float64"),
        ({"head_dim": 257}, "needs head dimensions of 1 to 256, got 257 and 64"),
        ({"head_dim_v": 300}, "needs head dimensions of 1 to 256, got 64 and 300"),
        ({"max_k": 2**30}, "needs sequences of at most 1073741823 tokens"),
        ({"batch": 2**20, "heads_q": 2**12}, "needs at most 2147483647 query tiles"),
        (
            {"arch": Arch("cuda", 75, 40, 65536, False)},
            "needs a CUDA GPU of sm_80 or newer, got sm_75",
        ),
        ({"arch": Arch("cpu", 0, 1, 0, False)}, "needs a CUDA GPU of sm_80 or newer, got cpu"),
    ],
)
def test_what_the_kernel_cannot_run(changes, reason):
    why = attention_triton.why_not_forward(problem(**changes))
    assert why is not None and why.startswith(reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16},
        {"head_dim": 256, "head_dim_v": 1},
        {"max_k": 2**30 - 1},
        {"arch": Arch("cuda", 80, 108, 166912, False)},
        {"mask_block": (16, 256)},
        {"varlen": True, "softcap": True, "sinks": True},
    ],
)
def test_what_it_can_run(changes):
    assert attention_triton.why_not_forward(problem(**changes)) is None


def test_an_explicit_choice_does_not_fall_back(device):
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64, device=device)
    with pytest.raises(Unsupported, match="attn_fwd: impl='triton' cannot run this: needs float16"):
        attention(q, q, q, impl="triton")


def test_attention_agrees_with_eager(device):
    q = torch.randn(1, 4, 20, 16, device=device)
    k = torch.randn(1, 2, 30, 16, device=device)
    options = {"causal": True, "window": 9, "softcap": 4.0, "return_lse": True}
    ours = attention(q, k, k, impl="triton", **options)
    torch.testing.assert_close(ours, attention(q, k, k, impl="eager", **options))


def test_outputs_follow_the_layout_of_queries(device):
    q = torch.randn(1, 20, 2, 16, device=device).transpose(1, 2)
    out = attention(q, q, q, impl="triton")
    assert out.stride() == q.stride()


def test_varlen_agrees_with_eager(device):
    q = torch.randn(20, 2, 16, device=device)
    cu = torch.tensor([0, 5, 5, 20], dtype=torch.int32, device=device)
    options = {"max_seqlen_q": 15, "max_seqlen_k": 15, "causal": True, "return_lse": True}
    ours = attention_packed(q, q, q, cu, cu, impl="triton", **options)
    torch.testing.assert_close(ours, attention_packed(q, q, q, cu, cu, impl="eager", **options))


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 5, 8), (2, 1, 2, 3, 5, 8)])
def test_merge_states_agrees_with_eager(shape, device):
    a, b = torch.randn(shape, device=device), torch.randn(shape, device=device)
    lse_a, lse_b = torch.randn(shape[:-1], device=device), torch.randn(shape[:-1], device=device)
    ours = merge_states_op(a, lse_a, b, lse_b, "triton")
    torch.testing.assert_close(ours, merge_states_op(a, lse_a, b, lse_b, "eager"))
