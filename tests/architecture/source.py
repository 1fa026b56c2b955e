"""The source tree as the architecture tests see it: files, their syntax trees, their imports."""

import ast
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

PACKAGE = "blackwell_sparsek"
ROOT = pathlib.Path(__file__).parents[2] / "src" / PACKAGE


class Import(NamedTuple):
    """One import: the absolute dotted name, its line, and whether it runs only on demand.

    `for_types` marks imports that never run: those under `if TYPE_CHECKING`.
    """

    target: str
    line: int
    lazy: bool
    for_types: bool = False


def files(root: pathlib.Path) -> list[pathlib.Path]:
    return sorted(root.rglob("*.py"))


def layer_of(path: pathlib.Path, root: pathlib.Path) -> str:
    """First component below the package; "" for the files directly in it.

    `__main__` is the command line, which is of the layer `bench`.
    """
    parts = path.relative_to(root).parts
    if parts == ("__main__.py",):
        return "bench"
    return parts[0] if len(parts) > 1 else ""


def imports(path: pathlib.Path, root: pathlib.Path) -> Iterator[Import]:
    """Every import of a file, relative ones resolved, names of packages' modules spelled out."""
    here = [PACKAGE, *path.relative_to(root).with_suffix("").parts]
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for outer in ast.walk(tree)
        if _for_type_checkers(outer)
        for inner in ast.walk(outer)
    }
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef) or _for_type_checkers(outer)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, id(node) in lazy, id(node) in for_types)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                name = ".".join([*module, alias.name])
                yield Import(name, node.lineno, id(node) in lazy, id(node) in for_types)


def file_of(target: str, root: pathlib.Path) -> pathlib.Path | None:
    """The file of the package that an import runs: a module, or the package that has the name."""
    package, *parts = target.split(".")
    if package != PACKAGE:
        return None
    for end in (len(parts), len(parts) - 1):
        base = root.joinpath(*parts[: max(end, 0)])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file() and path != root.with_suffix(".py"):
                return path
    return None


def is_kernel_file(path: pathlib.Path) -> bool:
    """Whether a file is in Triton's or Gluon's dialect: it imports triton when it is imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        else:
            continue
        if any(module.split(".")[0] == "triton" for module in modules):
            return True
    return False


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def write_tree(root: pathlib.Path, contents: dict[str, str]) -> pathlib.Path:
    """A planted package under `root`, for showing that a rule can be broken."""
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
