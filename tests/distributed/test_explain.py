"""`bsk.explain` of a call over several ranks, and options that shards do not have."""

import inspect
import sys

import pytest
import torch
import torch.distributed as dist

import blackwell_sparsek as bsk
from blackwell_sparsek.distributed import Band, Plan, Shapes, balance, traffic
from blackwell_sparsek.distributed.group import Members
from blackwell_sparsek.testing.inputs import normal

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")
api = sys.modules[bsk.distributed.attention.__module__]
RANKS, LENGTH = 4, 512


@pytest.fixture
def four(monkeypatch):
    """This process as rank 1 of four; a call that exchanges anything fails."""
    monkeypatch.setattr(api, "members_of", lambda *_: Members(None, 1, RANKS))


def shards(plan, heads=8, kv_heads=2):
    sizes = ((heads, 16), (kv_heads, 16), (kv_heads, 16))
    return [normal(1, h, plan.lengths[1], d, seed=i) for i, (h, d) in enumerate(sizes)]


def explained(plan, *given, **options):
    given = given or shards(plan)
    return bsk.explain(bsk.distributed.attention, *given, plan=plan, **options)


def test_method_bytes_imbalance_and_reasons(four):
    plan = balance(Band(31, 0), RANKS, seq_length=LENGTH, tile=16)
    given = shards(plan)
    found = explained(plan, *given, causal=True, window=32)
    said = traffic(plan, "needed", Shapes.of(*given), causal=True, window=32)
    assert (found.chosen, found.asked, found.traffic) == ("needed", "auto", said)
    assert set(found.reasons) == {"allgather", "ring", "ulysses", "heads"}
    most = max(traffic(plan, "allgather", Shapes.of(*given)).forward)
    needed = max(said.forward)
    assert found.reasons["allgather"] == (
        f"its busiest rank sends {most:,} bytes, that of needed {needed:,}"
    )
    assert found.reasons["ring"].endswith("only runs when asked for, where memory is short")
    assert found.local.op == "attn_fwd" and found.local.chosen == "eager"
    lines = str(found).splitlines()
    assert lines[0] == "distributed.attention: needed (method='auto')"
    assert "512 tokens in tiles of 16 on 4 ranks, 128 to 128 each; 8 query and 2 KV" in lines[1]
    assert lines[2] == f"  imbalance: {found.imbalance:.3f}"
    assert (
        lines[3] == f"  forward: {sum(said.forward):,} bytes sent, {needed:,} by the busiest rank"
    )
    assert lines[-1].startswith("  on this rank attn_fwd: eager")


def test_imbalance_is_that_of_the_mask_of_the_call(four):
    plan = Plan.contiguous(LENGTH, RANKS, tile=16)
    # rows of 32 blocks: rank r has 8 rows of 8 r + 1 to 8 r + 8 blocks
    assert explained(plan, causal=True).imbalance == pytest.approx((8 * 24 + 36) * 4 / 528)
    assert explained(plan).imbalance == 1.0
    mask = bsk.masks.random(LENGTH, 0.3, 16, heads=8, generator=torch.Generator().manual_seed(0))
    even = balance(mask, RANKS)
    assert explained(even, block_mask=mask).imbalance == pytest.approx(even.imbalance)
    nothing = bsk.BlockMask.from_dense(torch.zeros(32, 32, dtype=torch.bool), 16, LENGTH)
    found = explained(plan, block_mask=nothing, method="ring")
    assert found.imbalance == 1.0 and found.local is None


def test_auto_says_why_not_the_others(four):
    plan = Plan.contiguous(LENGTH, RANKS, tile=16)
    few = explained(plan, *shards(plan, 8, 1))
    assert few.chosen == "allgather"
    assert few.reasons["needed"].endswith("90% of all keys or more, so one collective for all")
    many = explained(plan, *shards(plan, 8, 8))
    assert many.chosen == "ulysses" and many.local is None
    uneven = explained(plan, *shards(plan, 6, 6))
    expected = "6 query and 6 KV heads do not divide evenly among 4 ranks"
    assert uneven.reasons["ulysses"] == expected
    asked = explained(plan, method="ring")
    assert asked.chosen == "ring" and asked.reasons["needed"] == "method='ring' was asked for"
    assert set(asked.reasons) == {"allgather", "needed", "ulysses", "heads"}


def test_wrong_arguments_are_errors_of_the_rank_that_asks(four):
    plan = Plan.contiguous(LENGTH, RANKS, tile=16)
    with pytest.raises(bsk.InvalidInput, match="sinks has a wrong shape"):
        explained(plan, sinks=torch.zeros(3))


OTHERS = {
    "key_gate": (torch.zeros(1), torch.zeros(1)),
    "alibi_slopes": torch.zeros(4),
    "bias": torch.zeros(4),
    "q_descale": torch.ones(1),
    "k_descale": torch.ones(1),
    "v_descale": torch.ones(1),
    "out_dtype": torch.float32,
    "out": torch.zeros(1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_options_that_shards_do_not_have_are_refused(name):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        q = normal(1, 2, 40, 16, seed=0)
        match = f"{name} is not available over several ranks; expected .*, got "
        with pytest.raises(bsk.Unsupported, match=match):
            bsk.distributed.attention(q, q, q, **{name: OTHERS[name]})
        assert bsk.distributed.attention(q, q, q, **{name: None}).shape == q.shape
        with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
            bsk.distributed.attention(q, q, q, dropout=0.1)
    finally:
        dist.destroy_process_group()


def test_no_option_of_attention_is_forgotten():
    """Each is taken or refused by name."""
    taken = set(inspect.signature(bsk.distributed.attention).parameters)
    assert set(inspect.signature(bsk.attention).parameters) <= taken | set(api.REFUSED)
