"""The layout for the `kernels` hub holds a package that works under any name."""

import json
import subprocess
import sys

import pytest

from . import hub_layout

# As `kernels` imports a variant: under the id of its metadata, from its folder.
LOAD = """
import importlib.util, json, pathlib, sys
variant = pathlib.Path(sys.argv[1])
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
module = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import torch
q = k = v = torch.randn(1, 2, 64, 16)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(module.attention(q, k, v, causal=True), expected)
w = torch.randn(32, 32)
m = module.BSRMatrix.from_dense(w, (16, 16))
torch.testing.assert_close(m @ w, w @ w, rtol=1e-4, atol=1e-4)
assert "blackwell_sparsek" not in sys.modules, "the installed package was imported as well"
"""


def test_both_variants_say_what_they_are(tmp_path):
    hub_layout.lay_out(tmp_path)
    for backend in hub_layout.BACKENDS:
        variant = tmp_path / "build" / f"torch-{backend}"
        told = json.loads((variant / "metadata.json").read_text())
        assert told["backend"] == {"type": backend} and told["name"] == "blackwell-sparsek"
        assert told["id"].isidentifier()
        assert (variant / "__init__.py").exists() and not (variant / "bench").exists()
        with pytest.raises(FileExistsError):
            hub_layout.lay_out(tmp_path)


def test_a_variant_works_under_its_own_name(tmp_path):
    hub_layout.lay_out(tmp_path)
    variant = tmp_path / "build" / "torch-cpu"
    command = [sys.executable, "-I", "-c", LOAD, str(variant)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_kernels_takes_it(tmp_path):
    pytest.importorskip("kernels")
    hub_layout.main([str(tmp_path), "--check"])
