"""The Hopper forward in fp8: what it refuses, where its barriers lie, and results on a GPU."""

import json
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.attention import api
from blackwell_sparsek.attention.fp8_op import fp8_dispatch
from blackwell_sparsek.attention.sm90 import launch_fp8
from blackwell_sparsek.attention.sm90.tuning import attn_fwd_fp8_sm90_unsupported
from blackwell_sparsek.calls.attention import AttentionCall, AttnGradients, AttnSpec
from blackwell_sparsek.calls.fp8 import Fp8AttentionCall
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.masks.band import Band
from blackwell_sparsek.testing import poison
from blackwell_sparsek.testing.attention_gradients import check_gradients
from blackwell_sparsek.testing.machine_code import misplaced_barriers
from blackwell_sparsek.testing.tolerance import assert_within_budget

from ..testing.child import printed

E4M3 = torch.float8_e4m3fn
H200 = Arch("cuda", 90, 132, 232448, False)
CASE = """
import ast
from blackwell_sparsek.testing.cases.fp8 import hopper_case
case = hopper_case("placed", **ast.literal_eval(sys.argv[1]))
"""
REPORT = """
print(json.dumps([
    config.placed_barriers(), config.programs_per_sm * (compiled.metadata.shared + 1024),
]))
"""


@pytest.mark.parametrize(
    "options",
    [{"dim": 64}, {"dim": 128}, {"dim": 128, "mask": (64, 64)}, {"dim": 256}],
    ids=str,
)
@pytest.mark.exhaustive
def test_the_barriers_lie_where_the_warps_look_for_them(options):
    head, ptx = printed(CASE, REPORT, repr(options)).split("\n", 1)
    expected, shared = json.loads(head)
    assert misplaced_barriers(ptx, [tuple(barrier) for barrier in expected]) == []
    assert shared <= 228 * 1024
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n(64|128)k32\.f32\.e4m3\.e4m3", ptx)


@pytest.mark.parametrize(
    "switches",
    [
        {"PING_PONG": True},
        {"Q_REGISTERS": True},
        {"FP8": False, "PRODUCTS_FIRST": True},
        {"TILE_DV": 256},
        {"CONSUMERS": 1},
    ],
    ids=str,
)
def test_what_no_configuration_has(switches):
    config = launch_fp8.make_fp8_config(2, 128, 128, None, True)
    with pytest.raises(AssertionError):
        replace(config, **switches)


def problem(**changes):
    q = torch.empty(1, 2, 256, 128, dtype=E4M3)
    v = torch.empty(1, 1, 128, 256, dtype=E4M3).mT
    spec = AttnSpec(0.1, max_q=256, max_k=256)
    call = Fp8AttentionCall(AttentionCall(q, q[:, :1], v, spec), None, None, None, torch.bfloat16)
    return replace(call.problem, arch=H200, **changes)


def test_what_it_takes():
    assert attn_fwd_fp8_sm90_unsupported(problem()) is None
    assert attn_fwd_fp8_sm90_unsupported(problem(mask_block=(64, 192))) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"varlen": True}, "packed sequences"),
        ({"out_dtype": torch.float32}, "writes float16 and bfloat16"),
        ({"head_dim": 72}, "in steps of 16, got 72"),
        ({"turned_values": False}, "contiguous along its tokens"),
        ({"positive": False}, "a scale above zero"),
        ({"mask_block": (128, 32)}, "not multiples of 64"),
        ({"tma": False}, "multiples of 16 bytes"),
        ({"max_k": 0}, "zero keys"),
    ],
)
def test_what_it_refuses(changes, text):
    assert text in attn_fwd_fp8_sm90_unsupported(problem(**changes))


@pytest.mark.parametrize(
    ("changes", "consumers"),
    [
        ({}, 3),
        ({"max_q": 1000, "max_k": 1000}, 2),
        ({"banded": True, "max_k": 2000}, 2),
        ({"softcap": True}, 2),
        ({"head_dim_v": 128}, 2),
        ({"head_dim": 192, "head_dim_v": 256}, 2),
        ({"mask_block": (128, 128)}, 2),
        ({"mask_block": (64, 128)}, 1),
    ],
    ids=str,
)
def test_consumers(changes, consumers):
    narrow = {"heads_q": 64, "head_dim": 64, "head_dim_v": 64, "max_q": 16384, "max_k": 16384}
    given = problem(**(narrow | changes))
    config = launch_fp8.attn_fwd_fp8_sm90_config(given, k_blocks=True)
    assert consumers == config.CONSUMERS


