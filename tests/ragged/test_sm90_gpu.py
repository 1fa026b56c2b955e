"""The Hopper kernel against the oracle, and what only a GPU can say about it.

`PYTHONPATH=src python -m pytest -m gpu tests/ragged/test_sm90_gpu.py`
"""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.ragged.sm90 import attention_ragged, launch_attn_ragged_sm90
from blackwell_sparsek.ragged.tuning import ragged_sm90_config, why_not_sm90
from blackwell_sparsek.testing.poison import poisoned_empty
from blackwell_sparsek.testing.ragged_cases import RaggedCase, check_ragged, draw_ragged_case

pytestmark = pytest.mark.gpu

BRAIN, HALF = torch.bfloat16, torch.float16
# decoding steps, a chunk of a prompt, whole prompts, and a sequence without queries
MIXED = RaggedCase(
    1, BRAIN, heads=(8, 2), q_lens=(1, 130, 1, 0, 300, 3), kv_lens=(700, 400, 1, 50, 300, 129),
    head_dims=(128, 128),
)  # fmt: skip
PAGED = dataclasses.replace(MIXED, layout="paged")


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")


def attend(call, programs=None):
    assert why_not_sm90(call.problem) is None
    with poisoned_empty():
        if programs is None:
            attention_ragged(call)
        else:
            config = ragged_sm90_config(call.problem, call.top_left)
            launch_attn_ragged_sm90(call, config, programs)
    return call.out, call.lse


def check(case, programs=None):
    """Against the oracle on the host: sequence by sequence it is faster there."""
    call = case.build("cuda")
    out, lse = attend(call, programs)
    copied = dataclasses.replace(case.build("cpu"), out=out.cpu(), lse=lse.cpu())
    check_ragged(copied, what=str(case), on_gpu=True)
    return call


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed):
    case = draw_ragged_case(seed, dtypes=(HALF, BRAIN), longest=(70, 300, 1000)[seed % 3])
    case = dataclasses.replace(
        case, slopes="none", block_size=None, fp8="none", page_size=(16, 32, 48, 256)[seed % 4],
        layout=("contiguous", "paged")[seed % 2], moved=case.moved and seed % 2 == 0,
    )  # fmt: skip
    check(case, (None, 1, 2, 3, 7, 132)[seed % 6])


@pytest.mark.parametrize("programs", [None, 1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("case", [MIXED, PAGED], ids=["contiguous", "paged"])
def test_any_number_of_programs(case, programs):
    """Tiles are split at other places each time."""
    check(case, programs)


@pytest.mark.parametrize("heads", [(4, 4), (12, 3), (7, 1), (16, 2), (65, 1), (128, 1)])
def test_groups_of_heads(heads):
    check(dataclasses.replace(PAGED, heads=heads))


@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (64, 128), (96, 80), (8, 128)])
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_head_dims(dims, dtype):
    check(dataclasses.replace(PAGED, head_dims=dims, dtype=dtype))


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("table", [torch.int32, torch.int64])
def test_pages_give_the_bits_of_a_contiguous_cache(page_size, table):
    plain = attend(MIXED.build("cuda"))
    case = dataclasses.replace(PAGED, page_size=page_size, table_dtype=table)
    other = check(case)
    assert plain[0].equal(other.out) and plain[1].equal(other.lse)


@pytest.mark.parametrize(
    "band", [Band(0, 0), Band(127, 0), Band(None, None), Band(3, 200), Band(500, None)]
)
@pytest.mark.parametrize("chunk", [0, 100, 128])
@pytest.mark.parametrize("top_left", [False, True])
def test_bands_and_chunks(band, chunk, top_left):
    """Values outside of the band hold anything: here NaN in front of the first key."""
    check(
        dataclasses.replace(
            PAGED, band=band, chunk=chunk, top_left=top_left, first_keys=True, used=True
        )
    )


@pytest.mark.parametrize("scale", [None, -0.3, 0.0])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_scores(scale, softcap):
    check(dataclasses.replace(PAGED, scale=scale, softcap=softcap, sinks=True, padding=200))


