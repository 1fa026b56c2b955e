"""What compiles another variant of the backward kernels, and what does not; nothing is run."""

import pytest

pytest.importorskip("triton")

SCRIPT = """
from blackwell_sparsek.attention.triton import backward as bwd
from blackwell_sparsek.attention.triton import delta as bwd_delta
from blackwell_sparsek.attention.triton.tuning import AttnBwdConfig

bwd_delta._attn_delta_kernel = Recorder(bwd_delta._attn_delta_kernel)
bwd._attn_dq_kernel = Recorder(bwd._attn_dq_kernel)
bwd._attn_dkdv_kernel = Recorder(bwd._attn_dkdv_kernel)
CONFIG = AttnBwdConfig(64, 32, 4, 2)


def run(q, k, spec, wanted=(True, True)):
    out, lse = empty_out(q, q.shape[-1]), empty_lse(q)
    delta = torch.empty_like(lse)
    bwd_delta.launch_attn_delta(delta, out, out, None, lse)
    dk, dv = (torch.empty_like(k) if want else None for want in wanted)
    gradients = AttnGradients(torch.empty_like(q), dk, dv, None)
    call = BackwardCall(AttentionCall(q, k, k, spec), out, None, out, lse, gradients)
    bwd.launch_attn_dq(call, delta, CONFIG)
    bwd.launch_attn_dkdv(call, delta, CONFIG)


def call(sq=64, sk=64, batch=2, heads=4, kv_heads=2, dim=64, bshd=False, mask=None,
         wanted=(True, True), **options):
    q, k, v = inputs(sq, sk, batch, heads, kv_heads, dim, bshd)
    run(q, k, AttnSpec(**{"scale": 0.125, **options}, block_mask=mask), wanted)


def varlen(lengths_q, lengths_k):
    cu = [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k)]
    q = torch.empty(sum(lengths_q), 4, 64, dtype=torch.float16)
    k = torch.empty(sum(lengths_k), 2, 64, dtype=torch.float16)
    run(q, k, AttnSpec(0.1, Band(None, 0), cu_seqlens_q=cu[0], cu_seqlens_k=cu[1],
                       max_q=max(lengths_q), max_k=max(lengths_k)))


print(json.dumps({
    **variants_by_data(call, varlen),
    "kinds": variants([lambda: call(), lambda: call(wanted=(True, False)),
                       lambda: call(wanted=(False, True)), lambda: call(softcap=2.0)]),
}))
"""


@pytest.fixture(scope="module")
def counts(run_recorder):
    return run_recorder(SCRIPT)


@pytest.mark.parametrize(
    "what",
    [
        "lengths",
        "lengths, heads inner",
        "batch",
        "bands",
        "scales",
        "softcaps",
        "masks",
        "packed",
    ],
)
def test_runtime_data_compiles_nothing(counts, what):
    """One variant of each of the three kernels."""
    assert counts[what] == 3


def test_kinds_of_calls_are_variants(counts):
    """The count can rise: delta, dQ and three of dK/dV, and dQ and dK/dV under a softcap."""
    assert counts["kinds"] == 7
