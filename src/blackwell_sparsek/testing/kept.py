"""Answers about kernels that take long to find, kept beside Triton's own cache."""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from triton import knobs


def kept(kind: str, asked: str, find: Callable[[], Any]) -> Any:
    """What `find()` returns, a value of JSON, or what it returned when the same was asked before.

    Parameters
    ----------
    kind : the folder in Triton's cache
    asked : everything that the answer depends on, the code that finds it included
    """
    name = hashlib.sha256(asked.encode()).hexdigest()
    place = pathlib.Path(knobs.cache.dir) / kind / f"{name}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(place.read_text())
    found = find()
    place.parent.mkdir(parents=True, exist_ok=True)
    # two processes may find the same at a time
    fresh = place.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(found))
    fresh.replace(place)
    return found
