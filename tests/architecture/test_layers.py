"""Imports go one way, third-party packages stay where they belong, importing stays cheap."""

import math
import subprocess
import sys

import pytest

from .source import PACKAGE, ROOT, file_of, files, imports, layer_of, write_tree

# What each package may import besides itself, from the ground up. A missing name is a
# package nobody decided on.
BELOW = {"core", "device", "launch", "dispatch", "calls", "masks", "sparse", "reference"}
OPERATIONS = {"attention", "decode", "fp8", "kv_cache", "matmul", "ragged"}
OPERATIONS |= {"select_keys", "sparse_attention", "sparsek"}
API = BELOW | OPERATIONS | {"nn", "prune"}
MAY_IMPORT = {
    "core": set(),
    "device": {"core"},
    "launch": {"core", "device"},
    "dispatch": {"core"},
    "masks": {"core", "device", "launch"},
    "sparse": {"core", "launch"},
    "calls": {"core", "masks", "sparse"},
    # the oracle is a second opinion: it shares the description of a call and nothing else
    "reference": {"core", "calls", "masks"},
    "attention": BELOW,
    "kv_cache": BELOW - {"sparse"},
    "decode": BELOW | {"attention", "kv_cache"},
    "matmul": BELOW - {"masks"},
    "ragged": BELOW | {"attention", "decode"},
    "fp8": BELOW | {"attention", "matmul"},
    "select_keys": BELOW | {"attention"},
    "sparse_attention": BELOW | {"attention", "decode"},
    "sparsek": BELOW | {"attention"},
    "prune": {"core", "sparse", "nn"},
    "nn": {"core", "launch", "masks", "sparse", "matmul", "fp8"}
    | {"attention", "select_keys", "sparse_attention", "sparsek"},
    "distributed": API,
    # shares what needs no torch: see FOR_JAX
    "jax": {"core", "masks", "dispatch", "launch", "attention", "decode", "matmul"},
    "integrations": API | {"distributed"},
    # results are checked against the oracle
    # its fixed and random calls cover every public function
    "testing": API,
    # measures whatever is public
    "bench": API | {"testing", "jax", "distributed"},
    "": API | {"integrations", "distributed"},
}
STANDARD = set(sys.stdlib_module_names)
# Third-party packages by package; a name under LAZY only inside functions.
KERNELS = {"triton"}
ALLOWED = {
    "everywhere": {"torch"},
    "device": KERNELS,
    "masks": KERNELS | {"numpy"},
    "sparse": {"numpy"},
    "attention": KERNELS,
    "decode": KERNELS,
    "fp8": KERNELS,
    "kv_cache": KERNELS,
    "matmul": KERNELS,
    "ragged": KERNELS,
    "select_keys": KERNELS,
    "sparse_attention": KERNELS,
    "sparsek": KERNELS,
    "testing": KERNELS | {"numpy", "pytest"},
    "jax": {"jax", "numpy"},
}
# Files that a program without torch imports; those of the package "jax" are among them. The others
# may import torch when a function for torch runs.
FOR_JAX = {
    "__init__.py",
    "core/after_torch.py",
    "core/compat.py",
    "core/env.py",
    "core/errors.py",
    "core/interrupts.py",
    "core/messages.py",
    "core/sizes.py",
    "core/target.py",
}
FOR_JAX |= {"masks/band.py", "_version.py"}
FOR_JAX |= {f"launch/{name}.py" for name in ("described", "description", "descriptors", "driver")}
FOR_JAX |= {f"launch/{name}.py" for name in ("parameters", "prepared", "signature")}
# Kernels, with their planners and tiles.
FOR_JAX |= {"dispatch/tuned.py", "attention/operands.py"}
FOR_JAX |= {f"attention/triton/{name}.py" for name in ("forward", "backward", "delta", "tuning")}
FOR_JAX |= {f"attention/sm90/{name}.py" for name in ("config", "forward", "forward_plan")}
FOR_JAX |= {f"attention/sm90/{name}.py" for name in ("forward_producer", "schedule", "tuning")}
FOR_JAX |= {"decode/triton.py", "decode/portable_tuning.py", "matmul/strides.py"}
FOR_JAX |= {f"matmul/triton/{name}.py" for name in ("spmm", "finish", "sddmm", "shares", "tuning")}
LAZY = {
    "core": {"rich", "triton"},
    "launch": {"triton"},
    "dispatch": {"triton"},
    "jax": {"jax_triton", "triton"},
    "sparse": {"scipy", "numpy"},
    "nn": {"safetensors"},
    "integrations": {"sglang", "transformers", "vllm"},
    "bench": {"jax", "numpy", "triton"},
}
# Files that are imported by the package that they derive from.
HOSTED = {
    "integrations/sglang/backend.py": {"sglang"},
    "integrations/vllm/backend.py": {"vllm"},
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
        for target, line, lazy, _ in imports(path, root):
            top, *rest = target.split(".")
            where = f"{name}:{line}"
            if top == PACKAGE:
                other = rest[0] if rest and (root / rest[0]).is_dir() else ""
                if other and other != layer and other not in MAY_IMPORT[layer]:
                    found.append(f"{where}: {layer or 'the package'} imports {other}")
                elif layer == "jax" and other not in ("", "jax"):
                    inner = file_of(target, root)
                    if inner is None or inner.relative_to(root).as_posix() not in FOR_JAX:
                        found.append(f"{where}: jax imports {target}, which is not in FOR_JAX")
            elif top not in STANDARD:
                allowed = ALLOWED["everywhere"] | ALLOWED.get(layer, set())
                allowed = allowed | (LAZY.get(layer, set()) if lazy else set())
                allowed = allowed | HOSTED.get(name.as_posix(), set())
                if layer == "jax" or (name.as_posix() in FOR_JAX and not lazy):
                    allowed = allowed - {"torch"}
                if top not in allowed:
                    found.append(f"{where}: {layer or 'the package'} imports {top}")
            if layer == "integrations" and [top, *rest][:2] == [PACKAGE, "integrations"]:
                own = {path.stem, *path.relative_to(root).parts}
                if rest[1] not in own:
                    found.append(f"{where}: integrations import one another")
    return found


def import_circles(root):
    """Sets of files that import one another, when they are imported or later in a function."""
    names = {path: path.relative_to(root).as_posix() for path in files(root)}
    reached = {
        name: {
            names[found]
            for target, _, _, for_types in imports(path, root)
            if not for_types and (found := file_of(target, root)) is not None and found != path
        }
        for path, name in names.items()
    }
    beyond = {name: _reachable(name, reached) for name in reached}
    circles = {
        frozenset(other for other in beyond[name] if name in beyond[other])
        for name in reached
        if name in beyond[name]
    }
    return sorted((set(circle) for circle in circles), key=sorted)


def _reachable(start, reached):
    found, waiting = set(), [start]
    while waiting:
        new = reached.get(waiting.pop(), set()) - found
        found |= new
        waiting.extend(new)
    return found


def test_files_import_one_another_in_no_circle():
    assert import_circles(ROOT) == []


@pytest.mark.parametrize(
    ("contents", "circles"),
    [
        ({"core/a.py": "from .b import x", "core/b.py": "from .c import y"}, []),
        (
            {"core/a.py": "from .b import x", "core/b.py": "from . import a"},
            [{"core/a.py", "core/b.py"}],
        ),
        (
            {"core/a.py": "from .b import x", "core/b.py": "def f():\n    from .a import y"},
            [{"core/a.py", "core/b.py"}],
        ),
        (
            {
                "core/a.py": "from ..masks.b import x",
                "masks/b.py": "import blackwell_sparsek.masks.c",
                "masks/c.py": "from ..core import a",
            },
            [{"core/a.py", "masks/b.py", "masks/c.py"}],
        ),
        (
            {"core/a.py": "from .b import x", "core/__init__.py": "from .a import x"}
            | {"core/b.py": "from . import x"},
            [{"core/__init__.py", "core/a.py", "core/b.py"}],
        ),
        (
            {
                "core/a.py": "from .b import x",
                "core/b.py": "if TYPE_CHECKING:\n    from .a import y",
            },
            [],
        ),
    ],
)
def test_a_planted_circle_is_found(tmp_path, contents, circles):
    write_tree(tmp_path, {"core/c.py": "", **contents})
    assert import_circles(tmp_path) == circles


def test_every_layer_of_the_table_exists():
    assert set(MAY_IMPORT) == {layer_of(path, ROOT) for path in files(ROOT)}


def test_imports_go_one_way():
    assert wrong_imports(ROOT) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("core/a.py", "from ..launch import replay", "core imports launch"),
        ("core/a.py", "def f():\n    from ..masks import band", "core imports masks"),
        ("reference/a.py", "from ..attention import a", "reference imports attention"),
        ("dispatch/a.py", "import blackwell_sparsek.attention.a", "dispatch imports attention"),
        ("reference/a.py", "from .. import device", "reference imports device"),
        ("attention/sm90/a.py", "from ...decode import a", "attention imports decode"),
        ("attention/a.py", "from ..kv_cache import a", "attention imports kv_cache"),
        ("device/a.py", "from ..masks.band import Band", "device imports masks"),
        ("matmul/a.py", "from ..testing import guard", "matmul imports testing"),
        ("dispatch/a.py", "import triton", "dispatch imports triton"),
        ("decode/a.py", "import numpy", "decode imports numpy"),
        ("integrations/a.py", "import transformers", "integrations imports transformers"),
        ("integrations/a.py", "from .b import x", "integrations import one another"),
        ("jax/a.py", "import torch", "jax imports torch"),
        ("masks/band.py", "import torch", "masks imports torch"),
        ("jax/a.py", "def f():\n    import torch", "jax imports torch"),
        ("launch/description.py", "import torch", "launch imports torch"),
        ("jax/a.py", "from ..kv_cache import a", "jax imports kv_cache"),
        ("jax/a.py", "from ..attention import api", "which is not in FOR_JAX"),
        ("jax/a.py", "from ..core.checks import x", "which is not in FOR_JAX"),
        ("core/a.py", "import jax", "core imports jax"),
        ("surprise/a.py", "", "layer 'surprise' is not in MAY_IMPORT"),
    ],
)
def test_a_planted_import_is_found(tmp_path, name, text, message):
    folders = (*MAY_IMPORT,)[:-1]
    write_tree(tmp_path, {f"{folder}/__init__.py": "" for folder in folders})
    write_tree(tmp_path, {name: text, "integrations/b.py": ""})
    found = wrong_imports(tmp_path)
    assert len(found) == 1 and found[0].endswith(message), found


def test_allowed_imports_pass(tmp_path):
    write_tree(
        tmp_path,
        {
            "core/a.py": "import math\nimport torch",
            "matmul/a.py": "import triton\nfrom ..core import a",
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
    # the best of a few: the first one may compile sources, and other tests share the cores
    best = math.inf
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", _FRESH], capture_output=True, text=True, check=True, timeout=120
        )
        seconds, has_triton, has_cuda = done.stdout.split()
        best = min(best, float(seconds))
    assert best < 2.0
    assert has_triton == "False" and has_cuda == "False"
