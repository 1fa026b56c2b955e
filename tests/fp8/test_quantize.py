"""Both implementations of rounding to fp8 against fp64 and a table of all values."""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.fp8 import SCALES, QuantizeCall, restored
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.fp8 import LARGEST, SMALLEST_SCALE
from blackwell_sparsek.fp8 import api
from blackwell_sparsek.fp8.op import quantize_dispatch
from blackwell_sparsek.launch.workspace import zeroed_counters
from blackwell_sparsek.reference.fp8 import hadamard, nearest, scale_places
from blackwell_sparsek.testing import guard, layouts, poison

from .. import fuzzing

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH = pytest.mark.parametrize("impl", ["triton", "eager"])
EVERY_SCALE = pytest.mark.parametrize("scale", SCALES)


def check(x, scale, impl, **options):
    """Scales from the largest values, and the nearest fp8 values, up to the rounding of fp32."""
    with poison.poisoned_empty():
        made = bsk.fp8.quantize(x, scale, impl=impl, **options)
    assert made.data.shape == x.shape
    exact = x.double().cpu()
    if made.mean is not None:
        finite = torch.where(exact.isfinite(), exact, 0.0)
        mean = finite.mean(-2)
        room = 2.0**-20 * finite.abs().mean(-2)
        assert ((made.mean.double().cpu() - mean).abs() <= room).all()
        exact = exact - made.mean.double().cpu().unsqueeze(-2)
    rounded = torch.zeros_like(exact)
    if options.get("hadamard"):
        channels = x.shape[-1]
        # tensor cores add eight products or more at a time, and cut each sum off to 24 bits;
        # the mean is rotated by itself
        sums = channels / 8 + 3
        size = x.double().cpu().abs().sum(-1, keepdim=True) * channels**-0.5
        if made.mean is not None:
            mean = made.mean.double().cpu().abs().sum(-1, keepdim=True) * channels**-0.5
            size = size + mean.unsqueeze(-2)
        rounded = (2.0**-23 * sums * size).expand_as(exact)
        exact = exact @ hadamard(channels)
    elif made.mean is not None:
        rounded = 2.0**-23 * exact.abs()
    rounded = torch.where(rounded.isfinite(), rounded, 0.0)
    places = scale_places(x.shape, scale, made.block)
    descale = made.descale.double().cpu().flatten()
    finite = torch.where(exact.isfinite(), exact.abs(), 0.0)
    groups = made.descale.numel()

    def largest(values):
        none = torch.zeros(groups).double()
        return none.scatter_reduce(0, places.flatten(), values.flatten(), "amax")

    top, room = largest(finite), largest(rounded) / LARGEST[made.data.dtype]
    expected = torch.where(
        top == 0, 1.0, (top / LARGEST[made.data.dtype]).clamp_min(SMALLEST_SCALE)
    )
    assert ((descale - expected).abs() <= 2.0**-22 * expected + room).all()
    each = descale[places]
    stored = made.data.double().cpu() * each
    best = nearest(exact / each, made.data.dtype) * each
    error, least = (stored - exact).abs(), (best - exact).abs()
    same = (exact.isinf() & (stored == best)) | (exact.isnan() & stored.isnan())
    assert ((error <= least + 2.0**-21 * exact.abs() + rounded) | same).all()
    return made


@BOTH
@EVERY_SCALE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounds_to_nearest_with_the_scale_of_its_group(impl, scale, dtype, device):
    x = torch.randn(2, 150, 40, device=device)
    x[..., 7] *= 50
    x[1, 70:90] *= 1e-3
    check(x.to(dtype), scale, impl)


@BOTH
@EVERY_SCALE
@pytest.mark.parametrize("shape", [(1, 1), (17, 300), (3, 129, 16), (1, 1, 65, 257)])
def test_shapes(impl, scale, shape, device):
    check(torch.randn(shape, device=device), scale, impl)


