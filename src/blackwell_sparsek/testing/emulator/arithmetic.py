"""Arithmetic of PTX on 32 lanes at a time.

Registers hold unsigned words; an operation looks at them as the type that its name asks for.
`operation(parts)` returns a function of the values of the source operands.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .memory import EmulatorError

LANES = 32
UNSIGNED: dict[str, Any] = {
    **{"pred": np.bool_, "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64},
}
TYPES: dict[str, Any] = {
    **UNSIGNED,
    **{f"u{n}": UNSIGNED[f"b{n}"] for n in (8, 16, 32, 64)},
    **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
    **{"f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": "bf16"},
}
Function = Callable[..., Any]


# Numbers of 8 and 16 bits.


def from_bf16(bits: Any) -> Any:
    """fp32 values of bf16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Any) -> Any:
    """bf16 bits of fp32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _e4m3_values() -> Any:
    bits = np.arange(256)
    sign = np.where(bits & 128, -1.0, 1.0)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    subnormal = mantissa * 2.0**-9
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    values = sign * np.where(exponent == 0, subnormal, normal)
    values[(bits & 127) == 127] = np.nan
    return values.astype(np.float32)


E4M3 = _e4m3_values()
_POSITIVE = E4M3[:127].astype(np.float64)


def to_e4m3(x: Any) -> Any:
    """e4m3 bits of fp32 values, to nearest even, saturating."""
    size = np.minimum(np.abs(x.astype(np.float64)), 448.0)
    above = np.clip(np.searchsorted(_POSITIVE, size), 1, 126)
    low, high = _POSITIVE[above - 1], _POSITIVE[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    bits = np.where(size == 0, 0, np.where(up, above, above - 1)).astype(np.uint8)
    bits = bits | np.where(np.signbit(x), 128, 0).astype(np.uint8)
    return np.where(np.isnan(x), np.uint8(127), bits)


# Values of operands and results.


def values(x: Any, kind: str) -> Any:
    """The words `x` as numbers of a type."""
    if kind == "bf16":
        return from_bf16(x)
    wanted = TYPES[kind]
    if x.dtype.itemsize != np.dtype(wanted).itemsize:
        x = x.astype(UNSIGNED[f"b{8 * np.dtype(wanted).itemsize}"])
    return x.view(wanted)


def words(x: Any, kind: str) -> Any:
    """Numbers of a type as unsigned words."""
    if kind == "bf16":
        return to_bf16(x)
    wanted = np.dtype(TYPES[kind])
    x = np.asarray(x)
    if x.dtype != wanted:
        x = x.astype(wanted)
    return x if wanted == np.bool_ else x.view(UNSIGNED[f"b{8 * wanted.itemsize}"])


def _to_odd(x: Any, error: Any) -> Any:
    """`x`, to odd instead of nearest: what is rounded once more to fewer bits is then right.

    `error` is what rounding took away.
    """
    odd = x.view(np.uint64 if x.dtype == np.float64 else np.uint32) & 1
    beyond = np.nextafter(x, np.where(error > 0, np.inf, -np.inf).astype(x.dtype))
    return np.where((odd == 1) | ~(np.abs(error) > 0) | np.isinf(x), x, beyond)


def rounded(x: Any, kind: str) -> Any:
    """fp64 numbers as words of a type of floating-point numbers, rounded once."""
    if kind == "bf16":
        narrow = x.astype(np.float32)
        return to_bf16(_to_odd(narrow, x - narrow))
    return words(x, kind)


def is_float(kind: str) -> bool:
    """Whether a type is one of floating-point numbers."""
    return kind in ("f16", "bf16", "f32", "f64")


def _typed(parts: tuple[str, ...]) -> str:
    return next(x for x in reversed(parts) if x in TYPES)


# Operations, by name: each makes a function from the parts of a name.


def _elementwise(function: Function) -> Callable[[tuple[str, ...]], Function]:
    def make(parts: tuple[str, ...]) -> Function:
        kind = _typed(parts)

        def run(*sources: Any) -> Any:
            return words(function(*(values(x, kind) for x in sources)), kind)

        return run

    return make


def _shift(left: bool) -> Callable[[tuple[str, ...]], Function]:
    def make(parts: tuple[str, ...]) -> Function:
        kind = _typed(parts)
        bits = 8 * np.dtype(TYPES[kind]).itemsize

        def run(x: Any, count: Any) -> Any:
            amount = np.minimum(count.astype(np.uint64), np.uint64(63))
            wide = values(x, kind).astype(np.int64 if kind.startswith("s") else np.uint64)
            amount = amount.astype(wide.dtype)
            if left:
                return np.where(count >= bits, 0, (wide << amount)).astype(UNSIGNED[f"b{bits}"])
            gone = 0 if wide.dtype == np.uint64 else np.where(wide < 0, -1, 0)
            shifted = np.where(count >= bits, gone, wide >> amount)
            return shifted.astype(TYPES[kind]).view(UNSIGNED[f"b{bits}"])

        return run

    return make


def _divide(parts: tuple[str, ...], remainder: bool = False) -> Function:
    kind = _typed(parts)

    def run(x: Any, y: Any) -> Any:
        a, b = values(x, kind), values(y, kind)
        if is_float(kind):
            with np.errstate(all="ignore"):
                return words(a / b, kind)
        wide = np.int64 if kind.startswith("s") else np.uint64
        a, b = a.astype(wide), b.astype(wide)
        safe = np.where(b == 0, 1, b)
        if wide is np.int64:
            # towards zero; magnitudes without a sign, as the least number has none with one
            sizes = (np.where(v < 0, -v, v).view(np.uint64) for v in (a, safe))
            quotient = np.floor_divide(*sizes).view(np.int64)
            quotient = np.where((a < 0) != (safe < 0), -quotient, quotient)
        else:
            quotient = a // safe
        quotient = np.where(b == 0, -1 if wide is np.int64 else 2**64 - 1, quotient)
        result = a - quotient.astype(wide) * safe if remainder else quotient
        return words(result.astype(wide), "s64" if wide is np.int64 else "u64").astype(
            UNSIGNED[f"b{8 * np.dtype(TYPES[kind]).itemsize}"]
        )

    return run


def _multiply(parts: tuple[str, ...]) -> Function:
    kind = _typed(parts)
    if is_float(kind):
        return _elementwise(np.multiply)(parts)
    bits = 8 * np.dtype(TYPES[kind]).itemsize
    signed = kind.startswith("s")

    def run(x: Any, y: Any) -> Any:
        a, b = values(x, kind), values(y, kind)
        if "wide" in parts:
            wide = np.dtype(f"{'i' if signed else 'u'}{bits // 4}")
            return (a.astype(wide) * b.astype(wide)).view(f"u{bits // 4}")
        if "hi" in parts:
            if bits == 64:
                high = [(int(p) * int(q)) >> 64 & (2**64 - 1) for p, q in zip(a, b, strict=True)]
                return np.array(high, np.uint64)
            whole = a.astype(np.int64 if signed else np.uint64) * b.astype(
                np.int64 if signed else np.uint64
            )
            return (whole >> np.array(bits, whole.dtype)).astype(UNSIGNED[f"b{bits}"])
        return words(a * b, kind)

    return run


def _multiply_add(parts: tuple[str, ...]) -> Function:
    multiply, kind = _multiply(parts), _typed(parts)

    def run(x: Any, y: Any, z: Any) -> Any:
        product = multiply(x, y)
        return product + z.astype(product.dtype)

    def fused(x: Any, y: Any, z: Any) -> Any:
        if kind == "f64":
            raise EmulatorError("a fused product and sum in fp64 is not known")
        a, b, c = (values(v, kind).astype(np.float64) for v in (x, y, z))
        with np.errstate(all="ignore"):
            # the product of two fp32 numbers is exact in fp64
            product = a * b
            whole = product + c
            if not (whole.view(np.uint64) & np.uint64(0xFFFFFFF)).all():
                # may be a tie that the sum's own rounding made
                part = whole - product
                whole = _to_odd(whole, (product - (whole - part)) + (c - part))
            return rounded(whole, kind)

    return fused if is_float(kind) else run


def _extreme(largest: bool) -> Callable[[tuple[str, ...]], Function]:
    def make(parts: tuple[str, ...]) -> Function:
        kind = _typed(parts)
        function: Any = np.maximum if largest else np.minimum
        if is_float(kind) and "NaN" not in parts:
            function = np.fmax if largest else np.fmin
        if "relu" in parts:
            return _elementwise(lambda a, b: np.maximum(function(a, b), 0))(parts)
        return _elementwise(function)(parts)

    return make


def _compare(parts: tuple[str, ...]) -> Function:
    """A comparison, and the same of its opposite."""
    kind, how = _typed(parts), parts[1]
    unordered = is_float(kind) and how.endswith("u") and how != "neu"
    functions = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
        "gt": np.greater, "ge": np.greater_equal,
        "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    }  # fmt: skip
    name = how[:2] if how not in functions else how
    joined = next((x for x in parts[2:] if x in ("and", "or", "xor")), None)

    def run(x: Any, y: Any, *others: Any) -> Any:
        a, b = values(x, kind), values(y, kind)
        if how in ("nan", "num"):
            result = np.isnan(a) | np.isnan(b)
            result = result if how == "nan" else ~result
        elif is_float(kind):
            nan = np.isnan(a) | np.isnan(b)
            result = functions[name](a, b)
            # ordered comparisons are false for NaN, "ne" included; with a "u" they are true
            result = (result | nan) if unordered or how == "neu" else (result & ~nan)
        else:
            result = functions[name](a, b)
        if joined is None:
            return result, ~result
        function = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[joined]
        return function(result, others[0]), function(~result, others[0])

    return run


_ROUNDINGS: dict[str, Function] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def _convert(parts: tuple[str, ...]) -> Function:
    named = [x for x in parts[1:] if x in TYPES or x.endswith("x2")]
    to, source = named[0], named[-1]
    if to in ("bf16x2", "f16x2") and source == "f32":
        narrow = to[:-2]

        def pack(high: Any, low: Any) -> Any:
            a, b = (words(values(x, "f32"), narrow) for x in (high, low))
            return (a.astype(np.uint32) << np.uint32(16)) | b.astype(np.uint32)

        return pack
    if to == "e4m3x2":

        def pack_fp8(high: Any, low: Any) -> Any:
            a, b = (to_e4m3(values(x, "f32")).astype(np.uint16) for x in (high, low))
            return (a << np.uint16(8)) | b

        def repack_fp8(pair: Any) -> Any:
            low = (pair & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
            high = (pair >> np.uint32(16)).astype(np.uint16).view(np.float16)
            a, b = (to_e4m3(x.astype(np.float32)).astype(np.uint16) for x in (high, low))
            return (a << np.uint16(8)) | b

        return pack_fp8 if source == "f32" else repack_fp8
    if source == "e4m3x2":

        def unpack(pair: Any) -> Any:
            low, high = E4M3[pair & np.uint16(0xFF)], E4M3[pair >> np.uint16(8)]
            a, b = (words(x, "f16").astype(np.uint32) for x in (high, low))
            return (a << np.uint32(16)) | b

        return unpack
    if to not in TYPES or source not in TYPES:
        raise EmulatorError(f"{'.'.join(parts)} is not known")
    rounding = next((_ROUNDINGS[x] for x in parts if x in _ROUNDINGS), None)

    def run(x: Any) -> Any:
        a = values(x, source)
        if is_float(source) and not is_float(to):
            return extended(_whole((rounding or np.trunc)(a.astype(np.float64)), source, to))
        if is_float(to):
            with np.errstate(all="ignore"):
                if source != to and (to == "bf16" or is_float(source)):
                    a = a.astype(np.float64)
                a = rounding(a) if rounding is not None else a
                a = np.where(np.isnan(a), 0, np.clip(a, 0.0, 1.0)) if "sat" in parts else a
                if to == "bf16" and source != to:
                    return rounded(a, to)
                return words(a, to)
        if "sat" in parts:
            limits = np.iinfo(TYPES[to])
            a = np.array([min(max(int(v), limits.min), limits.max) for v in a], TYPES[to])
        return extended(a.astype(TYPES[to]))

    def extended(x: Any) -> Any:
        """The words of a register, which may be wider than the type."""
        return words(x.astype(np.int64), "s64") if to.startswith("s") else words(x, to)

    return run


def _whole(x: Any, source: str, to: str) -> Any:
    """Whole numbers of fp64 as integers: saturated, and for NaN what the types make of it."""
    limits = np.iinfo(TYPES[to])
    wide = limits.bits == 64
    nan = 1 << (limits.bits - 1) if wide or source == "f64" else 0
    nan = nan - (1 << limits.bits) if nan > limits.max else nan
    # the largest fp64 numbers that the integers have
    most = 2.0**limits.bits * (0.5 if limits.min else 1.0)
    inside = np.where((x >= limits.min) & (x < most), x, 0).astype(TYPES[to])
    found = np.where(x >= most, np.array(limits.max, TYPES[to]), inside)
    found = np.where(x < limits.min, np.array(limits.min, TYPES[to]), found)
    return np.where(np.isnan(x), np.array(nan, TYPES[to]), found)


def _extract(parts: tuple[str, ...]) -> Function:
    kind = _typed(parts)
    bits = 8 * np.dtype(TYPES[kind]).itemsize

    def run(x: Any, start: Any, length: Any) -> Any:
        result = []
        for a, s, n in zip(x, start, length, strict=True):
            s, n = min(int(s) & 255, bits), min(int(n) & 255, bits)
            found = (int(a) >> s) & ((1 << n) - 1)
            if kind.startswith("s") and n:
                sign = (int(a) >> min(s + n - 1, bits - 1)) & 1
                width = min(n, bits - s)
                found &= (1 << width) - 1
                found -= sign << width
            result.append(found & ((1 << bits) - 1))
        return np.array(result, UNSIGNED[f"b{bits}"])

    return run


def _insert(parts: tuple[str, ...]) -> Function:
    kind = _typed(parts)
    bits = 8 * np.dtype(TYPES[kind]).itemsize

    def run(field: Any, x: Any, start: Any, length: Any) -> Any:
        result = []
        for f, a, s, n in zip(field, x, start, length, strict=True):
            s, n = int(s) & 255, int(n) & 255
            mask = (((1 << n) - 1) << s) & ((1 << bits) - 1)
            result.append((int(a) & ~mask & ((1 << bits) - 1)) | ((int(f) << s) & mask))
        return np.array(result, UNSIGNED[f"b{bits}"])

    return run


def _permute(parts: tuple[str, ...]) -> Function:
    def run(low: Any, high: Any, selector: Any) -> Any:
        pool = np.stack(
            [(x >> np.uint32(8 * i)) & np.uint32(255) for x in (low, high) for i in range(4)]
        )
        result = np.zeros(LANES, np.uint32)
        for i in range(4):
            chosen = (selector >> np.uint32(4 * i)) & np.uint32(15)
            byte = pool[chosen & np.uint32(7), np.arange(LANES)]
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            byte = np.where(chosen & np.uint32(8), sign, byte)
            result |= byte << np.uint32(8 * i)
        return result

    return run


def _logic3(parts: tuple[str, ...]) -> Function:
    def run(a: Any, b: Any, c: Any, table: Any) -> Any:
        chosen = int(table[0])
        result = np.zeros(LANES, np.uint32)
        for i in range(8):
            if chosen >> i & 1:
                result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return result

    return run


def _funnel(parts: tuple[str, ...]) -> Function:
    left, wraps = parts[1] == "l", "wrap" in parts

    def run(low: Any, high: Any, count: Any) -> Any:
        n = count & np.uint32(31) if wraps else np.minimum(count, np.uint32(32))
        whole = (high.astype(np.uint64) << np.uint64(32)) | low
        if left:
            return ((whole << n.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
        return (whole >> n.astype(np.uint64)).astype(np.uint32)

    return run


def _count(function: Callable[[int, int], int]) -> Callable[[tuple[str, ...]], Function]:
    def make(parts: tuple[str, ...]) -> Function:
        bits = 8 * np.dtype(TYPES[_typed(parts)]).itemsize

        def run(x: Any) -> Any:
            return np.array([function(int(a), bits) for a in x], np.uint32)

        return run

    return make


def _reverse(parts: tuple[str, ...]) -> Function:
    bits = 8 * np.dtype(TYPES[_typed(parts)]).itemsize
    kind = UNSIGNED[f"b{bits}"]

    def run(x: Any) -> Any:
        return np.array([int(f"{int(a):0{bits}b}"[::-1], 2) for a in x], kind)

    return run


def _bit_mask(parts: tuple[str, ...]) -> Function:
    wraps = "wrap" in parts

    def run(start: Any, length: Any) -> Any:
        first, count = (x & np.uint32(31) if wraps else np.minimum(x, 32) for x in (start, length))
        ones = (np.uint64(1) << count.astype(np.uint64)) - np.uint64(1)
        return (ones << first.astype(np.uint64)).astype(np.uint32)

    return run


def _select(parts: tuple[str, ...]) -> Function:
    def run(a: Any, b: Any, chosen: Any) -> Any:
        return np.where(chosen, a, b)

    return run


def _flushed(x: Any) -> Any:
    """Zero, with the sign, in place of fp32 numbers that are subnormal."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x)


