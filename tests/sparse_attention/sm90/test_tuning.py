"""Which problems the Hopper kernels take, and whether their tiles fit."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.calls.sparse_attention import SparseAttnProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.sparse_attention.op import backward_dispatch, forward_dispatch
from blackwell_sparsek.sparse_attention.sm90 import tuning
from blackwell_sparsek.sparse_attention.sm90.gathered_tuning import sparse_gathered_config
from blackwell_sparsek.sparse_attention.sm90.latent_tuning import sparse_latent_config
from blackwell_sparsek.sparse_attention.sm90.tuning import (
    sparse_attn_sm90_config,
    sparse_dkdv_sm90_config,
    sparse_dq_sm90_config,
    unsupported,
)

PROBLEM = SparseAttnProblem(
    arch=Arch("cuda", 90, 132, 232448, False),
    dtype=torch.bfloat16,
    batch=1,
    heads_q=64,
    heads_kv=4,
    lists=4,
    max_q=32768,
    max_k=32768,
    head_dim=128,
    head_dim_v=128,
    granularity=128,
    most=16,
    varlen=False,
    page_size=None,
    local=False,
    softcap=False,
    sinks=False,
    gate=False,
    tma=True,
)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"granularity": 64}, None),
        ({"head_dim": 192}, None),
        ({"head_dim": 256, "head_dim_v": 256}, None),
        ({"arch": Arch("cuda", 80, 108, 166912, False)}, "needs sm_90"),
        ({"dtype": torch.float32}, "torch.float32 has no 16-bit WGMMA"),
        ({"granularity": 32}, None),
        ({"granularity": 32, "gate": True}, "has no code for gates of entries of 32 keys"),
        ({"head_dim": 264}, "needs head dimensions up to 256 in steps of 8, got 264 and 128"),
        ({"head_dim_v": 100}, "needs head dimensions up to 256 in steps of 8, got 128 and 100"),
        ({"page_size": 64}, "has no code for keys in pages"),
        ({"tma": False}, "TMA needs keys to copy"),
        ({"max_k": 2**30}, "needs sequences of at most 1073741823 tokens"),
        ({"batch": 2**11, "max_q": 2**14}, "needs at most 2147483647 queries"),
    ],
)
def test_what_the_kernel_takes(changed, reason):
    given = unsupported(dataclasses.replace(PROBLEM, **changed))
    assert given is None if reason is None else reason in given


@pytest.mark.parametrize(
    ("changed", "chosen", "reason"),
    [
        ({}, "sm90", None),
        ({"granularity": 32}, "sm90", None),
        ({"granularity": 4, "gate": True}, "triton", "has no code for gates"),
        ({"page_size": 64}, "triton", "has no code for keys in pages"),
        ({"arch": Arch("cuda", 80, 108, 166912, False)}, "triton", "needs sm_90"),
        ({"dtype": torch.float64}, "eager", "has no 16-bit WGMMA"),
        ({"arch": Arch("cpu", 0, 1, 0, True)}, "eager", "needs sm_90"),
        ({"arch": Arch("cpu", 0, 1, 0, False)}, "eager", "needs sm_90"),
    ],
)
def test_what_auto_takes(changed, chosen, reason, monkeypatch):
    monkeypatch.setattr(tuning, "why_no_gluon", lambda: None)
    problem = dataclasses.replace(PROBLEM, **changed)
    decision = forward_dispatch.decide("auto", problem)
    assert decision.chosen == chosen
    assert reason is None or reason in decision.reasons["sm90"]


def test_auto_takes_the_kernels_for_gradients(monkeypatch):
    monkeypatch.setattr(tuning, "why_no_gluon", lambda: None)
    problem = dataclasses.replace(PROBLEM, backward=True)
    assert backward_dispatch.decide("auto", problem).chosen == "sm90"


def test_gradients_of_wide_heads_are_refused():
    given = unsupported(dataclasses.replace(PROBLEM, backward=True, head_dim=136))
    assert given == "needs head dimensions up to 128 in steps of 8, got 136 and 128"


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("granularity", [64, 128])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (64, 128), (128, 8)])
@pytest.mark.parametrize("heads", [(1, 1), (64, 4), (24, 2), (7, 1), (512, 1)])
def test_tiles_of_gradients_fit(granularity, dims, heads, gate):
    problem = dataclasses.replace(
        PROBLEM,
        granularity=granularity,
        head_dim=dims[0],
        head_dim_v=dims[1],
        heads_q=heads[0],
        heads_kv=heads[1],
        lists=heads[1],
        gate=gate,
        backward=True,
    )
    config = sparse_dq_sm90_config(problem)
    assert config.tile_bytes + 4 * 8 * config.barrier_room <= 226 * 1024
    # a consumer holds the keys of one stage while it waits for those of the next
    assert config.STAGES >= 2 and granularity % config.TILE_N == 0
    assert config.PACK * config.tile_t <= config.tile_m and config.tile_t >= 1
    own = sparse_dkdv_sm90_config(problem)
    if own is not None:
        # two programs on an SM, each with 1 KiB for the system
        assert 2 * (own.smem_bytes + 2048) <= 228 * 1024
        assert own.PACK * own.tokens == 64 and (heads[0] // heads[1]) % own.PACK == 0


@pytest.mark.parametrize(
    ("heads", "lists", "pack"),
    [
        *(((64, 4), 4, 16), ((64, 4), 64, None), ((24, 1), 1, 8), ((512, 2), 2, 64)),
        *(((8, 1), 1, 8), ((4, 1), 1, None), ((7, 7), 1, None), ((96, 2), 1, 16)),
    ],
)
def test_heads_that_are_copied_together(heads, lists, pack):
    problem = dataclasses.replace(
        PROBLEM, heads_q=heads[0], heads_kv=heads[1], lists=lists, backward=True
    )
    config = sparse_dkdv_sm90_config(problem)
    assert (None if config is None else config.PACK) == pack


@pytest.mark.parametrize("granularity", [64, 128])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (8, 256)])
@pytest.mark.parametrize("heads", [(1, 1), (64, 4), (24, 2), (7, 1), (512, 1)])
def test_tiles_fit(granularity, dims, heads):
    problem = dataclasses.replace(
        PROBLEM,
        granularity=granularity,
        head_dim=dims[0],
        head_dim_v=dims[1],
        heads_q=heads[0],
        heads_kv=heads[1],
        lists=heads[1],
    )
    config = sparse_attn_sm90_config(problem)
    # what a program may have on H100 and H200, less barriers
    assert config.tile_bytes + 4 * 8 * config.barrier_room <= 226 * 1024
    assert config.STAGES >= 2 and granularity % config.TILE_N == 0
    assert config.HEAD_DIM <= config.TILE_D and config.HEAD_DIM_V <= config.TILE_DV
    assert config.PACK * config.tile_t <= config.tile_m and config.tile_t >= 1
    assert (heads[0] // heads[1]) % config.PACK == 0


LATENT = dataclasses.replace(
    PROBLEM,
    heads_q=128,
    heads_kv=1,
    lists=1,
    head_dim=576,
    head_dim_v=512,
    granularity=1,
    most=2048,
    latent=True,
)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"granularity": 64}, None),
        ({"page_size": 64}, None),
        ({"varlen": True, "gate": True, "local": True}, None),
        ({"latent": False}, "needs values that are a view of the first 512 columns of the keys"),
        ({"tma": False}, "addresses and strides that are multiples of 16 bytes"),
        ({"dtype": torch.float32}, "torch.float32 has no 16-bit WGMMA"),
        ({"arch": Arch("cuda", 100, 148, 232448, False)}, "needs sm_90"),
        ({"max_k": 2**30}, "needs sequences of at most 1073741823 tokens"),
    ],
)
def test_which_latent_problems_the_kernel_takes(changed, reason):
    given = unsupported(dataclasses.replace(LATENT, **changed))
    assert given is None if reason is None else reason in given


def test_auto_takes_the_kernel_for_latent_problems(monkeypatch):
    monkeypatch.setattr(tuning, "why_no_gluon", lambda: None)
    assert forward_dispatch.decide("auto", LATENT).chosen == "sm90"
    # gradients of latent heads have no kernel at all
    given = unsupported(dataclasses.replace(LATENT, backward=True))
    assert given is not None and "gradients" in given


@pytest.mark.parametrize(("heads", "pack"), [(128, 64), (64, 64), (96, 48), (16, 16), (7, 7)])
def test_heads_of_a_latent_tile(heads, pack):
    config = sparse_latent_config(dataclasses.replace(LATENT, heads_q=heads))
    assert pack == config.PACK and config.ENTRY_KEYS == 1
    assert 2 * config.CONSUMER_REGISTERS + config.PRODUCER_REGISTERS <= 3 * config.MAX_REGISTERS


GATHERED = dataclasses.replace(
    PROBLEM,
    heads_q=24,
    heads_kv=2,
    lists=2,
    head_dim=256,
    head_dim_v=256,
    granularity=4,
    most=512,
)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"granularity": 1}, None),
        ({"page_size": 64}, None),
        ({"varlen": True, "local": True, "softcap": True, "sinks": True}, None),
        ({"head_dim": 64, "head_dim_v": 64}, None),
        ({"head_dim": 192, "head_dim_v": 192}, "needs equal head dimensions of 64, 128 or 256"),
        ({"head_dim_v": 128}, "for small entries, got 256 and 128"),
        ({"gate": True}, "has no code for gates of entries of 4 keys"),
        ({"tma": False}, "addresses and strides that are multiples of 16 bytes"),
        ({"backward": True}, "has no gradients for entries of 4 keys, only of 64 or 128"),
        ({"dtype": torch.float32}, "torch.float32 has no 16-bit WGMMA"),
        ({"arch": Arch("cuda", 100, 148, 232448, False)}, "needs sm_90"),
        ({"max_k": 2**30}, "needs sequences of at most 1073741823 tokens"),
    ],
)
def test_which_small_entries_the_kernel_takes(changed, reason):
    given = unsupported(dataclasses.replace(GATHERED, **changed))
    assert given is None if reason is None else reason in given


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("granularity", [1, 4, 16, 32])
@pytest.mark.parametrize(
    ("heads", "pack", "queries"),
    [
        *(((24, 2), 12, 5), ((1, 1), 1, 16), ((64, 4), 16, 4), ((7, 1), 7, 9)),
        *(((64, 1), 64, 1), ((96, 1), 48, 1), ((512, 1), 64, 1), ((8, 2), 4, 16)),
    ],
)
def test_tiles_of_small_entries(dim, granularity, heads, pack, queries):
    config = sparse_gathered_config(
        dataclasses.replace(
            GATHERED,
            head_dim=dim,
            head_dim_v=dim,
            granularity=granularity,
            heads_q=heads[0],
            heads_kv=heads[1],
            lists=heads[1],
        )
    )
    assert (pack, queries) == (config.PACK, config.QUERIES)
    assert config.PACK * config.QUERIES <= 64 and config.tile_t <= 32
    assert config.tile_bytes + 4 * 8 * config.barrier_room <= 226 * 1024
    # a consumer holds the values of one stage while it waits for the keys of the next
    assert config.STAGES >= 2
    assert 2 * config.CONSUMER_REGISTERS + config.PRODUCER_REGISTERS <= 3 * config.MAX_REGISTERS
