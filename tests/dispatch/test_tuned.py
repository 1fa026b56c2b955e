"""Tables of tuned tiles that strangers made: refused in one sentence, or used; never a crash."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blackwell_sparsek.core.errors import InvalidInput
from blackwell_sparsek.dispatch import tuned

from .. import fuzzing

TABLE = {
    "schema": 1,
    "device_name": "NVIDIA H200",
    "tiles": {"attn_fwd": {"90 128": [64, 32, 4, 2], "90 64": [128, 64, 8, 3]}, "bsr_spmm": {}},
}
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def assert_refused_or_tiles(path):
    try:
        found = tuned.read_tiles(path)
    except InvalidInput as error:
        assert type(error) is InvalidInput and str(error).startswith(f"{path}: ")
        assert len(str(error).splitlines()) == 1
        return
    for (kernel, key), (m, n, warps, stages) in found.items():
        assert isinstance(kernel, str) and isinstance(key, str)
        assert {m, n} <= {16, 32, 64, 128, 256}
        assert warps in (1, 2, 4, 8, 16) and 1 <= stages <= 8


def test_any_wrong_value_is_refused_or_read(tmp_path):
    path = tmp_path / "x.json"
    for place in fuzzing.places(TABLE):
        for value in fuzzing.ODD:
            path.write_text(fuzzing.as_text(fuzzing.replaced(TABLE, place, value)))
            assert_refused_or_tiles(path)


@pytest.mark.parametrize("tile", [[16, 256, 1, 1], [256, 16, 16, 8]])
def test_the_limits_of_a_tile(tmp_path, tile):
    path = tmp_path / "x.json"

    def read(changed):
        path.write_text(json.dumps(TABLE | {"tiles": {"k": {"1": changed}}}))
        return tuned.read_tiles(path)

    assert read(tile) == {("k", "1"): tuple(tile)}
    for i, wrong in ((0, 8), (0, 512), (1, 48), (2, 3), (2, 32), (3, 0), (3, 9)):
        with pytest.raises(InvalidInput, match="'k' '1': expected a tile, got"):
            read([*tile[:i], wrong, *tile[i + 1 :]])


@in_one_folder
@given(content=st.binary(max_size=60) | fuzzing.values.map(lambda x: fuzzing.as_text(x).encode()))
def test_any_other_file_is_refused(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(InvalidInput):
        tuned.read_tiles(path)
    assert_refused_or_tiles(path)


@pytest.mark.parametrize("depth", [300, 100_000])
def test_deep_nesting_is_refused(tmp_path, depth):
    path = tmp_path / "x.json"
    path.write_text('{"schema": 1, "tiles": {"k": {"1": ' + fuzzing.nested(depth) + "}}}")
    assert_refused_or_tiles(path)
    with pytest.raises(InvalidInput):
        tuned.read_tiles(path)


@pytest.mark.parametrize("tiles", [None, [], "x", {"attn_fwd": []}, {"attn_fwd": None}])
def test_tiles_that_are_no_table_are_not_overlooked(tmp_path, tiles):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(TABLE | {"tiles": tiles}))
    with pytest.raises(InvalidInput, match=r"expected an object of tiles, got"):
        tuned.read_tiles(path)


@pytest.mark.parametrize("name", ["../../etc/x", "/etc/x", "a/b", "a\\b", "..", "x\x00y", ""])
def test_the_name_of_a_device_stays_in_the_folder(tmp_path, name):
    path = tmp_path / "tables" / tuned.file_name(name)
    tuned.write_tiles(path, name, {("k", "1"): (64, 64, 4, 2)})
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()] == [
        f"tables/{tuned.file_name(name)}"
    ]


def test_a_file_that_is_no_table_is_not_overwritten(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("precious")
    with pytest.raises(InvalidInput, match="cannot be read as JSON"):
        tuned.write_tiles(path, "a", {("k", "1"): (64, 64, 4, 2)})
    assert path.read_text() == "precious"


# any text that an operating system takes as a value, names that are too long among them
FOLDERS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
FOLDERS |= st.sampled_from(["/" + "x" * 300, "x/" * 3000, "\udc80", "/dev/null", "/proc/self/mem"])


@in_one_folder
@given(folder=FOLDERS)
def test_any_folder_is_refused_or_has_no_tiles(monkeypatch, folder):
    monkeypatch.setenv("BSK_CONFIG_DIR", folder)
    with tuned.planned_for("NVIDIA H200"):
        try:
            assert tuned.tuned_tile("attn_fwd", (90, 128)) is None
        except InvalidInput as error:
            assert "BSK_CONFIG_DIR" in str(error) and fuzzing.is_one_sentence(error), error


def test_a_folder_whose_name_is_too_long_is_refused(monkeypatch):
    monkeypatch.setenv("BSK_CONFIG_DIR", "/" + "x" * 300)
    with tuned.planned_for("NVIDIA H200"), pytest.raises(InvalidInput, match="BSK_CONFIG_DIR"):
        tuned.tuned_tile("attn_fwd", (90, 128))