@BOTH
@pytest.mark.parametrize("scale", ["tensor", "head", "block", "channel"])
@pytest.mark.parametrize("smooth", [False, True])
def test_smoothing_and_rotation(impl, scale, smooth, device):
    x = torch.randn(2, 130, 64, device=device) + 5 * torch.randn(64, device=device)
    made = check(x, scale, impl, smooth=smooth, hadamard=True)
    # e4m3 moves an element by up to 1/16, and rotating back adds 64 of them divided by sqrt(64)
    unit = made.descale.max().item() * LARGEST[E4M3] / 16
    assert (made.dequantize() - x).abs().max() <= unit * 8


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [2, 8, 16, 128, 256])
@pytest.mark.parametrize("smooth", [False, True])
def test_rotation_of_every_width(impl, dtype, channels, smooth, device):
    x = torch.randn(2, 130, channels, device=device) * 3
    x[0, 5, 0], x[0, 6, 1], x[1, 7, channels // 2] = float("inf"), float("-inf"), float("nan")
    made = check(x.to(dtype), "block", impl, smooth=smooth, hadamard=True)
    assert made.data[0, :5].float().isfinite().all()


@BOTH
@EVERY_SCALE
def test_e5m2(impl, scale, device):
    x = torch.randn(2, 33, 130) * 10.0 ** torch.randint(-6, 1, (2, 33, 130))
    assert check(x.to(device), scale, impl, dtype=E5M2).data.dtype == E5M2


@pytest.mark.parametrize("scale", ["head", "channel", "block"])
@pytest.mark.parametrize("options", [{}, {"dtype": E5M2}, {"hadamard": True}], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 70, 64), (1, 1, 1, 8)])
def test_transposed_holds_the_same_bits_in_rows_that_tma_takes(scale, options, shape, device):
    x = torch.randn(shape, device=device)
    plain = bsk.fp8.quantize(x, scale, impl="eager", **options)
    for impl in ("eager", "triton"):
        turned = bsk.fp8.quantize(x, scale, impl=impl, transposed=True, **options)
        assert turned.data.shape == x.shape
        assert turned.data.stride(-2) == 1 and turned.data.stride(-1) % 16 == 0
        assert torch.equal(turned.data.float(), plain.data.float())
        assert torch.equal(turned.descale, plain.descale)


@EVERY_SCALE
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_kernels_give_the_bits_of_pytorch(scale, dtype, device):
    x = torch.randn(2, 140, 128) * 10.0 ** torch.randint(-9, 9, (2, 140, 128))
    x = x.to(device)
    plain = bsk.fp8.quantize(x, scale, dtype=dtype, impl="eager")
    made = bsk.fp8.quantize(x, scale, dtype=dtype, impl="triton")
    assert torch.equal(made.descale, plain.descale)
    assert torch.equal(made.data.view(torch.uint8), plain.data.view(torch.uint8))


@BOTH
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_ties_go_to_even_and_what_is_not_finite(impl, dtype, device):
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    exact = every[every.isfinite()].sort().values
    between = (exact[1:] + exact[:-1]) / 2
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 0.0, -0.0])
    x = torch.cat((exact, between, special)).view(1, -1).to(device)
    # the largest value makes the scale 1
    made = bsk.fp8.quantize(x, "head", dtype=dtype, impl=impl)
    assert made.descale.item() == 1.0
    stored = made.data[0].float().cpu()
    assert torch.equal(stored[: len(exact)], exact)
    ties = nearest(between.double(), dtype).float()
    assert torch.equal(stored[len(exact) : len(exact) + len(between)], ties)
    limit = LARGEST[dtype]
    assert stored[-6:-4].tolist() == [limit, -limit] and stored[-4:-2].isnan().all()
    assert stored[-2:].tolist() == [0.0, 0.0]


@BOTH
@EVERY_SCALE
def test_zeros_and_tiny_values(impl, scale, device):
    x = torch.zeros(1, 1, 130, 130, device=device)
    made = bsk.fp8.quantize(x, scale, impl=impl)
    assert (made.descale == 1).all() and (made.data.float() == 0).all()
    x[0, 0, 3, 5] = 1e-40
    made = bsk.fp8.quantize(x, scale, impl=impl)
    assert (made.descale > 0).all() and made.descale.isfinite().all()
    assert made.data.float().isfinite().all()


@BOTH
@pytest.mark.parametrize("smooth", [False, True])
def test_nan_and_infinity_leave_other_tokens_alone(impl, smooth, device):
    x = torch.randn(1, 2, 40, 32, device=device)
    x[0, 0, 5, 3], x[0, 0, 6, 4] = torch.nan, torch.inf
    made = bsk.fp8.quantize(x, "block", block=16, smooth=smooth, impl=impl)
    back = made.data.float()
    assert back[0, 0, 5, 3].isnan() and back[0, 0, 6, 4] == 448
    assert back.isnan().sum() == 1
    check(x, "channel", impl, smooth=smooth)


@BOTH
@EVERY_SCALE
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (2, 5, 0), (0, 2, 5, 8)])
def test_nothing_to_round(impl, scale, shape, device):
    made = bsk.fp8.quantize(torch.empty(shape, device=device), scale, smooth=True, impl=impl)
    assert made.data.shape == shape and made.dequantize().shape == shape
    assert (made.descale == 1).all()


@BOTH
def test_scales_are_fp32_whatever_the_default_dtype_is(impl, device):
    torch.set_default_dtype(torch.float64)
    try:
        for tokens in (0, 5):
            x = torch.ones(tokens, 16, dtype=torch.bfloat16, device=device)
            assert bsk.fp8.quantize(x, "block", impl=impl).descale.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@BOTH
