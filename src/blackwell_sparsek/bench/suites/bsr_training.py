"""Training steps of block-sparse layers: forward pass and both gradients, against dense layers.

A step is y = x @ W.T, then the gradients of x and of the stored blocks of W, each by one product.
Times are those of single calls: a step includes what autograd and the launches cost the host.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ... import BSRMatrix, explain, matmul, sddmm
from ...testing.tolerance import assert_within_budget
from ..case import EAGER, Case, Contender, Peer, Suite
from .matmul import DENSE, LLAMA, OURS, Product, ProductInputs, plain_product

# Products of a step, each as large as the forward pass.
PRODUCTS = 3
_CHECKED = 64
# Microbatches of a layer of Llama 3 8B.
TOKENS = 4096


class Step(NamedTuple):
    """What a step computes: y and the gradients of x and of the weight, dense ones [M, K]."""

    y: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor


@dataclass(frozen=True)
class StepInputs:
    """A layer with its input, and the gradient of its output."""

    layer: ProductInputs
    dy: torch.Tensor

    @classmethod
    def build(cls, product: Product, device: torch.device) -> "StepInputs":
        """Random values and a random pattern of exactly this density, the same at each call."""
        layer = product.build(device)
        generator = torch.Generator(device).manual_seed(1)
        shape = (product.n, product.rows)
        dy = torch.randn(shape, generator=generator, device=device, dtype=product.dtype)
        return cls(layer, dy)

    def check(self, *, blocks: bool) -> Callable[[Step], None]:
        """Compare samples with fp64; `blocks` says that dw holds stored blocks."""
        weight, x, dy, sparse = self.layer.dense, self.layer.x, self.dy, self.layer.sparse
        tokens = torch.linspace(0, x.shape[0] - 1, min(_CHECKED, x.shape[0])).long()
        tokens = tokens.to(x.device)

        def compare(step: Step) -> None:
            y, dx, dw = step
            _compare(y[tokens], x[tokens], weight.mT, "y")
            _compare(dx[tokens], dy[tokens], weight, "dx")
            bh, bw = sparse.block_shape
            rows = sparse.pattern.row_indices()
            for entry in (0, sparse.nnz_blocks // 2, sparse.nnz_blocks - 1):
                row, col = int(rows[entry]) * bh, int(sparse.pattern.indices[entry]) * bw
                got = dw[entry] if blocks else dw[row : row + bh, col : col + bw]
                some = dy[:, row : row + bh].mT, x[:, col : col + bw]
                _compare(got, *some, f"dw of block {entry}")

        return compare


def _compare(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    exact = a.double() @ b.double()
    assert_within_budget(got, exact, plain_product(a, b, exact), what=what)


def _ours(inputs: StepInputs) -> Contender:
    sparse = inputs.layer.sparse
    storage = sparse.storage.detach().requires_grad_()
    weight = BSRMatrix._from_parts(sparse.pattern, storage)
    x = inputs.layer.x.detach().requires_grad_()

    def run() -> Step:
        with torch.enable_grad():
            y = matmul(x, weight.T)
        dx, dw = torch.autograd.grad(y, (x, storage), inputs.dy)
        return Step(y.detach(), dx, dw)

    chosen = {
        "forward": explain(matmul, x.detach(), sparse.T).chosen,
        "dx": explain(matmul, inputs.dy, sparse).chosen,
        "dw": explain(sddmm, inputs.dy.mT, x.detach(), sparse.pattern).chosen,
    }
    elements = inputs.layer.dense.numel()
    executed = sum(elements if impl == "dense" else inputs.layer.stored for impl in chosen.values())
    flops = 2.0 * executed * inputs.layer.product.n
    return Contender(run, inputs.check(blocks=True), flops, notes={"implementation": chosen})


def _dense(inputs: StepInputs) -> Contender:
    weight = inputs.layer.dense.detach().requires_grad_()
    x = inputs.layer.x.detach().requires_grad_()

    def run() -> Step:
        with torch.enable_grad():
            y = F.linear(x, weight)
        dx, dw = torch.autograd.grad(y, (x, weight), inputs.dy)
        return Step(y.detach(), dx, dw)

    flops = PRODUCTS * inputs.layer.product.dense_flops
    return Contender(run, inputs.check(blocks=False), flops)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "blackwell_sparsek, impl auto", _ours),
        Peer(DENSE, "dense layer of torch (cuBLAS on a GPU)", _dense),
    )
}


def training_steps(tiny: bool = False) -> Iterator[Case]:
    """Forward and gradients of block-sparse layers, x @ W.T, against dense layers."""
    dtype = torch.float32 if tiny else torch.bfloat16
    size = 256 if tiny else 8192
    cube = Product(size, size, size, (128, 128), 0.22, dtype, linear=True)
    for block in ((128, 128), (64, 64), (32, 32), (16, 16)):
        yield _case(replace(cube, block=block), f"{size}^3")
    for density in (0.1, 0.3, 0.5):
        for block in ((128, 128), (64, 64)):
            yield _case(replace(cube, block=block, density=density), f"{size}^3")
    shrink, tokens = (16, 64) if tiny else (1, TOKENS)
    for name in ("8B qkv", "8B o", "8B gate_up", "8B down"):
        rows, inner = (side // shrink for side in LLAMA[name])
        for block in ((128, 128), (64, 64)):
            layer = Product(rows, inner, tokens, block, 0.22, dtype, linear=True)
            yield _case(layer, f"{name}, {tokens} tokens")
    # shapes that lost to dense layers before there was a Hopper kernel for dw
    for rows, inner, n, block, density in (
        (5120, 13824, 4096, (64, 64), 0.3),
        (13824, 5120, 4096, (128, 128), 0.1),
        (5120, 13824, 2048, (128, 64), 0.5),
        (8192, 28672, 1024, (32, 32), 0.2),
        (5120, 5120, 32, (64, 64), 0.2),
    ):
        shape = (rows // 8 // 128 * 128, inner // 8 // 128 * 128, 32) if tiny else (rows, inner, n)
        product = Product(*shape, block, density, dtype, linear=True)
        yield _case(product, f"{shape[0]}x{shape[1]}, {shape[2]} tokens")


def _case(product: Product, name: str) -> Case:
    block = f"{product.block[0]}x{product.block[1]}"

    def build(device: torch.device) -> Any:
        return StepInputs.build(product, device)

    return Case(
        f"{name}, blocks {block}, {1 - product.density:.0%} sparse",
        product.describe(),
        build,
        (OURS, DENSE),
        PRODUCTS * product.dense_flops,
        (EAGER,),
    )


SUITES = [Suite("bsr_training", training_steps.__doc__ or "", training_steps, PEERS, OURS, DENSE)]
