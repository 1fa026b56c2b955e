"""docs/support.md: what runs on which GPU with which releases; `make pages` writes it.

Every cell is what `auto` answers for a problem of that kind on a machine that has the GPU and the
newest known Triton, whatever machine writes the page.
"""

import pathlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from ...attention.fp8_op import fp8_dispatch
from ...attention.inputs import MAX_HEAD_DIM
from ...attention.op import backward_dispatch, forward_dispatch
from ...core import compat
from ...core.arch import Arch
from ...decode.op import decode_dispatch
from ...decode.portable_tuning import LARGEST_HEAD_DIM
from ...decode.tuning import FP8, LATENT_DIMS
from ...dispatch import dispatcher
from ...dispatch.dispatcher import Dispatcher
from ...matmul.choice import _slower_than_dense, _slower_than_triton, matmul_dispatch
from ...matmul.sm90.tuning import narrow_sm90_config, strips_config
from ...testing.compile_cases import ALL_ARCHS
from .. import results
from ..support import (
    KERNELS,
    TIMED,
    attention_problem,
    decode_problem,
    fp8_attention_problem,
    product_problem,
)
from .tables import table

PAGE = pathlib.Path("docs/support.md")
# The releases of torch whose wheels name each release of Triton.
TORCH_WITH = {
    (3, 6): "2.10, 2.11",
    (3, 7): "2.12, 2.13",
    (3, 8): "2.14",
    (3, 9): "2.15",
}
# SMs and shared memory decide among tiles and estimates: those of the GPU of that architecture
# which is most common in data centres, or is the largest.
_SMS = {80: (108, 166912), 89: (142, 101376), 90: (132, 232448), 100: (148, 232448)}
_SMS[120] = (170, 101376)
CPU = Arch("cpu", 0, 1, 0, False)
GPUS = {sm: Arch("cuda", sm, *_SMS[sm], False) for sm in ALL_ARCHS}
HOPPER = GPUS[90]
NOT_THERE = "-"


@contextmanager
def as_if(release: tuple[int, int]) -> Iterator[None]:
    """Inside, questions are answered as with this release of Triton and no BSK_IMPL."""
    with ExitStack() as stack:
        for kept in (narrow_sm90_config, strips_config, _slower_than_triton, _slower_than_dense):
            # answers of the installed release
            kept.cache_clear()
            stack.callback(kept.cache_clear)
        for where, name, answer in (
            (compat, "triton_version", lambda: release),
            (compat, "_why_import_fails", lambda: None),
            (dispatcher, "default_impl", lambda: "auto"),
        ):
            stack.enter_context(mock.patch.object(where, name, answer))
        yield


def _chosen(dispatch: Dispatcher, problem: Any) -> str:
    candidate = dispatch.choose("auto", problem)
    return NOT_THERE if candidate is None else candidate.name


# GPUs, dtypes and head dims.

# Of keys and of values, as in multi-head latent attention.
_UNEQUAL = (192, 128)
Ask = Callable[[Arch, int, int], str]


def by_gpu(asks: dict[str, Ask], largest: int, *further: tuple[int, int]) -> str:
    """A table of the implementations on each GPU, by the names of `asks` and by head dim.

    `largest` is the largest head dim that the function takes; `further` are more head dims of keys
    and of values that are not alike.
    """
    archs = (*GPUS.values(), CPU)
    rows = []
    for name, ask in asks.items():
        alike: dict[tuple[str, ...], list[int]] = {}
        for dim in range(1, largest + 1):
            alike.setdefault(tuple(ask(arch, dim, dim) for arch in archs), []).append(dim)
        rows += [
            [f"{name}, head dim {dims_in_words(dims)}", *cells] for cells, dims in alike.items()
        ]
        for d, dv in (_UNEQUAL, *further):
            rows.append([f"{name}, head dims {d} and {dv}", *(ask(arch, d, dv) for arch in archs)])
    return table(["", *map(str, GPUS.values()), "CPU"], rows)


