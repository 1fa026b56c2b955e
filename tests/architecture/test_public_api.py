"""The public names with their signatures, against a snapshot.

A change of the snapshot is a change users see: it belongs in CHANGELOG.md. To accept one, run
`python tests/architecture/test_public_api.py` and look at the diff.
"""

import inspect
import pathlib
import types

import blackwell_sparsek as bsk

SNAPSHOT = pathlib.Path(__file__).with_name("public_api.txt")


def signature(function):
    """Parameters with kinds and defaults; annotations are left out, they print differently."""
    try:
        found = inspect.signature(function)
    except (ValueError, TypeError):
        return "(...)"
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def describe(name, value):
    """Lines for one public name: itself, then the public members of a class or module."""
    if isinstance(value, types.ModuleType):
        lines = [f"module {name}"]
        for member in sorted(getattr(value, "__all__", [])):
            lines += describe(f"{name}.{member}", getattr(value, member))
        return lines
    if isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        lines = [f"class {name}({bases})"]
        if issubclass(value, Exception):
            return lines
        if "__init__" in vars(value) or "__new__" in vars(value):
            lines[0] += f" {signature(value)}"
        for member, attribute in sorted(vars(value).items()):
            if member.startswith("_"):
                continue
            if isinstance(attribute, staticmethod | classmethod):
                text = f"{type(attribute).__name__} {signature(getattr(value, member))}"
            elif callable(attribute):
                text = signature(attribute)
            else:
                text = "attribute"
            lines.append(f"  .{member} {text}")
        return lines
    if callable(value):
        return [f"def {name}{signature(value)}"]
    return [f"value {name}"]


def public_api(module):
    return "\n".join(
        line for name in sorted(module.__all__) for line in describe(name, getattr(module, name))
    )


def test_matches_the_snapshot():
    assert public_api(bsk) == SNAPSHOT.read_text().rstrip("\n")


def test_everything_exported_exists_and_is_documented():
    for name in bsk.__all__:
        value = getattr(bsk, name)
        if not isinstance(value, str):
            assert inspect.getdoc(value), f"bsk.{name} has no documentation"


def test_a_changed_signature_changes_the_text():
    before = types.SimpleNamespace(__all__=["f"], f=lambda a, *, b=None: None)
    after = types.SimpleNamespace(__all__=["f"], f=lambda a, *, b=0: None)
    assert public_api(before) == "def f(a, *, b=None)"
    assert public_api(after) == "def f(a, *, b=0)"


def test_classes_show_their_members():
    class Shape:
        def __init__(self, n=1): ...

        @property
        def area(self): ...

        @classmethod
        def square(cls, side): ...

        def _hidden(self): ...

    module = types.SimpleNamespace(__all__=["Shape"], Shape=Shape)
    assert public_api(module).splitlines() == [
        "class Shape() (n=1)",
        "  .area attribute",
        "  .square classmethod (side)",
    ]


if __name__ == "__main__":
    SNAPSHOT.write_text(public_api(bsk) + "\n")
    print(f"wrote {SNAPSHOT}")