@pytest.mark.parametrize("kind", layouts.KINDS)
@pytest.mark.parametrize("scale", ["channel", "128x128"])
def test_strides(impl, kind, scale, device):
    x = torch.randn(2, 2, 37, 24, device=device)
    given = layouts.strided_like(x, kind)
    made = check(given, scale, impl, smooth=True)
    # in the order of x, without gaps
    order = (0, 2, 1, 3) if kind == "swapped" else (0, 1, 2, 3)
    assert made.data.permute(order).is_contiguous()


@EVERY_SCALE
@pytest.mark.parametrize("side", ["left", "right"])
def test_touches_nothing_outside(scale, side, interpreted):
    x = guard.guarded(torch.randn(2, 65, 40), side)
    check(x, scale, "triton", smooth=True)


def test_offsets_past_two_to_the_31(interpreted):
    x = torch.randn(2, 40, 16)
    far = guard.huge_zeros(x.shape, x.dtype, (2**31 + 8, 16, 1))
    far.copy_(x)
    made = bsk.fp8.quantize(far, "channel", impl="triton")
    assert torch.equal(made.data.float(), bsk.fp8.quantize(x, "channel").data.float())


def test_lengths_and_heads_compile_nothing_new(run_recorder):
    script = """
import blackwell_sparsek.fp8.triton as kernels
from blackwell_sparsek.calls.fp8 import QuantizeCall

for name in ("_sums_kernel", "_means_kernel", "_amax_kernel", "_quantize_kernel"):
    setattr(kernels, name, Recorder(getattr(kernels, name)))

def calls(scale):
    return [
        (lambda call=QuantizeCall(torch.randn(2, h, s, 64), scale, torch.float8_e4m3fn, 128,
                                  True, False, False): kernels.quantize(call))
        for h in (2, 8, 16) for s in (2, 3, 16, 600)
    ]

print(json.dumps([variants(calls(scale)) for scale in ("tensor", "block", "1x128")]))
"""
    # sums, means, maxima where tiles do not hold whole groups, and the rounding, which has tiles of
    # three heights where a group is one token
    assert run_recorder(script) == [4, 3, 5]


def test_compiles_without_a_break():
    x = torch.randn(2, 40, 16)

    def made(x):
        quantized = bsk.fp8.quantize(x, "channel", smooth=True, transposed=True)
        return quantized.data.float(), quantized.descale, quantized.mean

    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(x), made(x), strict=True):
        assert torch.equal(got, expected) and got.stride() == expected.stride()


@pytest.mark.parametrize("transposed", [False, True])
def test_operator(transposed):
    args = (torch.randn(2, 40, 16), "channel", E4M3, 128, True, False, transposed, "eager")
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.bsk.fp8_quantize.default, args, test_utils=checks)


def test_explain_names_the_implementations():
    chosen = bsk.explain(bsk.fp8.quantize, torch.randn(2, 8))
    assert "rounding on cpu, torch.float32 -> torch.float8_e4m3fn, 16 elements" in str(chosen)
    assert chosen.chosen == "eager" and "triton" in chosen.reasons
    assert list(quantize_dispatch.candidates) == ["triton", "eager"]


def test_auto_takes_the_kernels_on_a_gpu():
    call = QuantizeCall(torch.zeros(2, 8), "tensor", E4M3, 128, False, False, False)
    problem = replace(call.problem, arch=Arch("cuda", 90, 132, 232448, False))
    assert quantize_dispatch.choose("auto", problem).name == "triton"


@pytest.mark.parametrize(
    "arch, dtype, why",
    [
        (Arch("cuda", 70, 80, 98304, False), torch.float16, "sm_80"),
        (Arch("cuda", 90, 132, 232448, False), torch.float64, "float64"),
    ],
)
def test_why_not_the_kernels(arch, dtype, why):
    call = QuantizeCall(torch.zeros(2, 8, dtype=dtype), "tensor", E4M3, 128, False, False, False)
    reason = quantize_dispatch.candidates["triton"].supports(replace(call.problem, arch=arch))
    assert reason is not None and why in reason


