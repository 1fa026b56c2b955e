"""Tiles that `bsk tune` found on a GPU, used in place of the built-in ones on request.

Off unless `BSK_CONFIG_DIR` names a folder. The folder holds one file for each device name.
"""

import json
import os
import pathlib
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from ..core.env import config_dir
from ..core.errors import InvalidInput
from ..core.messages import quoted

SCHEMA = 1
# Two sides of a tile (tile_m and tile_n of attention, tile_n and tile_k of a product), num_warps,
# num_stages.
Tile = tuple[int, int, int, int]
_planned_for: ContextVar[str | None] = ContextVar("planned_for", default=None)


def file_name(device_name: str) -> str:
    """The file of a device.

    Examples
    --------
    >>> file_name("NVIDIA H200")
    'device_name=NVIDIA_H200.json'
    """
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in device_name)
    return f"device_name={safe}.json"


def key_of(facts: tuple[Hashable, ...]) -> str:
    """The facts that a tile depends on, as a key of the file."""
    return " ".join(map(str, facts))


def tuned_tile(kernel: str, facts: tuple[Hashable, ...]) -> Tile | None:
    """The tile found for a kernel and these facts on this GPU, or None."""
    folder = config_dir()
    if folder is None or (name := _planned_for.get() or _gpu_of_torch()) is None:
        return None
    return _tiles(folder, name).get((kernel, key_of(facts)))


@contextmanager
def planned_for(device_name: str) -> Iterator[None]:
    """Plan for this GPU inside; elsewhere `tuned_tile` asks torch for the current one."""
    token = _planned_for.set(device_name)
    try:
        yield
    finally:
        _planned_for.reset(token)


def _gpu_of_torch() -> str | None:
    # programs without torch say what they plan for
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


@cache
def _tiles(folder: str, device_name: str) -> dict[tuple[str, str], Tile]:
    path = pathlib.Path(folder) / file_name(device_name)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:  # such as a name that is too long
        expected = "a folder that `bsk tune` wrote to, or no such variable"
        got = f"{quoted(folder)} ({error.strerror})"
        raise InvalidInput(
            f"BSK_CONFIG_DIR cannot be read; expected {expected}, got {got}"
        ) from error
    return read_tiles(path)


def read_tiles(path: pathlib.Path) -> dict[tuple[str, str], Tile]:
    """All tiles of a file, checked."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise InvalidInput(f"{path}: expected what `bsk tune` writes, schema {SCHEMA}")
    found = {}
    for kernel, tiles in _items(path, "tiles", document.get("tiles")):
        for key, tile in _items(path, kernel, tiles):
            if not _is_tile(tile):
                raise InvalidInput(f"{path}: {kernel!r} {key!r}: expected a tile, got {tile!r}")
            m, n, warps, stages = tile
            found[kernel, key] = (m, n, warps, stages)
    return found


def _items(path: pathlib.Path, name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        got = type(value).__name__
        raise InvalidInput(f"{path}: {name!r}: expected an object of tiles, got {got}")
    return list(value.items())


def _is_tile(value: Any) -> bool:
    """Whether `value` is two powers of two from 16 on, then warps and stages Triton accepts."""
    if not isinstance(value, list) or [type(x) for x in value] != [int] * 4:
        return False
    m, n, warps, stages = value
    sides = all(16 <= side <= 256 and side & (side - 1) == 0 for side in (m, n))
    return sides and warps in (1, 2, 4, 8, 16) and 1 <= stages <= 8


def write_tiles(path: pathlib.Path, device_name: str, tiles: dict[tuple[str, str], Tile]) -> None:
    """Write a file that `tuned_tile` reads, keeping what it had for other problems."""
    merged = (read_tiles(path) if path.exists() else {}) | tiles
    by_kernel: dict[str, dict[str, list[int]]] = {}
    for (kernel, key), tile in sorted(merged.items()):
        by_kernel.setdefault(kernel, {})[key] = list(tile)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": SCHEMA, "device_name": device_name, "tiles": by_kernel}
    # replaced as a whole: a process that reads it meanwhile must not find half a file
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)
