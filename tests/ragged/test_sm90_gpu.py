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
from blackwell_sparsek.ragged.tuning import ragged_sm90_config, takes_steps, why_not_sm90
from blackwell_sparsek.testing.poison import poisoned_empty
from blackwell_sparsek.testing.ragged_cases import RaggedCase, check_ragged, draw_ragged_case

pytestmark = pytest.mark.sm90

BRAIN, HALF = torch.bfloat16, torch.float16
# decoding steps, a chunk of a prompt, whole prompts, and a sequence without queries
MIXED = RaggedCase(
    1, BRAIN, heads=(8, 2), q_lens=(1, 130, 1, 0, 300, 3), kv_lens=(700, 400, 1, 50, 300, 129),
    head_dims=(128, 128),
)  # fmt: skip
PAGED = dataclasses.replace(MIXED, layout="paged")


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


# Enough softmaxes for three programs to claim them: prompts that end inside of a tile, at its end
# and with one consumer's rows, and decoding steps.
CLAIMED = RaggedCase(
    7, BRAIN, heads=(8, 2), q_lens=(1, 512, 300, 1, 16, 1, 48, 700),
    kv_lens=(900, 512, 300, 64, 40, 129, 48, 800), head_dims=(128, 128), layout="paged",
)  # fmt: skip
# Which settings of the kernel differ from those that it is launched with.
SETTINGS = {
    "ranges": {"DYNAMIC": False},
    "no overlap": {"PDL": False},
}


@pytest.mark.parametrize("programs", [1, 2, 3, 132])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_softmaxes_that_programs_claim(programs, batch_invariant):
    """Twice, since the counter of claims must be zero again."""
    case = dataclasses.replace(CLAIMED, batch_invariant=batch_invariant, sinks=True, padding=150)
    first = check(case, programs)
    second = check(case, programs)
    assert first.out.equal(second.out) and first.lse.equal(second.lse)


def test_claimed_softmaxes_have_the_bits_of_whole_ones():
    claimed = attend(CLAIMED.build("cuda"), 1)
    whole = attend(dataclasses.replace(CLAIMED, batch_invariant=True).build("cuda"), 132)
    assert claimed[0].equal(whole[0]) and claimed[1].equal(whole[1])


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("programs", [1, 3, 132])
def test_settings(changes, programs):
    call = CLAIMED.build("cuda")
    config = dataclasses.replace(ragged_sm90_config(call.problem, call.top_left), **changes)
    with poisoned_empty():
        launch_attn_ragged_sm90(call, config, programs)
    copied = dataclasses.replace(CLAIMED.build("cpu"), out=call.out.cpu(), lse=call.lse.cpu())
    check_ragged(copied, what=str(changes), on_gpu=True)


def test_outputs_at_any_address():
    """One element off 16 bytes: they are written, and nothing beside them."""
    call = CLAIMED.build("cuda")
    memory = torch.full((call.out.numel() + 2,), 7.0, dtype=call.out.dtype, device="cuda")
    out = memory[1:-1].view(call.out.shape)
    moved = dataclasses.replace(call, out=out)
    expected = attend(call)
    found = attend(moved)
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])
    assert memory[0] == memory[-1] == 7.0


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


# Decoding steps alone: sequences without a query or without keys, and rows without a sequence.
STEPS = RaggedCase(
    11, BRAIN, heads=(8, 2), q_lens=(1, 0, 1, 1, 1, 0, 1), head_dims=(128, 128), padding=3,
    kv_lens=(700, 50, 129, 0, 3000, 9, 1), layout="paged", sinks=True,
)  # fmt: skip


def check_steps(case):
    """By the kernel of decoding, and the same twice: counters of parts must be zero again."""
    assert takes_steps(case.build("cuda").problem)
    first, second = check(case), check(case)
    assert first.out.equal(second.out) and first.lse.equal(second.lse)


