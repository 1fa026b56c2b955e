"""(architecture, problem) -> tiles of the attention kernels. Pure functions; nothing is timed.

Nothing here may look at a length, a window or the content of a mask: changing those must compile
nothing. Figures in comments are registers per thread and shared memory of the compiled kernel.
"""

from functools import lru_cache
from typing import NamedTuple

from ..core.arch import Arch
from ..kernels.attention.config import AttnFwdConfig

# A section of heads whose KV is about this large stays in the L2 of every supported GPU beside
# the traffic of queries and outputs (A100 40 MB, H200 50 MB, Ada 32 to 96 MB).
SECTION_BYTES = 16 * 2**20


class _Tile(NamedTuple):
    m: int
    n: int
    warps: int
    stages: int


@lru_cache(maxsize=1024)
def fwd_tile(sm: int, itemsize: int, head_dim: int, precision: str) -> _Tile:
    """Tile of the forward kernel for the larger of D and Dv, without a block mask."""
    if itemsize == 4:
        return _tile_fp32(head_dim, precision)
    if sm in (90, 100, 103):
        return _tile_large_smem(head_dim)
    return _tile_mma_v2(sm, head_dim)
