"""How much of a prompt a sparse attention layer computes."""

from typing import NamedTuple


class KeptPart(NamedTuple):
    """What attention computes of a causal prompt: so many of all `unit`, blocks or pairs.

    A pair is a query and a key. `kept` is None if it follows from the values of a prompt.
    """

    kept: int | None
    total: int
    unit: str
