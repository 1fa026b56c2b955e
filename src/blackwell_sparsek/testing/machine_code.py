"""Checks of machine code: registers read before they are written, places of barriers, changes.

ptxas of CUDA 12.8, which comes with Triton 3.6, can lose the copy of a shared-memory address that
several products of a Hopper kernel share: it then computes the descriptor of an operand from a
uniform register that nothing wrote, and the kernel reads wherever its leftover value points.
"""

import hashlib
import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

_INSTRUCTION = re.compile(
    r"/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<op>[A-Z][\w.]*)\s*(?P<rest>[^;]*);"
)
# Instructions whose first operand, predicates aside, is the register that they write.
_WRITERS = re.compile(
    r"(UMOV|ULDC|UIADD3|UIMAD|ULEA|ULOP3|USHF|USEL|S2UR|R2UR|USGXT|UPRMT|UFLO|UPOPC|VOTEU|UP2UR"
    r"|UBMSK|UBREV|UIABS|REDUX)\b"
)
_WRITTEN = re.compile(r"\s*(?:U?P\w+,\s*)*UR(\d+)\b")
_READ = re.compile(r"(?<!gdesc\[)\bUR(\d+)\b")
_DESCRIPTORS = re.compile(r"gdesc\[UR(\d+)\]")
_FIRST_FACTOR_IN_REGISTERS = re.compile(r"\s*R\d+,\s*R\d+,")


def unwritten_registers(sass: str) -> list[str]:
    """One sentence for each uniform register that is read before any instruction wrote it.

    Examples
    --------
    >>> unwritten_registers("/*0010*/ UMOV UR4, 0x1 ; /*0020*/ UIADD3 UR5, UR4, UR6, URZ ;")
    ['UIADD3 at 0020 reads UR6, which nothing wrote']
    """
    written: set[int] = set()
    found = []
    for match in _INSTRUCTION.finditer(sass):
        at, op, rest = match["at"], match["op"], match["rest"]
        target = _WRITTEN.match(rest) if _WRITERS.match(op) else None
        body = rest if target is None else rest[target.end() :]
        read = [int(number) for number in _READ.findall(body)]
        for number in map(int, _DESCRIPTORS.findall(body)):
            # two descriptors of two registers each; the first is unused if registers replace it
            skip = 2 if _FIRST_FACTOR_IN_REGISTERS.match(body) else 0
            read += range(number + skip, number + 4)
        unknown = [x for x in read if x not in written]
        if op == "UMOV" and unknown and target is not None:
            # half of a pair is often copied along and then overwritten: report only a later read
            written.discard(int(target[1]))
            continue
        found += [f"{op} at {at} reads UR{x}, which nothing wrote" for x in unknown]
        if target is not None:
            width = 4 if ".128" in op else 2 if ".64" in op or ".WIDE" in op else 1
            written.update(range(int(target[1]), int(target[1]) + width))
    return found


class Barrier(NamedTuple):
    """An mbarrier: its offset in shared memory, in bytes, and the arrivals it waits for."""

    offset: int
    arrivals: int


def barriers_in(ptx: str) -> list[Barrier]:
    """The barriers that a kernel initialises where its code was compiled to know the address.

    Examples
    --------
    >>> ptx = "mov.b32 %r1, global_smem; add.s32 %r2, %r1, 64; mbarrier.init.b64 [%r2], 4;"
    >>> barriers_in(ptx)
    [Barrier(offset=64, arrivals=4)]
    """
    places = dict.fromkeys(re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx), 0)
    for register, base, offset in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx):
        if base in places:
            places[register] = places[base] + int(offset)
    inits = re.findall(r"mbarrier\.init\.\S+ \[(%r\d+)\], (\d+)", ptx)
    return [Barrier(places[at], int(arrivals)) for at, arrivals in inits if at in places]


def misplaced_barriers(ptx: str, expected: Sequence[tuple[int, int]]) -> list[str]:
    """One sentence if a kernel has barriers elsewhere than it looks for them, `expected`."""
    found = barriers_in(ptx)
    missing = [Barrier(*barrier) for barrier in expected if barrier not in found]
    if not missing:
        return []
    return [
        f"{len(missing)} of {len(expected)} barriers lie elsewhere than the kernel looks for them, "
        f"the first at {missing[0].offset} bytes with {missing[0].arrivals} arrivals; "
        f"found {', '.join(f'{at} ({arrivals})' for at, arrivals in found) or 'none'}"
    ]


class _Section(NamedTuple):
    """The fields of an ELF section header that matter here; `name` is an offset into the names."""

    name: int
    kind: int
    offset: int
    size: int


def code_digest(cubin: bytes) -> str:
    """A digest of a cubin's instructions alone, without names, line tables and notes.

    A change that only moves or renames code does not change it.
    """
    start, entry, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    sections = [
        _Section(*struct.unpack_from("<II8x8xQQ", cubin, start + i * entry)) for i in range(count)
    ]
    digest = hashlib.sha256()
    for section in sections:
        if cubin.startswith(b".text.", sections[names].offset + section.name):
            digest.update(cubin[section.offset : section.offset + section.size])
    return digest.hexdigest()[:16]
