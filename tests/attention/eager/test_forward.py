"""Eager attention against the oracle: values, gradients, poison, memory."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blackwell_sparsek.attention.eager import backward as eager_backward
from blackwell_sparsek.attention.eager import forward as eager
from blackwell_sparsek.attention.eager import operands
from blackwell_sparsek.calls.attention import AttentionCall, AttnGradients, AttnSpec, BackwardCall
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.masks.block_mask import BlockMask
from blackwell_sparsek.reference import attention as reference
from blackwell_sparsek.testing.inputs import normal, qkv
from blackwell_sparsek.testing.layouts import KINDS, strided_like
from blackwell_sparsek.testing.poison import poisoned_empty
from blackwell_sparsek.testing.tolerance import assert_within_budget

TILE = operands.CPU_STEPS.tile_q


@pytest.fixture
def small_steps(monkeypatch):
    """Steps so small that a few dozen tokens need many of them."""
    monkeypatch.setattr(operands, "CPU_STEPS", operands.StepSizes(tile_q=8, keys=32, scores=2048))


def gradients(function, q, k, v, spec, dout, dlse, precision):
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    sinks = None if spec.sinks is None else spec.sinks.detach().clone().requires_grad_()
    out, lse = function(q, k, v, spec._replace(sinks=sinks), precision)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    return torch.autograd.grad(
        (out, lse), inputs, (dout.to(out.dtype), dlse.to(lse.dtype)), allow_unused=True
    )


def eager_gradients(dout, dlse, q, k, v, out, lse, spec):
    call = AttentionCall(q, k, v, spec)
    # of the gradients to fill, it matters only that they are there
    return eager_backward.attention_backward(
        BackwardCall(call, dout, dlse, out, lse, AttnGradients(q, k, v, spec.sinks))
    )


def textbook_gradients(q, k, v, spec, dout, dlse):
    """The dense formula in the dtype of q, from an lse of that dtype.

    What recomputing probabilities from lse costs is not the fault of an implementation: the
    rounding of lse alone is an error of |lse| * eps / 2 in each of them, and autograd of a softmax
    does not have it.
    """
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    visible = reference.visible_elements(q.shape[2], k.shape[2], spec, q.device)
    out, lse = reference.attention(q, k, v, spec, precision=q.dtype)
    s = q @ wide_k.mT * spec.scale
    slope = 1.0
    if spec.softcap:
        tanh = torch.tanh(s / spec.softcap)
        s, slope = spec.softcap * tanh, 1 - tanh * tanh
    shift = lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]
    p = torch.where(visible, torch.exp(s - shift), 0.0)
    delta = (out * dout).sum(-1, keepdim=True) - dlse[..., None]
    ds = p * (dout @ wide_v.mT - delta) * slope * spec.scale
    dk, dv = ds.mT @ q, p.mT @ dout
    gradients = [ds @ wide_k, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))]
    if spec.sinks is not None:
        p_sink = torch.exp(spec.sinks[:, None, None] - shift)
        gradients.append(-(p_sink * delta).sum((0, 2, 3)))
    return gradients


def assert_close_enough(actual, exact, plain, what, factor=2.0):
    """The budget; in fp64 the oracle is no more exact than the result, so a relative bound."""
    if actual.dtype == torch.float64:
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)
    else:
        assert_within_budget(actual, exact, plain, what=what, factor=factor)


def check(q, k, v, spec, backward=True):
    """Forward, lse and all gradients within the budget."""
    dtype = q.dtype
    with poisoned_empty():
        out, lse = eager.attention(q, k, v, spec)
    assert out.dtype == dtype
    wide = [x.double() for x in (q, k, v)]
    wide_spec = spec._replace(sinks=None if spec.sinks is None else spec.sinks.double())
    exact_out, exact_lse = reference.attention(*wide, wide_spec)
    plain_out, plain_lse = reference.attention(q, k, v, spec, precision=dtype)
    assert_close_enough(out, exact_out, plain_out, "out")
    assert_close_enough(lse, exact_lse, plain_lse, "lse")
    if not backward:
        return
    dout, dlse = normal(*out.shape, seed=91, dtype=dtype), normal(*lse.shape, seed=92)
    dlse = dlse.to(lse.dtype)
    with poisoned_empty():
        got = eager_gradients(dout, dlse, q, k, v, out, lse, spec)
    exact = gradients(reference.attention, *wide, wide_spec, dout, dlse, torch.float64)
    plain = gradients(reference.attention, q, k, v, spec, dout, dlse, dtype)
    if dtype == torch.float32 and not spec.is_varlen:
        plain = textbook_gradients(q, k, v, spec, dout, dlse)
    # in fp32 base-2 scores round q once more than the formula does, and that is all the error
    # there is; below fp32 the rounding of the inputs' own dtype dwarfs it
    factor = 3.0 if spec.softcap or dtype == torch.float32 else 2.0
    for name, a, b, c in zip(("dq", "dk", "dv", "dsinks"), got, exact, plain, strict=False):
        assert_close_enough(a.to(dtype), b, c, name, factor)


def random_mask(rng, batch, heads, sq, sk):
    kind = rng.choice(["none", "blocks", "elements"])
    if kind == "none" or sk == 0:
        return None
    planes = (rng.choice([1, batch]), rng.choice([1, heads]))
    block = (rng.choice([16, 32]), rng.choice([16, 64]))
    if kind == "blocks":
        grid = (-(-sq // block[0]), -(-sk // block[1]))
        return BlockMask.from_dense(torch.rand(*planes, *grid) > 0.5, block, (sq, sk))
    visible = torch.rand(*planes, sq, sk) > 0.7
    visible[..., : sq // 3, :] = False
    return BlockMask.from_element_mask(visible, block)


@pytest.mark.parametrize("seed", range(48))
def test_random_options(seed, small_steps):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, heads_kv, group = rng.choice([1, 2]), rng.choice([1, 2, 3]), rng.choice([1, 2, 7])
    sq, sk = rng.choice([1, 15, 17, 63, 65]), rng.choice([0, 1, 16, 63, 65, 100])
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    heads = heads_kv * group
    q, k, v = qkv(
        batch, heads, heads_kv, sq, sk, rng.choice([4, 8, 24]), seed=seed, v_dim=16, dtype=dtype
    )
    q, k, v = (strided_like(x, rng.choice(KINDS)) for x in (q, k, v))
    spec = AttnSpec(
        scale=rng.choice([0.3, 1.0, -0.5, 0.0]),
        band=Band(rng.choice([None, 0, 5, 40]), rng.choice([None, 0, 3])),
        block_mask=random_mask(rng, batch, heads, sq, sk),
        softcap=rng.choice([0.0, 0.0, 2.0]),
        sinks=rng.choice([None, torch.randn(heads).to(dtype)]),
    )
    check(q, k, v, spec)


@pytest.mark.parametrize("window", [1, 2, TILE - 1, TILE, TILE + 1])
@pytest.mark.parametrize("lengths", [(300, 300), (129, 300), (300, 129)])
def test_windows_around_the_tile(window, lengths):
    q, k, v = qkv(1, 2, 1, *lengths, 8, seed=window)
    check(q, k, v, AttnSpec(scale=0.35, band=Band(window - 1, 0)))
    check(q, k, v, AttnSpec(scale=0.35, band=Band(window - 1, window - 1)), backward=False)


@pytest.mark.parametrize("batch_masks", [1, 4])
def test_packed_sequences(batch_masks, small_steps):
    cu_q = torch.tensor([0, 0, 17, 18, 40], dtype=torch.int32)
    cu_k = torch.tensor([0, 5, 38, 38, 60], dtype=torch.int32)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv(1, 4, 2, 40, 60, 8, seed=3, v_dim=16))
    spec = AttnSpec(
        scale=0.35,
        band=Band(9, 0),
        sinks=torch.randn(4),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_q=22,
        max_k=33,
    )
    check(q, k, v, spec)
    mask = BlockMask.from_element_mask(torch.rand(batch_masks, 1, 22, 33) > 0.4, 16)
    check(q, k, v, spec._replace(block_mask=mask, sinks=None))


@pytest.mark.parametrize("size", [1e6, 1e-30])
def test_extreme_logits(size):
    q, k, v = qkv(1, 2, 2, 33, 47, 8, seed=11)
    check(q * size, k, v, AttnSpec(scale=1.0, band=Band(None, 0)), backward=False)
    mask = BlockMask.from_element_mask(torch.rand(33, 47) > 0.5, 16)
    check(q * size, k, v, AttnSpec(scale=1.0, block_mask=mask), backward=False)


def poisoned_problem():
    """Keys 0..9 lie before every window, block column 1 is absent, key 60 is hidden by bits."""
    q, k, v = qkv(1, 2, 1, 40, 64, 8, seed=12)
    visible = torch.rand(40, 64) > 0.3
    visible[:, 16:32] = False
    visible[:, 60] = False
    mask = BlockMask.from_element_mask(visible, 16)
    spec = AttnSpec(scale=0.4, band=Band(14, None), block_mask=mask)
    return q, k, v, spec, [*range(10), *range(16, 32), 60]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_unseen_keys_reach_nothing(value, small_steps):
    q, k, v, spec, unseen = poisoned_problem()
    for chosen in (spec, spec._replace(block_mask=None)):
        keys = unseen if chosen.block_mask is not None else unseen[:10]
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, :, keys] = value
        bad_v[:, :, keys] = -value
        out, lse = eager.attention(q, k, v, chosen)
        bad_out, bad_lse = eager.attention(q, bad_k, bad_v, chosen)
        torch.testing.assert_close(bad_out, out, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(bad_lse, lse, rtol=1e-6, atol=1e-6)
        dout = torch.ones_like(out)
        good = eager_gradients(dout, None, q, k, v, out, lse, chosen)
        bad = eager_gradients(dout, None, q, bad_k, bad_v, bad_out, bad_lse, chosen)
        for a, b in zip(bad[:3], good[:3], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("masked", [False, True])
def test_live_nan_reaches_only_its_readers(name, masked):
    q, k, v = qkv(1, 1, 1, 40, 40, 8, seed=13)
    mask = BlockMask.from_element_mask(torch.ones(40, 40).tril().bool(), 16) if masked else None
    spec = AttnSpec(scale=0.4, band=Band(None, None if masked else 0), block_mask=mask)
    clean, _ = eager.attention(q, k, v, spec)
    {"q": q, "k": k, "v": v}[name][0, 0, 20] = torch.nan
    out, lse = eager.attention(q, k, v, spec)
    affected = torch.zeros(40, dtype=torch.bool)
    affected[20 : 21 if name == "q" else 40] = True
    assert torch.equal(out[0, 0].isnan().all(-1), affected)
    torch.testing.assert_close(out[0, 0, ~affected], clean[0, 0, ~affected])
    dq, dk, dv, _ = eager_gradients(torch.ones_like(out), None, q, k, v, out, lse, spec)
    assert dq[0, 0, ~affected].isfinite().all()
    if name == "q":
        assert dk[0, 0, 21:].isfinite().all() and dv[0, 0, 21:].isfinite().all()


def test_empty_rows_have_no_gradient():
    q, k, v = qkv(1, 2, 1, 50, 20, 8, seed=14)
    q[:, :, :30] = torch.nan
    spec = AttnSpec(scale=0.4, band=Band(None, 0))
    out, lse = eager.attention(q, k, v, spec)
    assert (out[:, :, :30] == 0).all() and (lse[:, :, :30] == -torch.inf).all()
    dlse = torch.full_like(lse, torch.nan)
    dlse[:, :, 30:] = 1.0
    dout = torch.ones_like(out)
    dout[:, :, :30] = torch.nan
    dq, dk, dv, _ = eager_gradients(dout, dlse, q, k, v, out, lse, spec)
    assert (dq[:, :, :30] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_heads_share_kv_as_if_repeated():
    q, k, v = qkv(2, 6, 2, 33, 40, 8, seed=15)
    repeated = [x.repeat_interleave(3, dim=1) for x in (k, v)]
    for mask in (None, BlockMask.from_dense(torch.rand(1, 6, 3, 3) > 0.4, 16, (33, 40))):
        spec = AttnSpec(scale=0.3, band=Band(None, 0), block_mask=mask)
        torch.testing.assert_close(
            eager.attention(q, k, v, spec)[0], eager.attention(q, *repeated, spec)[0]
        )


def test_full_block_mask_is_dense():
    q, k, v = qkv(1, 2, 2, 50, 70, 8, seed=16)
    mask = BlockMask.from_dense(torch.ones(4, 5).bool(), 16, (50, 70))
    spec = AttnSpec(scale=0.3)
    for a, b in zip(
        eager.attention(q, k, v, spec._replace(block_mask=mask)),
        eager.attention(q, k, v, spec),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest storage that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("kind", ["causal", "window", "blocks"])
def test_no_tensor_is_as_large_as_the_scores(kind):
    length = 4096
    q, k, v = qkv(1, 1, 1, length, length, 8, seed=17)
    spec = AttnSpec(scale=0.3, band=Band(255 if kind == "window" else None, 0))
    if kind == "blocks":
        mask = BlockMask.from_dense(torch.rand(32, 32) > 0.8, 128)
        spec = AttnSpec(scale=0.3, block_mask=mask)
    with LargestTensor() as forward:
        out, lse = eager.attention(q, k, v, spec)
    with LargestTensor() as backward:
        eager_gradients(out, lse, q, k, v, out, lse, spec)
    limit = 2 * operands.CPU_STEPS.scores
    assert length * 8 <= forward.numel <= limit < length * length
    assert backward.numel <= limit


def test_hidden_blocks_cost_nothing(monkeypatch):
    """Under a causal band the blocks after the diagonal are not visited."""
    visited = []
    original = eager.block_step

    def counting(*args, **kwargs):
        step = original(*args, **kwargs)
        visited.append(step.column.numel())
        return step

    monkeypatch.setattr(eager, "block_step", counting)
    q, k, v = qkv(1, 1, 1, 256, 256, 8, seed=18)
    mask = BlockMask.from_dense(torch.ones(16, 16).bool(), 16)
    eager.attention(q, k, v, AttnSpec(scale=0.3, block_mask=mask))
    everything, visited[:] = sum(visited), []
    eager.attention(q, k, v, AttnSpec(scale=0.3, band=Band(15, 0), block_mask=mask))
    assert everything == 256 and sum(visited) == 32


@pytest.mark.parametrize(
    ("lengths", "band", "whole"),
    [
        ((40, 50), Band(None, None), True),
        ((40, 40), Band(None, 0), True),
        ((40, 50), Band(None, 0), False),
        ((40, 40), Band(9, 0), False),
    ],
    ids=str,
)
def test_squares_and_triangles_take_the_fused_kernel(lengths, band, whole, monkeypatch):
    fused, original = [], eager._attend_whole

    def counting(*args):
        fused.append(args)
        return original(*args)

    monkeypatch.setattr(eager, "_attend_whole", counting)
    eager.attention(*qkv(1, 2, 1, *lengths, 8, seed=20), AttnSpec(scale=0.3, band=band))
    assert len(fused) == whole


@pytest.mark.parametrize("kind", ["contiguous", "swapped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_is_laid_out_as_queries(kind, dtype):
    q, k, v = qkv(2, 3, 3, 5, 5, 8, seed=19, v_dim=4, dtype=dtype)
    out, _ = eager.attention(strided_like(q, kind), k, v, AttnSpec(scale=1.0))
    assert (out.transpose(1, 2) if kind == "swapped" else out).is_contiguous()
