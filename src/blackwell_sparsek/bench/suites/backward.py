"""Gradients of attention: the backward pass alone."""

from collections.abc import Iterator
from dataclasses import replace

from ..case import Case, Suite
from ..peers.backward import BACKWARD, DETERMINISTIC, ON_BAND, ON_BLOCKS, ON_WINDOW
from ..peers.ours import OURS
from ..problems.attention import Attention
from ..problems.gradients import WORK
from .attention import HIDDEN, TOKENS, case_of, dtype_of
from .block_sparse import PROBLEMS, TINY


def backward(tiny: bool = False) -> Iterator[Case]:
    """Full, causal, window and block masks; ours also with the same bits in every run."""
    dtype = dtype_of(tiny)
    tokens, hidden = (256, 128) if tiny else (TOKENS, HIDDEN)
    for head_dim in (128, 64):
        for length in (128,) if tiny else (4096, 16384):
            for causal in (False, True):
                shape = (tokens // length, hidden // head_dim, length, head_dim)
                peers = (OURS, DETERMINISTIC, *ON_BAND[1:])
                yield _case(Attention(*shape, dtype=dtype, causal=causal), peers)
    heads, length, width = (2, 256, 64) if tiny else (16, 32768, 2048)
    window = Attention(1, heads, length, 128, dtype=dtype, causal=True, window=width)
    yield _case(window, ON_WINDOW)
    for side in (128, 64):
        for heads, length, density in TINY if tiny else PROBLEMS:
            problem = Attention(
                1, heads, length, 128, dtype=dtype, block=(side, side), density=density
            )
            yield _case(problem, (OURS, DETERMINISTIC, *ON_BLOCKS[1:]))


def _case(problem: Attention, peers: tuple[str, ...]) -> Case:
    case = case_of(problem, peers)
    return replace(case, dense_flops=WORK * case.dense_flops)


SUITES = [Suite("backward", backward.__doc__ or "", backward, BACKWARD, OURS)]
