"""How far attention in fp8 is from fp64 on the tensors before rounding, by scheme and inputs.

    python -m blackwell_sparsek.testing.fp8_accuracy --write     the table of docs/numerics.md

Everything is computed on a CPU. Weights are rounded to e4m3 as the Hopper kernel rounds them, the
largest of each row being 2^8; sums are exact, so that the figures are those of the rounding alone.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..fp8 import quantize

BEGIN, END = "<!-- fp8 accuracy: begin -->", "<!-- fp8 accuracy: end -->"
_SEED = 20261116


class Inputs(NamedTuple):
    """Queries, keys and values [1, H, S, D] in bf16."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def gaussian(heads: int, tokens: int, dim: int) -> Inputs:
    """Independent normal numbers."""
    return Inputs(*(torch.randn(1, heads, tokens, dim).bfloat16() for _ in range(3)))


def scattered(heads: int, tokens: int, dim: int) -> Inputs:
    """Normal numbers, one in a thousand of them about ten times larger."""
    q, k, v = (
        x + 10 * torch.randn(x.shape) * (torch.rand(x.shape) < 0.001)
        for x in gaussian(heads, tokens, dim)
    )
    return Inputs(q.bfloat16(), k.bfloat16(), v.bfloat16())


def shifted(heads: int, tokens: int, dim: int) -> Inputs:
    """Normal numbers; four channels of the keys are shifted by 30 to 100, four of v as large."""
    q, k, v = (x.float() for x in gaussian(heads, tokens, dim))
    order, large = torch.randperm(dim), torch.linspace(30, 100, 4)
    k[..., order[:4]] += large * torch.randn(heads, 1, 4).sign()
    v[..., order[4:8]] *= large
    return Inputs(q.bfloat16(), k.bfloat16(), v.bfloat16())


def swinging(heads: int, tokens: int, dim: int) -> Inputs:
    """Normal numbers; two channels of q, two others of k and four of v are 30 to 100 times larger.

    Queries are then divided by 30, which leaves scores of a few units.
    """
    q, k, v = (x.float() for x in gaussian(heads, tokens, dim))
    order = torch.randperm(dim)
    for x, channels in ((q, order[:2]), (k, order[2:4]), (v, order[4:8])):
        x[..., channels] *= torch.linspace(30, 100, len(channels))
    return Inputs((q / 30).bfloat16(), k.bfloat16(), v.bfloat16())


def like_a_model(heads: int, tokens: int, dim: int) -> Inputs:
    """Keys around a mean that is larger than their spread, channels of unequal size, heavy tails.

    Queries and keys share directions, as trained ones do, and the first token is a sink: its key
    meets every query, and its value is small.
    """
    size = torch.exp(torch.randn(heads, 1, dim) * 0.7)
    tails = torch.distributions.StudentT(4.0)
    shared = torch.randn(heads, dim, 8) / 8**0.5
    q = torch.randn(1, heads, tokens, 8) @ shared.mT + 0.3 * tails.sample((1, heads, tokens, dim))
    k = torch.randn(1, heads, tokens, 8) @ shared.mT + 0.3 * tails.sample((1, heads, tokens, dim))
    k = k * size + 4 * torch.randn(heads, 1, dim) * size
    q = q / size
    v = tails.sample((1, heads, tokens, dim)) * torch.exp(torch.randn(heads, 1, dim) * 0.5)
    k[:, :, 0] += 4 * q.mean(2) * size[:, 0]
    v[:, :, 0] *= 0.05
    return Inputs(q.bfloat16(), k.bfloat16(), v.bfloat16())


INPUTS: dict[str, Callable[[int, int, int], Inputs]] = {
    "normal": gaussian,
    "scattered outliers": scattered,
    "shifted channels": shifted,
    "swinging channels": swinging,
    "like a model": like_a_model,
}


class Scheme(NamedTuple):
    """How queries and keys, and values, are rounded; None leaves them in bf16."""

    rows: str | None
    values: str = "tensor"
    smooth: bool = False
    hadamard: bool = False


SCHEMES = {
    "bf16": Scheme(None),
    "one scale for a tensor": Scheme("tensor"),
    "one scale for a head": Scheme("head", "head"),
    "128 tokens, values by channel": Scheme("block", "channel"),
    "... and smoothed keys (`bsk.fp8.attention`)": Scheme("block", "channel", smooth=True),
    "... and rotated": Scheme("block", "channel", hadamard=True),
    "... and both": Scheme("block", "channel", smooth=True, hadamard=True),
}


def error(inputs: Inputs, scheme: Scheme) -> float:
    """Norm of the error of the output over the norm of the exact output, causal."""
    q, k, v = (x.double() for x in inputs)
    exact = _attend(q, k, v, None)
    if scheme.rows is None:
        made = _attend(q, k, v, torch.bfloat16)
    else:
        # smoothed keys are not shifted back: softmax does that
        q = quantize(inputs.q, scheme.rows, hadamard=scheme.hadamard).stored()
        k = quantize(inputs.k, scheme.rows, smooth=scheme.smooth, hadamard=scheme.hadamard).stored()
        v = quantize(inputs.v, scheme.values).stored()
        made = _attend(q.double(), k.double(), v.double(), torch.float8_e4m3fn)
    made = made.bfloat16()
    return float((made.double() - exact).norm() / exact.norm())


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.dtype | None
) -> torch.Tensor:
    tokens = q.shape[2]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    p = torch.exp(scores - scores.amax(-1, keepdim=True)) * 256
    total = p.sum(-1, keepdim=True)
    if weights is not None:
        p = p.float().to(weights).double()
    return p @ v / total


def table() -> str:
    """The table as markdown, for 2 heads, 512 tokens, head dim 128: relative errors in percent."""
    torch.manual_seed(_SEED)
    made = {name: make(2, 512, 128) for name, make in INPUTS.items()}
    lines = [f"| scales | {' | '.join(made)} |", "|---" * (len(made) + 1) + "|"]
    for name, scheme in SCHEMES.items():
        errors = (f"{100 * error(inputs, scheme):.2f}" for inputs in made.values())
        lines.append(f"| {name} | {' | '.join(errors)} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the table between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    """Print the table, or write it into docs/numerics.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write it into docs/numerics.md")
    if parser.parse_args().write:
        page = pathlib.Path("docs/numerics.md")
        page.write_text(with_table(page.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
