"""Tuples of more than two fields have names: nothing reads them by number.

A read counts when its index is a constant from 2 on (or from -3 down), or when two constant indexes
follow each other. Shapes and strides are read by dimension, and pairs by 0 and 1.
"""

import ast

import pytest

from .source import ROOT, files, write_tree

# What is read by position because positions are what it has: sizes of tensors, words of a line.
BY_DIMENSION = {"shape", "stride", "size", "split", "splitlines", "argv", "parts", "groups"}
# Names of sequences without fields.
SEQUENCES = {"shape", "lead", "sizes", "dims", "grid"}


def _number(node: ast.expr) -> int | None:
    """The constant integer that `node` is."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _number(node.operand)
        return None if number is None else -number
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def _by_dimension(node: ast.expr) -> bool:
    """Whether `node` is a shape, a stride or the like."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr in BY_DIMENSION
    # a name in capitals is a table by number
    return isinstance(node, ast.Name) and (node.id in SEQUENCES or node.id.isupper())


def reads_by_number(root):
    """`file:line: what` for each read of a field by its number."""
    found = []
    for path in files(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
                continue
            number = _number(node.slice)
            if number is None or _by_dimension(node.value):
                continue
            inner = node.value
            chained = (
                isinstance(inner, ast.Subscript)
                and _number(inner.slice) is not None
                and not _by_dimension(inner.value)
            )
            if chained or number >= 2 or number <= -3:
                where = f"{path.relative_to(root).as_posix()}:{node.lineno}"
                found.append(f"{where}: {ast.unparse(node)}")
    return found


def test_fields_are_read_by_name():
    assert reads_by_number(ROOT) == []


@pytest.mark.parametrize(
    "text",
    ["tile[6]", "shared[2][5]", "pair[0][1]", "options[10]", "x = rest[-3]", "f(a)[2]"],
)
def test_a_planted_read_is_found(tmp_path, text):
    found, *_ = reads_by_number(write_tree(tmp_path, {"core/a.py": f"\n{text}\n"}))
    assert found.startswith("core/a.py:2: ")


@pytest.mark.parametrize(
    "text",
    [
        "q.shape[2]",
        "x.stride()[3]",
        "pair[1]",
        "names[-1]",
        "rows[2:]",
        "x[..., 3]",
        "x[i][j]",
        "table[2] = 1",
        "tile: tuple[int, int]",
        "sys.argv[2]",
        "_LIMITS[90]",
        "x.shape[0][1]",
    ],
)
def test_other_reads_pass(tmp_path, text):
    assert reads_by_number(write_tree(tmp_path, {"core/a.py": text})) == []
