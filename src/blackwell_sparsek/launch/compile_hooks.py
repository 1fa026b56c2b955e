"""Support for compilation hooks, which Triton calls with the constants of a kernel as JSON.

Serving engines set such hooks: vLLM warns about kernels that are compiled while it serves. The
configurations of our kernels are dataclasses, which JSON cannot represent, so Triton would raise.
While a kernel is compiled here and a hook is set, such constants are passed to it as text.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def constants_as_text() -> Iterator[None]:
    """Inside, compilation hooks get constants that JSON cannot represent as text."""
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
    """The constant itself, or its text if JSON cannot represent it."""
    try:
        # the constant inside a `tl.constexpr` is its value
        json.dumps(getattr(constant, "value", constant))
    except TypeError:
        return str(constant)
    return constant
