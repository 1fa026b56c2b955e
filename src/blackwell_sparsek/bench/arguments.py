"""The arguments of `bsk`, declared without torch, so that a mistake is answered at once.

The command behind them is named as "module:function" and imported when it runs.
"""

import argparse
import difflib
import math
import pathlib
from collections.abc import Iterable
from typing import Any

from .._version import __version__
from ..core.env import IMPLS
from ..testing.cases import KERNELS
from ..testing.compile_cases import ALL_ARCHS

# eager: single calls between pauses; graph: inside a CUDA graph, where launches cost nothing;
# sustained: back-to-back calls, at the power limit; host: time on the host until a call returns;
# reported: `run` measures itself and returns seconds, as in a fresh process.
MODES = "eager", "graph", "sustained", "host", "reported"
DTYPES = "float16", "bfloat16", "float32"
CACHE_DTYPES = *DTYPES, "float8_e4m3fn"


_LARGEST = 2**63 - 1
"""What torch takes as a size."""


def whole(text: str) -> int | None:
    """The number that `text` writes in digits, or None if it is no size."""
    # `isdecimal`, since "²" is a digit to Python, and no number; short, since int() has a limit
    if not text.isdecimal() or len(text) > len(str(_LARGEST)):
        return None
    return number if 0 < (number := int(text)) <= _LARGEST else None


def positive(text: str) -> int:
    """A whole number of at least 1, as the type of an option.

    Examples
    --------
    >>> positive("8")
    8
    """
    if (number := whole(text)) is None:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a whole number of 1 or more")
    return number


def seconds(text: str) -> float:
    """A time of 0 or more, as the type of an option."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected seconds, 0 or more")
    return value


def architecture(text: str) -> int:
    """A compute capability, 90 for sm_90, as the type of an option.

    Examples
    --------
    >>> architecture("sm_90"), architecture("80")
    (90, 80)
    """
    digits = text.removeprefix("sm_").rstrip("a")
    if (number := whole(digits)) is None or number not in ALL_ARCHS:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected one of {known_architectures()}")
    return number


def known_architectures() -> str:
    """Those that kernels are compiled for."""
    return ", ".join(f"sm_{sm}" for sm in ALL_ARCHS)


def why_no_kernel(text: str) -> str | None:
    """Why no compile case has `text` in its name, or None if some may.

    Examples
    --------
    >>> why_no_kernel("atn_fwd")
    "no kernel has 'atn_fwd' in its name; did you mean attn_fwd or attn_fwd_fp8 or attn_dq?"
    """
    kernel = text.split("/")[0]
    if any(kernel in name for name in KERNELS):
        return None
    return f"no kernel has {kernel!r} in its name; {did_you_mean(kernel, KERNELS)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The names that are most like a mistyped one, or all of them if none is.

    Examples
    --------
    >>> did_you_mean("atention", ["matmul", "attention"])
    'did you mean attention?'
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(known)}"


def kernel_filter(text: str) -> str:
    """Part of a kernel's name, or a kernel, "/" and the beginning of a variant."""
    if (reason := why_no_kernel(text)) is not None:
        raise argparse.ArgumentTypeError(reason)
    return text


def parser() -> argparse.ArgumentParser:
    """All subcommands."""
    top = argparse.ArgumentParser(
        prog="bsk",
        description="Block-sparse products and attention for PyTorch.",
        epilog="Start with `bsk info` and `bsk bench --quick`. Options: `bsk COMMAND --help`.",
    )
    top.add_argument("--version", action="version", version=f"bsk {__version__}")
    subparsers = top.add_subparsers(metavar="COMMAND", dest="command")
    for declare in (_bench, _report, _compare, _profile, _info, _explain, _memory, _compile, _tune):
        declare(subparsers)
    return top


def _bench(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure suites against every installed peer",
        description="Each result is checked against fp64 before it is timed. Times are medians of "
        "interleaved rounds from cold caches. Results are saved after every case. Without a "
        "SUITE, the group `founding` runs, or `quick` with --quick.",
    )
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help="suites or groups of suites; see --list"
    )
    parser.add_argument("--list", action="store_true", help="list suites, groups and peers")
    parser.add_argument("--quick", action="store_true", help="only a few cases, in under a minute")
    parser.add_argument(
        "-o",
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("bsk-results"),
        metavar="DIR",
        help="folder for SUITE.json (default bsk-results)",
    )
    parser.add_argument("--device", help="cpu or cuda (default: the GPU, if there is one)")
    parser.add_argument("--peers", metavar="A,B", help="only these peers; bsk is always measured")
    parser.add_argument(
        "--case",
        metavar="PATTERN",
        help="only cases whose names contain this; * and ? are wildcards",
    )
    parser.add_argument(
        "--mode", action="append", choices=MODES, help="use only this timing mode; can be repeated"
    )
    parser.add_argument(
        "--seconds", type=seconds, default=0.3, metavar="N", help="time per case (default 0.3)"
    )
    parser.add_argument(
        "--prepare",
        type=positive,
        metavar="JOBS",
        help="only compile the kernels of the suites, in this many processes",
    )
    parser.add_argument("--commit", help="commit to record (default: that of the checkout)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--time-left",
        type=seconds,
        metavar="SECONDS",
        help="start no case after this time (default: 45 with --quick, 240 with --prepare)",
    )
    parser.set_defaults(run="bench:run")


