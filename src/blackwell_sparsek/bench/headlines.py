"""The cases that README.md shows: what a reader would ask for first, with times."""

from collections.abc import Iterable, Iterator
from typing import Any

from .peer_tables import number, table, times_faster
from .summary import MODES

# suite, case, how it was timed
HEADLINES = (
    ("matmul_founding", "8192^3, blocks 128x128, 78% sparse", "sustained"),
    ("matmul_founding", "8192^3, blocks 128x128, 78% sparse", "eager"),
    ("matmul_founding", "8192^3, blocks 64x64, 78% sparse", "eager"),
    ("matmul_founding", "8192^3, blocks 32x32, 78% sparse", "eager"),
    ("matmul_founding", "8192^3, blocks 16x16, 78% sparse", "eager"),
    ("matmul_decode", "8B gate_up, 16 tokens, blocks 128x128, 78% sparse", "graph"),
    ("attention_dense", "B1 H16 S16k D128 full", "eager"),
    ("attention_dense", "B1 H16 S16k D128 causal", "eager"),
    ("attention_dense", "B1 H32 S16k D64 causal", "eager"),
    ("attention_window", "B1 H16 S128k D128 causal window 2048", "eager"),
    ("attention_small", "B1 H8 S512 D64 full float16", "graph"),
    ("block_sparse", "B1 H16 S16k D128 blocks 128x128 at 22%", "eager"),
    ("block_sparse", "B1 H16 S16k D128 blocks 64x64 at 22%", "eager"),
    ("backward", "B1 H16 S16k D128 causal", "eager"),
    ("backward", "B1 H16 S16k D128 blocks 128x128 at 22%", "eager"),
    ("backward", "B1 H8 S64k D128 blocks 64x64 at 5%", "eager"),
    ("training", "B1 H32:8 S32k D128 causal", "eager"),
    ("decode", "B1 S8k H32:8 D128, contiguous", "graph"),
    ("decode", "B16 S8k H32:8 D128, pages of 64", "graph"),
)
HEAD = ("suite, case, timed how", "ours", "best peer", "faster than it", "faster than dense")


def headlines(documents: Iterable[dict[str, Any]]) -> str:
    """A row for each headline that was recorded."""
    cases = {(d["suite"], case["name"]): case for d in documents for case in d["cases"]}
    rows = [
        row
        for suite, name, mode in HEADLINES
        if (suite, name) in cases
        for row in _row(suite, cases[suite, name], mode)
    ]
    return table(HEAD, rows) if rows else ""


def _row(suite: str, case: dict[str, Any], mode: str) -> Iterator[list[str]]:
    times = {name: entry.get("times", {}).get(mode) for name, entry in case["peers"].items()}
    if times.get("bsk") is None:
        return
    ratio = case.get("ratios", {}).get(mode, {})
    best = ratio.get("best_peer")
    yield [
        f"{suite.replace('_', ' ')}: {case['name']}, {MODES[mode]}",
        _time(times["bsk"]),
        f"{_time(times[best])} ({best})" if best else "",
        times_faster(ratio["over_best_peer"]) if best else "",
        times_faster(ratio["over_dense"]) if ratio.get("over_dense") is not None else "",
    ]


def _time(figures: dict[str, Any]) -> str:
    seconds = figures["quantiles_s"]["p50"]
    time = f"{number(seconds * 1e3)} ms" if seconds >= 1e-4 else f"{number(seconds * 1e6)} us"
    # few tokens and caches are bound by memory: their rate of arithmetic says nothing
    work = figures.get("executed_tflops", 0)
    return f"{time}, {number(work)} TFLOP/s" if work >= 100 else time
