"""Forward attention under block masks, and how long masks take to make."""

from collections.abc import Iterator

from ..case import EAGER, HOST, Case, Suite
from ..peers.attention import FORWARD, ON_BLOCKS
from ..peers.mask_building import BUILDERS
from ..peers.ours import OURS, OURS_DENSE
from ..peers.torch_attention import DENSE, FLEX
from ..problems.attention import Attention
from .attention import TOKENS, case_of, dtype_of

# (heads, length, density)
PROBLEMS = ((16, 16384, 0.22), (8, 65536, 0.05))
TINY = ((2, 512, 0.25),)


def blocks(tiny: bool = False) -> Iterator[Case]:
    """22 % of 16k and 5 % of 64k: blocks of 128 and 64, narrow key blocks, nothing masked."""
    dtype = dtype_of(tiny)
    for block in ((128, 128), (64, 64), (128, 32), (128, 16)):
        for heads, length, density in TINY if tiny else PROBLEMS:
            problem = Attention(1, heads, length, 128, dtype=dtype, block=block, density=density)
            more = (FLEX,) if block[0] == block[1] and length <= TOKENS else ()
            yield case_of(problem, (*ON_BLOCKS, *more))
    heads, length, _ = (TINY if tiny else PROBLEMS)[0]
    everything = Attention(1, heads, length, 128, dtype=dtype, block=(128, 128), density=1.0)
    yield case_of(everything, (OURS, OURS_DENSE, *ON_BLOCKS[1:]))


def mask_building(tiny: bool = False) -> Iterator[Case]:
    """From kept blocks, or from a window's width, to what attention takes, and that attention."""
    dtype = dtype_of(tiny)
    for heads, length, density in TINY if tiny else PROBLEMS:
        for side in (128, 64):
            problem = Attention(
                1, heads, length, 128, dtype=dtype, block=(side, side), density=density
            )
            yield _building(problem, f"kept blocks, {problem.title}")
    heads, length, width = (2, 1024, 128) if tiny else (16, 131072, 2048)
    problem = Attention(1, heads, length, 128, dtype=dtype, causal=True, window=width)
    yield _building(problem, f"window {width} of {length // 1024}k, blocks of 128")


def _building(problem: Attention, name: str) -> Case:
    peers, modes = tuple(BUILDERS), (EAGER, HOST)
    return Case(name, problem.describe(), problem.build, peers, modes=modes)


SUITES = [
    Suite("block_sparse", blocks.__doc__ or "", blocks, FORWARD, OURS, DENSE),
    Suite("mask_building", mask_building.__doc__ or "", mask_building, BUILDERS, OURS, unit="ms"),
]