def _approximate(function: Function) -> Callable[[tuple[str, ...]], Function]:
    def make(parts: tuple[str, ...]) -> Function:
        kind = _typed(parts)

        def run(x: Any) -> Any:
            with np.errstate(all="ignore"):
                a = values(x, kind).astype(np.float64)
                a = _flushed(a) if "ftz" in parts else a
                result = function(a)
                result = _flushed(result) if "ftz" in parts else result
                return rounded(result, kind)

        return run

    return make


def _negate(parts: tuple[str, ...]) -> Function:
    kind = _typed(parts)
    if kind == "bf16":
        return lambda x: x ^ np.uint16(0x8000)
    return _elementwise(np.negative)(parts)


def _not(parts: tuple[str, ...]) -> Function:
    return lambda x: ~x


_MAKERS: dict[str, Callable[[tuple[str, ...]], Function]] = {
    "add": _elementwise(np.add),
    "sub": _elementwise(np.subtract),
    "mul": _multiply,
    "mad": _multiply_add,
    "fma": _multiply_add,
    "div": _divide,
    "rem": lambda parts: _divide(parts, remainder=True),
    "min": _extreme(False),
    "max": _extreme(True),
    "abs": _elementwise(np.abs),
    "neg": _negate,
    "and": lambda parts: np.bitwise_and,
    "or": lambda parts: np.bitwise_or,
    "xor": lambda parts: np.bitwise_xor,
    "not": _not,
    "shl": _shift(True),
    "shr": _shift(False),
    "setp": _compare,
    "selp": _select,
    "cvt": _convert,
    "bfe": _extract,
    "bfi": _insert,
    "bmsk": _bit_mask,
    "prmt": _permute,
    "lop3": _logic3,
    "shf": _funnel,
    "popc": _count(lambda a, bits: a.bit_count()),
    "clz": _count(lambda a, bits: bits - a.bit_length()),
    "brev": _reverse,
    "ex2": _approximate(np.exp2),
    "lg2": _approximate(np.log2),
    "rcp": _approximate(lambda a: 1 / a),
    "rsqrt": _approximate(lambda a: 1 / np.sqrt(a)),
    "sqrt": _approximate(np.sqrt),
    "tanh": _approximate(np.tanh),
    "sin": _approximate(np.sin),
    "cos": _approximate(np.cos),
}


