"""What the emulator of PTX makes of single instructions, and which mistakes of kernels it finds."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from blackwell_sparsek.testing.emulator import arithmetic, hopper
from blackwell_sparsek.testing.emulator.instructions import compiled
from blackwell_sparsek.testing.emulator.machine import Machine
from blackwell_sparsek.testing.emulator.memory import EmulatorError, GlobalMemory
from blackwell_sparsek.testing.emulator.program import parse

LANE = np.arange(32)
WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
NAN, INF = math.nan, math.inf
# Where the arrays of a kernel lie.
SPACE = 2**32
REGISTERS = """
    .reg .pred %p<20>; .reg .b16 %h<40>; .reg .b32 %r<80>; .reg .b64 %rd<40>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, %laneid; mov.u32 %r2, global_smem;
"""


def machine_of(body, arrays=(), maps=(), **options):
    """A kernel whose parameters are arrays, in %rd0, %rd1 ..., and tensor maps."""
    count = len(arrays) + len(maps)
    named = ", ".join(f".param .u64 k_param_{i}" for i in range(count))
    loads = "".join(f"ld.param.u64 %rd{i}, [k_param_{i}];" for i in range(len(arrays)))
    program = parse(f".visible .entry k({named}) {{ {REGISTERS} {loads} {body} ret; }}")
    placed = {SPACE * i: x for i, x in enumerate(arrays, 1)}
    tensors = [x.tensor for x in maps]
    options = {"grid": 1, "num_warps": 1, "shared_bytes": 8192, "compile_step": compiled, **options}
    values = [*placed, *(x.map for x in maps)]
    return Machine(program, values, GlobalMemory(tensors, placed), **options)


def run(body, arrays=(), maps=(), **options):
    machine_of(body, arrays, maps, **options).run()


def result_of(statements, result="%r3", bits=32, warps=1):
    """A register of every thread at the end."""
    found = np.zeros(32 * warps, WORDS[bits])
    end = f"mad.wide.u32 %rd0, %r0, {bits // 8}, %rd0; st.global.b{bits} [%rd0], {result};"
    run(f"{statements} {end}", [found], num_warps=warps)
    return found


def computed(name, bits, sources, widths, kind):
    """`name` of the i-th numbers of all sources, which have some widths, as numpy's `kind`."""
    registers = {8: "%h", 16: "%h", 32: "%r", 64: "%rd"}
    count = len(sources[0])
    padded = -(-count // 32) * 32
    arrays = [np.zeros(padded, WORDS[bits])]
    body, operands = "", []
    for i, (x, width) in enumerate(zip(sources, widths, strict=True), 1):
        x = np.asarray(x)
        words = x.view(WORDS[width]) if x.dtype.itemsize * 8 == width else x.astype(WORDS[width])
        arrays.append(np.resize(words, padded))
        at = f"%rd{10 + i}"
        body += f"mad.wide.u32 {at}, %r0, {width // 8}, %rd{i};"
        body += f"ld.global.b{width} {registers[width]}{20 + i}, [{at}];"
        operands.append(f"{registers[width]}{20 + i}")
    to = f"{registers[bits]}30"
    body += f"{name} {to}, {', '.join(operands)};"
    body += f"mad.wide.u32 %rd10, %r0, {bits // 8}, %rd0; st.global.b{bits} [%rd10], {to};"
    run(body, arrays, num_warps=padded // 32)
    return arrays[0][:count].view(kind)


def pairs(numbers):
    """All pairs of some numbers."""
    return tuple(zip(*itertools.product(numbers, numbers), strict=True))


def in_type(x, bits, signed):
    """A whole number, wrapped around."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if signed and x >> (bits - 1) else x


def awkward(bits, signed):
    numbers = [0, 1, 2, 3, 5, 7, 100, 2 ** (bits // 2), 2 ** (bits - 1) - 1]
    other = [2 ** (bits - 1), 2 ** (bits - 1) + 1, 2**bits - 7, 2**bits - 1]
    return [in_type(x, bits, signed) for x in numbers + other]


# Integers.


def divided(a, b):
    return (abs(a) // abs(b)) * (-1 if (a < 0) != (b < 0) else 1)


INTEGERS = {
    "add": lambda a, b, bits: a + b,
    "sub": lambda a, b, bits: a - b,
    "mul.lo": lambda a, b, bits: a * b,
    "mul.hi": lambda a, b, bits: a * b >> bits,
    "min": lambda a, b, bits: min(a, b),
    "max": lambda a, b, bits: max(a, b),
    "div": lambda a, b, bits: divided(a, b),
    "rem": lambda a, b, bits: a - divided(a, b) * b,
}


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name, kind):
    bits, signed = int(kind[1:]), kind[0] == "s"
    a, b = pairs(awkward(bits, signed))
    if name in ("div", "rem"):
        a, b = zip(*((x, y) for x, y in zip(a, b, strict=True) if y), strict=True)
    numpy_kind = f"{'i' if signed else 'u'}{bits // 8}"
    given = [np.array(x, numpy_kind) for x in (a, b)]
    found = computed(f"{name}.{kind}", bits, given, (bits, bits), numpy_kind)
    expected = [
        in_type(INTEGERS[name](x, y, bits), bits, signed) for x, y in zip(a, b, strict=True)
    ]
    assert found.tolist() == expected


@pytest.mark.parametrize(("name", "extreme"), [("max", max), ("min", min)])
def test_extremes_of_at_least_zero(name, extreme):
    a, b = pairs(awkward(32, True))
    given = [np.array(x, "i4") for x in (a, b)]
    found = computed(f"{name}.relu.s32", 32, given, (32, 32), "i4")
    assert found.tolist() == [max(extreme(x, y), 0) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_products_of_twice_the_width(kind):
    bits, signed = int(kind[1:]), kind[0] == "s"
    a, b = pairs(awkward(bits, signed))
    c = awkward(2 * bits, signed)
    c = [c[i % len(c)] for i in range(len(a))]
    narrow, wide = (f"{'i' if signed else 'u'}{n // 8}" for n in (bits, 2 * bits))
    given = [np.array(a, narrow), np.array(b, narrow), np.array(c, wide)]
    found = computed(f"mul.wide.{kind}", 2 * bits, given[:2], (bits, bits), wide)
    assert found.tolist() == [x * y for x, y in zip(a, b, strict=True)]
    found = computed(f"mad.wide.{kind}", 2 * bits, given, (bits, bits, 2 * bits), wide)
    expected = [in_type(x * y + z, 2 * bits, signed) for x, y, z in zip(a, b, c, strict=True)]
    assert found.tolist() == expected


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "s16", "s32", "s64", "u32"])
def test_shifts(kind):
    bits, signed = int(kind[1:]), kind[0] == "s"
    counts = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 2**31, 2**32 - 1]
    a, n = zip(*itertools.product(awkward(bits, signed), counts), strict=True)
    numpy_kind = f"{'i' if signed else 'u'}{bits // 8}"
    given = np.array(a, numpy_kind), np.array(n, np.uint32)
    found = computed(f"shr.{kind}", bits, given, (bits, 32), numpy_kind)
    assert found.tolist() == [x >> min(y, bits) for x, y in zip(a, n, strict=True)]
    if kind[0] == "b":
        found = computed(f"shl.{kind}", bits, given, (bits, 32), numpy_kind)
        expected = [in_type(x << min(y, bits), bits, False) for x, y in zip(a, n, strict=True)]
        assert found.tolist() == expected


def extracted(a, start, length, bits, signed):
    """What the manual says of bfe, bit by bit."""
    most = bits - 1
    sign = a >> min(start + length - 1, most) & 1 if signed and length else 0
    found = 0
    for i in range(bits):
        bit = a >> (start + i) & 1 if i < length and start + i <= most else sign
        found |= bit << i
    return found


FIELDS = [
    (s, n) for s in (0, 1, 8, 31, 32, 40, 63, 64, 255, 256) for n in (0, 1, 7, 31, 32, 64, 255)
]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind):
    bits = int(kind[1:])
    numbers = [0x12345678_9ABCDEF0, 0xF0E1D2C3_B4A59687, 2**64 - 1]
    cases = [(in_type(a, bits, False), s, n) for a in numbers for s, n in FIELDS]
    a, start, length = (np.array(x, np.uint64) for x in zip(*cases, strict=True))
    given = a.astype(WORDS[bits]), start.astype(np.uint32), length.astype(np.uint32)
    found = computed(f"bfe.{kind}", bits, given, (bits, 32, 32), WORDS[bits])
    signed = kind[0] == "s"
    assert found.tolist() == [extracted(x, s & 255, n & 255, bits, signed) for x, s, n in cases]
    if not signed:
        field = np.full_like(given[0], in_type(0xA5A5F00F_C33C1234, bits, False))
        found = computed(f"bfi.b{bits}", bits, (field, *given), (bits, bits, 32, 32), WORDS[bits])
        for one, (x, s, n) in zip(found.tolist(), cases, strict=True):
            s, n = s & 255, n & 255
            for i in range(bits):
                inside = s <= i < s + n
                assert one >> i & 1 == (int(field[0]) >> (i - s) if inside else x >> i) & 1


def test_bytes_are_permuted():
    low, high = 0x83_02_81_00, 0x07_86_05_84
    pool = [low >> 8 * i & 255 for i in range(4)] + [high >> 8 * i & 255 for i in range(4)]
    selectors = [0x3210, 0x7654, 0x0123, 0xFB9C, 0x8888, 0x4F0A]
    given = [np.full(6, x, np.uint32) for x in (low, high)] + [np.array(selectors, np.uint32)]
    for selector, found in zip(
        selectors, computed("prmt.b32", 32, given, (32, 32, 32), np.uint32).tolist(), strict=True
    ):
        for i in range(4):
            chosen = selector >> 4 * i & 15
            byte = pool[chosen & 7]
            byte = byte if chosen < 8 else (255 if byte & 128 else 0)
            assert found >> 8 * i & 255 == byte


def test_funnel_shifts():
    low, high = 0x89ABCDEF, 0x01234567
    counts = [0, 1, 8, 31, 32, 33, 63, 64, 2**32 - 1]
    given = [np.full(9, x, np.uint32) for x in (low, high)] + [np.array(counts, np.uint32)]
    both = high << 32 | low
    for mode, most in (("clamp", lambda n: min(n, 32)), ("wrap", lambda n: n & 31)):
        found = computed(f"shf.l.{mode}.b32", 32, given, (32, 32, 32), np.uint32)
        assert found.tolist() == [(both << most(n) >> 32) & 0xFFFFFFFF for n in counts]
        found = computed(f"shf.r.{mode}.b32", 32, given, (32, 32, 32), np.uint32)
        assert found.tolist() == [(both >> most(n)) & 0xFFFFFFFF for n in counts]


@pytest.mark.parametrize("table", [0, 0x80, 0x96, 0xE8, 0xCA, 0x1E, 0xFF])
def test_logic_of_three(table):
    a, b, c = 0xF0F0F0F0, 0xCCCC3333, 0xAAAA5555
    setup = f"mov.b32 %r4, {a:#x}; mov.b32 %r5, {b:#x}; mov.b32 %r6, {c:#x};"
    found = int(result_of(f"{setup} lop3.b32 %r3, %r4, %r5, %r6, {table:#x};")[0])
    for i in range(32):
        place = (a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)
        assert found >> i & 1 == table >> place & 1


def test_bits_are_counted():
    numbers = [0, 1, 0x80000000, 0xFFFFFFFF, 0x00F01000]
    given = [np.array(numbers, np.uint32)]
    assert computed("popc.b32", 32, given, (32,), np.uint32).tolist() == [0, 1, 1, 32, 5]
    assert computed("clz.b32", 32, given, (32,), np.uint32).tolist() == [32, 31, 0, 0, 8]
    expected = [int(f"{x:032b}"[::-1], 2) for x in numbers]
    assert computed("brev.b32", 32, given, (32,), np.uint32).tolist() == expected
    wide = [np.array([0, 1, 2**63], np.uint64)]
    assert computed("clz.b64", 32, wide, (64,), np.uint32).tolist() == [64, 63, 0]
    masks = [(0, 0), (0, 32), (4, 8), (31, 2), (32, 1), (5, 40)]
    given = [np.array(x, np.uint32) for x in zip(*masks, strict=True)]
    expected = [((1 << min(n, 32)) - 1) << s & 0xFFFFFFFF if s < 32 else 0 for s, n in masks]
    found = computed("bmsk.clamp.b32", 32, given, (32, 32), np.uint32)
    assert found.tolist() == expected


# Floating-point numbers.

FLOATS = [0.0, -0.0, 1.0, -1.5, 3e38, -3e38, 1e-38, 1e-45, INF, -INF, NAN, 2.0**24 + 2, 1 / 3]


def same(found, expected):
    """Equal bits, except for which NaN it is."""
    np.testing.assert_array_equal(found, expected)
    there = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found)[there], np.signbit(expected)[there])


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div.rn"])
def test_floats(name):
    a, b = (np.array(x, np.float32) for x in pairs(FLOATS))
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div.rn": np.divide}[name]
    with np.errstate(all="ignore"):
        same(computed(f"{name}.f32", 32, (a, b), (32, 32), np.float32), function(a, b))


def rounded_once(x, kind):
    """A fraction in a type, to nearest even, from the numbers of the type around it."""
    start = torch.tensor(float(x), dtype=torch.float64).to(kind)
    bits = start.view(torch.int16 if kind != torch.float32 else torch.int32)
    near = [(bits + i).view(kind) for i in (-1, 0, 1)]
    even = [int(bits + i) % 2 for i in (-1, 0, 1)]
    best = min(range(3), key=lambda i: (abs(Fraction(near[i].item()) - x), even[i]))
    return near[best].item()


@pytest.mark.parametrize(
    ("kind", "dtype", "factors", "less"),
    [
        ("f32", torch.float32, (1 + 2**-12, 1 + 2**-12), 2**-80),
        ("f16", torch.float16, (1 + 2**-5, 1 + 2**-6), 2**-24),
        ("bf16", torch.bfloat16, (1 + 2**-4, 1 + 2**-4), 2**-40),
    ],
)
def test_products_with_a_sum_round_once(kind, dtype, factors, less):
    bits = 32 if kind == "f32" else 16
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(320, generator=generator).to(dtype) for _ in range(3))
    # products that are ties, and a summand that says which way
    a[:3], b[:3] = factors
    c[:3] = torch.tensor([less, -less, 0.0])
    whole = np.int32 if bits == 32 else np.int16
    given = [x.view(torch.int32 if bits == 32 else torch.int16).numpy() for x in (a, b, c)]
    found = torch.from_numpy(computed(f"fma.rn.{kind}", bits, given, (bits,) * 3, whole).copy())
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z)
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert found.view(dtype).tolist() == [rounded_once(x, dtype) for x in exact]


def test_extremes_of_nan():
    a, b = (np.array(x, np.float32) for x in pairs([1.0, -2.0, INF, -INF, NAN]))
    for name, function, other in (("min", np.minimum, np.fmin), ("max", np.maximum, np.fmax)):
        same(computed(f"{name}.NaN.f32", 32, (a, b), (32, 32), np.float32), function(a, b))
        same(computed(f"{name}.f32", 32, (a, b), (32, 32), np.float32), other(a, b))


COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def compared(name, a, b, bits, joined=""):
    """Two bits for each pair: what the comparison is, and its opposite."""
    letter = {16: "h", 32: "r", 64: "rd"}[bits]
    out = np.zeros(-(-len(a) // 32) * 32, np.uint32)
    x, y = (np.resize(v.view(WORDS[bits]), len(out)) for v in (a, b))
    run(
        f"""
        mad.wide.u32 %rd11, %r0, {bits // 8}, %rd1; mad.wide.u32 %rd12, %r0, {bits // 8}, %rd2;
        mad.wide.u32 %rd10, %r0, 4, %rd0;
        ld.global.b{bits} %{letter}20, [%rd11]; ld.global.b{bits} %{letter}21, [%rd12];
        and.b32 %r4, %r0, 1; setp.ne.u32 %p9, %r4, 0;
        setp.{name} %p1|%p2, %{letter}20, %{letter}21{joined};
        selp.b32 %r5, 1, 0, %p1; selp.b32 %r6, 2, 0, %p2; or.b32 %r5, %r5, %r6;
        st.global.b32 [%rd10], %r5;
        """,
        [out, x, y],
        num_warps=len(out) // 32,
    )
    found = out[: len(a)]
    return (found & 1).astype(bool), (found & 2).astype(bool)


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name):
    a, b = (np.array(x, np.float32) for x in pairs([0.0, -0.0, 1.5, -INF, INF, NAN]))
    nan = np.isnan(a) | np.isnan(b)
    plain = COMPARISONS[name](a, b)
    for unordered in (False, True):
        expected = np.where(nan, unordered, plain)
        found, opposite = compared(f"{name}{'u' * unordered}.f32", a, b, 32)
        assert found.tolist() == expected.tolist()
        assert opposite.tolist() == (~expected).tolist()
    odd = np.arange(len(a)) % 2 == 1
    expected = np.where(nan, False, plain)
    for how, function in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        for text, other in ((", %p9", odd), (", !%p9", ~odd)):
            found, opposite = compared(f"{name}.{how}.f32", a, b, 32, text)
            assert found.tolist() == function(expected, other).tolist()
            assert opposite.tolist() == function(~expected, other).tolist()
    assert compared("nan.f32", a, b, 32)[0].tolist() == nan.tolist()
    assert compared("num.f32", a, b, 32)[0].tolist() == (~nan).tolist()
    for kind in ("s32", "u32", "s64"):
        bits, letter = int(kind[1:]), "i" if kind[0] == "s" else "u"
        a_, b_ = (np.array(x, f"{letter}{bits // 8}") for x in pairs(awkward(bits, kind[0] == "s")))
        found, _ = compared(f"{name}.{kind}", a_, b_, bits)
        assert found.tolist() == COMPARISONS[name](a_, b_).tolist()


def test_functions():
    x = np.array([0.5, 1.0, 2.0, 10.0, 2.0**-126, INF], np.float32)
    wide = x.astype(np.float64)
    for name, expected in (
        ("ex2.approx.f32", np.exp2(wide)),
        ("lg2.approx.f32", np.log2(wide)),
        ("rcp.rn.f32", 1 / wide),
        ("sqrt.rn.f32", np.sqrt(wide)),
        ("tanh.approx.f32", np.tanh(wide)),
    ):
        with np.errstate(over="ignore"):
            same(computed(name, 32, [x], (32,), np.float32), expected.astype(np.float32))
    root = computed("sqrt.rn.f64", 64, [np.array([2.0, 3.0])], (64,), np.float64)
    assert root.tolist() == [math.sqrt(2.0), math.sqrt(3.0)]
    small = [np.array([1e-40, -1e-40], np.float32)]
    found = computed("rcp.approx.ftz.f32", 32, small, (32,), np.float32)
    assert found.tolist() == [INF, -INF]


# Conversions.

SIXTEEN = np.arange(2**16, dtype=np.uint16)


def of_torch(words, dtype, to):
    return torch.from_numpy(words.view(np.int16)).view(dtype).to(to)


def convert(name, *words):
    """A conversion of any number of words at a time."""
    with np.errstate(all="ignore"):
        return arithmetic.operation(tuple(name.split(".")))(*words)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_all_numbers_of_16_bits(kind, dtype):
    found = convert(f"cvt.f32.{kind}", SIXTEEN).view(np.float32)
    wide = of_torch(SIXTEEN, dtype, torch.float32).numpy()
    same(found, wide)
    other, other_dtype = ("bf16", torch.bfloat16) if kind == "f16" else ("f16", torch.float16)
    found = convert(f"cvt.rn.{other}.{kind}", SIXTEEN)
    expected = of_torch(SIXTEEN, dtype, other_dtype)
    same(
        of_torch(found, other_dtype, torch.float32).numpy(),
        expected.to(torch.float32).numpy(),
    )
    # as far as e4m3 goes; PTX saturates where torch makes NaN
    narrow = torch.from_numpy(np.clip(wide, -448, 448)).to(torch.float8_e4m3fn)
    low = convert(
        "cvt.rn.satfinite.e4m3x2.f32", np.zeros_like(wide).view(np.uint32), wide.view(np.uint32)
    )
    fp8 = torch.from_numpy((low & 0xFF).astype(np.uint8)).view(torch.float8_e4m3fn)
    same(fp8.to(torch.float32).numpy(), narrow.to(torch.float32).numpy())
    if kind == "f16":
        pair = SIXTEEN.astype(np.uint32) << np.uint32(16)
        high = convert("cvt.rn.satfinite.e4m3x2.f16x2", pair) >> np.uint16(8)
        assert (high == (low & 0xFF)).all()
    for to, kind_of in (("s8", np.int8), ("u8", np.uint8), ("s32", np.int32), ("u32", np.uint32)):
        limits = np.iinfo(kind_of)
        with np.errstate(all="ignore"):
            whole = np.nan_to_num(np.trunc(wide.astype(np.float64)), nan=0.0)
        whole = np.clip(whole, limits.min, limits.max).astype(np.int64)
        found = convert(f"cvt.rzi.{to}.{kind}", SIXTEEN).astype(np.int64)
        bits = limits.bits
        assert (found & (2**bits - 1) == whole & (2**bits - 1)).all()


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_all_ties_round_to_even(kind, dtype):
    exact = of_torch(SIXTEEN, dtype, torch.float64).numpy()
    following = of_torch(SIXTEEN + np.uint16(1), dtype, torch.float64).numpy()
    with np.errstate(all="ignore"):
        middle = ((exact + following) / 2).astype(np.float32)
    near = [middle, np.nextafter(middle, np.float32(INF)), np.nextafter(middle, np.float32(-INF))]
    for x in near:
        expected = torch.from_numpy(x).to(dtype).to(torch.float32).numpy()
        found = convert(f"cvt.rn.{kind}.f32", x.view(np.uint32))
        same(of_torch(found, dtype, torch.float32).numpy(), expected)
        pair = convert(f"cvt.rn.{kind}x2.f32", x.view(np.uint32), np.zeros(2**16, np.uint32))
        high = (pair >> np.uint32(16)).astype(np.uint16)
        same(of_torch(high, dtype, torch.float32).numpy(), expected)


def test_e4m3_between_its_numbers():
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    middle = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat(
        [middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(INF))]
    )
    x = torch.cat([x, -x]).numpy()
    found = convert("cvt.rn.satfinite.e4m3x2.f32", np.zeros(len(x), np.uint32), x.view(np.uint32))
    expected = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert found.tolist() == expected.tolist()
    every = np.arange(256, dtype=np.uint16)
    unpacked = convert("cvt.rn.f16x2.e4m3x2", every | (every[::-1] << 8))
    fp8 = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    values = fp8.to(torch.float32).numpy()
    same((unpacked & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32), values)
    same((unpacked >> 16).astype(np.uint16).view(np.float16).astype(np.float32), values[::-1])


def test_conversions_saturate():
    x = np.array([1e30, -1e30, 2.5, 3.5, -2.5, NAN, INF, 2.0**63, -(2.0**63)], np.float32)
    found = computed("cvt.rni.s64.f32", 64, [x], (32,), np.int64)
    most, least = 2**63 - 1, -(2**63)
    assert found.tolist() == [most, least, 2, 4, -2, least, most, most, least]
    found = computed("cvt.rzi.u64.f32", 64, [x], (32,), np.uint64)
    assert found.tolist() == [2**64 - 1, 0, 2, 3, 0, 2**63, 2**64 - 1, 2**63, 0]
    found = computed("cvt.rmi.s32.f32", 32, [x], (32,), np.int32)
    assert found.tolist() == [2**31 - 1, -(2**31), 2, 3, -3, 0, 2**31 - 1, 2**31 - 1, -(2**31)]
    found = computed("cvt.rpi.u32.f32", 32, [x], (32,), np.uint32)
    assert found.tolist() == [2**32 - 1, 0, 3, 4, 0, 0, 2**32 - 1, 2**32 - 1, 0]
    found = computed("cvt.sat.f32.f32", 32, [x], (32,), np.float32)
    assert found.tolist() == [1, 0, 1, 1, 0, 0, 1, 1, 0]
    whole = [np.array([-200, -1, 0, 127, 200, 300], np.int32)]
    assert computed("cvt.sat.u8.s32", 32, whole, (32,), np.int32).tolist() == [
        0,
        0,
        0,
        127,
        200,
        255,
    ]
    assert computed("cvt.sat.s8.s32", 32, whole, (32,), np.int32).tolist() == [
        *(-128, -1, 0, 127, 127, 127)
    ]
    assert computed("cvt.s8.s32", 32, whole, (32,), np.int32).tolist() == [56, -1, 0, 127, -56, 44]
    assert computed("cvt.u8.s32", 32, whole, (32,), np.int32).tolist() == [56, 255, 0, 127, 200, 44]


def test_whole_numbers_round_once():
    x = [2**30 + 2**22 + 1, -(2**30) - 2**22 - 1, 2**24 + 1, 2**31 - 1]
    found = computed("cvt.rn.bf16.s32", 16, [np.array(x, np.int32)], (32,), np.int16)
    numbers = torch.from_numpy(found.copy()).view(torch.bfloat16).tolist()
    assert numbers == [rounded_once(Fraction(v), torch.bfloat16) for v in x]
    wide = [2**62 + 2**38 + 1, 2**53 + 2**29 + 1]
    found = computed("cvt.rn.f32.s64", 32, [np.array(wide, np.int64)], (64,), np.float32)
    assert found.tolist() == [rounded_once(Fraction(v), torch.float32) for v in wide]


# Exchanges between lanes.


@pytest.mark.parametrize("how", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8, 4])
def test_shuffles(how, width):
    for by in (0, 1, 3, width // 2, width - 1):
        clamp = (32 - width) << 8 | (0 if how == "up" else 31)
        statement = f"""
            add.u32 %r4, %r1, 100; shfl.sync.{how}.b32 %r3|%p1, %r4, {by}, {clamp}, -1;
            @!%p1 add.u32 %r3, %r3, 1000;
        """
        first, place = LANE // width * width, LANE % width
        other = {"up": place - by, "down": place + by, "bfly": place ^ by, "idx": by + 0 * place}[
            how
        ]
        inside = (other >= 0) & (other < width)
        expected = 100 + np.where(inside, first + other, LANE + 1000)
        assert result_of(statement).tolist() == expected.tolist()


def test_lanes_that_run_decide():
    within = """
        setp.lt.u32 %p1, %r1, 12; setp.gt.u32 %p2, %r1, 4; mov.b32 %r3, 77;
        @!%p1 bra $L; {} $L:
    """
    few = [1] * 12 + [77] * 20

    def masked(values):
        return [int(x) for x in values] + [77] * 20

    def found(text):
        return result_of(within.format(text)).tolist()

    assert found("vote.sync.ballot.b32 %r3, %p2, 4095;") == masked([0xFE0] * 12)
    assert found("activemask.b32 %r3;") == masked([4095] * 12)
    for how, expected in (("any", 1), ("all", 0), ("uni", 0)):
        text = f"vote.sync.{how}.pred %p3, %p2, 4095; selp.b32 %r3, 1, 0, %p3;"
        assert found(text) == masked([expected] * 12)
    text = "vote.sync.all.pred %p3, %p1, 4095; selp.b32 %r3, 1, 0, %p3;"
    assert found(text) == few
    for how, expected in (("add.u32", 66), ("max.s32", 11), ("min.u32", 0), ("or.b32", 15)):
        assert found(f"redux.sync.{how} %r3, %r1, 4095;") == masked([expected] * 12)
    text = "sub.u32 %r4, %r1, 3; redux.sync.min.s32 %r3, %r4, 4095; add.s32 %r3, %r3, 10;"
    assert found(text) == masked([7] * 12)
    text = "elect.sync %r4|%p3, 4095; selp.b32 %r3, 5, %r4, %p3;"
    assert found(text) == masked([5] + [0] * 11)


# Branches.


def test_lanes_part_and_meet():
    body = """
        and.b32 %r4, %r1, 3; setp.eq.u32 %p1, %r4, 0; mov.u32 %r3, 0;
        @%p1 bra $EVEN; add.u32 %r3, %r3, 10; setp.eq.u32 %p2, %r4, 1;
        @%p2 bra $ONE; add.u32 %r3, %r3, 100; bra $END;
        $EVEN: add.u32 %r3, %r3, 1; bra $END;
        $ONE: add.u32 %r3, %r3, 5;
        $END: activemask.b32 %r5; setp.eq.s32 %p3, %r5, -1; @%p3 add.u32 %r3, %r3, 1000;
    """
    assert result_of(body).tolist() == [1001, 1015, 1110, 1110] * 8


def test_loops_of_different_lengths():
    body = """
        mov.u32 %r3, 0; mov.u32 %r4, 0;
        $L: add.u32 %r3, %r3, %r4; add.u32 %r4, %r4, 1; setp.le.u32 %p1, %r4, %r1; @%p1 bra $L;
    """
    assert result_of(body).tolist() == (LANE * (LANE + 1) // 2).tolist()


def test_branches_by_index():
    body = """
        and.b32 %r4, %r1, 3; mov.u32 %r3, 0;
        $T: .branchtargets $A, $B, $C, $B;
        brx.idx %r4, $T;
        $A: add.u32 %r3, %r3, 1; bra $END;
        $B: add.u32 %r3, %r3, 2; bra $END;
        $C: add.u32 %r3, %r3, 3;
        $END: activemask.b32 %r5; setp.eq.s32 %p3, %r5, -1; @%p3 add.u32 %r3, %r3, 1000;
    """
    assert result_of(body).tolist() == [1001, 1002, 1003, 1002] * 8
    same_place = body.replace("and.b32 %r4, %r1, 3", "mov.u32 %r4, 2")
    assert result_of(same_place).tolist() == [1003] * 32


def test_some_lanes_leave():
    found = np.zeros(32, np.uint32)
    run(
        """
        setp.ge.u32 %p1, %r1, 20; mad.wide.u32 %rd5, %r1, 4, %rd0; st.global.b32 [%rd5], 1;
        @%p1 exit; setp.lt.u32 %p2, %r1, 4; st.global.b32 [%rd5], 2; @%p2 ret;
        st.global.b32 [%rd5], 3; mov.u32 %r3, 9; @%p1 exit;
        """,
        [found],
    )
    assert found.tolist() == [2] * 4 + [3] * 16 + [1] * 12


def test_blocks_have_names_of_their_own():
    body = """
        mov.u32 %r3, 1; { .reg .b32 %r3; mov.u32 %r3, 5; bra $X; mov.u32 %r3, 6; $X: }
        { .reg .pred p; setp.eq.u32 p, %r1, 0; @p bra $X; add.u32 %r3, %r3, 1; $X: }
    """
    assert result_of(body).tolist() == [1] + [2] * 31


# Memory.


def test_vectors():
    given = np.arange(128, dtype=np.uint32)
    out = np.zeros(128, np.uint32)
    run(
        """
        mad.wide.u32 %rd5, %r1, 16, %rd1; mad.wide.u32 %rd6, %r1, 16, %rd0;
        mad.lo.u32 %r4, %r1, 16, %r2;
        ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%rd5];
        st.shared.v4.b32 [%r4], {%r8, %r7, %r6, %r5};
        ld.shared.v2.b64 {%rd7, %rd8}, [%r4+0];
        mov.b64 {%r10, %r11}, %rd8; mov.b64 %rd8, {%r11, %r10};
        st.global.v2.b64 [%rd6], {%rd7, %rd8};
        """,
        [out, given],
    )
    turned = given.reshape(32, 4)[:, ::-1].copy()
    turned[:, 2:] = turned[:, [3, 2]]
    assert (out.reshape(32, 4) == turned).all()


def test_sums_are_cut_to_zero_and_one():
    a = np.array([0.25, 3, -1, np.inf, np.inf, np.nan, 0.5, -np.inf], np.float32)
    b = np.array([0.5, 1, 0.5, 1, -np.inf, 1, 0.5, 1], np.float32)
    found = computed("add.sat.f32", 32, (a, b), (32, 32), "f4")
    assert found.tolist() == [0.75, 1, 0, 1, 0, 0, 1, 0]


def test_lanes_add_vectors_to_the_same_place():
    out = np.ones(8, np.float32)
    run(
        """
        and.b32 %r4, %r1, 1; mad.wide.u32 %rd5, %r4, 16, %rd0;
        cvt.rn.f32.u32 %r5, %r1; mov.b32 %r6, 0f3F800000;
        red.relaxed.gpu.global.add.v4.f32 [%rd5], {%r5, %r6, %r6, %r5};
        """,
        [out],
    )
    even, odd = sum(range(0, 32, 2)), sum(range(1, 32, 2))
    assert out.tolist() == [1 + even, 17, 17, 1 + even, 1 + odd, 17, 17, 1 + odd]


def test_narrow_loads_fill_registers():
    given = np.array([-1, 1, -128, 127] * 8, np.int8)
    for kind, expected in (("s8", given.astype(np.int32)), ("u8", given.view(np.uint8))):
        out = np.zeros(32, np.int32)
        run(
            f"""
            cvt.u64.u32 %rd5, %r1; add.u64 %rd6, %rd5, %rd1; mad.wide.u32 %rd7, %r1, 4, %rd0;
            ld.global.{kind} %r3, [%rd6]; st.global.b32 [%rd7], %r3;
            """,
            [out, given],
        )
        assert out.tolist() == expected.tolist()


def test_atomic_sums():
    out = np.zeros(2, np.uint32)
    run(
        """
        atom.global.add.u32 %r3, [%rd0], 1; setp.eq.u32 %p1, %r3, 31;
        @%p1 red.global.max.u32 [%rd0+4], %r3; atom.global.cas.b32 %r4, [%rd0], 32, 50;
        """,
        [out],
    )
    assert out.tolist() == [50, 31]


def test_matrices_go_and_come():
    body = """
        mad.lo.u32 %r4, %r1, 16, %r2;
        mul.lo.u32 %r5, %r1, 7; add.u32 %r6, %r1, 900; xor.b32 %r7, %r1, 85; not.b32 %r8, %r1;
        stmatrix.sync.aligned.m8n8.x4{a}.shared.b16 [%r4], {{%r5, %r6, %r7, %r8}};
        ldmatrix.sync.aligned.m8n8.x4{b}.shared.b16 {{%r9, %r10, %r11, %r12}}, [%r4];
        mov.u32 %r3, %r{register};
    """
    for register, expected in ((9, LANE * 7), (10, LANE + 900), (11, LANE ^ 85), (12, ~LANE)):
        for mode in ("", ".trans"):
            found = result_of(body.format(a=mode, b=mode, register=register))
            assert found.tolist() == (expected & 0xFFFFFFFF).tolist()
    # one way only: the fragment of the transposed tile
    tile = (LANE * 7).astype(np.uint32).view(np.uint16).reshape(8, 8)
    found = result_of(body.format(a="", b=".trans", register=9))
    assert found.tolist() == np.ascontiguousarray(tile.T).reshape(-1).view(np.uint32).tolist()


# Barriers.

WAIT = "$W{n}: mbarrier.try_wait.parity.shared.b64 %p1, [{at}], {parity}; @!%p1 bra $W{n};"


def waits(parity, n=0, at="%r2"):
    return WAIT.format(parity=parity, n=n, at=at)


# Warp 0 sets up a barrier of some arrivals at %r2, and one at %r2+8; all warps then go on.
def set_up(arrivals=1, second=1):
    return f"""
        setp.eq.u32 %p10, %r0, 0; shr.u32 %r70, %r0, 5; setp.eq.u32 %p11, %r1, 0;
        @%p10 mbarrier.init.shared.b64 [%r2], {arrivals};
        @%p10 mbarrier.init.shared.b64 [%r2+8], {second};
        bar.sync 0;
    """


@pytest.mark.parametrize("seed", range(4))
def test_phases_pass_numbers_from_warp_to_warp(seed):
    # warp 0 writes, warp 1 adds up; one slot, which is free first
    out = np.zeros(1, np.uint32)
    run(
        f"""
        {set_up()}
        mov.u32 %r5, 0; mov.u32 %r6, 0; setp.ne.u32 %p2, %r70, 0; @%p2 bra $READER;
        $WRITE: and.b32 %r7, %r5, 1; xor.b32 %r8, %r7, 1;
        {waits("%r8", 1, "%r2+8")}
        mul.lo.u32 %r9, %r5, %r5; @%p11 st.shared.b32 [%r2+64], %r9;
        @%p11 mbarrier.arrive.shared.b64 _, [%r2];
        add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 9; @%p3 bra $WRITE; bra $END;
        $READER: and.b32 %r7, %r5, 1;
        {waits("%r7", 2)}
        ld.shared.b32 %r9, [%r2+64]; add.u32 %r6, %r6, %r9;
        @%p11 mbarrier.arrive.shared.b64 _, [%r2+8];
        add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 9; @%p3 bra $READER;
        @%p11 st.global.b32 [%rd0], %r6;
        $END:
        """,
        [out],
        num_warps=2,
        seed=seed,
    )
    assert out[0] == sum(i * i for i in range(9))


def test_a_barrier_counts_arrivals_and_bytes():
    barrier = hopper.Barrier(2)
    assert barrier.passed(1) and not barrier.passed(0)
    barrier.expect(48)
    barrier.arrive()
    barrier.receive(32)
    barrier.arrive()
    assert not barrier.passed(0)
    barrier.receive(16)
    assert barrier.passed(0) and not barrier.passed(1)
    # bytes may come before they are expected
    barrier.receive(16)
    barrier.expect(16)
    barrier.arrive(2)
    assert barrier.passed(1) and not barrier.passed(0)


@pytest.mark.parametrize("seed", range(4))
def test_named_barriers(seed):
    # two pairs of warps; the first of each writes and does not wait
    out = np.zeros(128, np.uint32)
    run(
        """
        shr.u32 %r4, %r0, 5; and.b32 %r5, %r4, 1; shr.u32 %r6, %r4, 1; add.u32 %r7, %r6, 1;
        mad.lo.u32 %r8, %r6, 128, %r2; mad.lo.u32 %r8, %r1, 4, %r8; setp.eq.u32 %p1, %r5, 1;
        @%p1 bra $READ;
        st.shared.b32 [%r8], %r0; bar.arrive %r7, 64; bra $END;
        $READ: bar.sync %r7, 64; ld.shared.b32 %r9, [%r8]; mad.wide.u32 %rd5, %r0, 4, %rd0;
        st.global.b32 [%rd5], %r9;
        $END:
        """,
        [out],
        num_warps=4,
        seed=seed,
    )
    assert out.reshape(4, 32)[1].tolist() == LANE.tolist()
    assert out.reshape(4, 32)[3].tolist() == (LANE + 64).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_nobody_waits_for_warps_that_have_ended(seed):
    body = "shr.u32 %r4, %r0, 5; setp.eq.u32 %p1, %r4, 1; @%p1 exit; bar.sync 0;"
    run(body, num_warps=3, seed=seed)


# Tensor copies.


class Tensor:
    """A tensor, and what a tensor map says of it."""

    def __init__(self, tensor, box, swizzle=0):
        self.tensor = tensor
        strides = [x * tensor.element_size() for x in tensor.stride()]
        self.map = hopper.TensorMap(
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(strides),
            box,
            tensor.element_size(),
            swizzle,
            tensor.dtype.is_floating_point,
        )


# %r4 is the tile, %r5 and %r6 its place in the tensor, %p10 one thread
def loaded(tensor, n, expected=None):
    return f"""
        add.u32 %r4, %r2, 1024;
        @%p10 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {expected or tensor.map.nbytes};
        @%p10 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
            [%r4], [k_param_{n}, {{%r5, %r6}}], [%r2];
    """


def stored(n, how=""):
    name = "cp.reduce.async" if how else "cp.async"
    return f"""
        fence.proxy.async.shared::cta;
        @%p10 {name}.bulk.tensor.2d.global.shared::cta{how}.bulk_group
            [k_param_{n}, {{%r5, %r6}}], [%r4];
        @%p10 cp.async.bulk.commit_group;
    """


COPIED = "@%p10 cp.async.bulk.wait_group 0;"


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("start", [(0, 0), (5, 3), (-2, -9), (20, 30), (16, -64)])
def test_tensor_copies(swizzle, start):
    generator = torch.Generator().manual_seed(0)
    rows, width = 16, (128, 32, 64, 128)[swizzle]
    columns = width // 2
    first, last = torch.randn(2, 24, 72, generator=generator).half()
    before = last.clone()
    x, y = (Tensor(t, (rows, columns), swizzle) for t in (first, last))
    tile = np.zeros(rows * width // 4, np.uint32)
    run(
        f"""
        {set_up()} mov.b32 %r5, {start[1]}; mov.b32 %r6, {start[0]};
        {loaded(x, 1)} {waits(0)}
        mov.u32 %r9, %r1;
        $READ: mad.lo.u32 %r10, %r9, 4, %r4; ld.shared.b32 %r11, [%r10];
        mad.wide.u32 %rd5, %r9, 4, %rd0; st.global.b32 [%rd5], %r11;
        add.u32 %r9, %r9, 32; setp.lt.u32 %p3, %r9, {len(tile)}; @%p3 bra $READ;
        {stored(2)} {COPIED}
        """,
        [tile],
        [x, y],
    )
    expected, inside = np.zeros((rows, columns), np.float16), before.clone()
    for i, j in itertools.product(range(rows), range(columns)):
        row, column = start[0] + i, start[1] + j
        if 0 <= row < 24 and 0 <= column < 72:
            expected[i, j] = first[row, column].item()
            inside[row, column] = first[row, column]
    assert torch.equal(last, inside)
    # chunks of 16 bytes of a row lie at the place of their number, changed by that of the row
    chunks = tile.view(np.float16).reshape(rows, width // 16, 8)
    row = np.arange(rows)[:, None]
    change = (0 * row, row >> 2 & 1, row >> 1 & 3, row & 7)[swizzle]
    found = chunks[row, np.arange(width // 16)[None] ^ change].reshape(rows, columns)
    np.testing.assert_array_equal(found, expected)


def test_tensor_copies_add():
    x, y = torch.arange(512.0).reshape(16, 32), torch.ones(16, 32)
    given, total = Tensor(x, (8, 32)), Tensor(y, (8, 32))
    run(
        f"""
        {set_up()} mov.b32 %r5, 0; mov.b32 %r6, 12; {loaded(given, 0)} {waits(0)}
        {stored(1, ".add.tile")} {COPIED}
        """,
        maps=[given, total],
    )
    assert torch.equal(y[:12], torch.ones(12, 32))
    assert torch.equal(y[12:], x[12:] + 1)


def test_a_tile_that_is_overwritten_before_its_store_is_read():
    results = []
    for waited in (True, False):
        y = torch.zeros(8, 32)
        run(
            f"""
            {set_up()} mov.b32 %r5, 0; mov.b32 %r6, 0; add.u32 %r4, %r2, 1024;
            mov.u32 %r9, %r1;
            $FILL: mad.lo.u32 %r10, %r9, 4, %r4; st.shared.b32 [%r10], 0f3F800000;
            add.u32 %r9, %r9, 32; setp.lt.u32 %p3, %r9, 256; @%p3 bra $FILL;
            {stored(0)} {COPIED if waited else ""}
            @%p10 st.shared.b32 [%r4], 0f40000000; {COPIED}
            """,
            maps=[Tensor(y, (8, 32))],
        )
        results.append(bool((y == 1).all()))
    assert results == [True, False]


def test_what_does_not_wait_for_a_copy_reads_nan():
    x = Tensor(torch.ones(8, 32), (8, 32))
    found = np.zeros(32, np.float32)
    text = f"""
        {set_up()} mov.b32 %r5, 0; mov.b32 %r6, 0; {loaded(x, 1)}
        {{}} mad.lo.u32 %r10, %r1, 4, %r4; ld.shared.b32 %r11, [%r10];
        mad.wide.u32 %rd5, %r1, 4, %rd0; st.global.b32 [%rd5], %r11;
    """
    seen = []
    for seed in range(6):
        run(text.replace("{}", ""), [found], [x], seed=seed)
        seen.append(np.isnan(found).all())
        run(text.replace("{}", waits(0)), [found], [x], seed=seed)
        assert (found == 1).all()
    assert any(seen)


# Mistakes.


def refused(match, body, *args, **options):
    with pytest.raises(EmulatorError, match=match):
        run(body, *args, **options)


def test_accesses_are_checked():
    x = np.zeros(8, np.uint32)
    past = "access to 4 bytes of global memory at .*: 32 bytes after the start .*, which has 32"
    refused(past, "ld.global.b32 %r3, [%rd0+32];", [x])
    refused("program 0, warp 0: st.global.b32", "st.global.b32 [%rd0-4], 0;", [x])
    refused("no tensors", "mov.u64 %rd5, 4096; ld.global.b32 %r3, [%rd5];")
    refused("misaligned address", "ld.global.b32 %r3, [%rd0+2];", [x])
    refused("misaligned address", "ld.global.v2.b32 {%r3, %r4}, [%rd0+4];", [x])
    refused("shared memory", "ld.shared.b32 %r3, [%r2+8192];")
    refused("shared memory", "st.shared.b32 [%r2-4], %r1;")
    refused("misaligned", "st.shared.v2.b32 [%r2+4], {%r1, %r1};")
    refused(
        "different programs",
        "shl.b32 %r4, %r1, 24; or.b32 %r4, %r4, %r2; ld.shared.b32 %r3, [%r4];",
    )
    refused("has ended", "mov.b32 %r4, 0x5000400; ld.shared.b32 %r3, [%r4];")
    # lanes that do not run may hold any address
    run(
        "setp.lt.u32 %p1, %r1, 8; mad.wide.u32 %rd1, %r1, 4, %rd0; @%p1 ld.global.b32 %r3, [%rd1];",
        [x],
    )
    gap = np.zeros(8, np.uint32)
    with pytest.raises(ValueError, match="not contiguous"):
        GlobalMemory([], {SPACE: gap[::2]})
    with pytest.raises(ValueError, match="not aligned"):
        GlobalMemory([], {SPACE + 4: gap})


def test_barriers_are_checked():
    arrive = "mbarrier.arrive.shared.b64 _, [%r2];"
    refused(
        "more than 4 arrivals in one phase",
        set_up(4) + "@%p10 mbarrier.arrive.shared.b64 _, [%r2], 5;",
    )
    x = Tensor(torch.ones(8, 32), (8, 32))
    start = "mov.b32 %r5, 0; mov.b32 %r6, 0;"
    more = f"{set_up()} {start} {loaded(x, 0)} @%p10 {arrive}"
    refused("more than 1 arrivals", more, maps=[x])
    refused(
        "no mbarrier was set up at 16 bytes", set_up() + "mbarrier.arrive.shared.b64 _, [%r2+16];"
    )
    refused("no mbarrier was set up", waits(0))
    refused("misaligned mbarrier", "mbarrier.init.shared.b64 [%r2+4], 1;")
    alone = loaded(x, 0).split(";", 2)
    not_set_up = f"setp.eq.u32 %p10, %r0, 0; {start} {alone[0]}; {alone[2]}"
    refused("a copy signals an mbarrier that is not set up", not_set_up, maps=[x])
    refused("32 lanes issue the same copy", not_set_up.replace("@%p10", ""), maps=[x])
    refused(
        "different branches", "setp.eq.u32 %p1, %r1, 0; @%p1 bra $L; bar.sync 0; $L: bar.sync 0;"
    )


def test_deadlocks_say_who_waits():
    with pytest.raises(EmulatorError, match="all warps wait") as caught:
        run(
            f"{set_up(2)} @%p10 mbarrier.arrive.shared.b64 _, [%r2]; {waits(0)}",
            num_warps=2,
            grid=2,
        )
    for program, warp in itertools.product(range(2), range(2)):
        assert f"program {program}, warp {warp}: " in str(caught.value)
    refused("all warps wait", "bar.sync 1, 64;")
    one_lane = f"{set_up()} @!%p10 exit; {waits(0)}"
    refused("all warps wait:\nprogram 0, warp 0: ", one_lane)
    x = Tensor(torch.ones(8, 32), (8, 32))
    start = "mov.b32 %r5, 0; mov.b32 %r6, 0;"
    refused("all warps wait", f"{set_up()} {start} {loaded(x, 0, 4096)} {waits(0)}", maps=[x])


# A product of 64 x 16 by 16 x 8: rows of 16 numbers in tiles whose rows have 32 bytes.
PRODUCT = """
    mov.u32 %r9, %r0;
    $FILL: mad.lo.u32 %r10, %r9, 4, %r2; st.shared.b32 [%r10], 0x3C003C00;
    add.u32 %r9, %r9, 128; setp.lt.u32 %p3, %r9, 768; @%p3 bra $FILL;
    fence.proxy.async.shared::cta; bar.sync 0;
    cvt.u64.u32 %rd5, %r2; shr.u64 %rd5, %rd5, 4; mov.u64 %rd6, 0xC000001000000000;
    or.b64 %rd7, %rd5, %rd6; add.u64 %rd8, %rd7, 128; mov.pred %p4, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16
        {%r20, %r21, %r22, %r23}, %rd7, %rd8, %p4, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
"""
PRODUCT_WAIT = "wgmma.wait_group.sync.aligned 0;"


@pytest.mark.parametrize("place", [0, 2048])
def test_operands_of_wgmma_stay_until_its_wait(place):
    end = "mov.u32 %r3, %r23;"
    whole = result_of(
        f"{PRODUCT} {PRODUCT_WAIT} bar.sync 0; st.shared.b32 [%r2+{place}], %r1; {end}", warps=4
    )
    assert (whole.view(np.float32) == 16).all()
    early = f"{PRODUCT} bar.sync 0; st.shared.b32 [%r2+{place}], %r1; bar.sync 0; {PRODUCT_WAIT}"
    refused("an operand of WGMMA was overwritten before its wait", early, num_warps=4)


@pytest.mark.parametrize("renamed", [False, True])
def test_sums_are_nan_until_the_wait(renamed):
    # the compiler may give them other registers before it waits
    sums, rename = ("%r24", "mov.b32 %r24, %r23;") if renamed else ("%r23", "")
    use = f"add.rn.f32 %r3, {sums}, {sums};"
    found = result_of(f"{PRODUCT} {rename} {use} {PRODUCT_WAIT}", warps=4)
    assert np.isnan(found.view(np.float32)).all()
    found = result_of(f"{PRODUCT} {rename} {PRODUCT_WAIT} {use}", warps=4)
    assert (found.view(np.float32) == 32).all()


def test_a_product_adds_to_sums_that_nobody_waited_for():
    again = PRODUCT[PRODUCT.index("wgmma.mma") :].replace("%p4", "1")
    for pending, expected in (("1", NAN), ("0", 64)):
        wait = PRODUCT_WAIT.replace("0", pending)
        use = "add.rn.f32 %r3, %r23, %r23;"
        found = result_of(f"{PRODUCT} {again} {wait} {use}", warps=4).view(np.float32)
        np.testing.assert_array_equal(found, np.full(128, expected, np.float32))


FENCE = "fence.proxy.async.shared::cta;"
NO_FENCE = "threads wrote to this tile, and none has run fence.proxy.async"


def test_what_threads_wrote_is_fenced_before_wgmma_reads_it():
    writers, readers = f"{FENCE} bar.sync 0;", f"bar.sync 0; {FENCE}"
    assert PRODUCT.count(writers) == 1
    end = f"{PRODUCT_WAIT} mov.u32 %r3, %r23;"
    result_of(f"{PRODUCT.replace(writers, readers)} {end}", warps=4)
    for order in ("bar.sync 0;", "fence.acq_rel.cta; bar.sync 0;"):
        refused(NO_FENCE, PRODUCT.replace(writers, order), num_warps=4)
    early = PRODUCT.replace(writers, "bar.sync 0;")
    refused(NO_FENCE, early.replace("$FILL:", f"{FENCE} $FILL:"), num_warps=4)
    # one warp of four fences what it has seen of the others, and what it wrote is fenced
    some = "shr.u32 %r11, %r0, 5; setp.eq.u32 %p5, %r11, 0; bar.sync 0; @%p5 " + FENCE
    refused("warp [123]: .*wgmma", PRODUCT.replace(writers, some + " bar.sync 0;"), num_warps=4)


def test_bytes_that_stay_the_same_need_no_fence():
    writers = f"{FENCE} bar.sync 0;"
    again = "ld.shared.b32 %r11, [%r2]; {} st.shared.b32 [%r2], %r11;"
    run(PRODUCT.replace(writers, writers + again.format("")) + PRODUCT_WAIT, num_warps=4)
    other = writers + again.format("xor.b32 %r11, %r11, 1;")
    refused(NO_FENCE, PRODUCT.replace(writers, other), num_warps=4)


def test_what_threads_wrote_is_fenced_before_a_copy_reads_it():
    body = f"""
        {set_up()} mov.b32 %r5, 0; mov.b32 %r6, 0; add.u32 %r4, %r2, 1024;
        mad.lo.u32 %r10, %r1, 4, %r4; st.shared.b32 [%r10], 0; {{}} {COPIED}
    """
    given = [Tensor(torch.ones(1, 32), (1, 32))]
    run(body.format(stored(0)), maps=given)
    refused(NO_FENCE, body.format(stored(0).replace(FENCE, "")), maps=given)


def test_gathered_copies_are_fenced_by_those_who_wait_for_them():
    gather = """
        mov.u32 %r9, %r0; cvt.u64.u32 %rd9, %r1; shl.b64 %rd9, %rd9, 2; add.u64 %rd9, %rd0, %rd9;
        $GATHER: mad.lo.u32 %r10, %r9, 4, %r2; cp.async.ca.shared.global [%r10], [%rd9], 4;
        add.u32 %r9, %r9, 128; setp.lt.u32 %p3, %r9, 768; @%p3 bra $GATHER;
        cp.async.commit_group; {} cp.async.wait_group 0; {} bar.sync 0;
    """
    product = PRODUCT[PRODUCT.index("cvt.u64.u32 %rd5") :] + PRODUCT_WAIT
    numbers = np.zeros(32, np.uint32)
    run(gather.format("", FENCE) + product, [numbers], num_warps=4)
    refused(NO_FENCE, gather.format(FENCE, "") + product, [numbers], num_warps=4)


@pytest.mark.parametrize(
    "text",
    [
        "frobnicate.b32 %r3, %r4;",
        "add.sat.s32 %r3, %r4, %r5;",
        "add.rz.f32 %r3, %r4, %r5;",
        "fma.rn.relu.bf16 %h3, %h4, %h5, %h6;",
        "prmt.b32.f4e %r3, %r4, %r5, %r6;",
        "cvt.rna.tf32.f32 %r3, %r4;",
        "cvt.rz.bf16.f32 %h3, %r4;",
        "cvt.rn.satfinite.e5m2x2.f32 %h3, %r4, %r5;",
        "ld.global.b128 %rd3, [%rd4];",
        "bar.red.popc.u32 %r3, 0, %p1;",
        "mbarrier.test_wait.shared.b64 %p1, [%r2], %rd3;",
        "red.async.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r2], %r3, [%r4];",
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r3, %r4}, %rd1, %rd2, %p1, 1, 1;",
        "mov.u32 %r3, %nosuch;",
    ],
)
def test_what_is_not_known_is_refused_where_it_is_reached(text):
    run(f"bra $L; {text} $L:")
    with pytest.raises(EmulatorError, match="known") as caught:
        run(text)
    assert f"program 0, warp 0: {text[:20]}" in str(caught.value)


def test_a_predicate_that_is_not_declared():
    with pytest.raises(ValueError, match="no register %q1"):
        run("@%q1 mov.u32 %r3, 0;")


def test_a_machine_runs_again_with_other_arrays():
    x, y = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    machine = machine_of("atom.global.add.u32 %r3, [%rd0], 1;", [x])
    machine.run()
    machine.bind([SPACE], GlobalMemory([], {SPACE: y}))
    machine.run()
    assert (x[0], y[0]) == (32, 32)
