"""Type completeness as pyright counts it: `pyright --verifytypes blackwell_sparsek`.

Every module counts as public there. Outside of Gluon kernels, whose decorator has no types, and of
the helpers of tests, only what derives from classes without types of other packages is unknown.
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
KERNELS_AND_HELPERS = re.compile(r"\.(sm90\w*|testing)(\.|$)|\.device\.gluon\.")
# Classes that derive from torch.nn.Module, ParallelStyle, or classes of vLLM and SGLang, and
# what names them: pyright does not know the types of those bases.
DERIVED = {
    "distributed": {"ColwiseBSR", "ParallelBSRLinear", "RowwiseBSR"},
    "nn": {"BSRLinear", "BSRWeight", "IndexerAttention", "MixtureOfBlockAttention"}
    | {"NativeSparseAttention", "SparsekAttention"},
    "prune": {"SparsifiedLayer", "shrink_"},
    "integrations": {"SparseKAttnBackend", "SparseKBackend", "SparseKImpl"}
    | {"SparseKMetadataBuilder"},
}


def _is_derived(name):
    _, package, *rest = name.split(".")
    return bool(DERIVED.get(package, set()) & set(rest))


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_every_public_type_is_known():
    command = ["pyright", "--pythonpath", sys.executable, "--verifytypes", "blackwell_sparsek"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
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
    unknown = {x for x in unknown if not KERNELS_AND_HELPERS.search(x) and not _is_derived(x)}
    assert unknown == set()
