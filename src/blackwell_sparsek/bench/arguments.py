"""The arguments of `bsk`, declared without torch, so that a mistake is answered at once.

The command behind them is named as "module:function" and imported when it runs.
"""

import argparse
import difflib
import math
import pathlib
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
    near = difflib.get_close_matches(kernel, KERNELS, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(KERNELS)}"
    return f"no kernel has {kernel!r} in its name; {hint}"


def kernel_filter(text: str) -> str:
    """Part of a kernel's name, or a kernel, "/" and the beginning of a variant."""
    if (reason := why_no_kernel(text)) is not None:
        raise argparse.ArgumentTypeError(reason)
    return text


def parser() -> argparse.ArgumentParser:
    """All subcommands."""
    top = argparse.ArgumentParser(
        prog="bsk", description="Block-sparse products and attention for PyTorch."
    )
    top.add_argument("--version", action="version", version=f"bsk {__version__}")
    subparsers = top.add_subparsers(metavar="COMMAND", dest="command")
    for declare in (_bench, _report, _compare, _profile, _info, _explain, _memory, _compile, _tune):
        declare(subparsers)
    return top


def _bench(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure suites against every peer that is installed",
        description="Every result is checked against fp64 before it is timed. Times are medians of "
        "interleaved rounds from cold caches. Results are kept after every case.",
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="suites or groups; see --list")
    parser.add_argument("--list", action="store_true", help="list suites, groups and peers")
    parser.add_argument("--quick", action="store_true", help="a few cases, under a minute in all")
    parser.add_argument(
        "-o",
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("bsk-results"),
        metavar="DIR",
        help="where SUITE.json goes (default bsk-results)",
    )
    parser.add_argument("--device", help="cpu or cuda; the GPU if there is one")
    parser.add_argument("--peers", metavar="A,B", help="only these peers; bsk always takes part")
    parser.add_argument("--case", metavar="PATTERN", help="only cases with this in their name")
    parser.add_argument("--mode", action="append", choices=MODES, help="only these ways of timing")
    parser.add_argument(
        "--seconds", type=seconds, default=0.3, metavar="N", help="for each case (default 0.3)"
    )
    parser.add_argument(
        "--prepare",
        type=positive,
        metavar="JOBS",
        help="time nothing: compile what the suites need in this many processes",
    )
    parser.add_argument("--commit", help="what to note where this is no git checkout")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--time-left",
        type=seconds,
        metavar="SECONDS",
        help="begin nothing after this time (default 45 with --quick, 240 with --prepare)",
    )
    parser.set_defaults(run="bench:run")


def _report(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report", help="make one HTML page of results files, or Markdown tables"
    )
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="results files")
    parser.add_argument(
        "-o",
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("report.html"),
        help="the page (default report.html)",
    )
    parser.add_argument("--markdown", action="store_true", help="print tables instead")
    parser.add_argument(
        "--write",
        action="store_true",
        help="rewrite docs/support.md, and figures of README.md and docs/results/ from "
        "benchmarks/results",
    )
    parser.set_defaults(run="report:run")


def _compare(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="say what became slower between two runs",
        description="The exit status is 1 when a case of ours became slower beyond the noise of "
        "both runs, or does not run any more, and when there is nothing to compare; 2 when some "
        "files cannot be compared.",
    )
    parser.add_argument("old", type=pathlib.Path, help="a results file, or a folder of them")
    parser.add_argument("new", type=pathlib.Path, help="a results file, or a folder of them")
    parser.add_argument("--force", action="store_true", help="even if the machines differ")
    parser.set_defaults(run="compare:run")