def dims_in_words(dims: list[int]) -> str:
    """Name ascending head dims.

    Examples
    --------
    >>> dims_in_words([64, 128]), dims_in_words([8, 16, 24]), dims_in_words([510, 511, 512])
    ('64, 128', '8 to 24 in steps of 8', '510 to 512')
    >>> dims_in_words([1, 2, 3, 4, 6])
    'up to 6, except where listed'
    """
    first, last = dims[0], dims[-1]
    step = dims[1] - first if len(dims) > 2 else 0
    if step and dims == list(range(first, last + 1, step)):
        return f"{first} to {last}" + (f" in steps of {step}" if step > 1 else "")
    if len(dims) < 4:
        return ", ".join(map(str, dims))
    return f"up to {last}, except where listed"


def _attention_asks(dispatch: Dispatcher, backward: bool) -> dict[str, Ask]:
    def asks(dtype: torch.dtype) -> Ask:
        def ask(arch: Arch, d: int, dv: int) -> str:
            sizes = {"head_dim": d, "head_dim_v": dv, "backward": backward}
            return _chosen(dispatch, attention_problem(arch, dtype=dtype, **sizes))

        return ask

    return {_dtype(x): asks(x) for x in (torch.float16, torch.bfloat16, torch.float32)}


def _fp8_attention_asks() -> dict[str, Ask]:
    def asks(turned: bool) -> Ask:
        def ask(arch: Arch, d: int, dv: int) -> str:
            sizes: dict[str, Any] = {"head_dim": d, "head_dim_v": dv, "turned_values": turned}
            return _chosen(fp8_dispatch, fp8_attention_problem(arch, **sizes))

        return ask

    return {f"{_dtype(FP8)}, transposed values": asks(True), _dtype(FP8): asks(False)}


def _decode_asks() -> dict[str, Ask]:
    def asks(dtype: torch.dtype, cache: torch.dtype) -> Ask:
        def ask(arch: Arch, d: int, dv: int) -> str:
            sizes: dict[str, Any] = {"head_dim": d, "head_dim_v": dv}
            sizes |= {"dtype": dtype, "cache_dtype": cache}
            if (d, dv) == LATENT_DIMS:
                sizes |= {"latent": True, "heads_q": 128, "heads_kv": 1}
            return _chosen(decode_dispatch, decode_problem(arch, **sizes))

        return ask

    plain = {_dtype(x): asks(x, x) for x in (torch.float16, torch.bfloat16, torch.float32)}
    half = torch.bfloat16
    return {**plain, f"{_dtype(half)}, cache {_dtype(FP8)}": asks(half, FP8)}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Features.


class Feature(NamedTuple):
    """An option, as changes to a problem; None for functions that do not have it."""

    name: str
    attention: dict[str, Any] | None
    decode: dict[str, Any] | None


FEATURES = (
    Feature("causal, windows", {"banded": True}, {"banded": True}),
    Feature("softcap", {"softcap": True}, {"softcap": True}),
    Feature("sinks", {"sinks": True}, {"sinks": True}),
    Feature("ALiBi slopes", {"alibi": True}, {"alibi": True}),
    Feature("bias", {"bias": True}, None),
    Feature("GQA, 32 query heads and 8 KV heads", {"heads_q": 32, "heads_kv": 8}, {}),
    Feature("deterministic gradients", {"deterministic": True}, None),
    Feature("packed sequences (varlen)", {"varlen": True, "tokens": (8192, 8192)}, None),
    Feature("block mask 128x128", {"mask_block": (128, 128)}, None),
    Feature("block mask 64x64", {"mask_block": (64, 64)}, None),
    Feature("block mask 64x64 with bit masks", {"mask_block": (64, 64)}, None),
    Feature("block mask 128x32", {"mask_block": (128, 32)}, None),
    Feature("block mask 32x32", {"mask_block": (32, 32)}, None),
    Feature(
        "block mask 128x128 per KV head",
        {"mask_block": (128, 128), "mask_per_kv_head": True, "heads_q": 32, "heads_kv": 8},
        None,
    ),
    Feature("fewer than 32 queries", {"max_q": 16}, {"q_len": 16}),
    Feature("scale of 0 or below", {"positive": False}, None),
    Feature("strides that TMA does not support", {"tma": False}, {"tma": False}),
    Feature("pages of 16 or more tokens", None, {"page_size": 16}),
    Feature("pages of 8 tokens", None, {"page_size": 8}),
    Feature("selected blocks of 64 tokens (`kv_blocks`)", None, {"block_size": 64}),
)


