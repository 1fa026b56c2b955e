"""Keys of kernels in Triton's cache that do not depend on what was compiled before.

A key names the global constants of all functions that a kernel calls. Up to 3.7, Triton asks a
called function for its constants before it has looked for them, so those of a function count only
if an earlier kernel called it too. Programs that compile kernels in another order, or leave some
out, then find nothing in the cache and compile again. 3.8 looks first, and here the same is done
for functions of this package; those of other libraries keep their keys.
"""

from functools import cache
from typing import Any

from ..core.compat import triton_version

# The first release whose keys do not depend on the order.
_SETTLED = (3, 8)
_OURS = __package__.split(".")[0] + "."


@cache
def settle_cache_keys() -> None:
    """Make Triton look for the constants of called functions first; needed before the first key."""
    if (triton_version() or _SETTLED) >= _SETTLED:
        return
    from triton.runtime.jit import DependenciesFinder

    finder: Any = DependenciesFinder
    add: Any = finder._update_hash

    def add_settled(self: Any, called: Any) -> None:
        if called.fn.__module__.startswith(_OURS):
            # makes the key, and with it the list of constants
            _ = called.cache_key
        add(self, called)

    finder._update_hash = add_settled
