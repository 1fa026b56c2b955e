"""Where the Hopper forward's warps look for barriers of K and V, read in its PTX."""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.core.env import environment_for_compiler

PROGRAM = """
import dataclasses, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from blackwell_sparsek.kernels.attention import fwd_sm90_cases as cases
from blackwell_sparsek.testing.compile_worker import Specialised

consumers, dim, block = json.loads(sys.argv[1])
make_config = cases.make_config
cases.make_config = lambda *args, **options: dataclasses.replace(
    make_config(*args, **options), PARTS=True, WARP_ARRIVALS=True
)
case = cases.attn_fwd_sm90_case(cases.Call(consumers, dim, dim, block and (block, block)))
special = Specialised(case)
compiled = triton.compile(
    GluonASTSource(case.kernel, special.signature, special.constants, special.attrs),
    target=GPUTarget("cuda", 90, 32),
    options={"num_warps": case.num_warps, **case.options},
)
config = case.args["CFG"]
print(json.dumps([
    2 * config.Q_STAGES,
    [
        [config.barrier_at(array) + 8 * stage, config.arrivals if array % 2 else 1]
        for array in range(4)
        for stage in range(config.STAGES)
    ],
    compiled.metadata.shared,
]))
print(compiled.asm["ptx"])
"""
# what one program may have on H100 and H200
MOST_SHARED = 227 * 1024


@pytest.mark.parametrize("consumers, dim, block", [(2, 128, None), (3, 64, None), (2, 128, 128)])
def test_the_barriers_lie_where_the_warps_look_for_them(consumers, dim, block):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([consumers, dim, block])],
        capture_output=True,
        text=True,
        env=environment_for_compiler(),
    )
    assert done.returncode == 0, done.stderr
    head, ptx = done.stdout.split("\n", 1)
    skipped, expected, shared = json.loads(head)
    base = re.search(r"mov\.b32\s+(%r\d+), global_smem;", ptx)[1]
    found = [
        [int(re.search(rf"add\.s32\s+{address}, {base}, (\d+);", ptx)[1]), int(arrivals)]
        for address, arrivals in re.findall(r"mbarrier\.init\.\S+ \[(%r\d+)\], (\d+)", ptx)
    ]
    assert found[skipped : skipped + len(expected)] == expected
    assert shared <= MOST_SHARED