def feature_table() -> str:
    """Which implementation each option takes on Hopper."""
    rows = []
    for name, changes, decoding in FEATURES:
        row = [name, NOT_THERE, NOT_THERE, NOT_THERE]
        if changes is not None:
            backward = changes | {"backward": True}
            row[2] = _chosen(backward_dispatch, attention_problem(HOPPER, **backward))
            if "deterministic" not in changes:
                row[1] = _chosen(forward_dispatch, attention_problem(HOPPER, **changes))
        if decoding is not None:
            row[3] = _chosen(decode_dispatch, decode_problem(HOPPER, **decoding))
        rows.append(row)
    return table(["bfloat16, head dim 128, sm_90", "forward", "backward", "decode"], rows)


# Products.

_BLOCKS = ((128, 128), (64, 64), (32, 32), (16, 16), (128, 16), (8, 8))
_TOKENS = (1, 16, 64, 1024, 8192)


def product_table(arch: Arch, dtype: torch.dtype) -> str:
    """Which implementation a product takes, by blocks and tokens."""
    rows = [
        [
            f"blocks {block[0]}x{block[1]}",
            *(_chosen(matmul_dispatch, product_problem(arch, block, n, dtype)) for n in _TOKENS),
        ]
        for block in _BLOCKS
    ]
    heads = (f"{n} token" + "s" * (n > 1) for n in _TOKENS)
    return table([f"{arch}, {_dtype(dtype)}", *heads], rows)


# Releases of Triton.


def releases() -> dict[tuple[int, int], str]:
    """The releases that the page shows, by the words of its heading."""
    newest = max(TORCH_WITH)
    found = {r: f"{r[0]}.{r[1]} (torch {torches})" for r, torches in TORCH_WITH.items()}
    return {**found, (newest[0], newest[1] + 1): "newer"}


def release_table() -> str:
    """Whether the kernels run on an H200 with each release, and who launches them."""
    rows = [[f"{k.name} ({k.computes})", *_by_release(k.why_not)] for k in KERNELS]
    rows.append(
        [
            "launches through the CUDA driver",
            *_by_release(lambda arch: compat.why_no_launcher()),
        ]
    )
    return table(["Triton", *releases().values()], rows)


def _by_release(why_not: Callable[[Arch], str | None]) -> Iterator[str]:
    for release in releases():
        with as_if(release):
            yield "yes" if why_not(HOPPER) is None else "no"


def reasons_for_newer() -> list[str]:
    """Why a release newer than those known runs less."""
    newer = list(releases())[-1]
    with as_if(newer):
        found = [kernels.why_not(HOPPER) for kernels in KERNELS]
        return list(dict.fromkeys(filter(None, [*found, compat.why_no_launcher()])))


# What was run.


def ran_on(folder: pathlib.Path) -> list[str]:
    """The GPUs and releases of the committed results."""
    found = set()
    for path in sorted(folder.rglob("*.json")):
        environment = results.read(path)["environment"]
        versions = environment["versions"]
        found.add(
            f"{environment['device_name']}, torch {versions['torch']}, "
            f"Triton {versions.get('triton', 'none')}"
        )
    return sorted(found)


# The page.