@pytest.mark.gpu
@EVERY_SCALE
@pytest.mark.parametrize(
    "options", [{}, {"smooth": True}, {"smooth": True, "transposed": True}], ids=str
)
def test_replayed_calls_round_what_they_are_given(scale, options, monkeypatch):
    monkeypatch.setattr(api, "_RECORDED", {})
    # the maxima lie behind whatever counters were handed out before
    zeroed_counters(1, torch.device("cuda", 0), torch.cuda.current_stream().cuda_stream, False)
    for turn in range(4):
        x = torch.randn(2, 3, 600, 64, device="cuda", dtype=torch.bfloat16)
        made = bsk.fp8.quantize(x, scale, impl="triton", **options)
        # with strides of its own, each of these calls is made in full; in another dtype, a kernel
        # may add up means in another order
        strided = torch.cat([x] * (turn + 2), -1)[..., :64]
        expected = bsk.fp8.quantize(strided, scale, impl="triton", **options)
        assert made.data.stride() == expected.data.stride()
        assert torch.equal(made.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(made.descale, expected.descale)
        assert made.mean is None or torch.equal(made.mean, expected.mean)
    assert [x is not None for x in api._RECORDED.values()] == [True]


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"x": [1.0]}, bsk.InvalidType, "x is not a tensor"),
        ({"x": torch.randn(4, 4).double()}, bsk.InvalidType, "unsupported dtype"),
        ({"x": torch.randn(4)}, bsk.InvalidInput, "x has a wrong rank"),
        ({"x": torch.randn(1, 1, 1, 4, 4)}, bsk.InvalidInput, "x has a wrong rank"),
        ({"x": torch.randn(4, 8)[:, ::2]}, bsk.InvalidInput, "contiguous in its last dimension"),
        ({"x": torch.randn(4, 4, requires_grad=True)}, bsk.InvalidInput, "requires gradients"),
        ({"scale": "row"}, bsk.InvalidInput, "scale is unknown.*'1x128'"),
        ({"dtype": torch.int8}, bsk.InvalidInput, "dtype is unknown"),
        ({"block": 100}, bsk.InvalidInput, "block is unknown.*got 100"),
        ({"smooth": 1}, bsk.InvalidType, "smooth is not a bool"),
        ({"hadamard": True, "x": torch.randn(4, 24)}, bsk.InvalidInput, "power of two up to 256"),
        ({"hadamard": True, "x": torch.randn(4, 512)}, bsk.InvalidInput, "got 512"),
        ({"hadamard": True, "scale": "1x128"}, bsk.InvalidInput, "hadamard is for attention"),
        ({"impl": "sm90"}, bsk.Unsupported, "sm90"),
        ({"impl": 3}, bsk.InvalidInput, "impl is unknown.*got 3"),
    ],
)
def test_refusals(change, kind, text):
    given = {"x": torch.randn(4, 4), **change}
    with pytest.raises(kind, match=f"(?s){text}"):
        bsk.fp8.quantize(given.pop("x"), **given)


def test_gradients_are_refused_only_where_they_would_flow():
    x = torch.randn(4, 4, requires_grad=True)
    with torch.no_grad():
        assert not bsk.fp8.quantize(x).data.requires_grad
    assert bsk.fp8.quantize(x.detach()).data.dtype == E4M3
    # a batched tensor does not report that it requires a gradient
    with pytest.raises(bsk.InvalidInput, match="x requires gradients"):
        torch.vmap(lambda x: bsk.fp8.quantize(x).data.float())(x[None])


@BOTH
def test_means_count_what_is_not_finite_as_zeros(impl):
    x = torch.tensor([[1.0], [3.0], [torch.nan], [torch.inf]])
    assert bsk.fp8.quantize(x, smooth=True, impl=impl).mean.item() == 1.0


# Copies and files.


def through_torch(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": through_torch,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@EVERY_SCALE
def test_copies_hold_the_same(way, transposed, dtype, scale):
    x = torch.randn(2, 20, 16)
    made = bsk.fp8.quantize(x, scale, dtype=dtype, transposed=transposed, smooth=True)
    other = COPIES[way](made)
    assert type(other) is type(made) and other.data.dtype == dtype
    assert torch.equal(other.data.view(torch.uint8), made.data.view(torch.uint8))
    assert torch.equal(other.descale, made.descale) and torch.equal(other.mean, made.mean)
    assert other[2:4] == made[2:4] and other.hadamard == made.hadamard
    assert other.data.stride() == made.data.stride()
    shares = other.data.untyped_storage().data_ptr() == made.data.untyped_storage().data_ptr()
    assert shares == (way == "copy")


def test_any_wrong_value_of_a_file_is_refused_or_harmless():
    made = bsk.fp8.quantize(torch.randn(2, 20, 16), "block", smooth=True)
    function, state = made.__reduce__()
    assert function is restored
    refused = 0
    for place in range(len(state)):
        for value in fuzzing.ODD_STATES:
            try:
                restored(*state[:place], value, *state[place + 1 :]).dequantize()
            except bsk.BskError as error:
                assert len(str(error).splitlines()) == 1
                refused += 1
    assert refused > 50
