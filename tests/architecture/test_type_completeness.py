"""Type completeness as pyright counts it: `pyright --verifytypes blackwell_sparsek`.

Every module counts as public there. Outside of Gluon kernels, whose decorator has no types, only
what derives from classes of packages that are not installed, or passes through a decorator of JAX,
is unknown.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(__file__).parents[2] / "src"
GLUON = re.compile(r"\.sm90\w*(\.|$)|\.device\.gluon\.")
# Classes whose bases belong to vLLM and SGLang, and functions that JAX differentiates.
DERIVED = {
    "integrations": {"SparseKAttnBackend", "SparseKBackend", "SparseKImpl"}
    | {"SparseKMetadataBuilder"},
    "jax": {"attend", "decode_triton", "multiply", "sample"},
}


def _is_derived(name):
    _, package, *rest = name.split(".")
    return bool(DERIVED.get(package, set()) & set(rest))


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_every_public_type_is_known():
    command = ["pyright", "--verifytypes", "blackwell_sparsek"]
    # pyright asks the first `python` of the path where packages are
    path = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [*command, "--ignoreexternal", "--outputjson"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    found = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    assert len(found) > 5000
    unknown = {
        symbol["name"]
        for symbol in found
        if symbol["isExported"] and (symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"])
    }
    # the exceptions are no wider than they have to be
    assert all(any(x.endswith(f".{n}") for x in unknown) for n in set().union(*DERIVED.values()))
    unknown = {x for x in unknown if not GLUON.search(x) and not _is_derived(x)}
    assert unknown == set()
