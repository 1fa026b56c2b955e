"""What only a GPU can say about the forward kernel: the real compiler, bf16, graphs, size, order.

`PYTHONPATH=src python -m pytest -m gpu tests/attention/test_api_gpu.py`
"""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention.api import attention, attention_packed
from blackwell_sparsek.attention.triton import forward as attention_triton
from blackwell_sparsek.calls.attention import AttentionCall
from blackwell_sparsek.testing import layouts
from blackwell_sparsek.testing.attention_cases import (
    AttnCase,
    check_attention,
    draw_case,
    oracle,
)
from blackwell_sparsek.testing.poison import poisoned_empty
from blackwell_sparsek.testing.tolerance import assert_lse_within_budget, assert_within_budget

pytestmark = pytest.mark.gpu

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
# Each structure is compiled once, in some seconds, and then sees many calls.
STRUCTURES = 32
CALLS = 12


def run(q, k, v, spec):
    with poisoned_empty():
        return attention_triton.forward(AttentionCall(q, k, v, spec))


def check_random_call(structure, seed):
    case = draw_case(
        seed,
        structure,
        dtypes=(BRAIN, HALF),
        longest=300,
        head_dims=(16, 40, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256),
        block_sizes=(16, 32, 64, 128, 256),
        most_heads=14,
    )
    q, k, v, spec = case.build("cuda")
    q, k, v = layouts.different_layouts(q, k, v, start=structure)
    check_attention(*run(q, k, v, spec), q, k, v, spec, what=f"structure {structure}, {case}")


@pytest.mark.parametrize("structure", range(STRUCTURES))
def test_random_calls(structure):
    for seed in range(structure * CALLS, (structure + 1) * CALLS):
        check_random_call(structure, seed)


@pytest.mark.parametrize("blocks", [None, (64, 256), (256, 64)])
@pytest.mark.parametrize("dims", [(40, 8), (24, 8), (56, 24), (72, 8), (104, 24), (136, 40)])
def test_values_narrower_than_keys(dims, blocks):
    """In rows that asynchronous copies cannot take; see the tile of values in the kernel."""
    for seed in range(3):
        case = AttnCase(
            seed, BRAIN, heads=(2, 2), lengths=((17 + 300 * seed, 9 + 350 * seed),), head_dims=dims,
            mask="elements" if blocks else "none", block_size=blocks or (64, 64), sinks=seed == 1,
        )  # fmt: skip
        q, k, v, spec = case.build("cuda")
        check_attention(*run(q, k, v, spec), q, k, v, spec, what=str(case))


def cut_to_tf32(x):
    """What tensor cores read of an fp32 operand: they drop the last 13 bits, and do not round."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(FLOAT)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fp32(dim, tf32):
    case = AttnCase(1, FLOAT, heads=(2, 1), lengths=((129, 257),), head_dims=(dim, dim))
    q, k, v, spec = case.build("cuda")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        out, lse = run(q, k, v, spec)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    if not tf32:
        check_attention(out, lse, q, k, v, spec)
        return
    exact, exact_lse = oracle(q.double(), k.double(), v.double(), spec)
    plain, plain_lse = oracle(*map(cut_to_tf32, (q, k, v)), spec, precision=FLOAT)
    assert_within_budget(out, exact, plain)
    assert_lse_within_budget(lse, exact_lse, plain_lse)


def test_auto_takes_triton():
    from blackwell_sparsek import explain

    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=BRAIN)
    assert explain(attention, q, q, q).chosen in ("triton", "sm90")
    assert attention(q, q, q, impl="triton").shape == q.shape


def test_packed_graph_replays_with_other_lengths():
    q = torch.randn(256, 2, 64, device="cuda", dtype=BRAIN)
    cu = torch.tensor([0, 100, 256], device="cuda", dtype=torch.int32)

    def call():
        return attention_packed(
            q, q, q, cu, cu, max_seqlen_q=256, max_seqlen_k=256, causal=True, impl="triton"
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for ends in ([0, 7, 256], [0, 0, 256], [0, 256, 256]):
        cu.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        assert out.equal(call())


def test_runtime_data_compiles_nothing():
    from blackwell_sparsek.attention.triton.forward import _attn_fwd_kernel

    def compiled():
        return sum(len(entry[0]) for entry in _attn_fwd_kernel.device_caches.values())

    def call(sq, sk, **options):
        q = torch.randn(2, 4, sq, 64, device="cuda", dtype=BRAIN)
        k = torch.randn(2, 2, sk, 64, device="cuda", dtype=BRAIN)
        attention(q, k, k, impl="triton", **options)

    call(64, 64, causal=True)
    before = compiled()
    for length in (1, 15, 16, 17, 333, 1000):
        call(length, length, causal=True)
        call(length, 1 + length // 2, window=length)
        call(1, length, scale=float(length))
    assert compiled() == before
