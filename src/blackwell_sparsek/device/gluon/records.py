"""Named records of Gluon kernels: what the roles of a program share. See `device.records`."""

from typing import Any, NamedTuple


class Ring(NamedTuple):
    """Stages of tiles, and for each a barrier of a full and one of an empty stage."""

    tiles: Any
    full: Any
    empty: Any


class WorkChannel(NamedTuple):
    """Numbers that describe work tiles, and barriers of filled and of free entries."""

    numbers: Any
    filled: Any
    free: Any


class StagePlace(NamedTuple):
    """Stage of a ring, and the phase of its barriers."""

    stage: Any
    phase: Any


class PackedPlace(NamedTuple):
    """Where the rows of a packed sequence and head lie for TMA, see `pipeline.tile_place`."""

    end: Any
    head: Any
    first_row: Any
