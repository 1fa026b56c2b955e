"""How much of a prompt a sparse attention layer computes."""

from typing import NamedTuple


class KeptPart(NamedTuple):
    """The part of a causal prompt that attention computes: `kept` of `total` units.

    `unit` names them: blocks, or pairs of a query and a key. `kept` is None if it depends on the
    values of the prompt.
    """

    kept: int | None
    total: int
    unit: str
