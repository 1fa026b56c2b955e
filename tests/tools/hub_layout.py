"""The package as the Hugging Face `kernels` hub wants it: python -m tests.tools.hub_layout DEST

DEST/build/torch-cuda and DEST/build/torch-cpu get the package, which is the same for both, and a
metadata.json. `--check` then loads it from there with `kernels`, if that is installed, and computes
something; nothing is asked of the network.
"""

import argparse
import json
import pathlib
import re
import shutil
import sys

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "src" / "blackwell_sparsek"
BACKENDS = ("cuda", "cpu")
# Parts that are commands or tests and serve no model.
LEFT_OUT = ("__pycache__", "bench", "testing", "jax", "__main__.py")


def version():
    """The major version, the number by which the hub knows compatible releases; at least 1."""
    text = (SOURCE / "_version.py").read_text()
    return max(1, int(re.search(r'__version__ = "(\d+)\.', text)[1]))


def metadata(backend):
    """What the hub has to know. The id is the name of the module that is imported."""
    return {
        "id": f"blackwell_sparsek_{backend}_v{version()}",
        "name": "blackwell-sparsek",
        "version": version(),
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": backend},
    }


def lay_out(destination):
    """Write both variants below `destination`; the folders must not exist."""
    for backend in BACKENDS:
        variant = destination / "build" / f"torch-{backend}"
        shutil.copytree(SOURCE, variant, ignore=shutil.ignore_patterns(*LEFT_OUT))
        (variant / "metadata.json").write_text(json.dumps(metadata(backend), indent=1) + "\n")


def check(destination):
    """Load what was laid out as users of the hub do, and compare a result with torch's."""
    import kernels
    import torch

    bsk = kernels.get_local_kernel(destination, backend="cpu")
    q = k = v = torch.randn(1, 2, 64, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(bsk.attention(q, k, v, causal=True), expected)
    print(f"hub_layout: {bsk.__name__} loads and computes")


def main(argv):
    """Lay out, and check if asked to."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.hub_layout", description=__doc__)
    parser.add_argument("destination", type=pathlib.Path)
    parser.add_argument("--check", action="store_true", help="load it with `kernels`")
    args = parser.parse_args(argv)
    lay_out(args.destination)
    if args.check:
        check(args.destination)


if __name__ == "__main__":
    main(sys.argv[1:])
