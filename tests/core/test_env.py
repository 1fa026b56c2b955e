import inspect
import pathlib
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blackwell_sparsek import InvalidInput
from blackwell_sparsek.core import env

from .. import fuzzing


def test_the_default_is_auto(monkeypatch):
    monkeypatch.delenv("BSK_IMPL", raising=False)
    assert env.default_impl() == "auto"


@pytest.mark.parametrize("name", env.IMPLS)
def test_every_name_can_be_set(monkeypatch, name):
    monkeypatch.setenv("BSK_IMPL", name)
    assert env.default_impl() == name


@pytest.mark.parametrize("value", ["", "Eager", "cuda"])
def test_other_names_are_refused(monkeypatch, value):
    monkeypatch.setenv("BSK_IMPL", value)
    names = "auto, reference, eager, dense, triton, sm90"
    with pytest.raises(InvalidInput, match=rf"^BSK_IMPL is '{value}'; expected one of {names}$"):
        env.default_impl()


# what an operating system takes as a value
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=TEXTS | TEXTS.map(lambda x: x * 100) | st.sampled_from(["\x1b[2J", "\udc80", "\n"]))
def test_any_other_text_is_refused_in_one_line(monkeypatch, value):
    monkeypatch.setenv("BSK_IMPL", value)
    try:
        assert env.default_impl() == value and value in env.IMPLS
    except InvalidInput as error:
        assert str(error).startswith("BSK_IMPL is ") and fuzzing.is_one_sentence(error), error


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), ("0", False), ("", False), ("off", False), ("1", True), ("TRUE", True)],
)
def test_interpreted(monkeypatch, value, expected):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert env.triton_interpreted() is expected


def test_overrides_are_those_that_are_set(monkeypatch):
    for name in env.triton_overrides():
        monkeypatch.delenv(name)
    assert env.triton_overrides() == {}
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/x/ptxas")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/x")
    assert env.triton_overrides() == {"TRITON_PTXAS_PATH": "/x/ptxas"}


def test_the_compilers_environment_is_this_one_without_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("BSK_SOMETHING", "kept")
    found = env.environment_for_compiler()
    assert "TRITON_INTERPRET" not in found and found["BSK_SOMETHING"] == "kept"


def test_an_environment_with_a_cache_of_its_own(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = env.environment_with_cache("/x")
    assert found["TRITON_CACHE_DIR"] == "/x"
    assert found["TORCHINDUCTOR_CACHE_DIR"] == "/x/inductor"
    assert found["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert found["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == "/x/flash_attention"
    assert "TRITON_INTERPRET" not in found


def test_variables_for_reports_are_those_that_matter(monkeypatch):
    monkeypatch.setenv("BSK_IMPL", "eager")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    found = env.relevant_variables()
    assert found["BSK_IMPL"] == "eager" and found["CUDA_VISIBLE_DEVICES"] == "1"
    assert "SECRET_TOKEN" not in found


def test_where_caches_and_tiles_are(monkeypatch):
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "BSK_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert env.triton_cache_dir().endswith("/.triton/cache") and env.config_dir() is None
    monkeypatch.setenv("TRITON_HOME", "/home")
    assert env.triton_cache_dir() == "/home/.triton/cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache")
    assert env.triton_cache_dir() == "/cache"
    monkeypatch.setenv("BSK_CONFIG_DIR", "")
    assert env.config_dir() is None


def test_the_security_page_names_what_is_trusted(monkeypatch):
    page = (pathlib.Path(__file__).parents[2] / "SECURITY.md").read_text()
    names = re.findall(r'"([A-Z][A-Z_]+)"', inspect.getsource(env.triton_overrides))
    for name in names:
        monkeypatch.setenv(name, "/x")
    assert set(env.triton_overrides()) == set(names) and len(names) > 5
    assert [name for name in names if f"`{name}`" not in page] == []
