"""The checks of what is uploaded, on planted faults; `make dist` runs them on the real thing."""

import importlib.util
import io
import pathlib
import re
import sys
import tarfile
import types
import zipfile

import pytest

from ..architecture.source import ROOT, files, imports
from . import check_dist

REPOSITORY = pathlib.Path(__file__).parents[2]


def metadata(description="", **fields):
    given = dict.fromkeys(check_dist.REQUIRED, "x") | fields
    head = "".join(f"{name}: {value}\n" for name, value in given.items() if value is not None)
    return f"{head}\n{description or 'text ' * 300}"


def write_dist(folder, *, more=(), told=None, padding=0, lacks=(), archived=()):
    info = "blackwell_sparsek-0.dist-info"
    files = {
        "blackwell_sparsek/py.typed": "",
        f"{info}/licenses/LICENSE": "",
        f"{info}/METADATA": told or metadata(),
        "blackwell_sparsek/big": "x" * padding,
        **dict.fromkeys(more, ""),
    }
    with zipfile.ZipFile(folder / "a-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            if name not in lacks:
                wheel.writestr(name, text)
    with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
        for name in ("pyproject.toml", "long_description.py", "README.md", "LICENSE", *archived):
            archive.addfile(tarfile.TarInfo(f"a-0/{name}"), io.BytesIO())
        if "CHANGELOG.md" not in lacks:
            archive.addfile(tarfile.TarInfo("a-0/CHANGELOG.md"), io.BytesIO())


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"more": ["tests/a.py"]}, "outside of the package: tests/a.py"),
        ({"padding": 2**21}, f"at most {check_dist.LARGEST_WHEEL} are expected"),
        ({"lacks": ["blackwell_sparsek/py.typed"]}, "lacks blackwell_sparsek/py.typed"),
        ({"lacks": ["CHANGELOG.md"]}, "lacks CHANGELOG.md"),
        ({"archived": ["examples/README.md"]}, "outside of src and tests: examples/README.md"),
        ({"told": metadata(Author=None)}, "METADATA has no Author"),
        ({"told": metadata("[a](docs/a.md)" + "x" * 1000)}, "relative link: docs/a.md"),
        ({"told": metadata("<!-- a -->" + "x" * 1000)}, "has a comment"),
        ({"told": metadata("short")}, "is missing"),
    ],
)
def test_planted_faults_are_found(tmp_path, capsys, fault, told):
    write_dist(tmp_path, **fault)
    assert check_dist.main([str(tmp_path)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert told in line


def test_what_is_in_order_passes_and_nothing_does_not(tmp_path, capsys):
    assert check_dist.main([str(tmp_path)]) == 1
    write_dist(tmp_path)
    assert check_dist.main([str(tmp_path)]) == 0


@pytest.fixture
def long_description(monkeypatch):
    # hatchling is there only while a package is built
    interface = types.ModuleType("interface")
    interface.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    path = REPOSITORY / "long_description.py"
    spec = importlib.util.spec_from_file_location("long_description", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.long_description


def test_the_long_description_has_no_relative_links(long_description):
    text = long_description((REPOSITORY / "README.md").read_text())
    assert list(check_dist.problems_of_metadata(metadata(text))) == []
    assert "Where it loses" in text and "What runs where" in text
    assert "pip install blackwell-sparsek\n" in text
    assert "pip install 'blackwell-sparsek[hf,cli]'\n" in text
    kept = "[a](https://b.org) text\n"
    assert long_description(f"![p](docs/p.svg)\n\n<!-- c -->\n{kept}[d](e.md#f)\n") == f"{kept}d\n"


def reachable(modules, starts):
    """Modules that these import, at once, later, or by a name in a string."""
    found, left = set(), list(starts)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            text = modules[name].read_text()
            named = re.findall(r'"(blackwell_sparsek\.[\w.]+)', text)
            for target in [i.target for i in imports(modules[name], ROOT)] + named:
                while target and target not in modules:
                    target = target.rpartition(".")[0]
                left += [target] if target else []
    return found


@pytest.mark.exhaustive
def test_nothing_in_the_wheel_imports_what_is_left_out():
    text = (REPOSITORY / "pyproject.toml").read_text()
    listed = re.findall(r'^    "src/(blackwell_sparsek/\S+)\.py",$', text, re.MULTILINE)
    left_out = {path.replace("/", ".") for path in listed}
    modules = {
        ".".join(("blackwell_sparsek", *path.relative_to(ROOT).with_suffix("").parts)): path
        for path in files(ROOT)
    }
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    assert left_out and left_out <= set(modules)
    commands = {f"blackwell_sparsek.testing.{name}" for name in ("compile_only", "compile_worker")}
    starts = {name for name in modules if not name.startswith("blackwell_sparsek.testing.")}
    starts -= left_out
    starts |= commands | {name for name in modules if ".testing.cases" in name}
    found = reachable(modules, starts)
    assert found & left_out == set()
    assert "blackwell_sparsek.testing.tolerance" in found  # which bench imports


def test_the_guide_names_the_largest_wheel():
    text = (REPOSITORY / "docs" / "guides" / "packaging.md").read_text()
    (limit,) = re.findall(r"smaller than ([\d.]+) MB", text)
    assert float(limit) * 1e6 == check_dist.LARGEST_WHEEL
