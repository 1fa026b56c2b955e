"""`bsk tune`: search for faster tiles on this GPU."""

import argparse
import pathlib
import sys
from typing import Any

import torch

from ...core.errors import Unsupported
from ...dispatch.tuned import file_name, write_tiles
from ..tune import PROBLEMS, PRODUCTS, tune_attention, tune_product


def add_to(subparsers: Any) -> None:
    """Declare the command."""
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search all problems and write what is faster than the built-in tiles."""
    if not torch.cuda.is_available():
        raise Unsupported("bsk tune: needs a CUDA GPU: times of an interpreter say nothing")
    found = {}

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with torch.no_grad():
        for problem in PROBLEMS:
            better = tune_attention(problem, torch.device("cuda"), say)
            if better is not None:
                found["attn_fwd", better[0]] = better[1]
        for product in PRODUCTS:
            better = tune_product(product, torch.device("cuda"), say)
            if better is not None:
                found["bsr_spmm", better[0]] = better[1]
    if not found:
        print("The built-in tiles are the fastest: nothing written.")
        return 0
    name = torch.cuda.get_device_name()
    path = args.out / file_name(name)
    write_tiles(path, name, found)
    print(f"Wrote {len(found)} tiles to {path}; BSK_CONFIG_DIR={args.out} makes use of them.")
    return 0
