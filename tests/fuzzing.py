"""Documents that a stranger might send: any JSON, and a valid document with some of it replaced."""

import copy
import json
import string

import torch
from hypothesis import strategies as st

# what parsers stumble over: floats that overflow or vanish, integers that no float holds, text that
# is markup, a path, an escape sequence of a terminal, or cannot be encoded
ODD = [
    *(None, True, False, 0, -1, 2**63, 10**400, 0.0, -0.0, 1e-320, 1e-12, 1e9, 1e300, -1e300),
    *(float("nan"), float("inf"), "", "x", "bsk", "dense", "eager", "<script>alert(1)</script>"),
    *("../../x", "/tmp/x", "a|b", "\x1b[2J", "\x00", "\ud800", "\n# x", 'x" onload="x', "9" * 500),
    *([], {}, [[]], [None], {"times": {}}, {"a": []}, [1, 2], [16, "<b>"], [[0.5, 2.0]]),
]
# what a saved state may hold besides JSON: plain objects of Python, and tensors of every kind
ODD_STATES = [
    *ODD,
    *(b"\x80", (), (1, 2), (2**40, 16), (-1, 0), (16.0, 16), (16, 16, 16)),
    *(10**5000, -(10**5000), {1: 2, "a": 3}),
    *(torch.zeros(0), torch.zeros(3), torch.zeros(2, 2, 10, 8), torch.tensor(5)),
    torch.full((4,), 2**31 - 1, dtype=torch.int32),
    torch.full((4,), -7, dtype=torch.int32),
    torch.full((2,), -7),
    torch.zeros(1, dtype=torch.int32).expand(2**20),
    torch.zeros(4, dtype=torch.int32, device="meta"),
    torch.zeros(1, 16, 16, device="meta"),
    torch.zeros(2, 2).to_sparse(),
    torch.zeros(2, dtype=torch.complex64),
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


def is_one_sentence(error):
    """Whether an error says what is wrong in one line that a terminal can show."""
    text = str(error)
    return len(text) < 1000 and text.isprintable() and "expected" in text


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
