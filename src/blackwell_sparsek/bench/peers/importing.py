"""Peers that may not be installed: found when asked for, with a reason where they are not."""

import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def load(module: str, name: str) -> Any:
    """`module.name`, imported on first use."""
    return getattr(importlib.import_module(module), name)


@cache
def why_missing(module: str, name: str) -> str | None:
    """Why `module.name` cannot be had here, or None; imports it where it is installed."""
    top = module.split(".")[0]
    if importlib.util.find_spec(top) is None:
        return f"{top} is not installed"
    try:
        load(module, name)
    except AttributeError:
        return f"{module} has no {name}"
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # built for another torch, another GPU, ...
        return f"{module} does not import: {type(error).__name__}: {error}".splitlines()[0][:200]
    return None


def needs(module: str, name: str) -> Callable[[], str | None]:
    """`Peer.available` for a peer that calls `module.name`."""
    return lambda: why_missing(module, name)


def library_on_path(name: str) -> pathlib.Path | None:
    """The first shared library of that name in a folder that Python imports from."""
    found = (pathlib.Path(folder or ".") / name for folder in sys.path)
    return next((path for path in found if path.is_file()), None)
