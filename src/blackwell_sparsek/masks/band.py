"""Bands: causal masks and sliding windows as one pair of numbers.

Query i of Sq sits at position p = i + Sk - Sq (the last query is aligned with the last key). A band
`(left, right)` shows it the keys p - left .. p + right. Every function here is plain integer
arithmetic on the host; kernels compute the same ranges on the device.
"""

from typing import Any, Literal, NamedTuple

from ..core.errors import InvalidInput, InvalidType
from ..core.messages import check_flag, message

UNBOUNDED = 2**30
"""An open side in operator schemas: farther than any key, yet safe to add in int32."""

TileKind = Literal["empty", "partial", "full"]


class Band(NamedTuple):
    """How many keys a query sees before and after its own position; None means all of them.

    Examples
    --------
    >>> Band(None, 0), Band(1023, 0)  # causal; causal with a window of 1024
    (Band(left=None, right=0), Band(left=1023, right=0))
    """

    left: int | None
    right: int | None

    def scalars(self) -> tuple[int, int]:
        """`(left, right)` with `UNBOUNDED` for None, as operator schemas carry them."""
        return (
            UNBOUNDED if self.left is None else self.left,
            UNBOUNDED if self.right is None else self.right,
        )

    @classmethod
    def from_scalars(cls, left: int, right: int) -> "Band":
        """The inverse of `scalars`."""
        return cls(None if left >= UNBOUNDED else left, None if right >= UNBOUNDED else right)

    @property
    def T(self) -> "Band":
        """The band of the transposed problem, in which keys look at queries."""
        return Band(self.right, self.left)


EVERYTHING = Band(None, None)
CAUSAL = Band(None, 0)


def band_of(op: str, causal: bool, window: int | tuple[int | None, int | None] | None) -> Band:
    """Turn the public arguments `causal` and `window` into a band.

    Parameters
    ----------
    op : str
        Name of the calling function, for messages.
    causal : bool
        Limits the right side to 0.
    window : None, int or (int or None, int or None)
        `n` means the n latest keys including the query's own: `(n - 1, 0)` under causal,
        `(n - 1, n - 1)` otherwise. In a pair, None means unbounded. Sides of `UNBOUNDED` (2**30)
        or more reach past every sequence and become None.

    Examples
    --------
    >>> band_of("attention", causal=True, window=4)
    Band(left=3, right=0)
    >>> band_of("attention", causal=False, window=(None, 2))
    Band(left=None, right=2)
    """
    check_flag(op, "causal", causal)
    left: int | None
    right: int | None
    if window is None:
        left = right = None
    elif isinstance(window, int) and not isinstance(window, bool):
        if window < 1:
            raise InvalidInput(
                message(op, "window", "sees no key", "None, an int >= 1 or a pair", window)
            )
        left = right = window - 1
    elif isinstance(window, (tuple, list)) and len(window) == 2:
        left, right = (_side(op, window, side) for side in window)
    else:
        raise InvalidType(
            message(op, "window", "is malformed", "None, an int >= 1 or (left, right)", window)
        )
    if causal:
        right = 0
    return Band.from_scalars(*Band(left, right).scalars())


def _side(op: str, window: Any, side: Any) -> int | None:
    if side is None:
        return None
    if not isinstance(side, int) or isinstance(side, bool):
        raise InvalidType(message(op, "window", "is malformed", "ints >= 0 or None", window))
    if side < 0:
        raise InvalidInput(message(op, "window", "is negative", "ints >= 0 or None", window))
    return side


def kv_range(band: Band, q_start: int, q_end: int, sq: int, sk: int) -> tuple[int, int]:
    """Keys `[lo, hi)` that at least one of the queries `[q_start, q_end)` sees; lo <= hi.

    Queries past `sq` do not exist and see nothing.

    >>> kv_range(Band(2, 0), 4, 8, 8, 8)
    (2, 8)
    """
    q_end = min(q_end, sq)
    if q_start >= q_end or sk == 0:
        return 0, 0
    left, right = band.scalars()
    shift = sk - sq
    lo = max(0, q_start + shift - left)
    hi = min(sk, q_end + shift + right)
    return (lo, hi) if lo < hi else (0, 0)


def q_range(band: Band, kv_start: int, kv_end: int, sq: int, sk: int) -> tuple[int, int]:
    """Queries `[lo, hi)` that see at least one of the keys `[kv_start, kv_end)`: the adjoint.

    >>> q_range(Band(2, 0), 0, 4, 8, 8)
    (0, 6)
    """
    return kv_range(band.T, kv_start, kv_end, sk, sq)


def covers(
    band: Band, q_start: int, q_end: int, kv_start: int, kv_end: int, sq: int, sk: int
) -> bool:
    """Whether every existing query of the tile sees every existing key of the tile.

    >>> covers(Band(None, 0), 4, 8, 0, 4, 8, 8), covers(Band(None, 0), 4, 8, 4, 8, 8, 8)
    (True, False)
    """
    left, right = band.scalars()
    shift = sk - sq
    first, last = q_start + shift, min(q_end, sq) - 1 + shift
    return kv_start >= last - left and min(kv_end, sk) - 1 <= first + right


def classify_tile(
    band: Band, q_start: int, q_end: int, kv_start: int, kv_end: int, sq: int, sk: int
) -> TileKind:
    """Whether a tile is "empty", "partial" or "full", judged by the elements that exist.

    >>> [classify_tile(Band(None, 0), 4, 8, k, k + 4, 12, 12) for k in (0, 4, 8)]
    ['full', 'partial', 'empty']
    """
    lo, hi = kv_range(band, q_start, q_end, sq, sk)
    if max(lo, kv_start) >= min(hi, kv_end):
        return "empty"
    return "full" if covers(band, q_start, q_end, kv_start, kv_end, sq, sk) else "partial"
