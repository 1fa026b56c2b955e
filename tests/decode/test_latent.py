"""Latent caches (MLA): values that are a view of the keys, up to D 576, in every implementation."""

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.decode import DecodeCall, values_are_keys
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.decode import api, eager, sm90_latent, triton
from blackwell_sparsek.decode.tuning import (
    SLICE,
    LatentConfig,
    attn_decode_sm90_unsupported,
    latent_launch,
)
from blackwell_sparsek.launch import launcher
from blackwell_sparsek.testing.decode_cases import CAUSAL, DecodeCase, check_decode
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.poison import poisoned_empty

H200 = Arch("cuda", 90, 132, 232448, False)
MLA = DecodeCase(1, torch.float16, heads=(16, 1), head_dims=(576, 512), latent=True)


@pytest.mark.parametrize("latent", [True, False])
@pytest.mark.parametrize("page_size", [None, 16])
def test_the_portable_kernel_keeps_the_budget(latent, page_size, device):
    case = dataclasses.replace(MLA, latent=latent, page_size=page_size, lengths=(35, 0, 17))
    call = case.build(device)
    assert values_are_keys(call.k_cache, call.v_cache) is latent
    with poisoned_empty():
        out, lse = triton.decode(call)
    check_decode(out, lse, call)


@pytest.mark.parametrize("options", [{"q_len": 3}, {"sinks": True, "softcap": 20.0}], ids=str)
def test_plain_pytorch_keeps_the_budget(options, device):
    case = dataclasses.replace(MLA, dtype=torch.float32, lengths=(70, 9), **options)
    call = case.build(device)
    check_decode(*eager.attention_decode(call), call)


def test_what_counts_as_a_view():
    k = torch.empty(2, 1, 8, 576)
    assert values_are_keys(k, k[..., :512])
    assert not values_are_keys(k, k)
    assert not values_are_keys(k, k[..., 64:])
    assert not values_are_keys(k, k[..., :512].clone())
    assert not values_are_keys(k[:, :, ::2], k[:, :, :4, :512])
    assert not values_are_keys(k, k.view(torch.int32)[..., :512])
    meta = torch.empty(2, 1, 8, 576, device="meta")
    assert not values_are_keys(meta, meta[..., :512])


