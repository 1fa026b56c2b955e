"""Which tiles the portable kernel takes, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from blackwell_sparsek.calls.ragged import RaggedProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.ragged import tuning
from blackwell_sparsek.ragged.op import ragged_dispatch
from blackwell_sparsek.ragged.tuning import (
    RaggedConfig,
    query_tiles,
    ragged_config,
    ragged_sm90_config,
    ragged_sm90_unsupported,
    takes_steps,
    why_not_triton,
)
from blackwell_sparsek.testing.ragged_cases import RaggedCase

INTERPRETED = Arch("cpu", 0, 1, 0, True)
H200 = Arch("cuda", 90, 132, 232448, False)
PROBLEM = RaggedProblem(
    arch=H200,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    batch=34,
    tokens=8224,
    heads_q=32,
    heads_kv=8,
    max_q=4096,
    capacity=8192,
    head_dim=128,
    head_dim_v=128,
    page_size=16,
    block_size=None,
    packed=False,
    batch_invariant=False,
    tma=True,
)


def test_decoding_steps_take_low_tiles():
    low = ragged_config(replace(PROBLEM, max_q=4), "ieee")
    assert low.tile_m == 16 and ragged_config(replace(PROBLEM, max_q=5), "ieee").tile_m == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 256])
def test_batch_invariant_tiles_depend_on_dtype_and_head_dim_alone(dtype, dim):
    fixed = replace(
        PROBLEM, dtype=dtype, cache_dtype=dtype, head_dim=dim, head_dim_v=dim, batch_invariant=True
    )
    others = [{"max_q": 1}, {"batch": 1}, {"tokens": 1}, {"capacity": 64}]
    configs = {ragged_config(replace(fixed, **x), "ieee") for x in others}
    assert configs == {ragged_config(fixed, "ieee")}


def test_every_query_has_a_tile():
    """However sequences are cut, and with padding behind the last."""
    problem = replace(PROBLEM, heads_q=3, heads_kv=1, tokens=50)
    for lengths in ([50], [1] * 50, [0, 49, 0, 1], [16, 17, 15]):
        tiles = sum(-(-3 * n // 16) for n in lengths)
        assert query_tiles(replace(problem, batch=len(lengths)), 16) > tiles


@pytest.mark.parametrize("changes, why", [
    ({"head_dim": 257}, "head dimensions of 1 to 256"),
    ({"dtype": torch.float32, "cache_dtype": torch.float8_e4m3fn}, "float16 or bfloat16 queries"),
    ({"arch": replace(H200, sm=86), "cache_dtype": torch.float8_e4m3fn}, "sm_89"),
    ({"capacity": 2**30}, "keys a sequence"), ({"tokens": 2**29}, "rows of all sequences"),
    ({"tokens": 2**20, "capacity": 2**20}, "tiles over all sequences"),
    ({"dtype": torch.float64}, "float64"),
])  # fmt: skip
def test_refusals(changes, why):
    pytest.importorskip("triton")
    problem = replace(PROBLEM, arch=INTERPRETED)
    assert why_not_triton(problem) is None
    assert why in why_not_triton(replace(problem, **changes))


@pytest.mark.parametrize("changes", [
    {"tile_m": 8}, {"tile_n": 24}, {"programs": 0}, {"precision": "tf64"},
])  # fmt: skip
def test_impossible_configs(changes):
    good = {"tile_m": 16, "tile_n": 16, "num_warps": 4, "num_stages": 2, "programs": 1}
    with pytest.raises(ValueError, match=next(iter(changes))):
        RaggedConfig(**{**good, **changes})


@pytest.mark.parametrize("changes, why", [
    ({"arch": replace(H200, sm=80)}, "needs sm_90"), ({"dtype": torch.float32}, "WGMMA"),
    ({"cache_dtype": torch.float8_e4m3fn}, "needs a cache of torch.bfloat16"),
    ({"head_dim": 136}, "up to 128 in steps of 8"), ({"head_dim_v": 100}, "steps of 8"),
    ({"packed": True}, "packed keys"), ({"block_size": 64}, "listed blocks"),
    ({"alibi": True}, "ALiBi"), ({"page_size": 24}, "not a multiple of 16"),
    ({"tma": False}, "multiples of 16 bytes"), ({"capacity": 2**30}, "keys a sequence"),
    ({"tokens": 2**28}, "rows of all sequences"),
    ({"tokens": 2**24, "capacity": 2**20}, "tiles over all sequences"),
])  # fmt: skip
def test_refusals_of_the_hopper_kernel(changes, why):
    assert ragged_sm90_unsupported(PROBLEM) is None
    assert why in ragged_sm90_unsupported(replace(PROBLEM, **changes))


def test_auto_takes_the_hopper_kernel_where_it_can_run(monkeypatch):
    monkeypatch.setattr(tuning, "why_no_kernels", lambda arch: None)
    monkeypatch.setattr(tuning, "why_no_gluon", lambda: None)
    assert ragged_dispatch.decide("auto", PROBLEM).chosen == "sm90"
    assert ragged_dispatch.decide("auto", replace(PROBLEM, alibi=True)).chosen == "triton"


STEPS = replace(PROBLEM, batch=32, tokens=32, max_q=1, steps=True)
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("changes", [
    {}, {"cache_dtype": FP8}, {"block_size": 16}, {"page_size": None}, {"heads_q": 512},
    {"head_dim": 64, "head_dim_v": 64}, {"tokens": 1, "batch": 1},
])  # fmt: skip
def test_decoding_steps_alone_take_the_kernel_of_decoding(changes):
    assert takes_steps(replace(STEPS, **changes))
    assert not takes_steps(replace(STEPS, steps=False, **changes))


@pytest.mark.parametrize("changes", [
    {"head_dim": 96}, {"cache_dtype": FP8, "heads_q": 256}, {"alibi": True}, {"tma": False},
    {"batch": 0}, {"batch": 0, "tokens": 0},
    # many parts of many rows, which a separate launch combines
    {"tokens": 1, "heads_q": 64, "heads_kv": 1}, {"arch": replace(H200, sm=100)},
])  # fmt: skip
def test_steps_that_it_does_not_take(changes):
    assert not takes_steps(replace(STEPS, **changes))


@pytest.mark.parametrize("changes, steps", [
    ({}, True), ({"layout": "paged"}, True), ({"sinks": True, "softcap": 2.0}, True),
    ({"moved": True}, True), ({"layout": "paged", "block_size": 16}, True), ({"padding": 3}, True),
    ({"q_lens": (0, 0)}, True), ({"moved": True, "block_size": 16}, False),
    ({"q_lens": (1, 2)}, False),
    ({"layout": "packed"}, False), ({"used": True}, False), ({"first_keys": True}, False),
    ({"chunk": 8}, False), ({"top_left": True}, False), ({"batch_invariant": True}, False),
])  # fmt: skip
def test_which_calls_are_decoding_steps(changes, steps):
    case = RaggedCase(1, **{"q_lens": (1, 0), "kv_lens": (30, 5), **changes})
    assert case.build("cpu").problem.steps is steps


def test_auto_takes_steps_over_fp8_caches_and_lists(monkeypatch):
    """Which the Hopper kernel of packed queries has no code for."""
    monkeypatch.setattr(tuning, "why_no_kernels", lambda arch: None)
    monkeypatch.setattr(tuning, "why_no_gluon", lambda: None)
    for changes in ({"cache_dtype": FP8}, {"block_size": 16}):
        assert ragged_dispatch.decide("auto", replace(STEPS, **changes)).chosen == "sm90"
        assert ragged_dispatch.decide("auto", replace(PROBLEM, **changes)).chosen == "triton"


@pytest.mark.parametrize("dim, stages", [(128, 3), (64, 4)])
def test_tiles_of_the_hopper_kernel_fit_into_shared_memory(dim, stages):
    config = ragged_sm90_config(replace(PROBLEM, head_dim=dim, head_dim_v=dim), False)
    assert stages == config.STAGES and config.tile_bytes + 2048 <= 226 * 1024
    assert config.k_block() == (1, 1, 16, dim)
    contiguous = ragged_sm90_config(replace(PROBLEM, page_size=None), False)
    assert contiguous.k_block() == (1, 1, 128, 128)


def test_prompts_have_programs_claim_whole_softmaxes():
    problem = replace(PROBLEM, tma_q=True)
    assert ragged_sm90_config(problem, False).DYNAMIC
    # decoding steps alone: 16 queries of a sequence, 4 heads of a KV head
    assert not ragged_sm90_config(replace(problem, max_q=16), False).DYNAMIC


@pytest.mark.parametrize("changes, heads", [
    ({}, 4), ({"heads_q": 8}, 1), ({"heads_q": 512}, 64),
    # 64 rows are no whole number of queries, or less than one
    ({"heads_q": 56}, 0), ({"heads_q": 1024}, 0),
    ({"tma_q": False}, 0), ({"positive": False}, 0),
])  # fmt: skip
def test_when_the_hopper_kernel_copies_queries_by_tma(changes, heads):
    config = ragged_sm90_config(replace(PROBLEM, **{"tma_q": True, **changes}), False)
    assert heads == config.HEADS
    if heads:
        assert config.q_block() == (64 // heads, 1, heads, 128)


@pytest.mark.parametrize("scale, softcap, positive", [
    (0.1, 0.0, True), (0.0, 0.0, False), (-0.1, 0.0, False), (-0.1, 30.0, True),
])  # fmt: skip
def test_a_softcap_keeps_the_sign_of_a_scale_out_of_queries(scale, softcap, positive):
    call = replace(RaggedCase(1, torch.bfloat16).build("cpu"), scale=scale, softcap=softcap)
    assert call.problem.positive is positive
