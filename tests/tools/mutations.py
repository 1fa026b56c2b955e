"""Small faults that can be planted in a source file, found on its syntax tree.

A mutant replaces one piece of the text and leaves the rest as it is, so that its diff reads as a
typing error would. Annotations, docstrings, texts, assertions (also those of kernels, and
`strict=True` of `zip`) and what runs only for type checkers stay as they are: no test could, or
should, tell the difference.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple


class Mutant(NamedTuple):
    """Replace `text[start:end]` of a file, in bytes, by `put`."""

    operator: str
    line: int
    start: int
    end: int
    put: str


_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


def mutants_of(source: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    tree = ast.parse(source)
    offsets = _line_offsets(source)
    found = []
    for node in _walk(tree):
        for operator, target, put in _changes(node):
            start = offsets[target.lineno - 1] + target.col_offset
            end = offsets[target.end_lineno - 1] + target.end_col_offset
            found.append(Mutant(operator, target.lineno, start, end, put))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.operator, mutant.put))


def apply(source: str, mutant: Mutant) -> str:
    """The file with the fault in it."""
    raw = source.encode()
    return (raw[: mutant.start] + mutant.put.encode() + raw[mutant.end :]).decode()


def _line_offsets(source: str) -> list[int]:
    """Where each line begins, in bytes, as the columns of a syntax tree count."""
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    return offsets


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: without annotations, decorators, texts and imports for types."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_alone(child):
                yield from _walk(child)


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return True
    if isinstance(node, ast.keyword) and ast.unparse(node) == "strict=True":
        return True
    if isinstance(node, ast.Assign):
        # names of types, lists of public names
        return any(isinstance(x, ast.Name) and x.id == "__all__" for x in node.targets)
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func).split(".")[-1] in ("static_assert", "device_assert")
    return isinstance(node.value, ast.Constant)


_Change = tuple[str, ast.expr | ast.stmt, str]


def _changes(node: ast.AST) -> Iterator[_Change]:
    """Each change of one node: the operator, the node whose text goes, the text that comes."""
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            ops = [*node.ops]
            ops[index] = _COMPARISONS[type(op)]()
            changed = ast.Compare(node.left, ops, node.comparators)
            yield "comparison swapped", node, f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        changed = ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
        if not _is_text(node.left) and not _is_text(node.right):
            yield "arithmetic swapped", node, f"({ast.unparse(changed)})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or swapped", node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not dropped", node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant):
        yield from _changed_constant(node)
    elif isinstance(node, ast.Call):
        yield from _swapped_arguments(node)
    elif isinstance(node, ast.If):
        yield "branch dropped", node.test, "False"
    elif isinstance(node, ast.IfExp):
        yield "branch dropped", node, f"({ast.unparse(node.orelse)})"
    elif isinstance(node, ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "statement dropped", node, "pass"
    elif isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
        yield "returned early", node.value, "None"


def _changed_constant(node: ast.Constant) -> Iterator[_Change]:
    if isinstance(node.value, bool):
        yield "constant changed", node, str(not node.value)
    elif isinstance(node.value, int):
        yield "constant changed", node, str(node.value + 1)
    elif isinstance(node.value, float):
        yield "constant changed", node, repr(node.value * 2 if node.value else 1.0)


# Functions whose arguments may come in any order: builtins, and by the last part of their name.
_SYMMETRIC_BUILTINS = ("max", "min")
_SYMMETRIC = ("maximum", "minimum", "logical_and", "logical_or", "equal")


def _swapped_arguments(node: ast.Call) -> Iterator[_Change]:
    """Neighbours in the list of positional arguments, unless they read the same."""
    name = ast.unparse(node.func)
    if name == "isinstance":  # any run raises TypeError
        return
    if name in _SYMMETRIC_BUILTINS or name.split(".")[-1] in _SYMMETRIC:
        return
    for index, (left, right) in enumerate(zip(node.args, node.args[1:], strict=False)):
        if any(isinstance(x, ast.Starred) for x in (left, right)):
            continue
        if ast.dump(left) != ast.dump(right):
            args = [*node.args]
            args[index], args[index + 1] = right, left
            changed = ast.Call(node.func, args, node.keywords)
            yield "arguments swapped", node, ast.unparse(changed)


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.JoinedStr):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
