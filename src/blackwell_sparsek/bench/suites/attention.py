"""Forward attention with causal masks and windows, long and short."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..case import EAGER, GRAPH, Case, Suite
from ..peers.attention import FORWARD, ON_BAND, ON_WINDOW
from ..peers.ours import OURS
from ..peers.torch_attention import DENSE, FLEX
from ..peers.varlen import VARLEN
from ..problems.attention import Attention
from ..problems.varlen import Varlen

TOKENS, HIDDEN = 16384, 2048
TIERS_US_PER_HEAD = (3.82, 3.0, 2.0)
# 16 lengths from 128 to 4096, each longer than the one before by the same factor, then shuffled
LENGTHS = (645, 161, 4096, 323, 1024, 128, 2580, 512, 203, 1625, 256, 3251, 813, 406, 2048, 1290)


def dtype_of(tiny: bool) -> torch.dtype:
    """CPUs compute bf16 slowly or not at all."""
    return torch.float32 if tiny else torch.bfloat16


def case_of(problem: Attention, peers: tuple[str, ...], modes: tuple[str, ...] = (EAGER,)) -> Case:
    """The forward pass of a problem."""
    dense = 4.0 * problem.batch * problem.heads * problem.head_dim
    dense *= problem.dense().band_pairs()
    return Case(problem.title, problem.describe(), problem.build, peers, dense, modes)


def dense(tiny: bool = False) -> Iterator[Case]:
    """Full and causal over 1k to 16k, 16k tokens and 2048 channels in all; GQA 32:8."""
    tokens, hidden = (512, 128) if tiny else (TOKENS, HIDDEN)
    for head_dim in (128, 64):
        for length in (128, 256) if tiny else (1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                shape = (tokens // length, hidden // head_dim, length, head_dim)
                problem = Attention(*shape, dtype=dtype_of(tiny), causal=causal)
                yield case_of(problem, ON_BAND, (EAGER, GRAPH))
    heads, kv_heads, length, batch = (4, 2, 128, 1) if tiny else (32, 8, 8192, 2)
    for causal in (False, True):
        problem = Attention(batch, heads, length, 128, kv_heads, dtype_of(tiny), causal)
        yield case_of(problem, ON_BAND, (EAGER, GRAPH))


def window(tiny: bool = False) -> Iterator[Case]:
    """The 2048 latest keys at 32k, 128k and 512k, against causal attention to everything."""
    heads, width = (2, 64) if tiny else (16, 2048)
    for length in (256,) if tiny else (32768, 131072):
        problem = Attention(1, heads, length, 128, 0, dtype_of(tiny), causal=True, window=width)
        yield case_of(problem, (*ON_WINDOW, FLEX))
    if not tiny:
        # four heads: causal attention to everything takes half a second of each call
        problem = Attention(1, 4, 524288, 128, causal=True, window=width)
        yield case_of(problem, ON_WINDOW)


def small(tiny: bool = False) -> Iterator[Case]:
    """One sequence of 512, D64, fp16, in a CUDA graph: microseconds per head."""
    for heads in (2, 4) if tiny else (8, 16, 32, 64, 96, 128):
        dtype = torch.float32 if tiny else torch.float16
        problem = Attention(1, heads, 64 if tiny else 512, 64, dtype=dtype)
        case = case_of(problem, ON_BAND, (EAGER, GRAPH))
        tiers = {"tiers_us_per_head": list(TIERS_US_PER_HEAD)}
        yield replace(case, problem=case.problem | tiers)


def varlen(tiny: bool = False) -> Iterator[Case]:
    """16 packed sequences of 128 to 4096 tokens, against packed kernels and against padding."""
    lengths = (17, 64, 5, 40) if tiny else LENGTHS
    shapes = ((4, 64, 0), (4, 64, 2)) if tiny else ((16, 128, 0), (32, 64, 0), (32, 128, 8))
    for heads, head_dim, kv_heads in shapes:
        for causal in (False, True):
            problem = Varlen(lengths, heads, head_dim, kv_heads, dtype_of(tiny), causal)
            name, peers, modes = problem.title, tuple(VARLEN), (EAGER, GRAPH)
            yield Case(name, problem.describe(), problem.build, peers, problem.flops, modes)


SUITES = [
    Suite("attention_dense", dense.__doc__ or "", dense, FORWARD, OURS),
    Suite("attention_window", window.__doc__ or "", window, FORWARD, OURS, DENSE),
    Suite("attention_small", small.__doc__ or "", small, FORWARD, OURS, unit="us_per_head"),
    Suite("attention_varlen", varlen.__doc__ or "", varlen, VARLEN, OURS),
]
