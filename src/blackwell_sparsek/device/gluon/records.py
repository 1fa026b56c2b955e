"""Named records that the warp roles of a Gluon kernel share. See `device.records`."""

from typing import Any, NamedTuple


class Ring(NamedTuple):
    """Stages of tiles, each with a barrier for "full" and one for "empty"."""

    tiles: Any
    full: Any
    empty: Any


class WorkChannel(NamedTuple):
    """Numbers that describe work tiles, and barriers for filled and for free entries."""

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
