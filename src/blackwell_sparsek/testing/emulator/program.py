"""PTX as a list of instructions.

Only what Triton and its inline assembly emit: one entry, registers, labels, and blocks in braces
whose names are their own.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

_LABEL = re.compile(r"([\w$]+):(?!:)")
_NOTES = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)([^{]*)\{", re.DOTALL)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_MANY = re.compile(r"(.+)<(\d+)>")
_GUARD = re.compile(r"@(!?)\s*([\w%$]+)\s+(.*)", re.DOTALL)
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_FLOAT = re.compile(r"0[fFdD][0-9a-fA-F]+")
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?")
# The kind of number that a register of each type holds.
KINDS = {"pred": "pred"} | {f"{x}{n}": f"b{n}" for x in "busf" for n in (8, 16, 32, 64)}


# No tuples: those are operands in braces.
@dataclass(frozen=True)
class Register:
    """A register: its place among all of a thread, and its width (`pred`, `b16`, ...)."""

    index: int
    kind: str


@dataclass(frozen=True)
class Address:
    """An operand in brackets: a register or a name, or none, and bytes that are added."""

    base: Any
    offset: int
    others: tuple[Any, ...] = ()
    """Coordinates of a tensor copy."""


class Instruction(NamedTuple):
    """One instruction: its name split at the dots, operands, and the predicate that guards it."""

    parts: tuple[str, ...]
    operands: tuple[Any, ...]
    guard: Register | None
    negated: bool
    text: str


class Program(NamedTuple):
    """A kernel: instructions, where labels point, the kinds of its registers, its parameters."""

    name: str
    instructions: list[Instruction]
    labels: dict[str, int]
    kinds: list[str]
    parameters: list[str]
    threads: int
    """Threads of a program, other than those of the launch if it has more warps."""


class _Scope:
    """Names of registers and labels of a block in braces, and of the blocks around it."""

    def __init__(self, outer: "_Scope | None", number: int):
        self.outer = outer
        self.number = number
        self.registers: dict[str, Register] = {}
        self.labels: set[str] = set()

    def register(self, name: str) -> Register | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            scope = scope.outer
        return None

    def label(self, name: str) -> str:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return f"{name}#{scope.number}"
            scope = scope.outer
        raise ValueError(f"no label {name}")


class _Parser:
    def __init__(self, name: str, body: str, parameters: list[str], threads: int):
        self._body = body
        self._scopes = 0
        self._waiting: list[tuple[str, _Scope]] = []
        self.kinds: list[str] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, tuple[str, ...]] = {}
        self._read()
        found = [self._instruction(text, scope) for text, scope in self._waiting]
        self.program = Program(name, found, self.labels, self.kinds, parameters, threads)

    def _read(self) -> None:
        """Collect statements with their scopes; operands can name labels that come later."""
        body, at, scope = self._body, 0, _Scope(None, 0)
        while at < len(body):
            char = body[at]
            if char.isspace() or char == ";":
                at += 1
            elif char == "{":
                self._scopes += 1
                scope, at = _Scope(scope, self._scopes), at + 1
            elif char == "}":
                if scope.outer is None:
                    return
                scope, at = scope.outer, at + 1
            elif label := _LABEL.match(body, at):
                scope.labels.add(label[1])
                self.labels[f"{label[1]}#{scope.number}"] = len(self._waiting)
                self._last = label[1]
                at = label.end()
            else:
                at = self._statement(scope, at)

    def _statement(self, scope: _Scope, at: int) -> int:
        body = self._body
        if body.startswith((".loc", ".file", ".pragma"), at):
            # the end of .loc is that of its line
            return (body.find("\n", at) + 1) or len(body)
        end = body.index(";", at)
        text = body[at:end].strip()
        if declared := _REGISTERS.match(text):
            width, names_of = declared.groups()
            kind = KINDS[width]
            for name in (x.strip() for x in names_of.split(",")):
                many = _MANY.match(name)
                names = [name]
                if many:
                    stem, count = many.groups()
                    names = [f"{stem}{i}" for i in range(int(count))]
                for one in names:
                    scope.registers[one] = Register(len(self.kinds), kind)
                    self.kinds.append(kind)
        elif text.startswith(".branchtargets"):
            names = [x.strip() for x in text.removeprefix(".branchtargets").split(",")]
            self.tables[self._last] = tuple(names)
        elif not text.startswith("."):
            self._waiting.append((text, scope))
        return end + 1

    def _instruction(self, text: str, scope: _Scope) -> Instruction:
        guard, negated, rest = None, False, text
        if match := _GUARD.match(text):
            sign, predicate, rest = match.groups()
            guard, negated = scope.register(predicate), bool(sign)
            if guard is None:
                raise ValueError(f"no register {predicate}")
        name, *given = rest.split(None, 1)
        operands = " ".join(given)
        found = [self._operand(x.strip(), scope) for x in _OPERANDS.findall(operands)]
        return Instruction(tuple(name.split(".")), tuple(found), guard, negated, text)

    def _operand(self, text: str, scope: _Scope) -> Any:
        if text.startswith("{"):
            return tuple(self._operand(x.strip(), scope) for x in text[1:-1].split(","))
        if text.startswith("["):
            return self._address(text[1:-1].strip(), scope)
        if "|" in text:
            return tuple(self._operand(x.strip(), scope) for x in text.split("|"))
        if text.startswith("!"):
            return ("not", self._operand(text[1:], scope))
        if (register := scope.register(text)) is not None:
            return register
        if _FLOAT.fullmatch(text):
            return int(text[2:], 16)
        if _NUMBER.fullmatch(text):
            return int(text.rstrip("U"), 0)
        if text in self.tables:
            return tuple(scope.label(x) for x in self.tables[text])
        if "+" in text:
            base, _, offset = text.partition("+")
            return Address(self._operand(base.strip(), scope), int(offset, 0))
        try:
            return scope.label(text)
        except ValueError:
            return text

    def _address(self, text: str, scope: _Scope) -> Address:
        others: tuple[Any, ...] = ()
        if "{" in text:
            text, _, listed = text.partition(",")
            others = self._operand(listed.strip(), scope)
        base, offset = text.strip(), 0
        if match := re.fullmatch(r"(.+?)\s*([+-])\s*(-?\w+)", base):
            base, sign, number = match.groups()
            offset = int(number, 0) * (-1 if sign == "-" else 1)
        return Address(self._operand(base, scope), offset, others)


def parse(ptx: str) -> Program:
    """The kernel that PTX defines."""
    text = _NOTES.sub("", ptx)
    entry = _ENTRY.search(text)
    if entry is None:
        raise ValueError("the PTX defines no kernel")
    name, declared, options = entry.groups()
    parameters = re.findall(r"\b(\w+_param_\d+)\b", declared)
    threads = re.search(r"\.reqntid\s+(\d+)", options)
    return _Parser(name, text[entry.end() :], parameters, int(threads[1]) if threads else 0).program