# Pairs of 16-bit numbers in one word.
_PAIRS = {"s16x2": "s16", "u16x2": "u16", "f16x2": "f16", "bf16x2": "bf16"}


def _pairwise(parts: tuple[str, ...]) -> Function:
    single = _MAKERS[parts[0]](tuple(_PAIRS.get(x, x) for x in parts))

    def run(*sources: Any) -> Any:
        halves = [np.ascontiguousarray(x).view(np.uint16).reshape(LANES, 2) for x in sources]
        low, high = (single(*(np.ascontiguousarray(x[:, i]) for x in halves)) for i in (0, 1))
        return np.ascontiguousarray(np.stack([low, high], 1)).view(np.uint32).reshape(LANES)

    return run


# What changes the result; where it is not among those known of an operation, it is not known.
_CHANGES = {
    *("sat", "satfinite", "relu", "rz", "rm", "rp", "rna", "rs", "tf32", "cc", "xorsign"),
    *("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", "oob"),
}
_KNOWN_CHANGES = {"cvt": {"sat", "satfinite"}, "max": {"relu"}, "min": {"relu"}}
_SATURATE_TO_ONE = ("add", "sub", "mul", "fma")


def _saturating(parts: tuple[str, ...]) -> Function:
    """Arithmetic in fp32 whose results are cut to 0 and 1; NaN becomes 0."""
    function = _MAKERS[parts[0]](parts)

    def run(*sources: Any) -> Any:
        found = values(function(*sources), "f32")
        return words(np.where(np.isnan(found), 0, np.clip(found, 0, 1)), "f32")

    return run


def operation(parts: tuple[str, ...]) -> Function | None:
    """The function of an instruction's sources; None if it is not arithmetic."""
    make = _MAKERS.get(parts[0])
    if make is None:
        return None
    if "sat" in parts and parts[0] in _SATURATE_TO_ONE and parts[-1] == "f32":
        return _saturating(parts)
    if not _CHANGES.intersection(parts) <= _KNOWN_CHANGES.get(parts[0], set()):
        raise EmulatorError(f"{'.'.join(parts)} is not known")
    if parts[0] != "cvt" and any(x in _PAIRS for x in parts):
        return _pairwise(parts)
    try:
        return make(parts)
    except StopIteration:
        raise EmulatorError(f"the type of {'.'.join(parts)} is not known") from None
