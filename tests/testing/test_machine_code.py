"""Finding registers that a compiler forgot to write, and machine code that changed."""

import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blackwell_sparsek.core.errors import InvalidInput
from blackwell_sparsek.testing.compile_only import changed_code, digests, main, read_digests
from blackwell_sparsek.testing.machine_code import (
    barriers_in,
    code_digest,
    misplaced_barriers,
    unwritten_registers,
)

from .. import fuzzing


def code(*instructions):
    return "\n".join(f"  /*{16 * i:04x}*/  {x} ;  /* 0x0 */" for i, x in enumerate(instructions))


def test_everything_was_written():
    assert not unwritten_registers(
        code(
            "ULDC.64 UR4, c[0x0][0x208]",
            "UIADD3 UR6, UP0, UR4, 0x20, URZ",
            "UIADD3.X UR7, UR5, -0x3ffffff0, URZ, UP0, !UPT",
            "@UP1 UMOV UR8, UR6",
            "R2UR UR9, R12",
            "LDG.E R4, desc[UR4][R2.64]",
            "HGMMA.64x16x16.F32.BF16 R56, R28, gdesc[UR6].tnspB, R56",
        )
    )


def test_the_lost_address_of_an_operand():
    found = unwritten_registers(
        code("UMOV UR8, 0x1", "UIADD3 UR12, UP0, UR12, 0x20, URZ", "UMOV UR14, UR12")
    )
    assert found == ["UIADD3 at 0010 reads UR12, which nothing wrote"]


def test_descriptors_of_products():
    both = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24"
    one = "HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0"
    moves = [f"UMOV UR{number}, 0x1" for number in (6, 7)]
    assert not unwritten_registers(code(*moves, one))
    assert [x.split(", ")[0] for x in unwritten_registers(code(*moves, both))] == [
        "HGMMA.64x64x16.F32.BF16 at 0020 reads UR4",
        "HGMMA.64x64x16.F32.BF16 at 0020 reads UR5",
    ]


def test_copies_of_nothing_are_found_where_they_are_read():
    assert not unwritten_registers(code("UMOV UR4, UR9", "UMOV UR4, 0x1", "UIADD3 UR5, UR4, URZ"))
    found = unwritten_registers(code("UMOV UR4, UR9", "UIADD3 UR5, UR4, URZ, URZ"))
    assert found == ["UIADD3 at 0010 reads UR4, which nothing wrote"]


def elf(*sections):
    """A file of 64-bit ELF with these (name, content), as much of one as sections need."""
    names = b"\0" + b"".join(name + b"\0" for name, _ in sections) + b".shstrtab\0"
    parts = [(names.index(name + b"\0"), content) for name, content in sections]
    parts.append((names.index(b".shstrtab"), names))
    body, headers = b"", b""
    for at, content in parts:
        headers += struct.pack("<II8x8xQQ24x", at, 1, 64 + len(body), len(content))
        body += content
    head = struct.pack("<Q10xHHH", 64 + len(body), 64, len(parts), len(parts) - 1)
    return b"\x7fELF".ljust(0x28, b"\0") + head + body + headers


def test_the_digest_is_of_instructions_alone():
    code = elf((b".text.kernel", b"abc"), (b".debug_line", b"1"))
    assert code_digest(code) == code_digest(elf((b".text.other", b"abc"), (b".debug_line", b"22")))
    assert code_digest(code) != code_digest(elf((b".text.kernel", b"abd"), (b".debug_line", b"1")))


def test_changed_code_is_named():
    records = [{"name": name, "arch": 90, "digest": name} for name in "abc"] + [
        {"name": "d", "arch": 90, "problems": ["does not build"]}
    ]
    before = digests(records)
    assert changed_code(records, before) == []
    before |= {"a sm_90": "other", "d sm_90": "built", "e sm_90": "e"}
    del before["b sm_90"]
    assert changed_code(records, before) == [
        "changed: a sm_90", "changed: d sm_90", "new: b sm_90", "gone: e sm_90"
    ]  # fmt: skip


PTX = """
mov.b32 %r1, global_smem;
add.s32 %r2, %r1, 1024;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
add.s32 %r3, %r2, 8;
@%p1 mbarrier.init.shared::cta.b64 [%r3], 16;
@%p1 mbarrier.init.shared::cta.b64 [%r1], 2;
add.s32 %r4, %r9, 64;
mbarrier.init.shared::cta.b64 [%r4], 3;
"""


def test_barriers_are_found_by_their_offset():
    # that of %r4 lies somewhere
    assert barriers_in(PTX) == [(1024, 1), (1032, 16), (0, 2)]


def test_barriers_elsewhere_are_told():
    assert misplaced_barriers(PTX, [(1032, 16), (1024, 1)]) == []
    (place,) = misplaced_barriers(PTX, [(1024, 1), (1040, 16)])
    assert place.startswith("1 of 2 barriers lie elsewhere") and "at 1040 bytes with 16" in place
    assert place.endswith("found 1024 (1), 1032 (16), 0 (2)")
    (arrivals,) = misplaced_barriers(PTX, [(1024, 2)])
    assert "at 1024 bytes with 2 arrivals" in arrivals
    assert misplaced_barriers("", [(0, 1)])[0].endswith("found none")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=40) | fuzzing.values.map(lambda x: fuzzing.as_text(x).encode()))
def test_files_of_digests_are_read_or_refused(tmp_path, content):
    path = tmp_path / "before.json"
    path.write_bytes(content)
    try:
        assert all(isinstance(x, str) for x in read_digests(path).values())
    except InvalidInput as error:
        assert str(error).startswith(f"{path}: ") and len(str(error).splitlines()) == 1


@pytest.mark.parametrize("text", [None, "", "[]", '{"a": 1}', "[" * 100_000])
def test_a_wrong_file_of_digests_is_refused_before_anything_is_built(tmp_path, capsys, text):
    path = tmp_path / "before.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["--compare", str(path), "--package", "no.such.package"])
    assert ended.value.code == 2 and f"error: {path}: " in capsys.readouterr().err
