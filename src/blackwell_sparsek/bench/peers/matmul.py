"""Who computes block-sparse products: this package, torch's dense and sparse products, cuSPARSE.

Executed work is that of stored elements. Zeros that a kernel multiplies because it packs small
blocks do not count, except in dense products, which multiply all of them.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ... import BSRMatrix, explain, matmul
from ..case import Contender, Peer
from ..problems.product import ProductInputs
from ..timing import time_interleaved

OURS, STORED = "bsk", "bsk_stored"
DENSE, PACKED = "dense", "dense_packed_k"
TORCH, TUNED, CUSPARSE = "torch_bsr", "torch_bsr_tuned", "cusparse_csr"

# How long the search for torch's best parameters may take; what was found by then counts.
_SEARCH_S = 4.0


def _ours(inputs: ProductInputs, impl: str = "auto") -> Contender:
    linear, sparse, x = inputs.product.linear, inputs.sparse, inputs.x

    def product(w: BSRMatrix) -> torch.Tensor:
        return matmul(x, w.T, impl=impl) if linear else matmul(w, x, impl=impl)

    decision = explain(product, sparse)
    elements = inputs.dense.numel() if decision.chosen == "dense" else inputs.stored
    return Contender(
        lambda: product(sparse),
        inputs.check(),
        2.0 * elements * inputs.product.n,
        tuple(
            partial(product, BSRMatrix._from_parts(sparse.pattern, s))
            for s in inputs.replicas(sparse.storage)
        ),
        {"implementation": decision.chosen, "why_not": decision.reasons},
    )


def _stored(inputs: ProductInputs) -> Contender:
    """The first implementation that works on stored blocks, even where `auto` takes another."""
    sparse, x = inputs.sparse, inputs.x
    for impl in ("sm90", "triton") if x.is_cuda else ():
        pair = (x, sparse.T) if inputs.product.linear else (sparse, x)
        if explain(matmul, *pair, impl=impl).chosen == impl:
            return _ours(inputs, impl)
    return _ours(inputs, "eager")


def _dense(inputs: ProductInputs) -> Contender:
    return _dense_product(inputs, inputs.dense, inputs.x)


def _packed(inputs: ProductInputs) -> Contender:
    """A dense product of the same work: what the stored blocks would take with no gaps at all."""
    width = round(inputs.product.inner * inputs.sparse.density)
    # cuBLAS has slower kernels for rows that do not begin on 16 bytes
    width = round(width / 64) * 64 if width >= 64 else width
    weight = inputs.dense.new_empty(inputs.product.rows, width).normal_()
    x = inputs.x[:, :width] if inputs.product.linear else inputs.x[:width]
    return _dense_product(inputs, weight, x.contiguous())


def _dense_product(inputs: ProductInputs, weight: torch.Tensor, x: torch.Tensor) -> Contender:
    def product(w: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, w.mT) if inputs.product.linear else torch.matmul(w, x)

    return Contender(
        lambda: product(weight),
        inputs.check(weight, x),
        2.0 * weight.numel() * inputs.product.n,
        tuple(partial(product, w) for w in inputs.replicas(weight)),
    )


def _torch_bsr(inputs: ProductInputs) -> Contender:
    bsr = _quietly(inputs.sparse.to_torch)
    flops = 2.0 * inputs.stored * inputs.product.n
    return Contender(lambda: _quietly(lambda: bsr @ inputs.x), inputs.check(), flops)


def _torch_bsr_tuned(inputs: ProductInputs) -> Contender:
    """torch's kernel with the best of a few parameters; `bsr @ x` itself has none for most GPUs."""
    from torch.sparse._triton_ops import bsr_dense_addmm

    bsr, x = _quietly(inputs.sparse.to_torch), inputs.x
    out = x.new_empty(inputs.product.rows, inputs.product.n)

    def product(meta: dict[str, int]) -> torch.Tensor:
        result: torch.Tensor = bsr_dense_addmm(out, bsr, x, beta=0, meta=meta, out=out)
        return result

    best, meta = _fastest(product, _torch_metas(inputs.product.n), x.device)
    if best is None:
        raise RuntimeError("none of the parameters runs")
    flops = 2.0 * inputs.stored * inputs.product.n
    return Contender(lambda: product(meta), inputs.check(), flops, notes={"meta": meta})


def _torch_metas(n: int) -> list[dict[str, int]]:
    """The likely best first: panels of 128 or 256 columns, loads three to five steps ahead."""
    shapes = [
        (128, 3, 4),
        (256, 3, 8),
        (128, 4, 8),
        (64, 4, 4),
        (256, 4, 4),
        (64, 5, 4),
        (32, 4, 2),
    ]
    return [
        {"SPLIT_N": n // width, "num_stages": stages, "num_warps": warps, "GROUP_SIZE_ROW": 4}
        for width, stages, warps in shapes
        if n % width == 0
    ]


def _fastest(
    product: Callable[[dict[str, int]], torch.Tensor],
    metas: list[dict[str, int]],
    device: torch.device,
) -> tuple[float | None, dict[str, int]]:
    deadline = time.monotonic() + _SEARCH_S
    best, chosen = None, {}
    for meta in metas:
        if time.monotonic() > deadline and best is not None:
            break
        try:
            run = partial(product, meta)
            times = time_interleaved({"it": run}, device, budget_s=0.02, rounds=(3, 9))
        except Exception:  # more shared memory than there is, say: the others may do
            continue
        if best is None or times["it"].median < best:
            best, chosen = times["it"].median, meta
    return best, chosen


def _cusparse(inputs: ProductInputs) -> Contender:
    csr = _quietly(inputs.dense.to_sparse_csr)
    flops = 2.0 * inputs.stored * inputs.product.n
    return Contender(lambda: csr @ inputs.x, inputs.check(), flops)


def _quietly(make: Callable[[], Any]) -> Any:
    """Torch warns about beta state and missing tables at every turn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def _as_layer(inputs: ProductInputs) -> str | None:
    return "only measured as W @ x" if inputs.product.linear else None


def _square_blocks(inputs: ProductInputs) -> str | None:
    height, width = inputs.product.block
    if (reason := _as_layer(inputs)) is not None or height != width:
        return reason or "takes square blocks only"
    has_mkl: Callable[[], bool] = torch.backends.mkl.is_available
    return None if inputs.x.is_cuda or has_mkl() else "needs a torch with MKL on a CPU"


def _needs_gpu(inputs: ProductInputs) -> str | None:
    return _as_layer(inputs) or (None if inputs.x.is_cuda else "needs a CUDA GPU")


PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "blackwell_sparsek, impl auto", _ours),
        Peer(STORED, "blackwell_sparsek, stored blocks", _stored),
        Peer(DENSE, "torch.matmul (cuBLAS on a GPU)", _dense),
        Peer(PACKED, "torch.matmul with K = density * K: a ceiling", _packed),
        Peer(
            TORCH,
            "torch.sparse_bsr @ dense",
            _torch_bsr,
            supports=_square_blocks,
            rival=True,
        ),
        Peer(
            TUNED,
            "torch bsr_dense_addmm, tuned",
            _torch_bsr_tuned,
            supports=_needs_gpu,
            rival=True,
        ),
        Peer(
            CUSPARSE,
            "torch CSR @ dense (cuSPARSE)",
            _cusparse,
            supports=_needs_gpu,
            rival=True,
        ),
    )
}