@pytest.mark.parametrize("changes", [
    {}, {"layout": "contiguous"}, {"layout": "contiguous", "moved": True}, {"page_size": 48},
    {"table_dtype": torch.int64, "page_size": 64}, {"heads": (64, 8), "head_dims": (64, 64)},
    {"fp8": "head"}, {"fp8": "tensor", "softcap": 2.0, "scale": -0.3}, {"block_size": 16},
    {"fp8": "head", "block_size": 16, "band": Band(500, 0)}, {"band": Band(100, 0)},
    {"heads": (64, 1), "dtype": HALF, "q_lens": (1,) * 140, "kv_lens": (300,) * 140},
    {"q_lens": (1,), "kv_lens": (5000,), "padding": 0}, {"q_lens": (0,), "kv_lens": (5,)},
    {"q_lens": (1,) * 150, "kv_lens": (70,) * 150, "softcap": 3.0},
])  # fmt: skip
def test_decoding_steps(changes):
    check_steps(dataclasses.replace(STEPS, **changes))


def test_steps_with_strides():
    """Queries and outputs that are parts of larger tensors, and an output at any address."""
    call = STEPS.build("cuda")
    tokens, heads, dim = call.q.shape
    expected = attend(call)
    wide = torch.full((tokens, heads + 2, dim + 24), 7.0, dtype=call.q.dtype, device="cuda")
    q, out = wide.clone()[:, 1:-1, 8:-16], wide.clone()[:, 1:-1, 1 : dim + 1]
    q.copy_(call.q)
    found = attend(dataclasses.replace(call, q=q, out=out))
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])


def test_a_wrong_page_of_a_step_spoils_only_its_row():
    call = STEPS.build("cuda")
    good = [x.clone() for x in attend(call)]
    table = call.page_table.clone()
    # the third sequence has the second query; the second sequence has none
    table[2, 1], table[1, 0] = 10**6, -1
    spoiled = dataclasses.replace(
        call, page_table=table, out=call.out.clone(), lse=call.lse.clone()
    )
    attend(spoiled)
    assert spoiled.out[1].isnan().all()
    spoiled.out[1], spoiled.lse[:, 1] = good[0][1], good[1][:, 1]
    assert spoiled.out.equal(good[0]) and spoiled.lse.equal(good[1])


def attend_in_pages(call):
    """The public function, with keys in pages."""
    return bsk.attention_varlen(
        call.q, call.k, call.v, call.cu_seqlens_q, max_seqlen_q=call.max_q,
        cache_seqlens=call.seqlens_k, page_table=call.page_table, causal=True, impl="sm90",
        return_lse=True,
    )  # fmt: skip


def replays(call, lengths):
    """Capture a call once and replay it; `(q_lens, kv_lens)` of its sequences change under it."""
    attend_in_pages(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend_in_pages(call)
    for q_lens, kv_lens in lengths:
        call.cu_seqlens_q.copy_(torch.tensor([0, *q_lens]).cumsum(0))
        call.seqlens_k.copy_(torch.tensor(kv_lens))
        graph.replay()
        yield dataclasses.replace(call, out=out, lse=lse)


def check_on_host(call):
    """Against the oracle on the host."""
    host = {name: x.cpu() for name, x in vars(call).items() if torch.is_tensor(x)}
    offsets = call.cu_seqlens_q.tolist()
    check_ragged(dataclasses.replace(call, **host), what=f"offsets {offsets}", on_gpu=True)


def test_a_graph_of_steps_follows_offsets_and_lengths():
    call = STEPS.build("cuda")
    call = dataclasses.replace(call, q=call.q.nan_to_num(), sinks=None)
    lengths = (
        ((1, 1, 1, 1, 1, 1, 1), (700, 50, 129, 0, 3000, 9, 1)),
        ((0, 0, 1, 0, 1, 1, 0), (3, 5, 100, 8, 2000, 0, 1)),
    )
    for given in replays(call, lengths):
        again, lse_again = attend_in_pages(call)
        assert given.out.equal(again) and given.lse.equal(lse_again)
        check_on_host(given)


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
    lengths = (
        ((1,) * 6, (700, 400, 1, 50, 300, 129)),
        ((300, 0, 0, 1, 100, 7), (301, 5, 0, 50, 300, 129)),
    )
    for given in replays(PAGED.build("cuda"), lengths):
        check_on_host(given)


def test_the_public_call_names_it():
    call = PAGED.build("cuda")
    report = bsk.explain(
        bsk.attention_varlen, call.q, call.k, call.v, call.cu_seqlens_q, max_seqlen_q=300,
        cache_seqlens=call.seqlens_k, page_table=call.page_table, impl="sm90",
    )  # fmt: skip
    assert report.chosen == "sm90"
