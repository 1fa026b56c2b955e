"""Every public name stands in the reference, docs/api, once, under the object that it is.

`python tests/architecture/test_api_pages.py` prints what to add for names that are missing.
"""

import importlib
import importlib.util
import inspect
import pathlib
import re
import types

import pytest

import blackwell_sparsek as bsk

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "api"
INTEGRATIONS = ("flash_attn", "huggingface", "torch_sdpa", "torch_sparse", "xformers")
# Strings, which a page mentions where they are used; and names that `bsk` has itself.
NOT_HERE = {
    "bsk.integrations.huggingface.NAME",
    "bsk.integrations.torch_sdpa.FLASH_NAME",
    "bsk.integrations.torch_sdpa.patch_sdpa",
    "bsk.integrations.torch_sparse.enable_torch_sparse",
}


def members(name, module):
    """Public names below a module, with their objects."""
    for member in module.__all__:
        value = getattr(module, member)
        if isinstance(value, types.ModuleType):
            yield from members(f"{name}.{member}", value)
        else:
            yield f"{name}.{member}", value


def public():
    found = dict(members("bsk", bsk))
    for part in INTEGRATIONS:
        module = importlib.import_module(f"blackwell_sparsek.integrations.{part}")
        found |= members(f"bsk.integrations.{part}", module)
    if importlib.util.find_spec("jax") is not None:
        found |= members("bsk_jax", importlib.import_module("blackwell_sparsek.jax"))
    return {name: value for name, value in found.items() if name not in NOT_HERE}


def documented(folder):
    """(heading, where its text comes from) of each entry; a plain heading has no source."""
    entry = r"^::: (?P<source>\S+)\n    options:\n      heading: \"(?P<head>[^\"]+)\""
    for page in sorted(folder.glob("*.md")):
        for found in re.finditer(rf"{entry}|^## (?P<plain>bsk\S*)$", page.read_text(), re.M):
            yield found["head"] or found["plain"], found["source"]


def resolved(path):
    """The object of a dotted path; functions may have the name of a package beside them."""
    module, _, rest = path.rpartition(".")
    return getattr(importlib.import_module(module), rest)


def directive(name, value):
    """What a page needs to show a name."""
    if not hasattr(value, "__qualname__"):
        return f"## {name}\n"
    source = f"{inspect.unwrap(value).__module__}.{value.__qualname__}"
    options = f'    options:\n      heading: "{name}"\n      toc_label: "{name}"\n'
    return f"::: {source}\n{options}"


ENTRIES = dict(documented(FOLDER))


def test_no_name_is_missing_and_none_is_left_over():
    engines = {f"bsk.integrations.{engine}.register" for engine in ("sglang", "vllm")}
    names = set(public()) | engines
    found = [name for name, _ in documented(FOLDER)]
    if importlib.util.find_spec("jax") is None:
        found = [name for name in found if not name.startswith("bsk_jax.")]
    hint = "`python tests/architecture/test_api_pages.py` prints what is missing"
    assert sorted(found) == sorted(names), hint


@pytest.mark.parametrize("name", sorted(set(public()) & set(ENTRIES)))
def test_the_text_is_that_of_the_name(name):
    if (source := ENTRIES[name]) is not None:
        assert resolved(source) is public()[name]


def test_the_index_names_everything():
    text = (FOLDER / "index.md").read_text()
    named = set(re.findall(r"`([\w.]+)`", text))
    # integrations are listed by library, functions for JAX by the names that they have there
    ours = {name for name in public() if not name.startswith(("bsk.integrations.", "bsk_jax."))}
    missing = {name.removeprefix("bsk.") for name in ours} - named
    assert missing == {"__version__"}


def test_planted_entries_are_found(tmp_path):
    text = f"# A\n\n{directive('bsk.matmul', bsk.matmul)}\n## bsk.__version__\n"
    (tmp_path / "a.md").write_text(text)
    assert list(documented(tmp_path)) == [
        ("bsk.matmul", "blackwell_sparsek.matmul.api.matmul"),
        ("bsk.__version__", None),
    ]


if __name__ == "__main__":
    for missing in sorted(set(public()) - set(ENTRIES)):
        print(directive(missing, public()[missing]))
