"""Compile cases of choosing keys."""

from collections.abc import Iterator

import torch

from ...calls.select_keys import SelectCall, SelectOptions
from ...select_keys.choose import _choose_kernel
from ...select_keys.scores import _scores_kernel
from ...select_keys.triton import forward
from ...select_keys.tuning import MOST_ENTRIES
from ..captured_launches import launched_case, meta
from ..compile_cases import CompileCase, compile_cases

INDEXER = SelectOptions(1, 1, 2048, activation="relu")
POOLED = SelectOptions(128, 4, 16, pool="max", force_last=1)
# Too few to store their scores in twice the memory of their lists.
FEW_QUERIES = 512
MEANS = SelectOptions(64, 4, 8, pool="mean")


def _call(options: SelectOptions, dtype: torch.dtype, q_len: int = 8192) -> SelectCall:
    weighted = options.lists == 1
    heads, kv_heads = (64, 1) if weighted else (4, 4)
    q, k = meta(1, heads, q_len, 128, dtype=dtype), meta(1, kv_heads, 131072, 128, dtype=dtype)
    return SelectCall(q, k, meta(1, heads, q_len) if weighted else None, options)


@compile_cases
def select_keys_cases() -> Iterator[CompileCase]:
    """DSA's indexer, in fp8 too, and pooled scores."""
    for name, dtype in (("", torch.bfloat16), ("-fp8", torch.float8_e4m3fn)):
        call = _call(INDEXER, dtype)
        yield launched_case(
            f"select_keys/scores{name}",
            forward,
            call,
            kernel=_scores_kernel,
            expect={"sass:HGMMA.64x256x16": 8},
            archs=(90,),
        )
    call = _call(INDEXER, torch.bfloat16)
    for sm in (80, 89, 120):
        yield launched_case(
            f"select_keys/scores-sm{sm}", forward, call, kernel=_scores_kernel, sm=sm, archs=(sm,)
        )
    pooled = INDEXER._replace(granularity=4, most=512, pool="mean", force_first=1, force_last=2)
    longest = INDEXER._replace(most=MOST_ENTRIES)
    for name, options in (("", INDEXER), ("-mean", pooled), ("-longest", longest)):
        yield launched_case(
            f"select_keys/choose{name}",
            forward,
            _call(options, torch.bfloat16),
            kernel=_choose_kernel,
            archs=(90,) if name else (90, 80, 120),
            # addresses of a full buffer, which a pass without a sampled threshold reads
            max_spill_bytes=160,
        )
    # a few registers around the search for the best, which runs a few times for a tile
    few = 32
    call = _call(INDEXER, torch.bfloat16, FEW_QUERIES)
    yield launched_case("select_keys/indexer", forward, call, archs=(80, 90), max_spill_bytes=few)
    call = _call(INDEXER, torch.float8_e4m3fn, FEW_QUERIES)
    yield launched_case("select_keys/indexer-fp8", forward, call, archs=(90,), max_spill_bytes=few)
    call = _call(POOLED, torch.bfloat16)
    yield launched_case("select_keys/max", forward, call, archs=(90,))
    call = _call(MEANS, torch.float32)
    yield launched_case("select_keys/mean-float32", forward, call, archs=(89,))
