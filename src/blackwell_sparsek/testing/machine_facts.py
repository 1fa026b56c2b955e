"""What ptxas and nvdisasm tell about a compiled kernel.

Asking them takes half as long as compiling, so answers are kept: while neither the kernel nor these
checks change, building all compile cases again takes seconds.
"""

import contextlib
import hashlib
import inspect
import io
import json
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import triton.backends.nvidia
from triton import knobs
from triton.backends.nvidia import compiler

from ..core.compat import ptxas_options
from . import machine_code
from .kept import kept
from .machine_code import code_digest, unwritten_registers

_TOOLS = pathlib.Path(triton.backends.nvidia.__file__).parent / "bin"


@contextlib.contextmanager
def assembler_log() -> Iterator[io.StringIO]:
    """What ptxas prints when Triton calls it inside; nothing if Triton finds the kernel kept."""
    printed = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
        knobs.nvidia.dump_ptxas_log = True
        yield printed


def facts_of(
    compiled: Any, brought_for: int, options: Sequence[str], wanted: Sequence[str], log: str
) -> dict[str, Any]:
    """Registers, spilled and shared bytes, and what the machine code of a kernel contains.

    Parameters
    ----------
    compiled : a kernel compiled by Triton
    brought_for : the compute capability whose ptxas, of the two that Triton brings, assembles it
    options : further options of ptxas
    wanted : instructions to count, as `compile_only.compile_kernels` takes them
    log : what `assembler_log` caught; ptxas is asked again where it caught nothing
    """
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]

    def find() -> dict[str, Any]:
        code = _Code(ptx, cubin)
        facts = _numbers(log if "registers" in log else _assembled(ptx, brought_for, options))
        facts["target"] = _target(ptx)
        facts["digest"] = code_digest(cubin)
        facts["counts"] = {what: code.count(what) for what in wanted}
        hopper = facts["target"].startswith("sm_90")
        facts["unwritten"] = unwritten_registers(code.sass) if hopper else []
        return facts

    checks = inspect.getsource(machine_code), pathlib.Path(__file__).read_text()
    machine = hashlib.sha256(cubin).hexdigest()
    asked = json.dumps([ptx, machine, brought_for, *options, list(wanted), *checks])
    facts: dict[str, Any] = kept("machine_facts", asked, find)
    return facts


def _target(ptx: str) -> str:
    # the PTX names its target: sm_90a where it uses wgmma
    found = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    if found is None:
        raise ValueError("the PTX names no target")
    return found[1]


def _assembled(ptx: str, brought_for: int, options: Sequence[str]) -> str:
    """What ptxas prints about a kernel."""
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / "kernel.ptx"
        path.write_text(ptx)
        # Triton brings two, and which of them an architecture needs differs by release
        command = [
            compiler.get_ptxas(brought_for).path,
            *(*ptxas_options(), *options, "-v", f"--gpu-name={_target(ptx)}", str(path)),
            *("-o", str(path.with_suffix(".cubin"))),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ptxas: {done.stderr.strip()}")
    return done.stderr


def _numbers(log: str) -> dict[str, Any]:
    def number(pattern: str) -> int:
        found = [int(n) for n in re.findall(pattern, log)]
        return max(found, default=0)

    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_stores": number(r"(\d+) bytes spill stores"),
        "spill_loads": number(r"(\d+) bytes spill loads"),
        "shared": number(r"(\d+) bytes smem"),
    }


class _Code:
    """PTX and machine code of a kernel."""

    def __init__(self, ptx: str, cubin: bytes):
        self._ptx = ptx
        self._cubin = cubin

    @cached_property
    def sass(self) -> str:
        """Machine code."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self._cubin)
            file.flush()
            command = [str(_TOOLS / "nvdisasm"), "-c", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def count(self, what: str) -> int:
        """How often an instruction occurs, in the PTX or, as `sass:NAME`, in the machine code."""
        if what.startswith("sass:"):
            name = re.escape(what.removeprefix("sass:"))
            return len(re.findall(rf"\b{name}\b", self.sass))
        lines = [x.strip() for x in self._ptx.splitlines()]
        return sum(what in x for x in lines if not x.startswith(("//", ".")))