def _profile(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure a case with ncu, or read registers and instructions of a kernel",
        description="CASE is part of the name of a benchmark case (see `bsk bench`) where ncu and "
        "a GPU are here. Otherwise, and with --arch, it is part of the name of a kernel variant, "
        "and the profile is static: what the compiler made of it, for any GPU. A part of a variant "
        "stands after its kernel: attn_fwd/bfloat16.",
    )
    parser.add_argument("case", metavar="CASE", help="part of a name")
    _add_arch(parser, "static, for this GPU")
    parser.add_argument("--jobs", type=positive, default=2, help="compiling processes (default 2)")
    parser.set_defaults(run="profile:run")


def _info(subparsers: Any) -> None:
    parser = subparsers.add_parser("info", help="say what is installed, what runs here and why")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run="info:run_info")


def _explain(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain", help="say which implementation would run, and why not the others"
    )
    kinds = parser.add_subparsers(metavar="FUNCTION", required=True)
    one = kinds.add_parser("attention", help="of bsk.attention")
    one.add_argument("--q", default="1x16x4096x128", metavar="BxHxSxD", help="shape of q")
    one.add_argument("--kv-heads", type=positive, metavar="N", help="as many as q has unless given")
    one.add_argument("--kv-length", type=positive, metavar="N", help="as long as q unless given")
    one.add_argument("--causal", action="store_true")
    one.add_argument("--window", type=int, metavar="N", help="the N latest keys")
    one.add_argument("--block", metavar="QxK", help="blocks of a random block mask")
    one.set_defaults(run="info:explain_attention")
    two = kinds.add_parser("matmul", help="of bsk.matmul")
    two.add_argument("--weight", default="4096x4096", metavar="RxC", help="shape of the matrix")
    two.add_argument("--n", type=positive, default=1024, metavar="N", help="columns, or tokens")
    two.add_argument("--block", default="64x64", metavar="HxW", help="blocks of the matrix")
    two.add_argument("--linear", action="store_true", help="x @ W.T, the order of a layer")
    two.set_defaults(run="info:explain_matmul")
    three = kinds.add_parser("decode", help="of bsk.attention_decode")
    three.add_argument("--q", default="1x32x1x128", metavar="BxHxSxD", help="shape of q")
    three.add_argument("--kv-heads", type=positive, default=8, metavar="N")
    three.add_argument(
        "--kv-length", type=positive, default=8192, metavar="N", help="cached tokens"
    )
    three.add_argument("--page-size", type=positive, metavar="N", help="contiguous unless given")
    three.set_defaults(run="info:explain_decode", density=1.0)
    for each in (one, two):
        each.add_argument("--density", type=float, default=0.22, help="share of kept blocks")
    for each in (one, two, three):
        each.add_argument("--dtype", choices=DTYPES, default="bfloat16")
        each.add_argument("--impl", choices=IMPLS, default="auto")
        each.add_argument("--device", help="cpu or cuda; the GPU if there is one")


def _memory(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "memory",
        help="say how much memory KV caches take, and what grouped heads save",
        description="Known models, or one of your own: --layers, --heads and --head-dim.",
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
        help="compile kernels for a GPU ahead of their first use",
        description="Builds every variant that is listed for a kernel into Triton's cache. Works "
        "without a GPU: copy the cache, or make it part of an image.",
    )
    parser.add_argument(
        "filter",
        nargs="?",
        type=kernel_filter,
        default="",
        help="part of a kernel's name, such as attn_fwd, or with the beginning of a variant, "
        "attn_fwd/bfloat16-d128",
    )
    _add_arch(parser, f"this GPU's unless given; {known_architectures()}")
    parser.add_argument("--jobs", type=positive, default=2, help="processes (default 2)")
    parser.set_defaults(run="precompile:run")


def _add_arch(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("--arch", type=architecture, action="append", metavar="sm_90", help=words)


def _tune(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="search for faster tiles of the portable kernels on this GPU",
        description="What is found is used only by processes in which BSK_CONFIG_DIR names the "
        "folder it was written to.",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("bsk-tuned"),
        metavar="DIR",
        help="where device_name=....json goes (default bsk-tuned)",
    )
    parser.set_defaults(run="tune:run")
