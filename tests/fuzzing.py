"""Documents that a stranger might send: any JSON, and a valid document with some of it replaced."""

import copy
import json
import string

from hypothesis import strategies as st

# what parsers stumble over: floats that overflow or vanish, integers that no float holds, text that
# is markup, a path, an escape sequence of a terminal, or cannot be encoded
ODD = [
    *(None, True, False, 0, -1, 2**63, 10**400, 0.0, -0.0, 1e-320, 1e-12, 1e9, 1e300, -1e300),
    *(float("nan"), float("inf"), "", "x", "bsk", "dense", "eager", "<script>alert(1)</script>"),
    *("../../x", "/tmp/x", "a|b", "\x1b[2J", "\x00", "\ud800", "\n# x", 'x" onload="x', "9" * 500),
    *([], {}, [[]], [None], {"times": {}}, {"a": []}, [1, 2], [16, "<b>"], [[0.5, 2.0]]),
]
odd = st.sampled_from(ODD)
values = st.recursive(
    odd | st.integers() | st.floats() | st.text(string.printable, max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(string.printable, max_size=9), inner, max_size=4)
    ),
    max_leaves=8,
)


def nested(depth):
    """An object inside an object, `depth` times, as text."""
    return '{"a":' * depth + "1" + "}" * depth


def places(value, path=()):
    """Every place in a document, as a path."""
    yield path
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def replaced(document, path, value):
    """A copy of `document` with `value` at `path`."""
    if not path:
        return value
    made = copy.deepcopy(document)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


@st.composite
def changed(draw, document):
    """`document` with one to three places replaced, dropped, or given another name."""
    made = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from([place for place in places(made) if place]))
        inner = made
        for key in path:
            inner = inner[key]
        value = inner.pop(last)
        what = draw(st.sampled_from(["replace", "replace", "replace", "drop", "rename"]))
        if isinstance(inner, list):
            inner.insert(last, draw(odd | values))
        elif what == "replace":
            inner[last] = draw(odd | values)
        elif what == "rename":
            inner[draw(st.sampled_from(["", "x", "<b>", "../x", "\x1b[2J", "eager", "bsk"]))] = (
                value
            )
        if not any(places(made)):
            break
    return made


def as_text(document):
    """As JSON; Python's own dialect, which has NaN and lone surrogates."""
    return json.dumps(document)
