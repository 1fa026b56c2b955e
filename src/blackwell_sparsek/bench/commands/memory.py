"""`bsk memory`: what the KV caches of models take."""

import argparse
from typing import Any

import torch

from ...core.errors import InvalidInput
from ...kv_cache.memory import MODELS, KVModel, format_kv_memory_table, kv_memory_table
from .options import positive

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def add_to(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "memory",
        help="say how much memory KV caches take, and what grouped heads save",
        description="Known models, or one of your own: --layers, --heads and --head-dim.",
    )
    parser.add_argument(
        "--tokens", type=positive, default=16384, help="cached tokens (default 16384)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--layers", type=positive, metavar="N")
    parser.add_argument("--heads", metavar="Q:KV", help="query and KV heads, such as 32:8")
    parser.add_argument("--head-dim", type=positive, default=128, metavar="D", help="(default 128)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    if (args.layers is None) != (args.heads is None):
        raise InvalidInput("bsk memory: --layers and --heads describe a model together")
    models = MODELS if args.heads is None else (_model(args),)
    print(format_kv_memory_table(kv_memory_table(models, args.tokens, DTYPES[args.dtype])))
    return 0


def _model(args: argparse.Namespace) -> KVModel:
    query, _, kv = args.heads.partition(":")
    if not (query.isdigit() and (kv or query).isdigit()):
        raise InvalidInput(f"bsk memory: --heads is {args.heads!r}; expected such as 32:8")
    return KVModel("this model", args.layers, int(query), int(kv or query), args.head_dim)
