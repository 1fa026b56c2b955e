"""Errors of the calls inside, told with the names that the caller used."""

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from ...core.errors import BskError, InvalidInput, InvalidType, Unsupported

P = ParamSpec("P")
R = TypeVar("R")
# What arguments of the functions inside are called in flash-attn. Names of one error are joined by
# slashes and may have an index.
OF_ATTENTION = {
    "scale": "softmax_scale",
    "sinks": "learnable_sink",
    "chunk": "attention_chunk",
    "page_table": "block_table/page_table",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}
OF_CACHES = {"k": "k_cache", "v": "v_cache", "leftpad_k": "cache_leftpad"}
OF_ROTARY = {
    "rotary.cos": "rotary_cos",
    "rotary.sin": "rotary_sin",
    "rotary.interleaved": "rotary_interleaved",
}
# "attention_varlen: k/v do not match; ...", "kv_append: rotary.cos has ..."
_ERROR = re.compile(r"(?P<op>\w+): (?P<args>[\w./]+)(?P<rest>.*)", re.DOTALL)


def named_as(
    op: str, names: dict[str, dict[str, str]]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Raise errors of the functions in `names` as errors of `op`, with its arguments' names."""

    def decorator(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except (InvalidInput, InvalidType, Unsupported) as error:
                raise renamed(error, op, names) from None

        return wrapper

    return decorator


def renamed(error: BskError, op: str, names: dict[str, dict[str, str]]) -> BskError:
    """The same error under another name; those of other functions stay as they are."""
    found = _ERROR.match(str(error))
    if found is None or found["op"] not in names:
        return error
    known = names[found["op"]]
    args = "/".join(known.get(arg, arg) for arg in found["args"].split("/"))
    return type(error)(f"{op}: {args}{found['rest']}")
