"""A first comparison with PyTorch on this machine: `python -m blackwell_sparsek.bench.quickstart`.

Every result is checked against fp64 before its time is taken; a failing check is shown and makes
the exit status 1.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from .. import BSRMatrix, attention, explain, masks, matmul
from ..core.errors import BskError
from ..core.progress import Progress
from ..testing.tolerance import assert_within_budget
from .commands import device_of
from .machine import describe_environment
from .suites.matmul import plain_product
from .timing import time_interleaved

OURS = "bsk"


def _rounds(progress: Progress, index: int, name: str) -> Callable[[int, int], None]:
    """Progress callback of a timing; only a terminal shows every round."""

    def show(done: int, count: int) -> None:
        if progress.live:
            progress.stage(index, f"{name}: timing [{'#' * (20 * done // count):<20}]")

    return show


@dataclass(frozen=True)
class Case:
    """One comparison. `check` raises AssertionError when a result is wrong."""

    name: str
    problem: dict[str, Any]
    peer: str
    contenders: dict[str, Callable[[], torch.Tensor]]
    check: Callable[[], None]
    explain: Callable[[], Any]


def cases(device: torch.device, quick: bool) -> Iterator[Callable[[], Case]]:
    """Builders of the cases, in order; each allocates its tensors only when called."""
    for sparsity in (0.50, 0.90) if quick else (0.50, 0.78, 0.90, 0.95):
        yield partial(matmul_case, device, sparsity, quick)
    yield partial(window_case, device, quick)
    yield partial(block_mask_case, device, quick)


def matmul_case(device: torch.device, sparsity: float, quick: bool) -> Case:
    """A block-sparse matrix times a dense one, against torch.matmul on the densified matrix."""
    gpu = device.type == "cuda"
    dtype = torch.float16 if gpu else torch.float32
    m = k = (8192 if gpu else 2048) // (2 if quick else 1)
    n = m if gpu else m // 4
    block = 128 if gpu else 64
    generator = torch.Generator().manual_seed(0)
    keep = _keep_blocks(m // block, k // block, sparsity, generator).to(device)
    dense = torch.randn(m, k, generator=generator).to(device, dtype)
    dense *= keep.repeat_interleave(block, 0).repeat_interleave(block, 1)
    sparse = BSRMatrix.from_mask(dense, keep)
    x = torch.randn(k, n, generator=generator).to(device, dtype)

    def check() -> None:
        # every 32nd column on a GPU, where fp64 on all of them would take longer than the timing
        columns = x[:, :: 32 if gpu else 8]
        exact = dense.double() @ columns.double()
        actual = matmul(sparse, x)[:, :: 32 if gpu else 8]
        assert_within_budget(actual, exact, plain_product(dense, columns, exact), what="matmul")

    return Case(
        f"matmul {sparsity:.0%} sparse",
        {
            "shapes": f"{m}x{k} @ {k}x{n}",
            "block": f"{block}x{block}",
            "dtype": str(dtype).split(".")[-1],
            "kept": round(sparse.density, 4),
        },
        "torch.matmul, dense",
        {OURS: lambda: matmul(sparse, x), "peer": lambda: torch.matmul(dense, x)},
        check,
        lambda: explain(matmul, sparse, x),
    )


def window_case(device: torch.device, quick: bool) -> Case:
    """Causal attention over the 512 latest keys, against causal SDPA, which has no window."""
    gpu = device.type == "cuda"
    length = 4096 if quick else (32768 if gpu else 8192)
    heads, head_dim = (16, 128) if gpu else (4, 64)
    window = 512
    dtype = torch.bfloat16 if gpu else torch.float32
    q, k, v = _qkv(heads, length, head_dim, dtype, device)

    def check() -> None:
        out = _attend(q, k, v, causal=True, window=window)
        for end in (256, length // 2 + 77, length):
            # queries end-256 .. end with the keys before `end` give the same rows as the full
            # problem, because positions align at the last key
            rows = q[:, :, end - 256 : end]
            keys_k, keys_v = k[:, :, :end], v[:, :, :end]
            wide = [x.double() for x in (rows, keys_k, keys_v)]
            exact = _attend(*wide, causal=True, window=window, impl="reference")
            pos = torch.arange(end - 256, end, device=device)[:, None]
            key = torch.arange(end, device=device)
            mask = (key <= pos) & (key > pos - window)
            plain = F.scaled_dot_product_attention(rows, keys_k, keys_v, attn_mask=mask)
            what = f"window attention, queries {end - 256}..{end}"
            assert_within_budget(out[:, :, end - 256 : end], exact, plain, what=what)

    return Case(
        f"attention, window {window}",
        _attention_problem(heads, length, head_dim, dtype, kept=window / (length / 2)),
        "SDPA, causal",
        {
            OURS: lambda: _attend(q, k, v, causal=True, window=window),
            "peer": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        },
        check,
        lambda: explain(attention, q, k, v, causal=True, window=window),
    )


def block_mask_case(device: torch.device, quick: bool) -> Case:
    """Attention to a quarter of the blocks, against SDPA with the same mask as a bool tensor."""
    gpu = device.type == "cuda"
    length = 2048 if quick else (16384 if gpu else 4096)
    heads, head_dim = (16, 128) if gpu else (4, 64)
    dtype = torch.bfloat16 if gpu else torch.float32
    q, k, v = _qkv(heads, length, head_dim, dtype, device)
    generator = torch.Generator().manual_seed(1)
    mask = masks.random(length, 0.25, 128, generator=generator, device=device)
    dense_mask = mask.to_element_mask()

    def check() -> None:
        out = _attend(q, k, v, block_mask=mask)
        for h in range(0, heads, max(1, heads // 4)):
            q_h, k_h, v_h = (x[:, h : h + 1] for x in (q, k, v))
            wide = [x.double() for x in (q_h, k_h, v_h)]
            exact = _attend(*wide, block_mask=mask, impl="reference")
            plain = F.scaled_dot_product_attention(q_h, k_h, v_h, attn_mask=dense_mask)
            what = f"block-masked attention, head {h}"
            assert_within_budget(out[:, h : h + 1], exact, plain, what=what)

    return Case(
        "attention, block mask",
        _attention_problem(heads, length, head_dim, dtype, kept=mask.density, block="128x128"),
        "SDPA, same mask",
        {
            OURS: lambda: _attend(q, k, v, block_mask=mask),
            "peer": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask),
        },
        check,
        lambda: explain(attention, q, k, v, block_mask=mask),
    )


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    out = attention(q, k, v, **options)
    assert isinstance(out, torch.Tensor)  # a pair only with return_lse
    return out


def _keep_blocks(rows: int, cols: int, sparsity: float, generator: torch.Generator) -> torch.Tensor:
    count = round(rows * cols * (1 - sparsity))
    keep = torch.zeros(rows * cols, dtype=torch.bool)
    keep[torch.randperm(rows * cols, generator=generator)[:count]] = True
    return keep.view(rows, cols)


def _qkv(
    heads: int, length: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (1, heads, length, head_dim)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3)]


def _attention_problem(
    heads: int, length: int, head_dim: int, dtype: torch.dtype, kept: float, **more: Any
) -> dict[str, Any]:
    shape = f"1 x {heads} heads x {length} x {head_dim}"
    return {"shapes": shape, "dtype": str(dtype).split(".")[-1], "kept": round(kept, 4), **more}


SCHEMA = 1


def run(
    builders: Iterable[Callable[[], Case]], device: torch.device, budget_s: float
) -> list[dict[str, Any]]:
    """Check and time each case; a case that fails has an `error` instead of times."""
    builders = list(builders)
    progress = Progress("", len(builders))
    results = []
    for index, builder in enumerate(builders):
        progress.stage(index, "preparing")
        case = builder()
        result: dict[str, Any] = {"name": case.name, "problem": case.problem, "peer": case.peer}
        results.append(result)
        with torch.no_grad():
            decision = case.explain()
            result["implementation"] = decision.chosen
            result["why_not"] = dict(decision.reasons)
            progress.stage(index, f"{case.name}: checking against fp64")
            try:
                case.check()
            except Exception as error:  # shown in the table; the other cases still run
                result["error"] = f"{type(error).__name__}: {error}"
                continue
            progress.stage(index, f"{case.name}: timing")
            times = time_interleaved(
                case.contenders,
                device,
                budget_s=budget_s,
                rounds=(3, 50),
                progress=_rounds(progress, index, case.name),
            )
        result["seconds"] = {
            name: {"quantiles": timing.quantiles(), "samples": timing.seconds}
            for name, timing in times.items()
        }
        result["speedup"] = times["peer"].median / times[OURS].median
    progress.close()
    return results


def report(results: Sequence[dict[str, Any]], environment: dict[str, Any]) -> str:
    """Format what ran, the table, and why this implementation was chosen."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [
        f"device    {environment['device_name']} ({environment['arch']}), "
        f"{environment['threads']} threads, {environment['system']}",
        f"versions  {versions}, python {environment['python']}",
        "",
        *_table(results),
        "",
    ]
    chosen = {r["implementation"] for r in results}
    for name in sorted(chosen, key=str):
        lines += _why(name, [r for r in results if r["implementation"] == name])
    failed = [r for r in results if "error" in r]
    if failed:
        lines += ["", *(f"FAILED {r['name']}: {r['error']}" for r in failed)]
    else:
        lines.append("All results agree with fp64 within twice the error of plain PyTorch.")
    lines.append("Times are medians of interleaved runs; the spread is in the JSON file.")
    load, cores = environment["load"], environment["cpu_count"]
    if load > cores / 2:
        lines.append(
            f"Other processes keep this machine busy (load {load:.1f} on {cores} cores at the "
            f"start): run again when it is quiet before believing these times."
        )
    return "\n".join(lines)


