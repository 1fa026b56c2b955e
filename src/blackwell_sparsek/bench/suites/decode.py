"""Decoding one token per sequence; bound by the bytes of the cache."""

from collections.abc import Iterator

import torch

from ..case import EAGER, GRAPH, Case, Suite
from ..peers.decode import DECODE
from ..peers.ours import OURS
from ..problems.decode import Decode

SHAPES = ((1, 1024), (1, 8192), (1, 131072), (16, 8192), (64, 4096))
PAGE_SIZES = (0, 16, 64, 256)


def decode(tiny: bool = False) -> Iterator[Case]:
    """32:8 heads, D128, contiguous and paged, eager and in CUDA graphs."""
    for page_size in (0, 16) if tiny else PAGE_SIZES:
        for batch, length in ((1, 100), (3, 64)) if tiny else SHAPES:
            problem = Decode(batch, length, page_size=page_size)
            if tiny:
                problem = Decode(batch, length, 4, 2, 64, page_size, torch.float32)
            yield Case(
                problem.title,
                problem.describe(),
                problem.build,
                tuple(DECODE),
                problem.flops,
                (EAGER, GRAPH),
            )


SUITES = [Suite("decode", decode.__doc__ or "", decode, DECODE, OURS, unit="us")]
