"""Decoding one token per sequence; bound by the bytes of the cache."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..case import EAGER, GRAPH, Case, Suite
from ..peers.decode import DECODE
from ..peers.ours import OURS, OURS_DENSE
from ..problems.decode import Decode

SHAPES = ((1, 1024), (1, 8192), (1, 131072), (16, 8192), (64, 4096))
PAGE_SIZES = (0, 16, 64, 256)


def decode(tiny: bool = False) -> Iterator[Case]:
    """32:8 heads, D128, contiguous and paged, few pages, fp8, unequal lengths."""
    for page_size in (0, 16) if tiny else PAGE_SIZES:
        for batch, length in ((1, 100), (3, 64)) if tiny else SHAPES:
            problem = Decode(batch, length, page_size=page_size)
            if tiny:
                problem = Decode(batch, length, 4, 2, 64, page_size, torch.float32)
            yield _case(problem)
    if tiny:
        yield _case(Decode(2, 128, 4, 2, 64, 16, torch.float32, kept=0.5))
        yield _case(Decode(3, 64, 4, 2, 64, 16, torch.float32, shortest=8))
        return
    for kept in (0.1, 0.25):
        yield _case(Decode(1, 131072, page_size=64, kept=kept))
    for page_size in (0, 64):
        yield _case(Decode(16, 8192, page_size=page_size, is_fp8=True))
    # as many bytes in lengths that differ and in lengths that do not
    for page_size in (0, 64):
        ragged = Decode(16, 32768, page_size=page_size, shortest=100)
        yield _case(ragged)
        yield _case(replace(ragged, length=sum(ragged.lengths) // 16, shortest=0))


def _case(problem: Decode) -> Case:
    peers = tuple(DECODE)
    return Case(
        problem.title, problem.describe(), problem.build, peers, problem.flops, (EAGER, GRAPH)
    )


SUITES = [Suite("decode", decode.__doc__ or "", decode, DECODE, OURS, OURS_DENSE, unit="us")]