def test_one_long_sequence_is_shared_by_all_programs():
    check(
        RaggedCase(
            5, BRAIN, heads=(8, 1), q_lens=(2,), kv_lens=(40_000,), head_dims=(128, 128),
            layout="paged", sinks=True,
        )
    )  # fmt: skip


def test_every_run_gives_the_same_bits():
    first = [x.clone() for x in attend(PAGED.build("cuda"))]
    for _ in range(20):
        again = attend(PAGED.build("cuda"))
        assert all(map(torch.equal, again, first))


def test_a_batch_invariant_sequence_does_not_depend_on_its_neighbours():
    whole = dataclasses.replace(PAGED, batch_invariant=True).build("cuda")
    attend(whole)
    offsets = whole.cu_seqlens_q.tolist()
    for b in (0, 1, 4):
        rows = slice(offsets[b], offsets[b + 1])
        alone = dataclasses.replace(
            whole,
            out=whole.out[rows].clone(),
            lse=whole.lse[:, rows].clone(),
            q=whole.q[rows],
            cu_seqlens_q=torch.tensor(
                [0, offsets[b + 1] - offsets[b]], dtype=torch.int32, device="cuda"
            ),
            seqlens_k=whole.seqlens_k[b : b + 1],
            page_table=whole.page_table[b : b + 1],
        )
        attend(alone)
        assert alone.out.equal(whole.out[rows]) and alone.lse.equal(whole.lse[:, rows])


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_a_page_out_of_range_spoils_only_what_reads_it(wrong):
    call = PAGED.build("cuda")
    good = [x.clone() for x in attend(call)]
    table = call.page_table.clone()
    # the tenth page of the second sequence, and one that nobody reads
    table[1, 9], table[2, 1] = wrong, wrong
    spoiled = dataclasses.replace(
        call, page_table=table, out=call.out.clone(), lse=call.lse.clone()
    )
    attend(spoiled)
    rows = slice(*call.cu_seqlens_q[1:3].tolist())
    assert spoiled.out[rows].isnan().any()
    spoiled.out[rows], spoiled.lse[:, rows] = good[0][rows], good[1][:, rows]
    assert spoiled.out.equal(good[0]) and spoiled.lse.equal(good[1])


def test_a_length_out_of_range_gives_nan():
    call = PAGED.build("cuda")
    call.seqlens_k[1] = 10**6
    attend(call)
    rows = slice(*call.cu_seqlens_q[1:3].tolist())
    assert call.out[rows].isnan().all() and not call.out[: rows.start].isnan().any()


def test_a_graph_follows_lengths_and_tables():
    """Captured once; lengths, offsets and tables change under it."""
    call = PAGED.build("cuda")
    arguments = (call.q, call.k, call.v, call.cu_seqlens_q)
    options = {
        "max_seqlen_q": 300, "cache_seqlens": call.seqlens_k, "page_table": call.page_table,
        "causal": True, "impl": "sm90", "return_lse": True,
    }  # fmt: skip
    bsk.attention_varlen(*arguments, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = bsk.attention_varlen(*arguments, **options)
    for q_lens, kv_lens in (
        ((1,) * 6, (700, 400, 1, 50, 300, 129)),
        ((300, 0, 0, 1, 100, 7), (301, 5, 0, 50, 300, 129)),
    ):
        call.cu_seqlens_q.copy_(torch.tensor([0, *q_lens]).cumsum(0))
        call.seqlens_k.copy_(torch.tensor(kv_lens))
        graph.replay()
        expected = bsk.attention_varlen(*arguments, **{**options, "impl": "eager"})
        assert (out - expected[0]).abs().max() < 0.02
        finite = expected[1].isfinite()
        assert lse.isfinite().equal(finite)
        assert (lse - expected[1])[finite].abs().max() < 0.01


def test_the_public_call_names_it():
    call = PAGED.build("cuda")
    report = bsk.explain(
        bsk.attention_varlen, call.q, call.k, call.v, call.cu_seqlens_q, max_seqlen_q=300,
        cache_seqlens=call.seqlens_k, page_table=call.page_table, impl="sm90",
    )  # fmt: skip
    assert report.chosen == "sm90"
