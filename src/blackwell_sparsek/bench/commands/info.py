"""`bsk info`: what is here, what runs on it, and why the rest does not."""

import argparse
import json
import os
import pathlib
import shutil
import stat
from typing import Any

import torch

from ... import BSRMatrix, attention, attention_decode, explain, matmul
from ...core.compat import why_triton_fails
from ...core.env import config_dir, triton_cache_dir, triton_overrides
from ..environment import describe_environment, source_commit
from ..suites import SUITES

# Root's, and the group of this user, which on most systems has no other members.
_OWN_GROUPS = (0, os.getgid() if hasattr(os, "getgid") else 0)


def add_to(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("info", help="say what is installed, what runs here and why")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was found."""
    found = gathered(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(json.dumps(found, indent=1) if args.json else told(found))
    return 0


def gathered(device: torch.device) -> dict[str, Any]:
    """Environment, implementations, peers, tools and caches."""
    peers = {peer.name: peer for suite in SUITES.values() for peer in suite.peers.values()}
    tools = ("ncu", "nsys", "nvidia-smi", "chromium")
    return {
        "environment": describe_environment(device),
        "commit": source_commit(),
        "triton": why_triton_fails() or "can compile kernels",
        "implementations": _implementations(device),
        "peers": {
            name: peer.available() or "installed" for name, peer in peers.items() if peer.rival
        },
        "tools": {name: shutil.which(name) or "not found" for name in tools},
        "cache": cache_state(pathlib.Path(triton_cache_dir())),
        "overrides": triton_overrides(),
        "tuned_tiles": config_dir() or "off (BSK_CONFIG_DIR is not set)",
    }


def _implementations(device: torch.device) -> dict[str, dict[str, str]]:
    """For calls of usual sizes: what runs, and why not the others."""
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
    """Where compiled kernels are kept, how much of it, and whether anybody else may write there.

    Triton loads and runs what it finds in this folder, so whoever can write there can run code.
    """
    if not folder.exists():
        return {"folder": str(folder), "size": "not there yet", "safety": "made at first use"}
    if not folder.is_dir():
        return {"folder": str(folder), "size": "none", "safety": "UNUSABLE: is not a folder"}
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return {
        "folder": str(folder),
        "size": f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB",
        "safety": unsafe(folder) or "only its owner can write there",
    }


def unsafe(folder: pathlib.Path) -> str | None:
    """Who besides this user could put code into a folder, or None."""
    for place in (folder, *folder.resolve().parents):
        state = place.stat()
        if hasattr(os, "getuid") and state.st_uid not in (0, os.getuid()):
            return f"UNSAFE: {place} belongs to another user (uid {state.st_uid})"
        # others may write, and no sticky bit keeps what they did not make
        if state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX:
            return f"UNSAFE: everybody can write to {place}"
        if place == folder and state.st_mode & stat.S_IWOTH:
            return f"UNSAFE: everybody can write to {place}"
        if state.st_mode & stat.S_IWGRP and state.st_gid not in _OWN_GROUPS:
            return f"UNSAFE: the group {state.st_gid} can write to {place}"
    return None


def told(found: dict[str, Any]) -> str:
    """The same for people."""
    environment = found["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [
        f"device    {environment['device_name']} ({environment['arch']}), {environment['system']}",
        f"versions  {versions}, python {environment['python']}",
        f"commit    {found['commit'] or 'no git checkout'}",
        f"triton    {found['triton']}",
        f"tiles     {found['tuned_tiles']}",
    ]
    for name, value in found["overrides"].items():
        lines.append(f"override  {name}={value}: Triton takes code or tools from there")
    for title in ("implementations", "peers", "tools", "cache"):
        lines += ["", title]
        for name, value in found[title].items():
            lines += _entry(name, value)
    return "\n".join(lines)


def _entry(name: str, value: str | dict[str, str]) -> list[str]:
    if isinstance(value, dict):
        return [f"  {name}", *(f"    {key:<12} {text}" for key, text in value.items())]
    return [f"  {name:<16} {value}"]
