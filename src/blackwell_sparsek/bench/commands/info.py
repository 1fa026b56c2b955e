"""`bsk info`, `bsk explain` and `bsk memory`: questions answered without measuring anything."""

import argparse
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ... import BSRMatrix, attention, attention_decode, explain, masks, matmul
from ...core.arch import Arch, arch_of
from ...core.compat import why_no_gluon, why_torch_misses_gpu, why_triton_fails
from ...core.env import config_dir, triton_cache_dir, triton_overrides
from ...core.errors import BskError, InvalidInput
from ...dispatch.dispatcher import how_launched
from ...dispatch.tuned import file_name
from ...kv_cache.memory import MODELS, KVModel, format_kv_memory_table, kv_memory_table
from ...sparse.matrix import BSRPattern
from ..arguments import whole
from ..machine import describe_environment, source_commit
from ..suites import SUITES
from ..support import KERNELS, verdict
from . import device_of

# Root's group, and this user's own, which on most systems has no other members.
_OWN_GROUPS = (0, os.getgid() if hasattr(os, "getgid") else 0)


def run_info(args: argparse.Namespace) -> int:
    """Print what was found."""
    found = gathered(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(json.dumps(found, indent=1) if args.json else told(found))
    return 0


def gathered(device: torch.device) -> dict[str, Any]:
    """Environment, implementations, kernels, peers, tools and caches."""
    arch = arch_of(device)
    peers = {peer.name: peer for suite in SUITES.values() for peer in suite.peers.values()}
    tools = ("ncu", "nsys", "nvidia-smi", "chromium")
    return {
        "environment": describe_environment(device),
        "commit": source_commit(),
        "gpu": why_torch_misses_gpu(),
        "triton": _triton(),
        "launching": _launching(arch),
        "implementations": _implementations(device),
        "kernels": {kernels.name: verdict(kernels, arch) for kernels in KERNELS},
        "peers": {
            name: peer.available() or "installed" for name, peer in peers.items() if peer.rival
        },
        "tools": {name: shutil.which(name) or "not found" for name in tools},
        "cache": cache_state(pathlib.Path(triton_cache_dir())),
        "overrides": triton_overrides(),
        "tuned_tiles": _tuned_tiles(device),
    }


def _triton() -> str:
    """What this Triton is good for, or what runs without one."""
    if (reason := why_triton_fails()) is not None:
        return f"{reason}; plain PyTorch runs instead"
    if (reason := why_no_gluon()) is not None:
        return f"can compile the portable kernels only: {reason}"
    return "can compile kernels"


def _tuned_tiles(device: torch.device) -> str:
    """The folder that `BSK_CONFIG_DIR` names, and why its tiles are not used if they are not."""
    folder = config_dir()
    if folder is None:
        return "off (BSK_CONFIG_DIR is not set)"
    if not pathlib.Path(folder).is_dir():
        return f"{folder} (no such folder; built-in tiles are used)"
    if device.type != "cuda":
        return f"{folder} (not used on a CPU)"
    name = file_name(torch.cuda.get_device_name(device))
    missing = not (pathlib.Path(folder) / name).exists()
    return f"{folder} (it has no {name}; built-in tiles are used)" if missing else folder


def _launching(arch: Arch) -> str:
    compiles = arch.sm and not arch.interpreted and why_triton_fails() is None
    return how_launched() if compiles else f"no compiled kernels on {arch}"


def _implementations(device: torch.device) -> dict[str, dict[str, str]]:
    """For calls of usual sizes: which implementation runs, and why the others do not."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.empty(1, 8, 1024, 128, dtype=dtype, device=device)
    weight = torch.zeros(1024, 1024, dtype=dtype, device=device)
    sparse = BSRMatrix.from_mask(weight, torch.eye(8, dtype=torch.bool, device=device))
    lengths = torch.full((1,), q.shape[2], dtype=torch.int32, device=device)
    decisions = {
        "attention": explain(attention, q, q, q, causal=True),
        "attention_decode": explain(attention_decode, q[:, :, :1], q, q, cache_seqlens=lengths),
        "matmul": explain(matmul, sparse, weight),
    }
    return {
        name: {decision.chosen or "nothing": "runs", **decision.reasons}
        for name, decision in decisions.items()
    }


def cache_state(folder: pathlib.Path) -> dict[str, str]:
    """Where compiled kernels are cached, their size, and whether other users may write there.

    Triton loads and runs what it finds in this folder, so a user who can write there can run code.
    """
    if not folder.exists():
        absent = {"size": "does not exist yet", "safety": "created at first use"}
        return {"folder": str(folder), **absent}
    if not folder.is_dir():
        return {"folder": str(folder), "size": "none", "safety": "UNUSABLE: it is not a folder"}
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return {
        "folder": str(folder),
        "size": f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB",
        "safety": unsafe(folder) or "only its owner can write to it",
    }


def unsafe(folder: pathlib.Path) -> str | None:
    """A message saying which other users could put code into a folder, or None."""
    for place in (folder, *folder.resolve().parents):
        state = place.stat()
        if hasattr(os, "getuid") and state.st_uid not in (0, os.getuid()):
            return f"UNSAFE: {place} belongs to another user (uid {state.st_uid})"
        # without the sticky bit, users who may write here may also replace the files of others
        if state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX:
            return f"UNSAFE: anyone can write to {place}"
        if place == folder and state.st_mode & stat.S_IWOTH:
            return f"UNSAFE: anyone can write to {place}"
        if state.st_mode & stat.S_IWGRP and state.st_gid not in _OWN_GROUPS:
            return f"UNSAFE: the group {state.st_gid} can write to {place}"
    return None


def told(found: dict[str, Any]) -> str:
    """The same facts as readable text."""
    environment = found["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [
        f"device    {environment['device_name']} ({environment['arch']}), {environment['system']}",
        f"versions  {versions}, python {environment['python']}",
        f"commit    {found['commit'] or 'no git checkout'}",
        *([] if found["gpu"] is None else [f"gpu       {found['gpu']}; the CPU is used instead"]),
        f"triton    {found['triton']}",
        f"launching {found['launching']}",
        f"tiles     {found['tuned_tiles']}",
    ]
    for name, value in found["overrides"].items():
        lines.append(f"override  {name}={value}: Triton takes code or tools from there")
    for title in ("implementations", "kernels", "peers", "tools", "cache"):
        lines += ["", title]
        width = max(16, *map(len, found[title]))
        for name, value in found[title].items():
            lines += _entry(name, value, width)
    return "\n".join(lines)


def _entry(name: str, value: str | dict[str, str], width: int) -> list[str]:
    if isinstance(value, dict):
        return [f"  {name}", *(f"    {key:<12} {text}" for key, text in value.items())]
    return [f"  {name:<{width}} {value}"]


def sizes(option: str, text: str, count: int) -> list[int]:
    """Parse sizes joined by x.

    Examples
    --------
    >>> sizes("--block", "128x64", 2)
    [128, 64]
    """
    found = [number for part in text.lower().split("x") if (number := whole(part)) is not None]
    if len(found) != count or text.lower().count("x") != count - 1:
        example = {2: "64x64", 4: "1x16x4096x128"}[count]
        raise InvalidInput(
            f"bsk explain: {option} is {text!r}; expected {count} sizes such as {example}"
        )
    return found


def _device(args: argparse.Namespace) -> torch.device:
    if not 0 < args.density <= 1:
        raise InvalidInput(f"bsk explain: --density is {args.density}; expected above 0, up to 1")
    return device_of("bsk explain", args.device)


@contextmanager
def _within_memory() -> Iterator[None]:
    """Report operands too large to allocate as invalid input: `explain` needs them, unfilled."""
    try:
        yield
    except BskError:
        raise
    except (RuntimeError, TypeError) as error:  # a TypeError: the product of two is no size
        first = str(error).splitlines()[0]
        raise InvalidInput(f"bsk explain: these sizes cannot be allocated here: {first}") from error


def explain_attention(args: argparse.Namespace) -> int:
    """Print the decision for one call of `bsk.attention`."""
    device = _device(args)
    batch, heads, length, dim = sizes("--q", args.q, 4)
    kv_length, kv_heads = args.kv_length or length, args.kv_heads or heads
    options: Any = {"dtype": getattr(torch, args.dtype), "device": device}
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
    options: Any = {"dtype": getattr(torch, args.dtype), "device": device}
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
    """A pattern with this many blocks at no valid positions: only kernels read them, none runs."""
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
    options: Any = {"dtype": getattr(torch, args.dtype), "device": device}
    with _within_memory():
        values = torch.empty(stored, height, width, **options)
        x = torch.empty((args.n, columns) if args.linear else (columns, args.n), **options)
    sparse = BSRMatrix._from_parts(_somewhere(stored, (rows, columns), values), values)
    pair = (x, sparse.T) if args.linear else (sparse, x)
    print(explain(matmul, *pair, impl=args.impl))
    return 0


def run_memory(args: argparse.Namespace) -> int:
    """Print the table."""
    if (args.layers is None) != (args.heads is None):
        raise InvalidInput("bsk memory: --layers and --heads must be given together")
    models = MODELS if args.heads is None else (_model_of(args),)
    print(format_kv_memory_table(kv_memory_table(models, args.tokens, getattr(torch, args.dtype))))
    return 0


def _model_of(args: argparse.Namespace) -> KVModel:
    first, _, second = args.heads.partition(":")
    query, kv = whole(first), whole(second or first)
    if query is None or kv is None:
        raise InvalidInput(f"bsk memory: --heads is {args.heads!r}; expected Q:KV, such as 32:8")
    if query % kv:
        raise InvalidInput(
            f"bsk memory: --heads is {args.heads!r}; expected a multiple of its {kv} KV heads"
        )
    return KVModel("this model", args.layers, query, kv, args.head_dim)
