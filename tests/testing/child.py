"""A case of the Hopper kernels, compiled in a process of its own, and what its PTX says."""

import subprocess
import sys

from blackwell_sparsek.core.env import environment_for_compiler

_PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from blackwell_sparsek.launch.prepared import COMPILE_OPTIONS
from blackwell_sparsek.testing.compile_worker import Specialised
{case}
special = Specialised(case)
compiled = triton.compile(
    GluonASTSource(case.kernel, special.signature, special.constants, special.attrs),
    target=GPUTarget("cuda", 90, 32),
    options=COMPILE_OPTIONS | {{"num_warps": case.num_warps, **case.options}},
)
config = case.args["CFG"]
{report}
print(compiled.asm["ptx"])
"""


def printed(case: str, report: str, *args: str) -> str:
    """What `report`, code that knows `config` and `compiled`, prints, and then the PTX.

    `case` is code that makes a `CompileCase` of that name; `args` are in its `sys.argv[1:]`.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(case=case, report=report), *args],
        capture_output=True,
        text=True,
        env=environment_for_compiler(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