def test_auto_takes_it():
    assert fp8_dispatch.choose("auto", problem()).name == "sm90"
    assert fp8_dispatch.choose("auto", problem(turned_values=False)).name == "triton"
    given = torch.zeros(1, 1, 64, 64).to(E4M3)
    with pytest.raises(bsk.Unsupported, match="sm_90"):
        bsk.attention(given, given, given, impl="sm90")


@pytest.mark.sm90
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 200}], ids=str)
def test_replayed_calls_attend_to_what_they_are_given(options, monkeypatch):
    monkeypatch.setattr(api, "_FP8", {})
    results = []
    for _ in range(4):
        q, k, v = (torch.randn(1, h, 700, 128, device="cuda") for h in (4, 2, 2))
        made, scales = rounded(q, k, v)
        call = {**scales, **options, "return_lse": True}
        results.append((made, call, bsk.attention(*(x.data for x in made), **call, impl="sm90")))
    assert [x is not None for x in api._FP8.values()] == [True]
    api._FP8.clear()
    for made, call, (out, lse) in results:
        again, lse_again = bsk.attention(*(x.data for x in made), **call, impl="sm90")
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


def rounded_weights(q, k, v, scale, visible, softcap=None, sinks=None):
    """Output and lse by plain PyTorch with weights in e4m3, the largest of a row being 256."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = torch.where(visible, s, -torch.inf)
    top = s.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    p = torch.exp(s - top) * 256
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + 256 * torch.exp(sinks.view(1, -1, 1, 1) - top)
    out = p.to(E4M3).float() @ v / torch.where(total == 0, 1.0, total)
    return out.bfloat16(), (top + torch.log(total / 256)).squeeze(-1)


def visible_keys(sq, sk, device, causal=False, left=None):
    at = torch.arange(sq, device=device)[:, None] + sk - sq
    key = torch.arange(sk, device=device)[None, :]
    seen = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if causal:
        seen = seen & (key <= at)
    if left is not None:
        seen = seen & (key >= at - left)
    return seen


def random_blocks(block, heads, sq, sk, device):
    """A mask of four of ten blocks, and the keys that it keeps."""
    keep = torch.rand((1, heads, -(-sq // block[0]), -(-sk // block[1])), device=device) < 0.4
    mask = bsk.BlockMask.from_dense(keep, block, seq_lengths=(sq, sk))
    each = keep.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)
    return mask, each[:, :, :sq, :sk]


@pytest.mark.sm90
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("scaled", ["block", "head", "none"])
@pytest.mark.parametrize(
    ("lengths", "heads", "options"),
    [
        ((1, 1), (1, 1), {}),
        ((65, 300), (4, 2), {"causal": True}),
        ((1000, 1000), (4, 1), {}),
        ((513, 2049), (8, 2), {"causal": True, "window": 300}),
        ((200, 700), (4, 4), {"softcap": 5.0}),
        ((300, 300), (4, 2), {"causal": True, "sinks": True}),
        ((512, 1024), (4, 2), {"mask": (128, 128)}),
        ((512, 1000), (4, 2), {"mask": (64, 64), "causal": True}),
        ((512, 1024), (4, 2), {"mask": (128, 256)}),
        ((512, 1000), (4, 2), {"mask": (64, 128)}),
    ],
    ids=str,
)
def test_results(dim, scaled, lengths, heads, options):
    device = torch.device("cuda")
    (sq, sk), (hq, hkv), options = lengths, heads, dict(options)
    q, k, v = (
        torch.randn(2, h, s, dim, device=device) for h, s in ((hq, sq), (hkv, sk), (hkv, sk))
    )
    kinds = {"block": ("block", "channel"), "head": ("head", "head"), "none": ("tensor", "tensor")}
    of_rows, of_values = kinds[scaled]
    made = [bsk.fp8.quantize(x, of_rows, impl="eager") for x in (q, k)]
    made.append(bsk.fp8.quantize(v, of_values, transposed=True, impl="eager"))
    names = ("q_descale", "k_descale", "v_descale")
    scales = {name: x.descale for name, x in zip(names, made, strict=True)}
    if scaled == "none":
        scales = {}
        made = [x._replace(descale=torch.ones_like(x.descale)) for x in made]
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(hq, device=device)
    visible = visible_keys(sq, sk, device, options.get("causal", False))
    if "window" in options:
        visible = visible_keys(sq, sk, device, True, options["window"] - 1)
    if block := options.pop("mask", None):
        options["block_mask"], kept = random_blocks(block, hq, sq, sk, device)
        visible = visible & kept
    factor = {"scale": 1e-4} if scaled == "none" else {}
    data = [x.data for x in made]
    with poison.poisoned_empty():
        out, lse = bsk.attention(*data, **scales, **options, **factor, return_lse=True, impl="sm90")
    oracle = {**scales, **options, **factor, "return_lse": True, "out_dtype": torch.float32}
    exact, exact_lse = bsk.attention(*data, **oracle, impl="reference")
    plain, plain_lse = rounded_weights(
        *(x.stored() for x in made), factor.get("scale", dim**-0.5), visible,
        options.get("softcap"), options.get("sinks"),
    )  # fmt: skip
    assert_within_budget(out, exact.double(), plain)
    # each of the dim / 32 sums in a score keeps 13 bits below its largest term
    truncated = dim / 32 * 2.0 ** (23 - 13)
    assert_within_budget(lse, exact_lse.double(), plain_lse, roundings=3.0 + truncated)
    again = bsk.attention(*data, **scales, **options, **factor, impl="sm90")
    assert torch.equal(out, again)


def rounded(q, k, v):
    """Tensors in e4m3 with their scales, as the kernel takes them."""
    made = [bsk.fp8.quantize(x, "block", impl="eager") for x in (q, k)]
    made.append(bsk.fp8.quantize(v, "channel", transposed=True, impl="eager"))
    names = ("q_descale", "k_descale", "v_descale")
    return made, dict(zip(names, (x.descale for x in made), strict=True))


@pytest.mark.sm90
@pytest.mark.parametrize("slope", [-40.0, -0.5, 0.5, 2.0, 40.0])
def test_maxima_that_rise_or_fall_with_every_key(slope):
    """Rows of a warp rise at different keys, by less than a factor of two in 64 keys or more."""
    device = torch.device("cuda")
    sq, sk = 256, 1500
    v = torch.randn(1, 1, sk, 128, device=device)
    q = torch.linspace(0.25, 1, sq, device=device).view(1, 1, sq, 1).expand(1, 1, sq, 128)
    # exponents of the last query differ by `slope` from one tile of 128 keys to the next
    at = torch.arange(sk, device=device).view(1, 1, sk, 1) / 128
    k = (slope * at * 0.6931 / 128**0.5).expand(1, 1, sk, 128)
    made, scales = rounded(q.contiguous(), k.contiguous(), v)
    data = [x.data for x in made]
    with poison.poisoned_empty():
        out, lse = bsk.attention(*data, **scales, return_lse=True, impl="sm90")
    exact, exact_lse = bsk.attention(
        *data, **scales, return_lse=True, out_dtype=torch.float32, impl="reference"
    )
    everything = torch.ones((), dtype=torch.bool, device=device)
    plain, _ = rounded_weights(*(x.stored() for x in made), 128**-0.5, everything)
    assert_within_budget(out, exact.double(), plain)
    # each of the four sums in a score keeps 13 bits below its largest term; twice 4 * 2^-13
    assert (lse - exact_lse).abs().max() <= 2**-10 * exact_lse.abs().max()


@pytest.mark.sm90
@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"STAGES": 2},
        {"PRODUCTS_FIRST": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window": 500}, {"mask": (128, 128)}], ids=str
)
def test_switches_of_the_configuration(switches, options, monkeypatch):
    device = torch.device("cuda")
    q, k, v = (
        torch.randn(2, h, s, 128, device=device) for h, s in ((8, 700), (2, 1500), (2, 1500))
    )
    made, scales = rounded(q, k, v)
    data = [x.data for x in made]
    chosen = launch_fp8.attn_fwd_fp8_sm90_config

    def switched(*problem):
        return replace(chosen(*problem), **switches)

    visible, options = visible_keys(700, 1500, device), dict(options)
    if block := options.pop("mask", None):
        options["block_mask"], visible = random_blocks(block, 8, 700, 1500, device)
    elif options:
        visible = visible_keys(700, 1500, device, True, options["window"] - 1)
    monkeypatch.setattr(launch_fp8, "attn_fwd_fp8_sm90_config", switched)
    monkeypatch.setattr(api, "_FP8", {})
    with poison.poisoned_empty():
        out = bsk.attention(*data, **scales, **options, impl="sm90")
    exact = bsk.attention(*data, **scales, **options, out_dtype=torch.float32, impl="reference")
    plain, _ = rounded_weights(*(x.stored() for x in made), 128**-0.5, visible)
    assert_within_budget(out, exact.double(), plain)


@pytest.mark.sm90
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((1, 1), {}),
        ((193, 300), {"causal": True}),
        ((450, 700), {"causal": True, "window": 200}),
        ((129, 65), {"causal": True, "sinks": True}),
        ((400, 515), {"scale": 0.3}),
    ],
    ids=str,
)
def test_three_consumers(lengths, options, monkeypatch):
    device = torch.device("cuda")
    sq, sk = lengths
    q, k, v = (torch.randn(2, h, s, 64, device=device) for h, s in ((4, sq), (2, sk), (2, sk)))
    made, scales = rounded(q, k, v)
    data = [x.data for x in made]
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(4, device=device)
    config = launch_fp8.make_fp8_config(3, 64, 64, None, sk > 128)
    monkeypatch.setattr(launch_fp8, "attn_fwd_fp8_sm90_config", lambda *_: config)
    monkeypatch.setattr(api, "_FP8", {})
    with poison.poisoned_empty():
        out, lse = bsk.attention(*data, **scales, **options, return_lse=True, impl="sm90")
    exact, exact_lse = bsk.attention(
        *data, **scales, **options, return_lse=True, out_dtype=torch.float32, impl="reference"
    )
    visible = visible_keys(sq, sk, device, options.get("causal", False))
    if "window" in options:
        visible = visible_keys(sq, sk, device, True, options["window"] - 1)
    plain, plain_lse = rounded_weights(
        *(x.stored() for x in made), options.get("scale", 0.125), visible,
        sinks=options.get("sinks"),
    )  # fmt: skip
    assert_within_budget(out, exact.double(), plain)
    # each of the two sums in a score keeps 13 bits below its largest term
    truncated = 2 * 2.0 ** (23 - 13)
    assert_within_budget(lse, exact_lse.double(), plain_lse, roundings=3.0 + truncated)


@pytest.mark.sm90
@pytest.mark.parametrize("dims", [(192, 128), (64, 128), (80, 96), (256, 64)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_values_of_another_head_dim(dims, causal):
    device = torch.device("cuda")
    q, k, v = (
        torch.randn(1, h, s, d, device=device)
        for h, s, d in ((4, 200, dims[0]), (2, 330, dims[0]), (2, 330, dims[1]))
    )
    made, scales = rounded(q, k, v)
    data = [x.data for x in made]
    with poison.poisoned_empty():
        out = bsk.attention(*data, **scales, causal=causal, impl="sm90")
    exact = bsk.attention(*data, **scales, causal=causal, out_dtype=torch.float32, impl="reference")
    visible = visible_keys(200, 330, device, causal)
    plain, _ = rounded_weights(*(x.stored() for x in made), dims[0] ** -0.5, visible)
    assert_within_budget(out, exact.double(), plain)


@pytest.mark.sm90
def test_many_keys_stay_accurate():
    """128k keys of one sign: sums that stayed in the tensor cores would lose the last ones."""
    device = torch.device("cuda")
    q, k = (torch.randn(1, 1, s, 128, device=device) for s in (64, 131072))
    v = torch.rand(1, 1, 131072, 128, device=device) + 1
    made, scales = rounded(q, k, v)
    out = bsk.attention(*(x.data for x in made), **scales, impl="sm90")
    exact = bsk.attention(*(x.data for x in made), **scales, out_dtype=torch.float32, impl="eager")
    plain, _ = rounded_weights(
        *(x.stored() for x in made), 128**-0.5, torch.ones((), dtype=torch.bool, device=device)
    )
    assert_within_budget(out, exact.double(), plain)


@pytest.mark.sm90
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fp8_attention_by_kernels_alone(dim):
    q, k, v = (torch.randn(1, h, 1000, dim, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    out, lse = bsk.fp8.attention(q, k, v, causal=True, return_lse=True, impl="sm90")
    exact, exact_lse = bsk.attention(q, k, v, causal=True, return_lse=True)
    # rounding to the three bits of e4m3 moves an element by up to 1/16
    assert (out - exact).float().norm() <= exact.float().norm() / 16
    assert (lse - exact_lse).abs().max() <= exact_lse.abs().max() / 16


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_training(compiled):
    q, k, v, dout = (
        torch.randn(1, 4, 200, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    for x in (q, k, v):
        x.requires_grad_()
    function = bsk.fp8.attention
    if compiled:
        function = torch.compile(function, fullgraph=True)
    out = function(q, k, v, causal=True)
    with torch.no_grad():
        assert torch.equal(out, bsk.fp8.attention(q, k, v, causal=True))
    made = torch.autograd.grad(out, (q, k, v), dout)
    spec = AttnSpec(128**-0.5, Band(None, 0), max_q=200, max_k=200)
    check_gradients(AttnGradients(*made, None), dout, None, q, k, v, spec)
