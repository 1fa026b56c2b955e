"""Latent caches (MLA): values that are a view of the keys, up to D 576, in every implementation."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.decode import values_are_keys
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.decode import api, eager, triton
from blackwell_sparsek.decode.tuning import attn_decode_sm90_unsupported, latent_launch
from blackwell_sparsek.testing.decode_cases import DecodeCase, check_decode
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


def test_when_the_hopper_kernel_takes_a_latent_cache():
    problem = dataclasses.replace(MLA.build("cpu").problem, arch=H200)
    assert problem.latent and attn_decode_sm90_unsupported(problem) is None
    for changes, reason in (
        ({"latent": False}, "a view of the keys, v_cache = k_cache"),
        ({"head_dim_v": 256}, "needs head dimensions of 64 or 128, or 576 and 512"),
        ({"page_size": 24}, "pages of 24 are not a multiple of 16"),
        ({"tma": False}, "TMA needs slots"),
    ):
        assert reason in attn_decode_sm90_unsupported(dataclasses.replace(problem, **changes))


@pytest.mark.parametrize(("page_size", "copies"), [(None, 1), (64, 1), (16, 4), (48, 4)])
def test_tiles_of_a_latent_cache(page_size, copies):
    problem = dataclasses.replace(MLA.build("cpu").problem, arch=H200, page_size=page_size)
    config, programs = latent_launch(problem)
    assert programs == 132 and config.copies == copies
    # copies fill a tile of keys, whose columns lie side by side
    (*_, keys, rest), (*_, keys_v, values) = config.k_block(), config.v_block()
    assert keys == keys_v == config.TILE_N // copies
    assert config.k_column == values == 512 and values + rest == 576
    # the ring, the queries and the weights fit beside barriers and row states
    elements = config.STAGES * config.TILE_N * 576 + config.ROWS * (576 + config.TILE_N)
    assert 2 * elements + 2048 <= 227 * 1024


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
