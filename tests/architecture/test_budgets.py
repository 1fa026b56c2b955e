"""Sizes past which code stops being readable; made of parts, it stays below them."""

import ast

import pytest

from .source import ROOT, files, is_kernel_file, write_tree

# A file is one role: about 700 lines, and never cut apart for a few more.
MAX_FILE_LINES = 750
MAX_TILE_CONSTEXPRS = 6
MAX_BEHAVIOUR_CONSTEXPRS = 3
MAX_KERNEL_LINES = 120
# constexprs that give sizes; every other one switches behaviour
SIZE_WORDS = (
    "TILE_",
    "BLOCK_",
    "HEAD_DIM",
    "_DIM",
    "GROUP_SIZE",
    "STAGES",
    "WARPS",
    "NUM_",
    "SIZE",
)


def too_long_files(root):
    counted = ((path, len(path.read_text().splitlines())) for path in files(root))
    return [f"{p.relative_to(root)}: {n} lines" for p, n in counted if n > MAX_FILE_LINES]


def entry_kernels(root):
    """Every jitted function whose name ends in `_kernel`, with its file."""
    for path in files(root):
        if not is_kernel_file(path):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                yield path.relative_to(root), node


def over_budget(root):
    """Each kernel over one of the budgets, as `file: kernel: what`."""
    found = []
    for path, node in entry_kernels(root):
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        constexprs = [
            a.arg for a in args if a.annotation and "constexpr" in ast.unparse(a.annotation)
        ]
        sizes = [name for name in constexprs if any(word in name for word in SIZE_WORDS)]
        first, last = node.body[0].lineno, node.end_lineno or node.lineno
        measures = (
            (len(sizes), MAX_TILE_CONSTEXPRS, "size constexprs"),
            (len(constexprs) - len(sizes), MAX_BEHAVIOUR_CONSTEXPRS, "behaviour constexprs"),
            (last - first + 1, MAX_KERNEL_LINES, "lines"),
        )
        found += [
            f"{path}: {node.name}: {n} {what} (at most {limit})"
            for n, limit, what in measures
            if n > limit
        ]
    return found


def unclear_names(root):
    """Kernel arguments that break the naming rule: upper case exactly for constexprs."""
    found = []
    for path, node in entry_kernels(root):
        for arg in (*node.args.args, *node.args.kwonlyargs):
            constant = arg.annotation is not None and "constexpr" in ast.unparse(arg.annotation)
            if constant != arg.arg.isupper():
                found.append(f"{path}: {node.name}: {arg.arg}")
    return found


def undocumented(root):
    """Jitted functions without a docstring."""
    found = []
    for path in files(root):
        if not is_kernel_file(path):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and not ast.get_docstring(node):
                jitted = any("jit" in ast.unparse(d) for d in node.decorator_list)
                if jitted:
                    found.append(f"{path.relative_to(root)}: {node.name}")
    return found


@pytest.mark.parametrize("rule", [too_long_files, over_budget, unclear_names, undocumented])
def test_the_package_keeps_within(rule):
    assert rule(ROOT) == []


def test_kernels_are_found():
    assert any(node.name == "_merge_states_kernel" for _, node in entry_kernels(ROOT))


_KERNEL = 'import triton\n@triton.jit\ndef _x_kernel({}):\n    """Doc."""\n{}'


@pytest.mark.parametrize(
    ("rule", "text", "message"),
    [
        (too_long_files, "x = 1\n" * 751, "751 lines"),
        (
            over_budget,
            _KERNEL.format(", ".join(f"TILE_{i}: tl.constexpr" for i in range(7)), ""),
            "7 size constexprs",
        ),
        (
            over_budget,
            _KERNEL.format(", ".join(f"HAS_{i}: tl.constexpr" for i in range(4)), ""),
            "4 behaviour constexprs",
        ),
        (over_budget, _KERNEL.format("a", "    a = 1\n" * 120), "121 lines"),
        (unclear_names, _KERNEL.format("Q_PTR", ""), "Q_PTR"),
        (unclear_names, _KERNEL.format("tile: tl.constexpr", ""), "tile"),
        (undocumented, "import triton\n@triton.jit\ndef f(x):\n    return x", "f"),
    ],
)
def test_a_planted_excess_is_found(tmp_path, rule, text, message):
    (found,) = rule(write_tree(tmp_path, {"matmul/a.py": text}))
    assert message in found


def test_the_boundary_passes(tmp_path):
    text = _KERNEL.format("a", "    a = 1\n" * 119)
    tree = write_tree(tmp_path, {"matmul/a.py": text, "core/b.py": "x = 1\n" * 750})
    assert over_budget(tree) == [] and too_long_files(tree) == []
