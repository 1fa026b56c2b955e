"""Hooks on compilation, which Triton calls with the constants of a kernel as JSON.

Engines set them: vLLM warns of kernels that are compiled while it serves. JSON holds no dataclass,
which the configurations of our kernels are, and Triton would raise. While a kernel is compiled here
and a hook is set, constants that JSON does not hold are handed to it as text.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def constants_as_text() -> Iterator[None]:
    """Let hooks on compilation take every constant."""
    from triton import knobs
    from triton.runtime import jit

    if not (knobs.runtime.jit_cache_hook or knobs.runtime.jit_post_compile_hook):
        yield
        return
    with _ONE_AT_A_TIME:
        write: Any = jit.serialize_specialization_data

        def write_all(name: str, signature: Any, constants: dict[Any, Any], *rest: Any) -> Any:
            return write(name, signature, {k: _for_json(v) for k, v in constants.items()}, *rest)

        jit.serialize_specialization_data = write_all
        try:
            yield
        finally:
            jit.serialize_specialization_data = write


def _for_json(constant: Any) -> Any:
    """The constant itself, or its text if JSON does not hold it."""
    try:
        # `tl.constexpr` keeps what it holds as its value
        json.dumps(getattr(constant, "value", constant))
    except TypeError:
        return str(constant)
    return constant
