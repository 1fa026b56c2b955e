"""What only a GPU can say about the portable kernel: CUDA graphs, nothing that waits.

`PYTHONPATH=src python -m pytest -m gpu tests/ragged/test_triton_gpu.py`
"""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.testing.ragged_cases import RaggedCase

from .test_api import arguments
from .test_sm90_gpu import check_on_host

pytestmark = pytest.mark.gpu

# Decoding steps, a chunk of a prompt, whole prompts, and a sequence without queries; rows of q that
# belong to no sequence at first.
MIXED = RaggedCase(
    31, torch.bfloat16, heads=(8, 2), q_lens=(1, 130, 1, 0, 300, 3),
    kv_lens=(700, 400, 1, 50, 300, 129), head_dims=(128, 128), layout="paged", padding=20,
)  # fmt: skip
STEPS = dataclasses.replace(MIXED, q_lens=(1, 1, 1, 0, 1, 1), padding=1)
KINDS = {
    "pages": {},
    "rows": {"layout": "contiguous", "moved": True},
    "fp8": {"fp8": "head", "softcap": 2.0},
    "lists": {"block_size": 16, "sinks": True},
    "slopes": {"slopes": "sequence", "page_size": 48, "table_dtype": torch.int64},
    "whole": {"batch_invariant": True, "used": True},
}
# Queries and keys of the sequences, and how many places their pages or rows move on.
LENGTHS = (
    ((1, 1, 1, 1, 1, 1), (700, 400, 1, 50, 300, 129), 0),
    ((300, 0, 0, 1, 100, 7), (301, 5, 0, 50, 300, 129), 0),
    ((1, 5, 200, 0, 3, 100), (129, 700, 400, 0, 50, 300), 1),
    # every row of q
    ((2, 130, 0, 0, 300, 23), (700, 130, 0, 0, 300, 129), 0),
    ((0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0), 0),
)
LENGTHS_OF_STEPS = (
    ((1, 1, 1, 1, 1, 1), (700, 400, 1, 50, 300, 129), 0),
    ((0, 1, 0, 1, 1, 0), (129, 650, 40, 1, 0, 300), 1),
    ((1, 0, 0, 0, 0, 1), (3, 0, 0, 0, 0, 128), 0),
)


def build(case, kind):
    """The call on the GPU; any sequence may take the rows of q behind the last one."""
    call = dataclasses.replace(case, **KINDS[kind]).build("cuda")
    return dataclasses.replace(call, q=call.q.nan_to_num())


def attend(call, impl="triton", **changes):
    given, options = arguments(call)
    return bsk.attention_varlen(*given, **{**options, **changes}, return_lse=True, impl=impl)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case, lengths", [(MIXED, LENGTHS), (STEPS, LENGTHS_OF_STEPS)], ids=["mixed", "steps"]
)
def test_a_graph_follows_lengths_and_tables(case, lengths, kind):
    """Captured once; lengths, offsets and tables change under it, the maxima do not."""
    call = build(case, kind)
    attend(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(call)
    places = call.slabs if call.page_table is None else call.page_table
    first_places = places.clone()
    for q_lens, kv_lens, moved in lengths:
        call.cu_seqlens_q.copy_(torch.tensor([0, *q_lens]).cumsum(0))
        call.seqlens_k.copy_(torch.tensor(kv_lens))
        places.copy_(first_places.roll(moved, 0))
        if call.seqused_q is not None:
            call.seqused_q.copy_((torch.tensor(q_lens) + 1) // 2)
        for result in (out, lse):
            result.fill_(torch.nan)
        graph.replay()
        check_on_host(dataclasses.replace(call, out=out, lse=lse))
        again, lse_again = attend(call)
        assert out.equal(again) and lse.equal(lse_again)


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [MIXED, STEPS], ids=["mixed", "steps"])
def test_nothing_waits_for_the_device(case, kind, impl):
    """Neither in a full call nor in the recorded one or a repeated one that follow it."""
    call = build(case, kind)
    attend(call, impl)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            out, lse = attend(call, impl)
        attend(call, impl, window=64)
        given = torch.empty_like(out)
        attend(call, impl, out=given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_on_host(dataclasses.replace(call, out=out, lse=lse))
    assert given.equal(out)
