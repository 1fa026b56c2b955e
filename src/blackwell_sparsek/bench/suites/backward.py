"""Gradients of attention: the backward pass alone, and a layer's training step."""

from collections.abc import Iterator
from dataclasses import replace

from ..case import Case, Suite
from ..peers.backward import BACKWARD, ON_BAND, ON_BLOCKS, ON_WINDOW
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
                yield _case(Attention(*shape, dtype=dtype, causal=causal), ON_BAND)
    for side in (128, 64):
        for heads, length, density in TINY if tiny else PROBLEMS:
            problem = Attention(
                1, heads, length, 128, dtype=dtype, block=(side, side), density=density
            )
            yield _case(problem, ON_BLOCKS)
    heads, width = (2, 64) if tiny else (16, 2048)
    for length in (256,) if tiny else (32768, 131072):
        window = Attention(1, heads, length, 128, dtype=dtype, causal=True, window=width)
        yield _case(window, ON_WINDOW)


def training(tiny: bool = False) -> Iterator[Case]:
    """Forward and backward pass of the attention in a layer of Llama 3 8B, one sequence."""
    heads, kv_heads = (4, 2) if tiny else (32, 8)
    for length in (128,) if tiny else (8192, 32768):
        problem = Attention(1, heads, length, 128, kv_heads, dtype_of(tiny), causal=True)
        yield _case(replace(problem, forward_too=True), ON_BAND)


def _case(problem: Attention, peers: tuple[str, ...]) -> Case:
    case = case_of(problem, peers)
    return replace(case, dense_flops=(WORK + problem.forward_too) * case.dense_flops)


SUITES = [
    Suite("backward", backward.__doc__ or "", backward, BACKWARD, OURS),
    Suite("training", training.__doc__ or "", training, BACKWARD, OURS),
]
