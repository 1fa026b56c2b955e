"""Imports go one way, third-party packages stay where they belong, importing stays cheap."""

import subprocess
import sys

import pytest

from .source import PACKAGE, ROOT, files, imports, layer_of, write_tree

# What each layer may import besides itself. A missing name here is a layer nobody decided on.
BELOW_OPS = {"core", "device", "formats", "reference", "eager", "kernels", "tuning"}
BELOW_API = BELOW_OPS | {"ops"}
API = BELOW_API | {"functional", "nn", "prune"}
MAY_IMPORT = {
    "core": set(),
    "device": {"core"},
    "formats": {"core", "device"},
    "reference": {"core", "formats"},
    "eager": {"core", "formats"},
    "kernels": {"core", "device", "formats"},
    # the config dataclasses live beside the kernels that they configure
    "tuning": {"core", "formats", "kernels"},
    "ops": BELOW_OPS,
    "functional": {"core", "formats", "ops", "tuning"},
    "nn": {"core", "formats", "ops", "functional", "prune"},
    "prune": {"core", "formats", "functional", "nn"},
    "integrations": API,
    # results are checked against the oracle
    "testing": {"core", "formats", "functional", "reference"},
    "bench": API | {"testing"},
    "": API | {"integrations"},
}
STANDARD = set(sys.stdlib_module_names)
# Third-party packages by layer; a name under "lazy" only inside functions.
ALLOWED = {
    "everywhere": {"torch"},
    "device": {"triton"},
    "kernels": {"triton"},
    "testing": {"numpy", "triton"},
    "formats": {"numpy"},
}
LAZY = {
    "core": {"triton"},
    "formats": {"scipy", "numpy"},
    "ops": {"triton"},
    "tuning": {"triton"},
    "nn": {"safetensors"},
    "testing": {"triton"},
    "integrations": {"transformers"},
    "bench": {"rich", "numpy", "triton"},
}


def wrong_imports(root):
    """Each import that breaks a rule, as `file:line: what`."""
    found = []
    for path in files(root):
        layer = layer_of(path, root)
        name = path.relative_to(root)
        if layer not in MAY_IMPORT:
            found.append(f"{name}:1: layer {layer!r} is not in MAY_IMPORT")
            continue
        for target, line, lazy in imports(path, root):
            top, *rest = target.split(".")
            where = f"{name}:{line}"
            if top == PACKAGE:
                other = rest[0] if rest and (root / rest[0]).is_dir() else ""
                if other and other != layer and other not in MAY_IMPORT[layer]:
                    found.append(f"{where}: {layer or 'the package'} imports {other}")
            elif top not in STANDARD:
                allowed = ALLOWED["everywhere"] | ALLOWED.get(layer, set())
                allowed = allowed | (LAZY.get(layer, set()) if lazy else set())
                if top not in allowed:
                    found.append(f"{where}: {layer or 'the package'} imports {top}")
            if layer == "integrations" and [top, *rest][:2] == [PACKAGE, "integrations"]:
                own = {path.stem, *path.relative_to(root).parts}
                if rest[1] not in own:
                    found.append(f"{where}: integrations import one another")
    return found


def test_every_layer_of_the_table_exists():
    assert set(MAY_IMPORT) == {layer_of(path, ROOT) for path in files(ROOT)}


def test_imports_go_one_way():
    assert wrong_imports(ROOT) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("core/a.py", "from ..ops import dispatch", "core imports ops"),
        ("core/a.py", "def f():\n    from ..formats import bsr", "core imports formats"),
        ("reference/a.py", "from ..eager import a", "reference imports eager"),
        ("eager/a.py", "import blackwell_sparsek.reference.a", "eager imports reference"),
        ("reference/a.py", "from .. import kernels", "reference imports kernels"),
        ("kernels/bsr/a.py", "from ...eager import a", "kernels imports eager"),
        ("device/a.py", "from ..formats.band import Band", "device imports formats"),
        ("ops/a.py", "from ..functional import a", "ops imports functional"),
        ("kernels/a.py", "from ..testing import guard", "kernels imports testing"),
        ("ops/a.py", "import triton", "ops imports triton"),
        ("functional/a.py", "import numpy", "functional imports numpy"),
        ("integrations/a.py", "import transformers", "integrations imports transformers"),
        ("integrations/a.py", "from .b import x", "integrations import one another"),
        ("surprise/a.py", "", "layer 'surprise' is not in MAY_IMPORT"),
    ],
)
def test_a_planted_import_is_found(tmp_path, name, text, message):
    folders = ("core", "ops", "formats", "eager", "reference", "kernels", "functional", "testing")
    write_tree(tmp_path, {f"{folder}/__init__.py": "" for folder in folders})
    write_tree(tmp_path, {name: text, "integrations/b.py": ""})
    found = wrong_imports(tmp_path)
    assert len(found) == 1 and found[0].endswith(message), found


def test_allowed_imports_pass(tmp_path):
    write_tree(
        tmp_path,
        {
            "core/a.py": "import math\nimport torch",
            "kernels/a.py": "import triton\nfrom ..core import a",
            "integrations/a.py": "def f():\n    import transformers",
        },
    )
    assert wrong_imports(tmp_path) == []


_FRESH = """
import sys, time
import torch
started = time.process_time()
import blackwell_sparsek
print(time.process_time() - started)
print("triton" in sys.modules)
print(torch.cuda.is_initialized())
"""


def test_importing_is_cheap_and_touches_no_gpu():
    done = subprocess.run(
        [sys.executable, "-c", _FRESH], capture_output=True, text=True, check=True, timeout=120
    )
    seconds, has_triton, has_cuda = done.stdout.split()
    assert float(seconds) < 2.0
    assert has_triton == "False" and has_cuda == "False"
