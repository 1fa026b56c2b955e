"""The decode kernel against the oracle; the same bodies run interpreted and compiled."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.calls.attention import empty_lse, empty_out
from blackwell_sparsek.decode.triton import half_rows, launch_attn_decode
from blackwell_sparsek.decode.tuning import DecodeConfig
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.testing import guard, layouts, poison
from blackwell_sparsek.testing.decode_cases import DecodeCase, check_decode, draw_decode_case

HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16


# whether rows lie across, set by the fixture
ACROSS = False


@pytest.fixture(params=[False, True], ids=["down", "across"], autouse=True)
def across(request, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ACROSS", request.param)


def config(programs=5, tile_m=16, tile_n=16):
    return DecodeConfig(tile_m, tile_n, num_warps=4, num_stages=2, programs=programs, across=ACROSS)


def attend(call, cfg=None):
    """Launch on poisoned outputs and a poisoned workspace."""
    out = poison.poison_(empty_out(call.q, call.v_cache.shape[-1]))
    lse = poison.poison_(empty_lse(call.q))
    with poison.poisoned_empty():
        launch_attn_decode(out, lse, call, cfg or config())
    return out, lse


def check(case, device, cfg=None):
    call = case.build(device)
    out, lse = attend(call, cfg)
    check_decode(out, lse, call, what=str(case))
    return out, lse


@pytest.mark.parametrize(
    "seed, across", [(seed, seed // 2 % 2 == 1) for seed in range(16)], indirect=["across"]
)
def test_random_calls(seed, across, device):
    case = draw_decode_case(seed, dtypes=(HALF, FLOAT, BRAIN), longest=50)
    cfg = config((1, 2, 3, 7, 16)[seed % 5], (16, 32)[seed % 2], (16, 32, 64)[seed % 3])
    check(case, device, cfg)


@pytest.mark.parametrize(
    "programs, across", [(n, n % 2 == 1) for n in range(1, 17)], indirect=["across"]
)
def test_any_number_of_splits(programs, across, device):
    """One KV head: the programs are the splits of its keys."""
    case = DecodeCase(1, HALF, heads=(2, 1), lengths=(16 * 16 - 3,))
    check(case, device, config(programs))


@pytest.mark.parametrize(
    "page_size, tile_n, across",
    [(16, 16, False), (32, 16, True), (16, 32, True), (48, 32, False), (17, 16, True)],
    indirect=["across"],
)
def test_pages_give_the_bits_of_a_contiguous_cache(page_size, tile_n, across, device):
    case = DecodeCase(2, BRAIN, heads=(4, 2), lengths=(50, 0, 33), q_len=2)
    contiguous = attend(case.build(device), config(7, tile_n=tile_n))
    paged = dataclasses.replace(case, page_size=page_size)
    shuffled = check(paged, device, config(7, tile_n=tile_n))
    assert contiguous[0].equal(shuffled[0]) and contiguous[1].equal(shuffled[1])
    call = paged.build(device)
    call = dataclasses.replace(call, page_table=call.page_table.long())
    wide = attend(call, config(7, tile_n=tile_n))
    assert wide[0].equal(shuffled[0]) and wide[1].equal(shuffled[1])


@pytest.mark.parametrize(
    "heads, q_len, tile_m", [((3, 3), 1, 16), ((4, 1), 5, 32), ((14, 2), 1, 16), ((14, 2), 5, 64),
                             ((8, 1), 5, 16), ((20, 1), 1, 32)],
)  # fmt: skip
def test_groups_of_query_heads(heads, q_len, tile_m, device):
    case = DecodeCase(3, HALF, heads=heads, lengths=(37, 9), q_len=q_len)
    check(case, device, config(5, tile_m, 32))


@pytest.mark.parametrize("q_len", [1, 2, 3, 8, 15, 16, 40])
def test_several_queries_align_to_the_end(q_len, device):
    check(DecodeCase(4, HALF, heads=(2, 1), lengths=(35, 7, 1), q_len=q_len), device)


@pytest.mark.parametrize("dim, dim_v", [(16, 16), (80, 96), (24, 8), (128, 256), (256, 16)])
def test_head_dims(dim, dim_v, device):
    check(DecodeCase(5, HALF, lengths=(35,), head_dims=(dim, dim_v)), device)


@pytest.mark.parametrize("band", [Band(0, 0), Band(15, 0), Band(16, 0)])
@pytest.mark.parametrize("page_size", [None, 16])
def test_keys_before_a_band_are_not_read(band, page_size, device):
    """Their slots hold NaN and their pages nothing: they may have been given away."""
    case = DecodeCase(6, HALF, heads=(2, 1), lengths=(50, 33), q_len=2, band=band)
    call = dataclasses.replace(case, page_size=page_size).build(device)
    if page_size is None:
        for b, length in enumerate(case.lengths):
            unseen = max(length - 2 - band.left, 0)
            call.k_cache[b, :, :unseen], call.v_cache[b, :, :unseen] = float("nan"), float("nan")
    else:
        for b, length in enumerate(case.lengths):
            call.page_table[b, : max(length - 2 - band.left, 0) // 16] = 12345
            call.page_table[b, -(-length // 16) :] = -7
    out, lse = attend(call)
    check_decode(out, lse, call)


@pytest.mark.parametrize("band", [Band(None, None), Band(None, 1), Band(3, None), Band(2, 3)])
def test_bands_that_look_ahead(band, device):
    check(DecodeCase(7, HALF, heads=(2, 2), lengths=(40, 17), q_len=4, band=band), device)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("programs", [1, 6])
def test_softcap_and_sinks(softcap, sinks, programs, device):
    case = DecodeCase(
        8, HALF, heads=(4, 2), lengths=(50, 0, 21), q_len=2, softcap=softcap, sinks=sinks
    )
    check(case, device, config(programs))


@pytest.mark.parametrize("dims", [(48, 24), (24, 48), (32, 32)])
def test_fp8_rows_that_are_too_short_for_words_are_read_as_bytes(dims, device):
    """Also if only those of the keys, or only those of the values, are long enough."""
    case = DecodeCase(12, HALF, heads=(4, 2), lengths=(37, 9), head_dims=dims, fp8="head")
    check(case, device, dataclasses.replace(config(3), words=True))


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_caches_that_are_not_fp8_are_never_read_as_words(dtype, device):
    case = DecodeCase(13, dtype, lengths=(37,), head_dims=(48, 64))
    check(case, device, dataclasses.replace(config(3), words=True))


def test_empty_sequences(device):
    call = DecodeCase(9, HALF, lengths=(0, 20, 0), capacity=32).build(device)
    out, lse = attend(call)
    for b in (0, 2):
        assert out[b].eq(0).all() and lse[b].eq(-torch.inf).all()
    check_decode(out, lse, call)


def test_more_sequences_than_are_read_at_a_time(device):
    """Lengths are found by a scan over 32 at a time."""
    lengths = tuple(i % 3 for i in range(40))
    check(DecodeCase(10, HALF, heads=(1, 1), lengths=lengths), device, config(3))


@pytest.mark.parametrize(
    "page_size, block_size", [(None, 8), (None, 48), (16, 16), (32, 32), (24, 24)]
)
def test_all_blocks_are_the_dense_result(page_size, block_size, device):
    case = DecodeCase(
        11, FLOAT, heads=(4, 2), lengths=(50, 5), page_size=page_size, q_len=2,
        block_size=block_size, keep=1.0,
    )  # fmt: skip
    check(case, device)
    check(dataclasses.replace(case, block_size=None), device)


@pytest.mark.parametrize(
    "page_size, band", [(None, Band(30, 0)), (16, Band(None, 0)), (64, Band(30, 0))]
)
def test_only_listed_blocks_are_read(page_size, band, device):
    case = DecodeCase(
        12, HALF, heads=(4, 2), lengths=(66, 9), q_len=3, page_size=page_size,
        block_size=page_size or 16, keep=0.3, band=band,
    )  # fmt: skip
    call = case.build(device)
    exact = attend(call)
    check_decode(*exact, call)
    size = call.kv_block_size
    for b, head in ((b, h) for b in range(2) for h in range(2)):
        for block in set(range(-(-66 // size))) - set(call.kv_blocks[b, head].tolist()):
            for cache in (call.k_cache, call.v_cache):
                if page_size is None:
                    cache[b, head, block * size : (block + 1) * size] = float("nan")
                else:
                    cache[call.page_table[b, block], :, head] = float("nan")
    again = attend(call)
    assert all(a.equal(b) for a, b in zip(exact, again, strict=True))


def test_lists_without_a_block(device):
    call = DecodeCase(13, HALF, heads=(4, 2), lengths=(40,), block_size=16, keep=0.0).build(device)
    for blocks in (call.kv_blocks, call.kv_blocks[..., :0]):
        out, lse = attend(dataclasses.replace(call, kv_blocks=blocks))
        assert out.eq(0).all() and lse.eq(-torch.inf).all()


@pytest.mark.parametrize(
    "scales, dtype, softcap", [("tensor", BRAIN, 0.0), ("head", BRAIN, 3.0), ("head", HALF, 0.0)]
)
def test_fp8_caches(scales, dtype, softcap, device):
    case = DecodeCase(
        14, dtype, heads=(4, 2), lengths=(20, 33), q_len=2, fp8=scales, softcap=softcap
    )
    check(case, device)
    check(dataclasses.replace(case, page_size=16), device, config(3, tile_n=32))


@triton.jit
def _half_rows_kernel(half_ptr, up_ptr, q_ptr, D: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    half, up = half_rows(tl.load(q_ptr + at))
    tl.store(half_ptr + at, half)
    tl.store(up_ptr + rows, up)


@pytest.mark.parametrize("across", [False], indirect=True)
def test_queries_of_any_size_fit_into_fp16(across, device):
    """Beside keys in fp8; the largest in a row are within the rounding of fp16, others near it."""
    largest = torch.tensor([3e38, 2.0**127, 1e38, 65520.0, 1.0, 2e-5, 2.0**-126, 0.0])
    q = (largest[:, None] * torch.linspace(-1, 1, 16)).to(device)
    half, up = torch.empty_like(q, dtype=HALF), torch.empty_like(q[:, 0])
    _half_rows_kernel[(1,)](half, up, q, D=16, ROWS=len(q))
    error = (half.double() * up.double()[:, None] - q.double()).abs().amax(1)
    assert (error <= largest.double().to(device) * 2.0**-11).all()


@pytest.mark.parametrize("page", [-1, 9, 2**31 - 1, 2**32])
@pytest.mark.parametrize("page_size", [32, 24])
def test_a_page_out_of_range_is_nan_and_not_read(page, page_size, device):
    case = DecodeCase(15, HALF, heads=(4, 2), lengths=(9, 40, 3), page_size=page_size)
    call = case.build(device)
    if page == 2**32:
        call = dataclasses.replace(call, page_table=call.page_table.long())
    fine = attend(call, config(3))
    call.page_table[1, 1] = page if page != 9 else call.k_cache.shape[0]
    out, lse = attend(call, config(3))
    assert out[1].isnan().all() and lse[1].isnan().all()
    for b in (0, 2):
        assert out[b].equal(fine[0][b]) and lse[b].equal(fine[1][b])


@pytest.mark.parametrize("length", [-1, 65, 2**31 - 1])
@pytest.mark.parametrize("page_size", [None, 16])
def test_a_length_out_of_range_is_nan_and_not_read(length, page_size, device):
    case = DecodeCase(16, HALF, lengths=(20, 64, 9), page_size=page_size, band=Band(8, 0))
    call = case.build(device)
    fine = attend(call)
    call.cache_seqlens[1] = length
    out, lse = attend(call)
    assert out[1].isnan().all() and lse[1].isnan().all()
    # those of the others are right, although they are split otherwise
    out[1], lse[1] = fine[0][1], fine[1][1]
    check_decode(out, lse, case.build(device))


@pytest.mark.parametrize("block", [-2, 4, 2**28])
@pytest.mark.parametrize("block_size", [16, 12])
def test_a_block_out_of_range_is_nan_and_not_read(block, block_size, device):
    call = DecodeCase(
        17, HALF, heads=(4, 2), lengths=(48, 30), block_size=block_size, keep=1.0
    ).build(device)
    fine = attend(call)
    call.kv_blocks[1, 0, 1] = block
    out, lse = attend(call)
    assert out[1, :2].isnan().all() and lse[1, :2].isnan().all()
    assert out[0].equal(fine[0][0]) and out[1, 2:].equal(fine[0][1, 2:])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("page_size", [None, 24])
def test_nothing_beside_the_tensors_is_touched(side, page_size, device, interpreted):
    call = DecodeCase(
        18, HALF, heads=(6, 2), lengths=(33, 3), q_len=2, page_size=page_size,
        block_size=page_size, sinks=True, head_dims=(24, 40),
    ).build(device)  # fmt: skip
    q, k_cache, v_cache = guard.guard_pages(
        call.q, call.k_cache.clone(), call.v_cache.clone(), side=side
    )
    tables = {
        name: guard.guarded(getattr(call, name), side)
        for name in ("cache_seqlens", "page_table", "kv_blocks", "sinks")
        if getattr(call, name) is not None
    }
    call = dataclasses.replace(call, q=q, k_cache=k_cache, v_cache=v_cache, **tables)
    check_decode(*attend(call, config(3)), call)


@pytest.mark.parametrize("seed", range(4))
def test_layouts(seed, device):
    call = DecodeCase(19, HALF, heads=(4, 2), lengths=(40, 21), q_len=3).build(device)
    q, k, v = layouts.different_layouts(call.q, call.k_cache, call.v_cache, start=seed)
    call = dataclasses.replace(call, q=q, k_cache=k, v_cache=v)
    check_decode(*attend(call), call)


def test_counters_reset_themselves(device, monkeypatch):
    """A launch leaves them as it found them, whatever the number of splits."""
    from blackwell_sparsek.launch import workspace

    words = torch.zeros(16, dtype=torch.int32, device=device)
    monkeypatch.setattr(workspace, "self_resetting_counters", lambda count, device: words[:count])
    for programs in (2, 7):
        check(DecodeCase(20, HALF, lengths=(60, 30)), device, config(programs))
        assert words.eq(0).all()


@pytest.mark.parametrize("shape", [(0, 1, 1, 16), (1, 0, 1, 16), (1, 1, 0, 16)])
def test_nothing_to_compute(shape, device):
    q = torch.empty(shape, device=device)
    k = torch.ones(shape[0], 1, 7, 16, device=device)
    call = DecodeCase(21, lengths=(7,)).build(device)
    lengths = call.cache_seqlens[: shape[0]]
    out, lse = attend(dataclasses.replace(call, q=q, k_cache=k, v_cache=k, cache_seqlens=lengths))
    assert out.shape == shape and lse.shape == shape[:3]