@pytest.mark.parametrize("page_size", [None, 64, 16])
def test_caches_of_one_memory_are_decoded_as_latent_ones(page_size):
    """What `bsk.KVCache` and `bsk.PagedKVCache` hold, against the oracle and for the H200."""
    lengths, q_len, sizes = [70, 3, 129], 3, {"head_dim_v": 512, "latent": True}
    latents, q = (normal(3, h, n, 576, seed=h).half() for h, n in ((1, 129), (16, q_len)))
    if page_size is None:
        cache = bsk.KVCache(3, 1, 140, 576, dtype=torch.float16, **sizes)
        cache.append(latents, counts=lengths)
        where = {"cache_seqlens": cache.lengths}
    else:
        pages = 1 + 3 * -(-129 // page_size)
        cache = bsk.PagedKVCache(pages, page_size, 1, 576, dtype=torch.float16, **sizes)
        ids = cache.add_sequences(4)
        # sequences in pages that do not follow each other
        cache.append(ids, latents[:, :, :1].expand(3, 1, 1, 576)[[0, 0, 1, 2]], counts=[1, 0, 0, 0])
        ids = [ids[2], ids[1], ids[3]]
        cache.append(ids, latents, counts=lengths)
        where = {"cache_seqlens": cache.lengths(ids), "page_table": cache.page_table(ids)}
    call = DecodeCall(q, cache.k, cache.v, scale=576**-0.5, band=CAUSAL, **where)
    on_hopper = dataclasses.replace(call.problem, arch=H200)
    assert on_hopper.latent and on_hopper.tma
    assert attn_decode_sm90_unsupported(on_hopper) is None
    assert latent_launch(on_hopper).config.copies == {None: 1, 64: 1, 16: 4}[page_size]
    out, lse = bsk.attention_decode(q, cache.k, cache.v, return_lse=True, **where)
    check_decode(out, lse, call)
    # values in memory of their own are not for this kernel
    separate = dataclasses.replace(call, v_cache=cache.v.clone()).problem
    assert attn_decode_sm90_unsupported(dataclasses.replace(separate, arch=H200)) is not None


def test_when_the_hopper_kernel_takes_a_latent_cache():
    problem = dataclasses.replace(MLA.build("cpu").problem, arch=H200)
    assert problem.latent and attn_decode_sm90_unsupported(problem) is None
    for changes, reason in (
        ({"latent": False}, "a view of the keys, v_cache = k_cache"),
        ({"head_dim_v": 256}, "needs head dimensions of 64, 128 or 256, or 576 and 512"),
        ({"page_size": 24}, "pages of 24 are not a multiple of 16"),
        ({"tma": False}, "TMA needs slots"),
    ):
        assert reason in attn_decode_sm90_unsupported(dataclasses.replace(problem, **changes))


@pytest.mark.parametrize(("page_size", "copies"), [(None, 1), (64, 1), (16, 4), (48, 4)])
def test_tiles_of_a_latent_cache(page_size, copies):
    problem = dataclasses.replace(MLA.build("cpu").problem, arch=H200, page_size=page_size)
    config = latent_launch(problem).config
    assert config.copies == copies
    # copies of 64 columns fill a tile of keys, those behind the values last
    assert config.block() == (1, 1, config.TILE_N // copies, SLICE)
    assert config.k_column == 512 == 576 - SLICE
    # the ring, the queries and the weights fit beside barriers and row states
    elements = config.STAGES * config.TILE_N * 576 + config.ROWS * (576 + config.TILE_N)
    assert 2 * elements + 2048 <= 227 * 1024


@pytest.mark.parametrize("paired", [False, True])
def test_copies_by_address_fill_each_tile_once(paired):
    config = LatentConfig(None, None, 40, PAIRED=paired)
    copied = {
        part: sorted(
            config.first_slice(part, i) + rank
            for i, rank in itertools.product(range(config.own_slices), range(config.pair))
        )
        for part in range(config.parts)
    }
    # a consumer releases what it has multiplied: its half of the columns
    assert copied == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    # the columns behind the values are one more slice, of the last part
    assert [config.part_bytes(part) for part in range(2)] == [64 * 256 * 2, 64 * 320 * 2]


@pytest.mark.parametrize("paired", [False, True])
def test_every_part_of_a_pair_of_tiles_has_its_turn(paired):
    config = LatentConfig(None, None, 40, PAIRED=paired)
    turns = range(2 * config.parts)
    order = [(config.copied_tile(turn), config.copied_part(turn)) for turn in turns]
    assert sorted(order) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # notes of a tile are written when all its parts are known to be empty, and only once
    for tile in range(2):
        ends = [turn for turn in turns if config.copied_tile(turn) == tile]
        assert [config.completes(turn) for turn in ends] == [False] * (len(ends) - 1) + [True]
    if paired:
        # own weights first: consumer 0 has even tiles and left halves, consumer 1 odd and right
        assert order[:2] == [(0, 0), (1, 1)]


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("block_kv", [None, 64])
def test_places_in_shared_memory(paired, block_kv):
    config = LatentConfig(None, block_kv, 64, PAIRED=paired)
    values = range(config.values_offset, config.values_offset + 2 * 64 * 512 * 2)
    rest = range(config.rest_offset, config.rest_offset + 2 * 64 * 64 * 2)
    bars = range(config.bars_offset, config.bars_offset + 8 * config.bars_room)
    for a, b in itertools.combinations((values, rest, bars), 2):
        assert a.stop <= b.start or b.stop <= a.start
    # the swizzle repeats after 1024 bytes
    assert values.start % 1024 == rest.start % 1024 == 0
    places = config.placed_barriers()
    assert all(place in bars for place, _ in places)
    # row states, positions, splits, flags, other barriers, and what Triton hands to its roles
    states = 4 * 64 * 4 if paired else 0
    assert bars.stop + states + 4 * 2 * config.noted_keys + 640 <= 227 * 1024
    # full halves of both stages, then empty ones
    assert [count for _, count in places] == [1] * 4 + [4 * 2 if paired else 1] * 4


@pytest.mark.parametrize(
    ("heads", "q_len", "paired"),
    [(16, 1, False), (64, 1, False), (65, 1, True), (128, 1, True), (64, 2, True), (192, 1, False),
     (128, 2, True), (16, 9, False)],
)  # fmt: skip
def test_pairs_take_an_even_number_of_head_tiles_and_many_keys(heads, q_len, paired):
    case = dataclasses.replace(MLA, heads=(heads, 1), q_len=q_len)
    problem = dataclasses.replace(case.build("cpu").problem, arch=H200, batch=64, capacity=8191)
    assert not latent_launch(problem).config.PAIRED
    problem = dataclasses.replace(problem, capacity=8192)
    config, programs = latent_launch(problem)
    assert config.PAIRED is paired and programs == 132
    odd_machine = dataclasses.replace(problem, arch=dataclasses.replace(H200, num_sms=131))
    assert latent_launch(odd_machine).programs == (130 if paired else 131)


@pytest.mark.parametrize(
    ("heads", "capacity", "programs"),
    # times of numbers near these are in docs/decisions/decode.md
    [(128, 4096, 64), (64, 8192, 64), (64, 32768, 103), (16, 8192, 128), (16, 32768, 128)],
)
def test_parts_of_one_sequence(heads, capacity, programs):
    problem = dataclasses.replace(MLA, heads=(heads, 1), lengths=(40,)).build("cpu").problem
    one = dataclasses.replace(problem, arch=H200, capacity=capacity)
    assert latent_launch(one).programs == programs
    assert latent_launch(dataclasses.replace(one, batch=2)).programs == 132


def test_a_call_without_sequences_has_a_launch():
    problem = dataclasses.replace(MLA.build("cpu").problem, arch=H200, batch=0)
    assert latent_launch(problem).programs == 132


@pytest.mark.parametrize("heads", [64, 128, 192])
def test_a_pair_is_launched_as_a_cluster(heads, monkeypatch):
    launched = []

    def note(kernel, grid, args, cluster, options):
        launched.append((grid, cluster))

    monkeypatch.setattr(launcher, "launch_kernel", note)
    call = dataclasses.replace(MLA, heads=(heads, 1), lengths=(9, 70)).build("cpu")
    out, lse = call.empty_results()
    sm90_latent.launch_attn_decode_latent(out, lse, call, LatentConfig(None, None, 40), 132)
    assert launched == [(132, 1)]
    config = LatentConfig(None, None, 40, PAIRED=True)
    if heads == 128:
        sm90_latent.launch_attn_decode_latent(out, lse, call, config, 132)
        assert launched[1:] == [(66, 2)]
    else:
        with pytest.raises(AssertionError, match=f"head_tiles={heads // 64} "):
            sm90_latent.launch_attn_decode_latent(out, lse, call, config, 132)


def test_the_launch_that_combines_parts_starts_early(monkeypatch):
    launched = []

    def note(kernel, grid, args, cluster, options):
        launched.append(options.get("launch_pdl", False))

    monkeypatch.setattr(launcher, "launch_kernel", note)
    call = dataclasses.replace(MLA, heads=(128, 1), lengths=(9, 70)).build("cpu")
    config, programs = latent_launch(dataclasses.replace(call.problem, arch=H200))
    assert config.COMBINED
    out, lse = call.empty_results()
    sm90_latent.launch_attn_decode_latent(out, lse, call, config, programs)
    # the launch that combines parts waits on the device
    assert launched == [False, True]


def test_a_recording_has_the_cache_once(monkeypatch):
    """Keys and values at one address would be two roles of one tensor."""
    seen = []

    def record(cache, options, inputs, run, *args, **rest):
        seen.append((options, inputs))
        return run(*args)

    monkeypatch.setattr(api, "record", record)
    call = dataclasses.replace(MLA, lengths=(9,), heads=(2, 1)).build("cpu")
    for v_cache in (call.v_cache, call.v_cache.clone()):
        bsk.attention_decode(call.q, call.k_cache, v_cache, cache_seqlens=call.cache_seqlens)
    (options, (_, k, v, *_)), (own_options, (_, _, own, *_)) = seen
    assert k is call.k_cache and v is None and own is not None
    assert options == (*own_options, 512)
