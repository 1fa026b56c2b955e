"""Runs straight-line PTX on the CPU: each instruction for all threads of a program at a time.

Gluon has no interpreter. What its functions compute of integers, and who holds which element of a
layout, can be read from the PTX of a small kernel that calls them. Instructions that are not known
here are errors, branches among them, and so are addresses outside of the buffers and registers
that are read before they are written.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

Values = np.ndarray
# Far more bytes than a buffer has: a wrong address meets no other buffer.
SPACE = 2**44

_COMPARISONS: dict[str, Callable[[Values, Values], Values]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
# Operands are int64, signed if the instruction is; only the low bits of a result count.
_INSTRUCTIONS: dict[str, Callable[..., Values]] = {
    "ld.param": lambda a: a,
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "not": np.invert,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "mul.wide": np.multiply,
    "mad.lo": lambda a, b, c: a * b + c,
    "rem": np.fmod,  # has the sign of the first operand
    "min": np.minimum,
    "max": np.maximum,
    "shl": lambda a, n: np.where(n > 63, 0, a << np.minimum(n, 63)),
    "shr": lambda a, n: a >> np.minimum(n, 63),
    "bfe": lambda a, first, n: a >> first & (1 << n) - 1,
    "bmsk.clamp": lambda first, n: ((1 << np.minimum(n, 32)) - 1) << first,
    "selp": lambda a, b, p: np.where(p != 0, a, b),
}
# These have a meaning of their own for numbers of 64 bits without a sign, which int64 lacks.
_SIGN_MATTERS = ("rem", "min", "max", "shr", "bfe", "setp", "cvt")


class Memory:
    """Buffers at made-up addresses."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, Values]] = []

    def place(self, array: Values, skipped: int = 0) -> int:
        """The address `skipped` bytes before an array; nothing can be read between the two."""
        start = (len(self._buffers) + 1) * SPACE
        self._buffers.append((start, array.reshape(-1).view(np.uint8)))
        return start - skipped

    def load(self, addresses: Values, size: int) -> Values:
        """The `size` bytes at each address, which has to be a multiple of that."""
        data, places = self._found(addresses, size)
        return data[places]

    def store(self, addresses: Values, values: Values) -> None:
        """Store the bytes `values` [addresses, size]."""
        data, places = self._found(addresses, values.shape[1])
        data[places] = values

    def _found(self, addresses: Values, size: int) -> tuple[Values, Values]:
        assert not (addresses % size).any(), f"addresses are not multiples of {size}: {addresses}"
        for start, data in self._buffers:
            if ((start <= addresses) & (addresses + size <= start + data.size)).all():
                return data, (addresses - start)[:, None] + np.arange(size)
        raise AssertionError(f"no buffer has {size} bytes at all of {addresses}")


class Program:
    """The threads of a program, and their registers."""

    def __init__(self, memory: Memory, threads: int = 128) -> None:
        self._memory = memory
        self._threads = threads
        self._registers: dict[str, Values] = {}

    def run(self, ptx: str, arguments: Sequence[int]) -> None:
        """Run the only kernel of `ptx`; its parameters after the `arguments` are 0."""
        entry = ptx[ptx.index(".entry") :]
        start = entry.index("{")
        names = re.findall(r"(\w+)\s*[,)]", entry[entry.index("(") : start])
        thread = np.arange(self._threads)
        self._registers = {"%tid.x": thread, "%laneid": thread % 32}
        for i, name in enumerate(names):
            value = arguments[i] if i < len(arguments) else 0
            self._registers[f"[{name}]"] = np.full(self._threads, value, np.int64)
        assert len(arguments) <= len(names)
        code = re.sub(r"//.*|^\s*\.loc.*|^\s*\$\w+:", "", entry[start:], flags=re.MULTILINE)
        for statement in code.split(";"):
            # braces around statements limit the scope of registers, which `.reg` begins anew
            line = " ".join(statement.split()).lstrip("{} ")
            if line == "ret":
                return
            if line.startswith(".reg"):
                for name in line.split(" ", 2)[2].split(","):
                    self._registers.pop(name.strip(), None)
            elif line:
                self._execute(line)
        raise AssertionError("the kernel does not return")

    def _execute(self, line: str) -> None:
        guard, inverted, name, rest = self._parsed(line)
        live = np.ones(self._threads, bool)
        if guard:
            live = (self._registers[guard] != 0) != inverted
        target, *sources = (x.strip() for x in re.findall(r"{[^}]*}|\[[^]]*\]|[^,\s{}[\]]+", rest))
        *words, kind = name.split(".")
        if words[:2] == ["ld", "global"]:
            self._load(words[2:], int(kind[1:]) // 8, target, sources[0], live)
        elif words[:2] == ["st", "global"]:
            self._store(words[2:], int(kind[1:]) // 8, target, sources[0], live)
        else:
            assert kind != "u64" or words[0] not in _SIGN_MATTERS, line
            bits = 1 if kind == "pred" else int(kind[1:])
            given = [self._read(x, bits, kind.startswith("s")) for x in sources]
            if words[0] == "setp":
                assert len(words) == 2, line
                result = _COMPARISONS[words[1]](*given)
            else:
                what = "cvt" if words[0] == "cvt" else ".".join(words)
                result = _INSTRUCTIONS[what](*given)
            self._write(target, result, live)

    @staticmethod
    def _parsed(line: str) -> tuple[str | None, bool, str, str]:
        found = re.fullmatch(r"(?:@(!?)(\S+) )?([\w.]+) (.*)", line)
        assert found, line
        return found[2], found[1] == "!", found[3], found[4]

    def _load(self, words: list[str], size: int, target: str, place: str, live: Values) -> None:
        names, addresses = self._vector(words, target), self._addresses(place)
        found = np.zeros((self._threads, len(names)), np.int64)
        if live.any():
            there = self._memory.load(addresses[live], size * len(names))
            found[live] = there.view(f"i{size}")
        for i, name in enumerate(names):
            self._write(name, found[:, i], live)

    def _store(self, words: list[str], size: int, place: str, source: str, live: Values) -> None:
        names, addresses = self._vector(words, source), self._addresses(place)
        numbers = np.stack([self._read(x, 8 * size, True) for x in names], 1).astype(f"i{size}")
        if live.any():
            self._memory.store(addresses[live], numbers[live].view(np.uint8))

    @staticmethod
    def _vector(words: list[str], operand: str) -> list[str]:
        names = [x.strip() for x in operand.strip("{} ").split(",")]
        assert words == ([f"v{len(names)}"] if len(names) > 1 else []), words
        return names

    def _addresses(self, place: str) -> Values:
        base, _, offset = place.strip("[] ").replace(" ", "").partition("+")
        return self._read(base, 64, True) + int(offset or "0")

    def _read(self, operand: str, bits: int, signed: bool) -> Values:
        if operand in self._registers:
            values = self._registers[operand]
        else:
            # a number: hexadecimal after 0f is that of the bits of a float
            number = int(re.sub("^0[fF]", "0x", operand), 0) % 2**64
            values = np.full(self._threads, number - (number >> 63 << 64), np.int64)
        if bits == 64:
            return values
        low = values & (1 << bits) - 1
        return low - (low >> (bits - 1) << bits) if signed else low

    def _write(self, register: str, values: Values, live: Values) -> None:
        if not live.all():
            values = np.where(live, values, self._registers[register])
        self._registers[register] = values.astype(np.int64)
