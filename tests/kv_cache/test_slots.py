"""`kv_append` by slot mapping, with and without rotary embedding; eager and the kernel."""

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.core.errors import InvalidInput, InvalidType, Unsupported
from blackwell_sparsek.kv_cache.slots import rotated
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.kv_cases import assert_same_bits
from blackwell_sparsek.testing.poison import poison_
from blackwell_sparsek.testing.tolerance import assert_within_budget

FP8 = torch.float8_e4m3fn


@pytest.fixture(params=["eager", "triton"])
def impl(request):
    if request.param == "triton":
        request.getfixturevalue("interpreted")
    return request.param


def make(
    tokens=7, heads=3, dims=(24, 16), dtype=torch.float32, stored=None, page_size=4, hnd=False
):
    """Poisoned pages, new tokens, and slots of which some are skipped."""
    page_size = 4
    k, v = (normal(tokens, heads, d, seed=i, dtype=dtype) for i, d in enumerate(dims))
    caches = []
    for d in dims:
        shape = (5, heads, page_size, d) if hnd else (5, page_size, heads, d)
        cache = poison_(torch.empty(shape, dtype=torch.float32)).to(stored or dtype)
        caches.append(cache.transpose(1, 2) if hnd else cache)
    slots = torch.randperm(5 * page_size, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[::3] = -1
    return *caches, k, v, slots


def expected(cache, new, slots, scale=None):
    """What a cache must hold afterwards, slot by slot."""
    after = cache.clone()
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        row = new[t]
        if cache.dtype == FP8:
            row = row.float() * (1.0 if scale is None else scale.reciprocal().view(-1, 1))
            row = row.clamp(-448, 448).to(FP8)
        after[slot // cache.shape[1], slot % cache.shape[1]] = row
    return after


@pytest.mark.parametrize("options", [
    {}, {"hnd": True}, {"dtype": torch.bfloat16}, {"tokens": 1, "heads": 1}, {"dims": (40, 300)},
    {"dtype": torch.bfloat16, "stored": FP8},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_tokens_go_to_their_slots(options, index, impl):
    k_cache, v_cache, k, v, slots = make(**options)
    want = expected(k_cache, k, slots), expected(v_cache, v, slots)
    done = bsk.kv_append(k_cache, v_cache, k, v, slot_mapping=slots.to(index), impl=impl)
    assert done is None
    assert_same_bits(k_cache, want[0])
    assert_same_bits(v_cache, want[1])


def test_fp8_scales(impl):
    k_cache, v_cache, k, v, slots = make(dtype=torch.float16, stored=FP8)
    k_scale, v_scale = torch.tensor([0.5, 2.0, 0.01]), torch.tensor(0.25)
    want = expected(k_cache, k, slots, k_scale), expected(v_cache, v, slots, v_scale)
    bsk.kv_append(
        k_cache, v_cache, k, v, slot_mapping=slots, k_scale=k_scale, v_scale=v_scale, impl=impl
    )
    assert_same_bits(k_cache, want[0])
    assert_same_bits(v_cache, want[1])


def naive_rotation(x, cos, sin, positions, interleaved, dtype=torch.float64):
    """Pair by pair, in fp64 or as plain PyTorch would in another dtype."""
    x, cos, sin = (y.to(dtype) for y in (x, cos, sin))
    out = x.clone()
    half = cos.shape[1]
    for t, p in enumerate(positions.tolist()):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            c, s, first, second = cos[p, i], sin[p, i], x[t, :, a], x[t, :, b]
            out[t, :, a], out[t, :, b] = first * c - second * s, second * c + first * s
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half, dtype", [(12, torch.float32), (5, torch.bfloat16)])
def test_rotary(half, dtype, interleaved, impl):
    """All of a head, and a part of odd size; values are not rotated."""
    k_cache, v_cache, k, v, slots = make(dtype=dtype)
    angles = torch.outer(torch.arange(50.0), 10000.0 ** -torch.linspace(0, 1, half))
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([0, 49, 7, 7, 1, 30, 2], dtype=torch.int32)
    q = normal(7, 6, 24, seed=5, dtype=dtype)
    values = expected(v_cache, v, slots)
    got = bsk.kv_append(
        *(k_cache, v_cache, k, v),
        slot_mapping=slots,
        rotary=bsk.Rotary(cos, sin, interleaved),
        positions=positions,
        q=q,
        impl=impl,
    )
    how = (cos, sin, positions, interleaved)
    plain = [naive_rotation(x, *how, dtype=dtype) for x in (q, k)]
    assert_within_budget(got, naive_rotation(q, *how), plain[0], what="q")
    written = slots >= 0
    at = slots[written]
    stored = k_cache[at // 4, at % 4]
    assert_within_budget(stored, naive_rotation(k, *how)[written], plain[1][written], what="k")
    assert k_cache.isnan().flatten(2).all(-1).sum() == 20 - written.sum()
    assert_same_bits(v_cache, values)
    assert got[..., 2 * half :].equal(q[..., 2 * half :])


def test_rotated_keys_of_fp8_caches(impl):
    """Rotated in fp32, rounded to the dtype of k, then scaled and stored as any key."""
    k_cache, v_cache, k, v, slots = make(dtype=torch.bfloat16, stored=FP8)
    cos, sin = torch.rand(9, 4), torch.rand(9, 4)
    positions = torch.arange(7)
    scale = torch.tensor(0.5)
    turned = rotated(k, cos, sin, positions, False)
    want = expected(k_cache, turned, slots, scale)
    bsk.kv_append(
        *(k_cache, v_cache, k, v),
        slot_mapping=slots,
        rotary=bsk.Rotary(cos, sin),
        positions=positions,
        k_scale=scale,
        impl=impl,
    )
    assert_same_bits(k_cache, want)


def test_kernel_skips_what_does_not_exist(interpreted):
    """Slots past the pages are not written, and positions without a row give NaN."""
    from blackwell_sparsek.calls.cache import SlotsCall
    from blackwell_sparsek.kv_cache.slots import append_eager
    from blackwell_sparsek.kv_cache.slots_kernel import launch_append_slots

    for run in (launch_append_slots, append_eager):
        k_cache, v_cache, k, v, _ = make(tokens=3)
        k_cache.zero_()
        slots = torch.tensor([20, -5, 0])
        run(SlotsCall(k_cache, v_cache, k, v, slots))
        assert k_cache[0, 0].equal(k[2]) and k_cache.flatten(0, 1)[1:].eq(0).all()
        cos, positions = torch.ones(2, 4), torch.tensor([0, 1, 2])
        run(SlotsCall(k_cache, v_cache, k, v, slots, cos, cos, False, positions))
        assert k_cache[0, 0, :, :8].isnan().all() and k_cache[0, 0, :, 8:].isfinite().all()


def test_no_tokens(impl):
    k_cache, v_cache, k, v, slots = make()
    before = k_cache.clone()
    bsk.kv_append(k_cache, v_cache, k[:0], v[:0], slot_mapping=slots[:0], impl=impl)
    assert_same_bits(k_cache, before)


def test_compiles_without_graph_breaks():
    k_cache, v_cache, k, v, slots = make()
    want = expected(k_cache, k, slots)

    def step(k, v):
        bsk.kv_append(k_cache, v_cache, k, v, slot_mapping=slots)
        return k * 2

    torch.compile(step, backend="aot_eager", fullgraph=True)(k, v)
    assert_same_bits(k_cache, want)


def test_page_tables_of_int64():
    k_cache, v_cache, k, v, _ = make(tokens=3)
    table = torch.tensor([[4, 1]])
    new = (k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    bsk.kv_append(k_cache, v_cache, *new, cache_seqlens=torch.tensor([3]).int(), page_table=table)
    assert k_cache[4, 3].equal(k[0]) and k_cache[1, :2].equal(k[1:])


ROTARY = bsk.Rotary(torch.ones(9, 4), torch.ones(9, 4))


@pytest.mark.parametrize("changes, error, match", [
    ({"slot_mapping": torch.zeros(6).long()}, InvalidInput, r"slot_mapping .*\[7\]"),
    ({"slot_mapping": torch.zeros(7)}, InvalidType, "slot_mapping has an unsupported dtype"),
    ({"slot_mapping": torch.arange(7) + 14}, InvalidInput,
     r"slot_mapping\[6\] is out of range; expected -1 to 19, got 20"),
    ({"slot_mapping": None, "rotary": ROTARY, "positions": torch.arange(7)}, InvalidInput,
     "slot_mapping is missing"),
    ({"slot_mapping": None}, InvalidInput, "cache_seqlens is missing; expected lengths, or slot"),
    ({"cache_seqlens": torch.zeros(1).int()}, InvalidInput, "cache_seqlens says another slot"),
    ({"rotary": ROTARY}, InvalidInput, "positions is missing; expected both"),
    ({"positions": torch.arange(7)}, InvalidInput, "rotary is missing; expected both"),
    ({"rotary": (1, 2), "positions": torch.arange(7)}, InvalidType, "rotary is of a wrong class"),
    ({"rotary": ROTARY, "positions": torch.arange(7) + 3}, InvalidInput,
     r"positions\[6\] is out of range; expected 0 to 8, got 9"),
    ({"rotary": bsk.Rotary(torch.ones(9, 13), torch.ones(9, 13)), "positions": torch.arange(7)},
     InvalidInput, "rotary.cos is too wide; expected 1 to 12 columns"),
    ({"rotary": bsk.Rotary(torch.ones(9, 4), torch.ones(9, 3)), "positions": torch.arange(7)},
     InvalidInput, r"rotary.sin .*\[9, 4\]"),
    # not the same as no rotary embedding at all
    ({"rotary": bsk.Rotary(None, torch.ones(9, 4))}, InvalidType, "rotary.cos is not a tensor"),
    ({"rotary": bsk.Rotary(None, None)}, InvalidType, "rotary.cos is not a tensor"),
    ({"rotary": bsk.Rotary(torch.ones(9, 4), None), "positions": torch.arange(7)}, InvalidType,
     "rotary.sin is not a tensor"),
    ({"q": torch.zeros(7, 6, 24)}, InvalidInput, "q goes with rotary"),
    ({"k": torch.zeros(7, 2, 24)}, InvalidInput, r"k .*\[7, 3, 24\]"),
    ({"k": torch.zeros(7, 3, 24).half()}, InvalidType, "k has an unsupported dtype"),
    ({"k_scale": torch.ones(())}, InvalidInput, "k_scale is for fp8 caches only"),
    ({"impl": "sm90"}, Unsupported, "sm90"), ({"impl": 3}, InvalidInput, "impl is unknown"),
    ({"k_cache": torch.zeros(1, 4, 3, 24).expand(5, 4, 3, 24)}, InvalidInput,
     r"k_cache overlaps itself; expected one place .*got \[0, 72, 24, 1\]"),
])  # fmt: skip
def test_refusals(changes, error, match):
    k_cache, v_cache, k, v, slots = make()
    given = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "slot_mapping": slots}
    with pytest.raises(error, match=match):
        bsk.kv_append(**{**given, **changes})


def test_gradients_are_refused():
    k_cache, v_cache, k, v, slots = make()
    with pytest.raises(InvalidInput, match="k requires gradients"):
        bsk.kv_append(k_cache, v_cache, k.clone().requires_grad_(), v, slot_mapping=slots)
    caches, scale = [x.to(FP8) for x in (k_cache, v_cache)], torch.ones((), requires_grad=True)
    with pytest.raises(InvalidInput, match="v_scale requires gradients, which do not flow"):
        bsk.kv_append(*caches, k, v, slot_mapping=slots, v_scale=scale)
    rotary = bsk.Rotary(torch.ones(9, 2), torch.zeros(9, 2, requires_grad=True))
    with pytest.raises(InvalidInput, match=r"rotary\.sin requires gradients"):
        bsk.kv_append(
            k_cache, v_cache, k, v, slot_mapping=slots, rotary=rotary, positions=slots.clamp(0, 8)
        )