def _table(results: Sequence[dict[str, Any]]) -> list[str]:
    rows = [["", "shapes", "dtype", "kept", "bsk ms", "peer ms", "speedup", "ran", "peer"]]
    for r in results:
        problem = r["problem"]
        cells = ["check failed", "-", "-"]
        if "seconds" in r:
            ours, peer = (r["seconds"][c]["quantiles"]["p50"] * 1e3 for c in (OURS, "peer"))
            cells = [f"{ours:.2f}", f"{peer:.2f}", f"{r['speedup']:.2f}x"]
        kept = f"{problem['kept']:.1%}"
        head = [r["name"], problem["shapes"], problem["dtype"], kept]
        rows.append([*head, *cells, str(r["implementation"]), r["peer"]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numbers = (3, 4, 5, 6)
    return [
        "  ".join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _why(name: str | None, results: Sequence[dict[str, Any]]) -> list[str]:
    what = {"eager": "plain PyTorch, work proportional to the kept blocks"}.get(str(name), "")
    lines = [f"Ran the {name} implementation" + (f" ({what})." if what else ".")]
    # a reason that does not apply to every case is printed with the cases it applies to
    cases: dict[tuple[str, str], list[str]] = {}
    for r in results:
        for pair in r["why_not"].items():
            if pair[0] != "reference":
                cases.setdefault(pair, []).append(r["name"])
    for (other, why), names in cases.items():
        of = "" if len(names) == len(results) else f" ({', '.join(names)})"
        lines.append(f"  not {other}: {why}{of}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: run, print the report, write the JSON; 1 when a check fails."""
    parser = argparse.ArgumentParser(
        prog="python -m blackwell_sparsek.bench.quickstart", description=__doc__
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything measured to FILE")
    parser.add_argument("--quick", action="store_true", help="smaller, for a first look")
    parser.add_argument("--device", help="cpu or cuda; the GPU if there is one")
    args = parser.parse_args(argv)
    try:
        device = device_of("quickstart", args.device)
        if args.json:
            open(args.json, "a").close()  # fail now, not after minutes of measuring
    except (BskError, OSError) as error:
        print(error, file=sys.stderr)
        return 2

    started = time.monotonic()
    environment = describe_environment(device)
    results = run(cases(device, args.quick), device, budget_s=0.5 if args.quick else 3.0)
    failed = any("error" in result for result in results)
    print(report(results, environment))
    if args.json:
        document = {
            "schema": SCHEMA,
            "environment": environment,
            "quick": args.quick,
            "passed": not failed,
            "elapsed_s": time.monotonic() - started,
            "cases": results,
        }
        with open(args.json, "w") as file:
            json.dump(document, file, indent=1)
        print(f"Wrote {args.json}.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
