"""Suites of forward attention: causal, windows, packed sequences, block masks and building them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ... import BlockMask, attention, masks
from ..case import EAGER, GRAPH, HOST, Case, Contender, Peer, Suite
from .attention_peers import (
    DENSE,
    FLEX,
    FORWARD,
    ON_BAND,
    ON_BLOCKS,
    ON_WINDOW,
    OURS,
    OURS_DENSE,
    flex_mask,
    load,
    needs,
    on_gpu,
    options_of,
    ours,
    workspace,
)
from .attention_problem import Attention, AttentionInputs
from .varlen import VARLEN, Varlen

TOKENS, HIDDEN = 16384, 2048
TIERS_US_PER_HEAD = (3.82, 3.0, 2.0)
# 16 lengths from 128 to 4096, spaced geometrically and shuffled
LENGTHS = (645, 161, 4096, 323, 1024, 128, 2580, 512, 203, 1625, 256, 3251, 813, 406, 2048, 1290)


def dtype_of(tiny: bool) -> torch.dtype:
    """The dtype of a suite; fp32 on a CPU, where bf16 is slow or missing."""
    return torch.float32 if tiny else torch.bfloat16


def case_of(problem: Attention, peers: tuple[str, ...], modes: tuple[str, ...] = (EAGER,)) -> Case:
    """The forward pass of a problem."""
    dense = 2.0 * problem.batch * problem.heads * (problem.head_dim + problem.value_dim)
    dense *= problem.dense().band_pairs()
    return Case(problem.title, problem.describe(), problem.build, peers, dense, modes)


def dense(tiny: bool = False) -> Iterator[Case]:
    """Full and causal, 1k to 16k; 16k tokens in all, hidden size 2048; GQA 32:8."""
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


def wide(tiny: bool = False) -> Iterator[Case]:
    """D256 full and causal with 16:8 heads, and D192/128 causal with 16 and 128 heads."""
    dtype = dtype_of(tiny)
    for length in (128,) if tiny else (8192, 16384):
        heads, kv_heads = (4, 2) if tiny else (16, 8)
        for causal in (False, True):
            yield case_of(Attention(1, heads, length, 256, kv_heads, dtype, causal), ON_BAND)
        for heads in (2,) if tiny else (16, 128):
            problem = Attention(1, heads, length, 192, dtype=dtype, causal=True, head_dim_v=128)
            yield case_of(problem, ON_BAND)


def window(tiny: bool = False) -> Iterator[Case]:
    """A window of 2048 keys at 32k, 128k and 512k tokens, against full causal attention."""
    heads, width = (2, 64) if tiny else (16, 2048)
    for length in (256,) if tiny else (32768, 131072):
        problem = Attention(1, heads, length, 128, 0, dtype_of(tiny), causal=True, window=width)
        yield case_of(problem, (*ON_WINDOW, FLEX))
    if not tiny:
        # only four heads, because causal attention to everything takes half a second per call
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


# Peers that build masks: they turn kept blocks or a window into what their attention takes.

SERVED, SERVED_ANEW = "bsk_attention", "bsk_new_mask"


def _ours(inputs: AttentionInputs) -> Contender:
    p, keep = inputs.problem, inputs.keep
    if keep is not None:
        expected = int(keep.sum())
    else:
        assert p.window is not None
        expected = _window_blocks(p.length, p.window)
    return _contender(_builder(inputs), lambda mask: mask.nnz_blocks, expected)


def _builder(inputs: AttentionInputs) -> Callable[[], BlockMask]:
    p, keep = inputs.problem, inputs.keep
    if keep is None:
        width, device = p.window, inputs.q.device
        assert width is not None
        return lambda: masks.sliding_window(p.length, width, 128, causal=p.causal, device=device)
    assert p.block is not None
    block, batched = p.block, keep[None]
    return lambda: BlockMask.from_dense(batched, block)


def _attention_anew(inputs: AttentionInputs) -> Contender:
    """Attention with a new mask in each call, including what the first call derives from a mask."""
    make = _builder(inputs)
    options = options_of(inputs)

    def run() -> Any:
        return attention(inputs.q, inputs.k, inputs.v, **{**options, "block_mask": make()})

    return Contender(run, inputs.check(), inputs.flops)


def _contender(make: Callable[[], Any], blocks: Callable[[Any], int], expected: int) -> Contender:
    def check(made: Any) -> None:
        if (got := blocks(made)) != expected:
            raise AssertionError(f"expected {expected} blocks, got {got}")

    return Contender(make, check)


def _window_blocks(length: int, window: int) -> int:
    """The number of blocks of 128 x 128 that a causal window touches."""
    rows = range(-(-length // 128))
    return sum(row - max(0, row * 128 - window + 1) // 128 + 1 for row in rows)


def _flex(inputs: AttentionInputs) -> Contender:
    if inputs.keep is not None:
        expected = int(inputs.keep.sum())
    else:
        assert inputs.problem.window is not None
        expected = _window_blocks(inputs.problem.length, inputs.problem.window)

    def blocks(mask: Any) -> int:
        full = mask.full_kv_num_blocks
        return int(mask.kv_num_blocks.sum()) + (0 if full is None else int(full.sum()))

    return _contender(lambda: flex_mask(inputs), blocks, expected)


def _flashinfer(inputs: AttentionInputs) -> Contender:
    p, keep, device = inputs.problem, inputs.keep, inputs.q.device
    assert keep is not None and p.block is not None
    wrapper = load("flashinfer.sparse", "VariableBlockSparseAttentionWrapper")(workspace(device))
    int32: Any = {"dtype": torch.int32, "device": device}
    rows = torch.full(keep.shape[:2], p.block[0], **int32)
    columns = torch.full((p.heads, keep.shape[2]), p.block[1], **int32)

    def make() -> None:
        wrapper.plan(keep, rows, columns, p.heads, p.heads, p.head_dim, q_data_type=p.dtype)

    return Contender(make, lambda made: None)


def _blocks_only(inputs: AttentionInputs) -> str | None:
    return on_gpu(inputs) or ("plans block masks only" if inputs.keep is None else None)


BUILDERS = {
    peer.name: peer
    for peer in (
        Peer("bsk", "blackwell_sparsek BlockMask", _ours),
        Peer(SERVED, "the attention that the mask is for", ours.prepare),
        Peer(SERVED_ANEW, "that attention, a mask built for each call", _attention_anew),
        Peer("flex", "FlexAttention block mask", _flex, supports=on_gpu, rival=True),
        Peer(
            "flashinfer",
            "FlashInfer plan()",
            _flashinfer,
            available=needs("flashinfer.sparse", "VariableBlockSparseAttentionWrapper"),
            supports=_blocks_only,
            rival=True,
        ),
    )
}


# (heads, length, density)
PROBLEMS = ((16, 16384, 0.22), (8, 65536, 0.05))
TINY = ((2, 512, 0.25),)


def blocks(tiny: bool = False) -> Iterator[Case]:
    """Masks of 22 % of 16k and 5 % of 64k, blocks of 16 to 128; one that hides nothing."""
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
    """Building a mask from kept blocks or a window, and the attention that uses it."""
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
    Suite("attention_dense", dense.__doc__ or "", dense, FORWARD, OURS),
    Suite("attention_wide", wide.__doc__ or "", wide, FORWARD, OURS),
    Suite("attention_window", window.__doc__ or "", window, FORWARD, OURS, DENSE),
    Suite("attention_small", small.__doc__ or "", small, FORWARD, OURS, unit="us_per_head"),
    Suite("attention_varlen", varlen.__doc__ or "", varlen, VARLEN, OURS),
    Suite("block_sparse", blocks.__doc__ or "", blocks, FORWARD, OURS, DENSE),
    Suite("mask_building", mask_building.__doc__ or "", mask_building, BUILDERS, OURS, unit="ms"),
]
