"""What compiles another variant of the forward kernel, and what does not.

Counted with the keys that Triton's own front end makes for launches, in a process that does not
interpret kernels; nothing is compiled or run.
"""

import pytest

pytest.importorskip("triton")

SCRIPT = """
from blackwell_sparsek.attention.triton import forward as fwd
from blackwell_sparsek.attention.triton.tuning import AttnFwdConfig

fwd._attn_fwd_kernel = Recorder(fwd._attn_fwd_kernel)


def call(sq=64, sk=64, batch=2, heads=4, kv_heads=2, dim=64, bshd=False, mask=None, **options):
    q, k, v = inputs(sq, sk, batch, heads, kv_heads, dim, bshd)
    spec = AttnSpec(**{"scale": 0.125, **options}, block_mask=mask)
    config = AttnFwdConfig(64, 64, 4, 2)
    fwd.launch_attn_fwd(AttentionCall(q, k, v, spec), empty_out(q, dim), empty_lse(q), config)


def varlen(lengths_q, lengths_k):
    cu = [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k)]
    q = torch.empty(sum(lengths_q), 4, 64, dtype=torch.float16)
    k = torch.empty(sum(lengths_k), 2, 64, dtype=torch.float16)
    spec = AttnSpec(0.1, Band(None, 0), cu_seqlens_q=cu[0], cu_seqlens_k=cu[1],
                    max_q=max(lengths_q), max_k=max(lengths_k))
    fwd.launch_attn_fwd(AttentionCall(q, k, k, spec), empty_out(q, 64), empty_lse(q),
                        AttnFwdConfig(64, 64, 4, 2))


print(json.dumps({
    **variants_by_data(call, varlen),
    "kinds": variants([lambda: call(), lambda: call(softcap=2.0),
                       lambda: call(mask=blocks(64, 64)), lambda: varlen((5, 6), (7, 8)),
                       lambda: call(sinks=torch.zeros(4)), lambda: call(dim=128)]),
    "unaligned head dimension": variants([lambda a=a, b=b: call(a, b, dim=72)
                                          for a in LENGTHS for b in LENGTHS]),
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
    assert counts[what] == 1


def test_kinds_of_calls_are_variants(counts):
    """The count can rise: each of these needs code of its own."""
    assert counts["kinds"] == 6


def test_unaligned_head_dimensions_stay_bounded(counts):
    """Whether 16 divides the strides of batch and head then depends on the lengths: of q, of k."""
    assert counts["unaligned head dimension"] <= 4 * 4
