"""`bsk explain`: which implementation would run, and why not the others."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ... import BSRMatrix, attention, attention_decode, explain, masks, matmul
from ...core.env import IMPLS
from ...core.errors import InvalidInput
from ...sparse.matrix import BSRPattern
from .options import device_of, positive

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def add_to(subparsers: Any) -> None:
    """Declare the command."""
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
    one.set_defaults(run=explain_attention)
    two = kinds.add_parser("matmul", help="of bsk.matmul")
    two.add_argument("--weight", default="4096x4096", metavar="RxC", help="shape of the matrix")
    two.add_argument("--n", type=positive, default=1024, metavar="N", help="columns, or tokens")
    two.add_argument("--block", default="64x64", metavar="HxW", help="blocks of the matrix")
    two.add_argument("--linear", action="store_true", help="x @ W.T, the order of a layer")
    two.set_defaults(run=explain_matmul)
    three = kinds.add_parser("decode", help="of bsk.attention_decode")
    three.add_argument("--q", default="1x32x1x128", metavar="BxHxSxD", help="shape of q")
    three.add_argument("--kv-heads", type=positive, default=8, metavar="N")
    three.add_argument(
        "--kv-length", type=positive, default=8192, metavar="N", help="cached tokens"
    )
    three.add_argument("--page-size", type=positive, metavar="N", help="contiguous unless given")
    three.set_defaults(run=explain_decode, density=1.0)
    for each in (one, two):
        each.add_argument("--density", type=float, default=0.22, help="share of kept blocks")
    for each in (one, two, three):
        each.add_argument("--dtype", choices=DTYPES, default="bfloat16")
        each.add_argument("--impl", choices=IMPLS, default="auto")
        each.add_argument("--device", help="cpu or cuda; the GPU if there is one")


def sizes(option: str, text: str, count: int) -> list[int]:
    """Sizes joined by x.

    Examples
    --------
    >>> sizes("--block", "128x64", 2)
    [128, 64]
    """
    parts = text.lower().split("x")
    if len(parts) != count or not all(part.isdigit() and int(part) > 0 for part in parts):
        example = {2: "64x64", 4: "1x16x4096x128"}[count]
        raise InvalidInput(
            f"bsk explain: {option} is {text!r}; expected {count} sizes such as {example}"
        )
    return [int(part) for part in parts]


def _device(args: argparse.Namespace) -> torch.device:
    if not 0 < args.density <= 1:
        raise InvalidInput(f"bsk explain: --density is {args.density}; expected above 0, up to 1")
    return device_of("bsk explain", args.device)


@contextmanager
def _within_memory() -> Iterator[None]:
    """Operands are made, though not filled: what no memory can hold is no problem to explain."""
    try:
        yield
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise InvalidInput(f"bsk explain: these sizes cannot be allocated here: {first}") from error


def explain_attention(args: argparse.Namespace) -> int:
    """Print the decision for one call of `bsk.attention`."""
    device = _device(args)
    batch, heads, length, dim = sizes("--q", args.q, 4)
    kv_length, kv_heads = args.kv_length or length, args.kv_heads or heads
    options: Any = {"dtype": DTYPES[args.dtype], "device": device}
    mask = None
    with _within_memory():
        q = torch.empty(batch, heads, length, dim, **options)
        k = torch.empty(batch, kv_heads, kv_length, dim, **options)
        if args.block is not None:
            bq, bk = sizes("--block", args.block, 2)
            mask = masks.random((length, kv_length), args.density, (bq, bk), device=device)
    asked = {"causal": args.causal, "window": args.window, "block_mask": mask, "impl": args.impl}
    print(explain(attention, q, k, k, **asked))
    return 0


def explain_decode(args: argparse.Namespace) -> int:
    """Print the decision for one call of `bsk.attention_decode`."""
    device = _device(args)
    batch, heads, queries, dim = sizes("--q", args.q, 4)
    options: Any = {"dtype": DTYPES[args.dtype], "device": device}
    table = None
    with _within_memory():
        q = torch.empty(batch, heads, queries, dim, **options)
        lengths = torch.full((batch,), args.kv_length, dtype=torch.int32, device=device)
        if args.page_size is None:
            cache = torch.empty(batch, args.kv_heads, args.kv_length, dim, **options)
        else:
            pages = -(-args.kv_length // args.page_size)
            cache = torch.empty(batch * pages, args.page_size, args.kv_heads, dim, **options)
            table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    asked = {"cache_seqlens": lengths, "page_table": table, "impl": args.impl}
    print(explain(attention_decode, q, cache, cache, **asked))
    return 0


def _somewhere(blocks: int, shape: tuple[int, int], values: torch.Tensor) -> BSRPattern:
    """A pattern of so many blocks: where they are is for the kernels, which do not run."""
    anywhere = torch.zeros(1, dtype=torch.int32, device=values.device).expand(blocks)
    pattern = BSRPattern.__new__(BSRPattern)
    pattern._set([anywhere] * 5, anywhere, shape, (values.shape[1], values.shape[2]))
    return pattern


def explain_matmul(args: argparse.Namespace) -> int:
    """Print the decision for one call of `bsk.matmul`."""
    device = _device(args)
    rows, columns = sizes("--weight", args.weight, 2)
    height, width = sizes("--block", args.block, 2)
    blocks = -(-rows // height) * -(-columns // width)
    stored = max(1, round(args.density * blocks))
    options: Any = {"dtype": DTYPES[args.dtype], "device": device}
    with _within_memory():
        values = torch.empty(stored, height, width, **options)
        x = torch.empty((args.n, columns) if args.linear else (columns, args.n), **options)
    sparse = BSRMatrix._from_parts(_somewhere(stored, (rows, columns), values), values)
    pair = (x, sparse.T) if args.linear else (sparse, x)
    print(explain(matmul, *pair, impl=args.impl))
    return 0
