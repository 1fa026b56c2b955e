"""Words that belong in one place only."""

import ast
import re

import pytest

from .source import ROOT, files, is_kernel_file, write_tree

# what: (pattern, whether only kernel files are looked at, files that may have it)
RULES = {
    "environment": (r"\bos\.(environ|getenv|putenv)\b", False, {"core/env.py"}),
    "versions and capabilities": (
        r"__version__|\btorch\.version\b|get_device_capability|get_device_properties|version_info",
        False,
        # bench/arguments.py prints it before torch, which core/compat.py needs, is imported
        {"core/compat.py", "core/arch.py", "_version.py", "__init__.py", "jax/version.py"}
        | {"bench/arguments.py"},
    ),
    "exponentials": (
        r"\.exp2?\(",
        True,
        # sparsek is no softmax: a logistic distribution gives it a first guess
        {"device/softmax.py", "device/backprop.py", "device/scores.py", "device/epilogue.py"}
        | {"sparsek/triton.py"},
    ),
    "causal and window": (r"(?i)causal|window", True, {"device/masks.py", "device/schedule.py"}),
    "pickle": (r"\btorch\.(load|save)\b|\bpickle\b", False, set()),
    "code from text": (
        r"(?<![\w.])(eval|exec)\(|\b(marshal|shelve|yaml)\b|\bshell=True|\bos\.(system|popen)\b",
        False,
        # writes a kernel without records around one of ours, from names that are ours
        {"jax/flat_kernels.py"},
    ),
    "network": (r"^\s*(import|from) (socket|urllib|http|requests|ftplib)\b", False, set()),
    "loose ends": (r"\b(TODO|FIXME|XXX|HACK)\b(?!.*(#\d+|\bv?\d+\.\d+))", False, set()),
}


def misplaced(rule, root):
    """Lines that hold a word outside of the files it belongs in."""
    pattern, in_kernels, allowed = RULES[rule]
    found = []
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if name in allowed or (in_kernels and not is_kernel_file(path)):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{name}:{number}: {line.strip()}")
    return found


def dots_without_precision(root):
    """Calls of `tl.dot` that leave the precision to a default, which is tf32."""
    found = []
    for path in files(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "tl.dot":
                continue
            if not any(keyword.arg == "input_precision" for keyword in node.keywords):
                found.append(f"{path.relative_to(root)}:{node.lineno}")
    return found


def launches_without_device(root):
    """Launchers that do not make the device of their tensors current."""
    found = []
    for path in files(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("launch_"):
                text = ast.unparse(node)
                if re.search(r"_kernel\[", text) and "with on_device_of(" not in text:
                    found.append(f"{path.relative_to(root)}:{node.lineno}: {node.name}")
    return found


@pytest.mark.parametrize("rule", RULES)
def test_words_stay_in_their_place(rule):
    assert misplaced(rule, ROOT) == []


@pytest.mark.parametrize("check", [dots_without_precision, launches_without_device])
def test_calls_say_what_they_must(check):
    assert check(ROOT) == []


@pytest.mark.parametrize(
    ("rule", "name", "line"),
    [
        ("environment", "dispatch/a.py", 'os.environ["X"]'),
        ("environment", "launch/launcher.py", 'os.getenv("X")'),
        ("versions and capabilities", "dispatch/a.py", 'torch.__version__ >= "2"'),
        ("versions and capabilities", "matmul/a.py", "torch.cuda.get_device_capability()"),
        ("exponentials", "matmul/a.py", "p = tl.exp2(s)"),
        ("exponentials", "device/masks.py", "p = tl.exp(s)"),
        ("causal and window", "attention/a.py", "IS_CAUSAL: tl.constexpr,"),
        ("causal and window", "attention/a.py", "window_left,"),
        ("pickle", "bench/a.py", "import pickle"),
        ("pickle", "nn/a.py", "torch.load(path)"),
        ("code from text", "bench/a.py", "x = eval(text)"),
        ("code from text", "bench/a.py", "subprocess.run(text, shell=True)"),
        ("network", "bench/a.py", "import urllib.request"),
        ("loose ends", "core/a.py", "# TODO: later"),
    ],
)
def test_a_planted_word_is_found(tmp_path, rule, name, line):
    assert misplaced(
        rule, write_tree(tmp_path, {name: f'import triton\n\n"""\n{line}\n"""\n'})
    ) == [f"{name}:4: {line}"]


@pytest.mark.parametrize(
    ("rule", "name", "line"),
    [
        ("environment", "core/env.py", 'os.environ["X"]'),
        ("exponentials", "device/softmax.py", "p = tl.exp2(s)"),
        ("exponentials", "device/scores.py", "p = s.exp()"),
        ("exponentials", "matmul/a.py", "out = exp(a - b)  # of a docstring"),
        ("causal and window", "device/masks.py", "a window"),
        ("code from text", "nn/a.py", "model.eval()"),
        ("network", "nn/a.py", "# from requests of a batch"),
        ("loose ends", "core/a.py", "# TODO(#12): when torch 2.14 is the oldest"),
    ],
)
def test_words_in_their_place_pass(tmp_path, rule, name, line):
    assert misplaced(rule, write_tree(tmp_path, {name: f'import triton\n"""\n{line}\n"""'})) == []


def test_planted_calls_are_found(tmp_path):
    text = """
def launch_x(a):
    _x_kernel[(1,)](a)

def launch_y(a):
    with on_device_of(a):
        _y_kernel[(1,)](a)

def helper(a, b):
    c = tl.dot(a, b)
    return tl.dot(a, b, c, input_precision="ieee")
"""
    tree = write_tree(tmp_path, {"matmul/a.py": text})
    assert dots_without_precision(tree) == ["matmul/a.py:10"]
    assert launches_without_device(tree) == ["matmul/a.py:2: launch_x"]