def _report(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report", help="turn results files into an HTML page or Markdown tables"
    )
    parser.add_argument(
        "files", nargs="*", type=pathlib.Path, help="JSON files written by `bsk bench`"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("report.html"),
        help="HTML file to write (default report.html)",
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables instead")
    parser.set_defaults(run="report:run")


def _compare(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="list the cases that became slower between two runs",
        description="The exit status is 1 if a case of this package became slower by more than the "
        "noise of both runs, if one fails that used to run, or if there is nothing to compare. It "
        "is 2 if some files cannot be compared.",
    )
    parser.add_argument("old", type=pathlib.Path, help="a results file, or a folder of them")
    parser.add_argument("new", type=pathlib.Path, help="a results file, or a folder of them")
    parser.add_argument(
        "--force", action="store_true", help="compare results of different machines"
    )
    parser.set_defaults(run="compare:run")


def _profile(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="profile a benchmark case with Nsight Compute, or inspect a compiled kernel",
        description="With a GPU and Nsight Compute (ncu), CASE is part of the name of a benchmark "
        "case, and ncu profiles it. Without them, or with --arch, CASE is part of a kernel's name, "
        "such as attn_fwd, or a kernel and the beginning of a variant, attn_fwd/bfloat16; bsk then "
        "prints registers, spills, instructions and occupancy of the compiled kernel.",
    )
    parser.add_argument("case", metavar="CASE", help="part of the name of a case or kernel")
    _add_arch(parser, f"compile for this GPU: {known_architectures()}")
    parser.add_argument(
        "--jobs", type=positive, default=2, metavar="N", help="compiler processes (default 2)"
    )
    parser.set_defaults(run="profile:run")


def _info(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "info", help="show what is installed, what runs here, and why the rest does not"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run="info:run_info")


def _explain(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain", help="show which implementation would run, and why not the others"
    )
    kinds = parser.add_subparsers(metavar="FUNCTION", required=True)
    one = kinds.add_parser("attention", help="a call of bsk.attention")
    one.add_argument("--q", default="1x16x4096x128", metavar="BxHxSxD", help="shape of q")
    one.add_argument("--kv-heads", type=positive, metavar="N", help="default: as many as q has")
    one.add_argument("--kv-length", type=positive, metavar="N", help="default: as long as q")
    one.add_argument("--causal", action="store_true")
    one.add_argument("--window", type=int, metavar="N", help="sliding window of the latest N keys")
    one.add_argument("--block", metavar="QxK", help="random block mask with blocks of this size")
    one.set_defaults(run="info:explain_attention")
    two = kinds.add_parser("matmul", help="a call of bsk.matmul")
    two.add_argument("--weight", default="4096x4096", metavar="RxC", help="shape of the matrix")
    two.add_argument(
        "--n",
        type=positive,
        default=1024,
        metavar="N",
        help="columns of the dense operand, or tokens",
    )
    two.add_argument("--block", default="64x64", metavar="HxW", help="block size of the matrix")
    two.add_argument("--linear", action="store_true", help="explain x @ W.T, as in a linear layer")
    two.set_defaults(run="info:explain_matmul")
    three = kinds.add_parser("decode", help="a call of bsk.attention_decode")
    three.add_argument("--q", default="1x32x1x128", metavar="BxHxSxD", help="shape of q")
    three.add_argument("--kv-heads", type=positive, default=8, metavar="N")
    three.add_argument(
        "--kv-length", type=positive, default=8192, metavar="N", help="cached tokens"
    )
    three.add_argument("--page-size", type=positive, metavar="N", help="default: contiguous")
    three.set_defaults(run="info:explain_decode", density=1.0)
    for each in (one, two):
        each.add_argument(
            "--density", type=float, default=0.22, help="fraction of blocks to keep (default 0.22)"
        )
    for each in (one, two, three):
        each.add_argument("--dtype", choices=DTYPES, default="bfloat16")
        each.add_argument("--impl", choices=IMPLS, default="auto")
        each.add_argument("--device", help="cpu or cuda (default: the GPU, if there is one)")


def _memory(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "memory",
        help="show the memory of KV caches, and what GQA saves",
        description="To describe your own model, pass --layers, --heads and --head-dim; by "
        "default, the table has well-known models.",
    )
    parser.add_argument(
        "--tokens", type=positive, default=16384, help="cached tokens (default 16384)"
    )
    parser.add_argument("--dtype", choices=CACHE_DTYPES, default="bfloat16")
    parser.add_argument("--layers", type=positive, metavar="N")
    parser.add_argument("--heads", metavar="Q:KV", help="query and KV heads, such as 32:8")
    parser.add_argument("--head-dim", type=positive, default=128, metavar="D", help="(default 128)")
    parser.set_defaults(run="info:run_memory")


def _compile(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compile",
        help="compile kernels ahead of their first use",
        description="Compile kernels into Triton's cache. This needs no GPU: copy the cache to the "
        "machine that has one, or include it in a container image.",
    )
    parser.add_argument(
        "filter",
        nargs="?",
        type=kernel_filter,
        default="",
        metavar="KERNEL",
        help="part of a kernel's name, such as attn_fwd, or a kernel and the beginning of a "
        "variant, attn_fwd/bfloat16-d128; without it, all kernels",
    )
    _add_arch(parser, f"{known_architectures()}; default: this GPU")
    parser.add_argument(
        "--jobs", type=positive, default=2, metavar="N", help="compiler processes (default 2)"
    )
    parser.set_defaults(run="precompile:run")


def _add_arch(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("--arch", type=architecture, action="append", metavar="sm_90", help=words)


def _tune(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="search for faster tiles of the portable kernels on this GPU",
        description="To use the tiles, set BSK_CONFIG_DIR to the output folder.",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("bsk-tuned"),
        metavar="DIR",
        help="output folder (default bsk-tuned)",
    )
    parser.set_defaults(run="tune:run")