_INTRODUCTION = """# What runs where

Generated by `make pages` from the functions that choose an implementation; do not edit.
To check your machine, run `bsk info`; to check a call, use `bsk.explain`. Both give reasons.

The cells name the implementation that `auto` chooses. `sm90` means the Hopper kernels, `triton` the
portable kernels, `eager` plain PyTorch, and `dense` a cuBLAS product with the densified matrix. All
of them satisfy the same error budget ([numerics](numerics.md#the-error-budget))."""
_RUN = """All GPU tests and all figures come from {timed}. The tests also compile the portable
kernels for {compiled}, compile the Hopper kernels for sm_90, and run the portable kernels in
Triton's interpreter on a CPU. **Nothing has been run on {never}**; the tiles chosen for these GPUs
are estimates. The committed results were measured with:"""
_ATTENTION = """Forward. Head dims above {largest} raise an error. Where there are two head dims,
they are those of keys and of values:"""
_FP8 = """In fp8, forward alone. Values are transposed by `bsk.fp8.quantize(v, "channel",
transposed=True)`:"""
_DECODING = """Decoding from a KV cache, with head dims of up to {largest}. Head dims {latent[0]}
and {latent[1]} are those of a latent cache (MLA), whose values are a view of its keys:"""
_PRODUCTS = """These tables are for x @ W.T, with W [8192, 8192] and 22 % of its blocks stored, on
Hopper and on Ampere, which stands for the other GPUs:"""
_RELEASES = """This table shows whether each family of kernels runs on Hopper. Where the Hopper
kernels do not run, the portable kernels do. If Triton is missing, fails to import, or is older than
{oldest}, everything runs in plain PyTorch."""
_NEWER = """With a newer release, such as {newer}: {reasons}. Triton then launches the portable
kernels itself, which takes about 300 us of host time per call instead of 20 to 30."""


def _listed(archs: Iterable[int], last: str = "and") -> str:
    *names, final = [f"sm_{sm}" for sm in archs]
    return f"{', '.join(names)} {last} {final}" if names else final


def support_page(folder: pathlib.Path) -> str:
    """The page; `folder` has the results files."""
    newer = ".".join(map(str, list(releases())[-1]))
    oldest = ".".join(map(str, compat.MIN_TRITON))
    never = [sm for sm in ALL_ARCHS if sm not in TIMED]
    with as_if(max(TORCH_WITH)):
        forward = by_gpu(_attention_asks(forward_dispatch, backward=False), MAX_HEAD_DIM)
        backward = by_gpu(_attention_asks(backward_dispatch, backward=True), MAX_HEAD_DIM)
        fp8 = by_gpu(_fp8_attention_asks(), MAX_HEAD_DIM)
        decoding = by_gpu(_decode_asks(), LARGEST_HEAD_DIM, LATENT_DIMS)
        features = feature_table()
        products = [
            product_table(arch, dtype)
            for arch in (HOPPER, GPUS[80])
            for dtype in (torch.bfloat16, torch.float32)
        ]
    parts = [
        _INTRODUCTION,
        "## What was run",
        _RUN.format(
            timed=_listed(TIMED), compiled=_listed(ALL_ARCHS), never=_listed(never, last="or")
        ),
        "\n".join(f"- {machine}" for machine in ran_on(folder)),
        "## Attention by GPU, dtype and head dim",
        _ATTENTION.format(largest=MAX_HEAD_DIM),
        forward,
        "Backward:",
        backward,
        _FP8,
        fp8,
        _DECODING.format(largest=LARGEST_HEAD_DIM, latent=LATENT_DIMS),
        decoding,
        "## Attention by option",
        features,
        "## Products",
        _PRODUCTS,
        *products,
        "## Releases of torch and Triton",
        _RELEASES.format(oldest=oldest),
        release_table(),
        _NEWER.format(newer=newer, reasons="; ".join(reasons_for_newer())),
    ]
    return "\n\n".join(parts) + "\n"
